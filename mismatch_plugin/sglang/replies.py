"""Replies of SGLang's `/generate`, read into records. What is missing or does not fit is an error, never a gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

from pydantic import ValidationError

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY, Served
from mismatch_plugin.rollout.records import FinishReason, RolloutRecord

ReplyKind = Literal["error_reply", "form", "count", "prompt", "log_probs_lost", "length", "token_ids", "kept_ids"]


class ReplyError(ValueError):
    """A reply that cannot be trusted. `sample` is its place in the batch, `kind` one of `ReplyKind`."""

    def __init__(self, sample: object, kind: ReplyKind, message: str) -> None:
        super().__init__(f"reply to sample {sample}: {message} (kind {kind})")
        self.sample, self.kind, self.message = sample, kind, message


def parse_generate(
    reply: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParameters | None = None,
    *,
    samples_per_prompt: int = 1,
    samples: Sequence[object] | None = None,
    require_log_probs: bool = True,
    require_kept_ids: bool = False,
) -> list[RolloutRecord]:
    """The records of one reply (a JSON object, or a list of them for a batch), in the order of the request.

    Every count the reply makes is compared with every other: prompt tokens, `completion_tokens`, output ids, log-probs
    and their ids, kept ids. Values of log-probs are not judged here; `RolloutRecord.faults` does that.

    Args:
        reply: the decoded JSON.
        prompts: token ids as they were sent.
        samples_per_prompt: the request's `n`; replies come prompt by prompt.
        samples: how errors call the replies; default 0, 1, ….
        require_log_probs: False accepts replies to requests without `return_logprob`; their log-probs are None.
        require_kept_ids: the request asked for the sampling mask.

    Raises:
        ReplyError: for an error reply, or one that does not fit its request.
    """
    items = reply if isinstance(reply, list) else [reply]
    first = samples[0] if samples else 0
    if len(items) == 1 and isinstance(items[0], Mapping) and "meta_info" not in items[0]:
        raise error_reply(first, items[0])
    expected = len(prompts) * samples_per_prompt
    if len(items) != expected:
        raise ReplyError(first, "count", f"{len(items)} responses to {expected} requests")
    names = range(expected) if samples is None else samples
    if len(names) != expected:
        raise ValueError(f"samples has {len(names)} names for {expected} requests.")
    records = []
    for index, (item, name) in enumerate(zip(items, names, strict=True)):
        prompt = list(prompts[index // samples_per_prompt])
        meta = _meta_info(item, name)
        seen = item.get("prompt_token_ids")
        if seen is not None and list(seen) != prompt:
            difference = _first_difference(prompt, seen)
            raise ReplyError(name, "prompt", f"the server saw another prompt ({difference})")
        records.append(
            meta.record(
                prompt,
                item.get("output_ids"),
                sampling or SamplingParameters(),
                text=item.get("text"),
                require_log_probs=require_log_probs,
                require_kept_ids=require_kept_ids,
            )
        )
    return records


def parse_exchange(request: Mapping[str, Any], reply: Any) -> list[RolloutRecord]:
    """The records of a logged pair of request and reply; what the reply must hold follows from the request."""
    given = request.get("input_ids")
    if not given:
        raise ValueError("the request has no input_ids: responses to text prompts cannot be compared token by token.")
    prompts = [given] if isinstance(given[0], int) else given
    params = dict(request.get("sampling_params") or {})
    samples_per_prompt = params.pop("n", None) or 1
    return parse_generate(
        reply,
        prompts,
        SamplingParameters.from_sglang(params),
        samples_per_prompt=samples_per_prompt,
        require_log_probs=bool(request.get("return_logprob")),
        require_kept_ids=bool(request.get("return_sampling_mask")),
    )


def parse_prompt_log_probs(
    reply: Any, sequence: Sequence[int], sample: object = 0, *, vocab_size: int | None = None
) -> list[float | None]:
    """What rescoring (`max_new_tokens` 0, `logprob_start_len` 0) says of each token of `sequence`, at temperature 1.

    The first is None, and only the first: a sequence that comes back with gaps raises ReplyError.

    vocab_size: ids of the model, if known. SGLang reports the last one as 0 (its log-prob is right).
    """
    log_probs = _meta_info(reply, sample).prompt_log_probs(list(sequence), vocab_size)
    if log_probs is None:
        raise ReplyError(sample, "log_probs_lost", "no input_token_logprobs: send logprob_start_len 0")
    for position, value in enumerate(log_probs):
        told = f"the log-prob of prompt position {position} is {value}"
        if position > 0 and (value is None or math.isnan(value)):
            raise ReplyError(sample, "log_probs_lost", told)
        if value is not None and not FLOOR < value <= POSITIVE_TOLERANCE:
            raise ReplyError(sample, "form", f"{told}: it is invalid")
    return log_probs


def error_reply(
    sample: object, item: Mapping[str, Any], lacks: str = "meta_info", what: str = "reply of /generate"
) -> ReplyError:
    """What an answer without the field `lacks` is: the server's error, or nothing that is known."""
    error = item.get("error", item if item.get("object") == "error" else None)
    if error is None:
        return ReplyError(sample, "form", f"no {lacks} among {sorted(item)[:8]}: this is no {what}")
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return ReplyError(sample, "error_reply", f"the server answered: {message}")


