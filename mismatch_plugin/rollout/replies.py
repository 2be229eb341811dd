"""Replies of SGLang's `/generate`, read into records. What is missing or does not fit is an error, never a gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE
from mismatch_plugin.rollout.records import FinishReason, RolloutRecord, WeightSpan
from mismatch_plugin.rollout.sampling import SamplingParameters

ReplyKind = Literal["error_reply", "form", "count", "prompt", "log_probs_lost", "length", "token_ids", "kept_ids"]


class ReplyError(ValueError):
    """A reply that cannot be trusted. `sample` is its place in the batch, `kind` one of `ReplyKind`."""

    def __init__(self, sample: object, kind: ReplyKind, message: str) -> None:
        super().__init__(f"reply to sample {sample}: {message} (kind {kind})")
        self.sample, self.kind, self.message = sample, kind, message


class Entries(NamedTuple):
    """The columns of a list of SGLang's [log-prob, token id, text] entries."""

    log_probs: list[float | None]
    ids: list[int]


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
    first = 0 if samples is None or not samples else samples[0]
    if len(items) == 1 and isinstance(items[0], Mapping) and "meta_info" not in items[0]:
        raise _error_reply(first, items[0])
    expected = len(prompts) * samples_per_prompt
    if len(items) != expected:
        raise ReplyError(first, "count", f"{len(items)} responses to {expected} requests")
    names = range(expected) if samples is None else samples
    if len(names) != expected:
        raise ValueError(f"samples has {len(names)} names for {expected} requests.")
    return [
        _record(
            item,
            list(prompts[index // samples_per_prompt]),
            sampling or SamplingParameters(),
            name,
            require_log_probs,
            require_kept_ids,
        )
        for index, (item, name) in enumerate(zip(items, names, strict=True))
    ]


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
    meta = _meta_info(reply, sample)
    log_probs = _prompt_log_probs(meta, list(sequence), sample, vocab_size)
    if log_probs is None:
        raise ReplyError(sample, "log_probs_lost", "no input_token_logprobs: send logprob_start_len 0")
    for position, value in enumerate(log_probs):
        if position > 0 and (value is None or math.isnan(value)):
            raise ReplyError(sample, "log_probs_lost", f"the log-prob of prompt position {position} is {value}")
        if value is not None and not FLOOR < value <= POSITIVE_TOLERANCE:
            raise ReplyError(sample, "form", f"the log-prob of prompt position {position} is {value}: it is invalid")
    return log_probs


def record_from_meta_info(
    meta: Mapping[str, Any],
    prompt: list[int],
    output_ids: Sequence[int] | None,
    sampling: SamplingParameters,
    sample: object,
    *,
    text: str | None,
    finish_reason: Any,
    require_log_probs: bool = True,
    require_kept_ids: bool = False,
) -> RolloutRecord:
    """The record that a `meta_info` describes; shared by `/generate` and the chat replies."""
    entries = _output_entries(meta, output_ids, sample, require_log_probs)
    ids = entries.ids
    _check_counts(meta, len(prompt), len(ids), sample)
    kept_ids, behaviour = _kept(meta, ids, sample, require_kept_ids)
    try:
        return RolloutRecord(
            prompt_ids=prompt,
            response_ids=ids,
            rollout_log_probs=entries.log_probs,
            sampling=sampling,
            finish_reason=_finish_reason(finish_reason, sample),
            weight_versions=weight_spans(meta, len(ids)),
            kept_ids=kept_ids,
            behaviour_log_probs=behaviour,
            prompt_log_probs=_prompt_log_probs(meta, prompt, sample),
            top_log_probs=_top_log_probs(meta, len(ids), sample),
            text=text,
            request_id=meta.get("id"),
            dp_rank=meta.get("dp_rank"),
            sample_id=None if sample is None else str(sample),
        )
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise ReplyError(sample, "form", f"{place or 'reply'}: {fault['msg']}") from None


def weight_spans(meta: Mapping[str, Any], length: int) -> list[WeightSpan]:
    """The weight versions of a response. A server that tells only one version is taken at its word for all tokens."""
    spans = meta.get("weight_versions")
    if spans is None and meta.get("weight_version") is not None:
        spans = [{"version": meta["weight_version"], "start": 0, "end": length}]
    return [WeightSpan.model_validate(span) for span in spans or ()]


def _record(
    item: Any,
    prompt: list[int],
    sampling: SamplingParameters,
    sample: object,
    require_log_probs: bool,
    require_kept_ids: bool,
) -> RolloutRecord:
    meta = _meta_info(item, sample)
    seen = item.get("prompt_token_ids")
    if seen is not None and list(seen) != prompt:
        raise ReplyError(sample, "prompt", f"the server saw another prompt ({_first_difference(prompt, seen)})")
    return record_from_meta_info(
        meta,
        prompt,
        item.get("output_ids"),
        sampling,
        sample,
        text=item.get("text"),
        finish_reason=meta.get("finish_reason"),
        require_log_probs=require_log_probs,
        require_kept_ids=require_kept_ids,
    )


def _error_reply(sample: object, item: Mapping[str, Any]) -> ReplyError:
    error = item.get("error", item if item.get("object") == "error" else None)
    if error is None:
        return ReplyError(sample, "form", f"no meta_info among {sorted(item)[:8]}: this is no reply of /generate")
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return ReplyError(sample, "error_reply", f"the server answered: {message}")


def _meta_info(item: Any, sample: object) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise ReplyError(sample, "form", f"a JSON object is expected, not {type(item).__name__}")
    meta = item.get("meta_info")
    if meta is None:
        raise _error_reply(sample, item)
    if not isinstance(meta, Mapping):
        raise ReplyError(sample, "form", f"meta_info is no JSON object but {type(meta).__name__}")
    return meta


def _output_entries(
    meta: Mapping[str, Any], output_ids: Sequence[int] | None, sample: object, require_log_probs: bool
) -> Entries:
    raw = meta.get("output_token_logprobs")
    if raw is None:
        if output_ids is None:
            raise ReplyError(sample, "form", "neither output_ids nor output_token_logprobs: which tokens are these?")
        if require_log_probs and len(output_ids):
            raise ReplyError(
                sample,
                "log_probs_lost",
                f"{len(output_ids)} tokens and no output_token_logprobs: send return_logprob true",
            )
        return Entries([None] * len(output_ids), list(output_ids))
    entries = _entries(raw, "output_token_logprobs", sample)
    if output_ids is not None:
        if len(entries.ids) != len(output_ids):
            raise ReplyError(
                sample,
                "length" if entries.ids else "log_probs_lost",
                f"{len(output_ids)} output_ids, but {len(entries.ids)} output_token_logprobs",
            )
        if entries.ids != list(output_ids):
            difference = _first_difference(output_ids, entries.ids)
            raise ReplyError(sample, "token_ids", f"output_ids and output_token_logprobs disagree ({difference})")
    return entries


def _entries(raw: Any, name: str, sample: object) -> Entries:
    log_probs: list[float | None] = []
    ids: list[int] = []
    if not isinstance(raw, list):
        raise ReplyError(sample, "form", f"{name} is no list but {type(raw).__name__}")
    for position, entry in enumerate(raw):
        if not isinstance(entry, (list, tuple)) or len(entry) < 2:
            raise ReplyError(sample, "form", f"{name}, position {position}: {entry!r} is not [log-prob, id, text]")
        value, token = entry[0], entry[1]
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ReplyError(sample, "token_ids", f"{name}, position {position}: {token!r} is no token id")
        if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise ReplyError(sample, "form", f"{name}, position {position}: {value!r} is no log-prob")
        log_probs.append(value)
        ids.append(token)
    return Entries(log_probs, ids)


def _check_counts(meta: Mapping[str, Any], prompt: int, response: int, sample: object) -> None:
    for name in ("completion_tokens", "output_token_logprobs_length"):
        told = meta.get(name)
        if told is not None and told != response:
            raise ReplyError(sample, "length", f"{name} is {told}, but {response} tokens came")
    told = meta.get("prompt_tokens")
    if told is not None and told != prompt:
        raise ReplyError(sample, "prompt", f"{prompt} prompt tokens were sent, the server saw {told}")


def _prompt_log_probs(
    meta: Mapping[str, Any], prompt: list[int], sample: object, vocab_size: int | None = None
) -> list[float | None] | None:
    raw = meta.get("input_token_logprobs")
    if not raw:
        return None
    entries = _entries(raw, "input_token_logprobs", sample)
    skipped = len(prompt) - len(entries.ids)  # logprob_start_len leaves the first ones out
    if skipped < 0:
        raise ReplyError(sample, "length", f"{len(entries.ids)} input_token_logprobs for {len(prompt)} prompt tokens")
    sent = prompt[skipped:]
    # SGLang reports the vocabulary's last id as 0. Where nobody knows the size, that can only be the largest id sent.
    last = max(prompt, default=0) if vocab_size is None else vocab_size - 1
    if entries.ids != sent and entries.ids != [0 if token == last else token for token in sent]:
        difference = _first_difference(sent, entries.ids, skipped)
        raise ReplyError(sample, "token_ids", f"input_token_logprobs are of another prompt ({difference})")
    return [None] * skipped + entries.log_probs


def _kept(
    meta: Mapping[str, Any], ids: list[int], sample: object, required: bool
) -> tuple[list[list[int]] | None, list[float | None] | None]:
    kept, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if kept is None or values is None:
        if required and ids:
            raise ReplyError(sample, "kept_ids", "the sampling mask was asked for and did not come")
        return ([], []) if required else (None, None)
    if len(kept) != len(ids) or len(values) != len(ids):
        raise ReplyError(sample, "length", f"{len(kept)} kept sets and {len(values)} log-probs for {len(ids)} tokens")
    behaviour: list[float | None] = []
    for position, (support, value, token) in enumerate(zip(kept, values, ids, strict=True)):
        if token not in support:
            raise ReplyError(sample, "kept_ids", f"position {position}: the sampled id {token} is not among those kept")
        # With sampling_logprobs_mode "support" there is one log-prob for each kept id.
        behaviour.append(value[support.index(token)] if isinstance(value, list) else value)
    return kept, behaviour


def _top_log_probs(meta: Mapping[str, Any], length: int, sample: object) -> list[list[tuple[float, int]]] | None:
    raw = meta.get("output_top_logprobs")
    if raw is None:
        return None
    if len(raw) != length:
        raise ReplyError(sample, "length", f"{len(raw)} output_top_logprobs for {length} tokens")
    return [[(entry[0], entry[1]) for entry in row or ()] for row in raw]


def _finish_reason(reason: Any, sample: object) -> FinishReason | None:
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind is None or kind in ("stop", "length", "abort"):
        return kind
    raise ReplyError(sample, "form", f"finish reason {kind!r} is unknown")


def _first_difference(expected: Sequence[int], got: Sequence[int], offset: int = 0) -> str:
    for position, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return f"position {position + offset}: {ours} against {theirs}"
    return f"{len(expected)} against {len(got)} tokens"
