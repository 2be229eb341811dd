"""Replies of SGLang's `/generate`, read into samples. What is missing or does not fit is an error, never a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any, Literal, get_args

import numpy as np
from pydantic import ValidationError

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE
from mismatch_plugin.data.arrays import NULL, Floats, as_floats
from mismatch_plugin.data.sample import FinishReason, Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY, Served, last_told

ReplyKind = Literal["error_reply", "form", "count", "prompt", "log_probs_lost", "length", "token_ids", "kept_ids"]

_NUMBERS = {float, int, NoneType}


class ReplyError(ValueError):
    """A reply that cannot be trusted. `sample` is its place in the batch, `kind` one of `ReplyKind`."""

    def __init__(self, kind: ReplyKind, message: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.sample = kind, message, 0

    def __str__(self) -> str:
        return f"reply to sample {self.sample}: {self.message} (kind {self.kind})"


def parse_generate(
    reply: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParameters | None = None,
    *,
    samples_per_prompt: int = 1,
    require_log_probs: bool = True,
    require_kept_ids: bool = False,
) -> list[Sample]:
    """The samples of one reply (a JSON object, or a list of them for a batch), in the order of the request.

    Every count the reply makes is compared with every other: prompt tokens, `completion_tokens`, output ids, log-probs
    and their ids, kept ids. Values of log-probs are not judged here; `core.validity.find_invalid` does that.

    Args:
        reply: the decoded JSON.
        prompts: token ids as they were sent.
        samples_per_prompt: the request's `n`; replies come prompt by prompt.
        require_log_probs: False accepts replies to requests without `return_logprob`; their log-probs are NULL.
        require_kept_ids: the request asked for the sampling mask.

    Raises:
        ReplyError: for an error reply, or one that does not fit its request.
    """
    items = reply if isinstance(reply, list) else [reply]
    expected = len(prompts) * samples_per_prompt
    if len(items) == 1 and isinstance(items[0], Mapping) and "meta_info" not in items[0]:
        raise _error_reply(items[0])
    if len(items) != expected:
        raise ReplyError("count", f"{len(items)} responses to {expected} requests")
    asked, found = sampling or SamplingParameters(), []
    try:
        for index, item in enumerate(items):
            prompt = list(prompts[index // samples_per_prompt])
            found.append(_sample(item, index, prompt, asked, require_log_probs, require_kept_ids))
    except ReplyError as error:
        error.sample = len(found)
        raise
    except (TypeError, LookupError, AttributeError) as error:
        wrong = ReplyError("form", f"a reply of another form ({error!r})")
        wrong.sample = len(found)
        raise wrong from None
    return found


def parse_exchange(request: Mapping[str, Any], reply: Any) -> list[Sample]:
    """The samples of a logged pair of request and reply; what the reply must hold follows from the request."""
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


def parse_prompt_log_probs(reply: Any, sequence: Sequence[int], *, vocab_size: int | None = None) -> Floats:
    """What rescoring (`max_new_tokens` 0, `logprob_start_len` 0) says of each token of `sequence`, at temperature 1.

    [n] float64. The first is NULL, and only the first: a sequence that comes back with gaps raises ReplyError.

    vocab_size: ids of the model, if known. SGLang reports the last one as 0 (its log-prob is right).
    """
    values = _prompt_log_probs(_meta_info(reply), list(sequence), vocab_size)
    if values is None:
        raise ReplyError("log_probs_lost", "no input_token_logprobs: send logprob_start_len 0")
    wrong = np.flatnonzero(~((values > FLOOR) & (values <= POSITIVE_TOLERANCE)))
    for at in wrong[wrong > 0] if np.isnan(values[0]) else wrong:
        value = None if np.isnan(values[at]) else values[at]
        told = f"the log-prob of prompt position {at} is {value}"
        raise ReplyError("log_probs_lost", told) if value is None else ReplyError("form", f"{told}: it is invalid")
    return values


def _error_reply(item: Mapping[str, Any]) -> ReplyError:
    """What an answer without meta_info is: the server's error, or nothing that is known."""
    error = item.get("error", item if item.get("object") == "error" else None)
    if error is None:
        lacks = f"no meta_info among {sorted(item)[:8]}: this is no reply of /generate"
        return ReplyError("form", lacks)
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return ReplyError("error_reply", f"the server answered: {message}")


def _meta_info(item: Any) -> Mapping[str, Any]:
    if item.get("meta_info") is None:
        raise _error_reply(item)
    return item["meta_info"]