def _meta_info(item: Any, sample: object) -> MetaInfo:
    if not isinstance(item, Mapping):
        raise ReplyError(sample, "form", f"a JSON object is expected, not {type(item).__name__}")
    meta = item.get("meta_info")
    if meta is None:
        raise error_reply(sample, item)
    if not isinstance(meta, Mapping):
        raise ReplyError(sample, "form", f"meta_info is no JSON object but {type(meta).__name__}")
    return MetaInfo(meta, sample)


@dataclass(frozen=True)
class MetaInfo:
    """SGLang's `meta_info` of one response, of `/generate` and of chat replies. sample: how errors call it."""

    meta: Mapping[str, Any]
    sample: object

    def record(
        self,
        prompt: list[int],
        output_ids: Sequence[int] | None,
        sampling: SamplingParameters,
        *,
        text: str | None,
        finish_reason: Any = None,
        require_log_probs: bool = True,
        require_kept_ids: bool = False,
    ) -> RolloutRecord:
        """The record that it describes. finish_reason: where it tells none. Raises ReplyError."""
        log_probs, ids = self._output(output_ids, require_log_probs)
        for name in ("completion_tokens", "output_token_logprobs_length"):
            if self.meta.get(name, len(ids)) not in (None, len(ids)):
                raise self._error("length", f"{name} is {self.meta[name]}, but {len(ids)} tokens came")
        if (told := self.meta.get("prompt_tokens")) not in (None, len(prompt)):
            raise self._error("prompt", f"{len(prompt)} prompt tokens were sent, the server saw {told}")
        reason = self.meta.get("finish_reason", finish_reason)
        reason = reason.get("type") if isinstance(reason, Mapping) else reason
        if reason is not None and reason not in get_args(FinishReason):
            raise self._error("form", f"finish reason {reason!r} is unknown")
        spans: Any = self.meta.get("weight_versions")
        version = self.meta.get("weight_version")
        if spans is None and version is not None:  # of a server that tells only one version, for all tokens
            spans = [{"version": version, "start": 0, "end": len(ids)}]
        kept_ids, behaviour = self._kept(ids, require_kept_ids)
        served = self._served()
        try:
            return RolloutRecord(
                prompt_ids=prompt,
                response_ids=ids,
                rollout_log_probs=log_probs,
                sampling=sampling,
                log_probs_of="tempered" if served is None else served.log_probs_of,
                finish_reason=reason,
                weight_versions=spans or [],
                kept_ids=kept_ids,
                behaviour_log_probs=behaviour,
                prompt_log_probs=self.prompt_log_probs(prompt),
                top_log_probs=self._top(len(ids)),
                text=text,
                request_id=self.meta.get("id"),
                dp_rank=self.meta.get("dp_rank"),
                served=served,
                sample_id=None if self.sample is None else str(self.sample),
            )
        except ValidationError as error:
            raise self._unreadable("", error) from None

    def prompt_log_probs(self, prompt: list[int], vocab_size: int | None = None) -> list[float | None] | None:
        """Of each token of the prompt; None for those that `logprob_start_len` left out. None: there are none."""
        if not self.meta.get("input_token_logprobs"):
            return None
        log_probs, ids = self._entries("input_token_logprobs")
        skipped = len(prompt) - len(ids)
        if skipped < 0:
            raise self._error("length", f"{len(ids)} input_token_logprobs for {len(prompt)} prompt tokens")
        sent = prompt[skipped:]
        # SGLang reports the vocabulary's last id as 0. Where nobody knows the size, that can only be the largest sent.
        last = max(prompt, default=0) if vocab_size is None else vocab_size - 1
        if ids != sent and ids != [0 if token == last else token for token in sent]:
            difference = _first_difference(sent, ids, skipped)
            raise self._error("token_ids", f"input_token_logprobs are of another prompt ({difference})")
        return [None] * skipped + log_probs

    def _served(self) -> Served | None:
        """What our plugin in the server told."""
        told: Any = self.meta.get(META_KEY)
        try:
            return None if told in (None, []) else Served.model_validate(told)
        except ValidationError as error:
            raise self._unreadable(META_KEY, error) from None

    def _error(self, kind: ReplyKind, message: str) -> ReplyError:
        return ReplyError(self.sample, kind, message)

    def _unreadable(self, inside: str, error: ValidationError) -> ReplyError:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in (inside, *fault["loc"]) if part != "")
        return self._error("form", f"{place or 'reply'}: {fault['msg']}")

    def _output(self, output_ids: Sequence[int] | None, required: bool) -> tuple[list[float | None], list[int]]:
        if self.meta.get("output_token_logprobs") is None:
            if output_ids is None:
                raise self._error("form", "neither output_ids nor output_token_logprobs: which tokens are these?")
            if required and len(output_ids):
                message = f"{len(output_ids)} tokens and no output_token_logprobs: send return_logprob true"
                raise self._error("log_probs_lost", message)
            return [None] * len(output_ids), list(output_ids)
        log_probs, ids = self._entries("output_token_logprobs")
        if output_ids is not None and len(ids) != len(output_ids):
            message = f"{len(output_ids)} output_ids, but {len(ids)} output_token_logprobs"
            raise self._error("length" if ids else "log_probs_lost", message)
        if output_ids is not None and ids != list(output_ids):
            difference = _first_difference(output_ids, ids)
            raise self._error("token_ids", f"output_ids and output_token_logprobs disagree ({difference})")
        return log_probs, ids

    def _entries(self, name: str) -> tuple[list[float | None], list[int]]:
        """The columns of a list of SGLang's [log-prob, token id, text] entries."""
        raw = self.meta[name]
        if not isinstance(raw, list):
            raise self._error("form", f"{name} is no list but {type(raw).__name__}")
        for position, entry in enumerate(raw):
            kind: ReplyKind = "form"
            if not isinstance(entry, (list, tuple)) or len(entry) < 2:
                fault = f"{entry!r} is not [log-prob, id, text]"
            elif type(entry[1]) is not int or entry[1] < 0:
                kind, fault = "token_ids", f"{entry[1]!r} is no token id"
            elif type(entry[0]) not in (float, int, NoneType):
                fault = f"{entry[0]!r} is no log-prob"
            else:
                continue
            raise self._error(kind, f"{name}, position {position}: {fault}")
        return [entry[0] for entry in raw], [entry[1] for entry in raw]

    def _kept(self, ids: list[int], required: bool) -> tuple[list[list[int]] | None, list[float | None] | None]:
        """Kept ids, and the log-probs renormalised over them."""
        kept, values = (self.meta.get(f"output_token_sampling_{name}") for name in ("mask", "logprobs"))
        if kept is None or values is None:
            if required and ids:
                raise self._error("kept_ids", "the sampling mask was asked for and did not come")
            return ([], []) if required else (None, None)
        if len(kept) != len(ids) or len(values) != len(ids):
            message = f"{len(kept)} kept sets and {len(values)} log-probs for {len(ids)} tokens"
            raise self._error("length", message)
        behaviour: list[float | None] = []
        for position, (support, value, token) in enumerate(zip(kept, values, ids, strict=True)):
            if token not in support:
                raise self._error("kept_ids", f"position {position}: the sampled id {token} is not among those kept")
            # With sampling_logprobs_mode "support" there is one log-prob for each kept id.
            behaviour.append(value[support.index(token)] if isinstance(value, list) else value)
        return kept, behaviour

    def _top(self, length: int) -> list[list[tuple[float, int]]] | None:
        raw = self.meta.get("output_top_logprobs")
        if raw is None:
            return None
        if len(raw) != length:
            raise self._error("length", f"{len(raw)} output_top_logprobs for {length} tokens")
        return [[(entry[0], entry[1]) for entry in row or ()] for row in raw]


def _first_difference(expected: Sequence[int], got: Sequence[int], offset: int = 0) -> str:
    for position, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return f"position {position + offset}: {ours} against {theirs}"
    return f"{len(expected)} against {len(got)} tokens"