def _sample(
    item: Any,
    index: int,
    prompt: list[int],
    sampling: SamplingParameters,
    require_log_probs: bool,
    require_kept_ids: bool,
) -> Sample:
    meta = _meta_info(item)
    seen = item.get("prompt_token_ids")
    if seen is not None and list(seen) != prompt:
        raise ReplyError("prompt", f"the server saw another prompt ({_first_difference(prompt, seen)})")
    log_probs, ids = _output(meta, item.get("output_ids"), require_log_probs)
    n = len(ids)
    for count in ("completion_tokens", "output_token_logprobs_length"):
        if meta.get(count) not in (None, n):
            raise ReplyError("length", f"{count} is {meta[count]}, but {n} tokens came")
    if (told := meta.get("prompt_tokens")) not in (None, len(prompt)):
        raise ReplyError("prompt", f"{len(prompt)} prompt tokens were sent, the server saw {told}")
    reason = meta.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    if reason is not None and reason not in get_args(FinishReason):
        raise ReplyError("form", f"finish reason {reason!r} is unknown")
    spans, version = meta.get("weight_versions"), meta.get("weight_version")
    if spans is None and version is not None:  # of a server that tells only one version, for all tokens
        spans = [{"version": version, "start": 0, "end": n}]
    top: Any = meta.get("output_top_logprobs")
    if top is not None:
        if len(top) != n:
            raise ReplyError("length", f"{len(top)} output_top_logprobs for {n} tokens")
        top = [[(entry[0], entry[1]) for entry in row or ()] for row in top]
    kept_ids, behaviour = _kept(meta, ids, require_kept_ids)
    fields: dict[str, Any] = {
        "prompt_ids": prompt,
        "response_ids": ids,
        "rollout_log_probs": log_probs,
        "sampling": sampling,
        "finish_reason": reason,
        "weight_versions": spans or (),
        "kept_ids": kept_ids,
        "behaviour_log_probs": behaviour,
        "prompt_log_probs": _prompt_log_probs(meta, prompt),
        "top_log_probs": top,
        "text": item.get("text"),
        "request_id": meta.get("id"),
        "sample_id": str(index),
        "dp_rank": meta.get("dp_rank"),
        "cached_tokens": meta.get("cached_tokens"),
    }
    try:
        if (told := last_told(meta.get(META_KEY))) is not None:
            served = Served.model_validate(told)
            fields |= {"served": served, "log_probs_of": served.log_probs_of}
        return Sample(**fields)
    except ValidationError as error:  # of what our plugin told
        fault = error.errors()[0]
        raise ReplyError("form", f"{'.'.join(map(str, (META_KEY, *fault['loc'])))}: {fault['msg']}") from None
    except ValueError as error:
        raise ReplyError("form", str(error)) from None


def _output(meta: Mapping[str, Any], output_ids: Sequence[int] | None, required: bool) -> tuple[Floats, list[int]]:
    if meta.get("output_token_logprobs") is None:
        if output_ids is None:
            raise ReplyError("form", "neither output_ids nor output_token_logprobs: which tokens are these?")
        if required and len(output_ids):
            message = f"{len(output_ids)} tokens and no output_token_logprobs: send return_logprob true"
            raise ReplyError("log_probs_lost", message)
        return np.full(len(output_ids), NULL), list(output_ids)
    log_probs, ids = _entries(meta, "output_token_logprobs")
    if output_ids is not None and len(ids) != len(output_ids):
        message = f"{len(output_ids)} output_ids, but {len(ids)} output_token_logprobs"
        raise ReplyError("length" if ids else "log_probs_lost", message)
    if output_ids is not None and ids != list(output_ids):
        difference = _first_difference(output_ids, ids)
        raise ReplyError("token_ids", f"output_ids and output_token_logprobs disagree ({difference})")
    return log_probs, ids


def _entries(meta: Mapping[str, Any], name: str) -> tuple[Floats, list[int]]:
    """The columns of a list of SGLang's [log-prob, token id, text] entries."""
    raw = meta[name]
    with suppress(TypeError, ValueError):  # an entry that is no list, or has less than two; or there is none
        log_probs, ids, *_ = zip(*raw, strict=False)
        if {*map(type, ids)} <= {int} and min(ids) >= 0 and {*map(type, log_probs)} <= _NUMBERS:
            return as_floats(log_probs), list(ids)
    for position, entry in enumerate(raw):  # names the first fault: with each reply it would take half of the time
        right = type(entry) is list and len(entry) >= 2 and type(entry[0]) in _NUMBERS and type(entry[1]) is int
        if not right or entry[1] < 0:
            raise ReplyError("form", f"{name}, position {position}: {entry!r} is not [log-prob, id, text]")
    return as_floats([]), []


def _prompt_log_probs(meta: Mapping[str, Any], prompt: list[int], vocab_size: int | None = None) -> Floats | None:
    """Of each token of the prompt; NULL for those that `logprob_start_len` left out. None: there are none."""
    if not meta.get("input_token_logprobs"):
        return None
    log_probs, ids = _entries(meta, "input_token_logprobs")
    skipped = len(prompt) - len(ids)
    if skipped < 0:
        raise ReplyError("length", f"{len(ids)} input_token_logprobs for {len(prompt)} prompt tokens")
    sent = prompt[skipped:]
    # SGLang reports the vocabulary's last id as 0. Where nobody knows the size, that can only be the largest sent.
    last = max(prompt, default=0) if vocab_size is None else vocab_size - 1
    if ids != sent and ids != [0 if token == last else token for token in sent]:
        difference = _first_difference(sent, ids, skipped)
        raise ReplyError("token_ids", f"input_token_logprobs are of another prompt ({difference})")
    return np.concatenate([np.full(skipped, NULL), log_probs])


def _kept(meta: Mapping[str, Any], ids: list[int], required: bool) -> tuple[list[list[int]] | None, Floats | None]:
    """Kept ids, and the log-probs renormalised over them."""
    kept, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if kept is None or values is None:
        if required and ids:
            raise ReplyError("kept_ids", "the sampling mask was asked for and did not come")
        return ([], as_floats([])) if required else (None, None)
    if len(kept) != len(ids) or len(values) != len(ids):
        raise ReplyError("length", f"{len(kept)} kept sets and {len(values)} log-probs for {len(ids)} tokens")
    behaviour: list[float | None] = []
    for position, (support, value, token) in enumerate(zip(kept, values, ids, strict=True)):
        if token not in support:
            raise ReplyError("kept_ids", f"position {position}: the sampled id {token} is not among those kept")
        # With sampling_logprobs_mode "support" there is one log-prob for each kept id.
        behaviour.append(value[support.index(token)] if isinstance(value, list) else value)
    return kept, as_floats(behaviour)


def _first_difference(expected: Sequence[int], got: Sequence[int], offset: int = 0) -> str:
    for position, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return f"position {position + offset}: {ours} against {theirs}"
    return f"{len(expected)} against {len(got)} tokens"
