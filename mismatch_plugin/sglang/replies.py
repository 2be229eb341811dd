"""Replies of SGLang's `/generate`, read into samples. What is missing or does not fit is an error, never a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any, Literal

import numpy as np

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE
from mismatch_plugin.data.arrays import Floats, as_floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import META_KEY, last_told

ReplyKind = Literal["error_reply", "form", "prompt", "log_probs_lost", "length", "token_ids", "kept_ids"]

_NUMBERS = {float, int, NoneType}


class ReplyError(ValueError):
    """A reply that cannot be trusted. `kind` is one of `ReplyKind`."""

    def __init__(self, kind: ReplyKind, message: str) -> None:
        super().__init__(f"{message} (kind {kind})")
        self.kind, self.message = kind, message


def parse_generate(
    reply: Any, prompt: Sequence[int], sampling: SamplingParameters | None = None, *, require_kept_ids: bool = False
) -> Sample:
    """The sample of one reply to a request with `return_logprob`.

    Every count the reply makes is compared with every other: prompt tokens, `completion_tokens`, output ids, log-probs
    and their ids, kept ids. Values of log-probs are not judged here; `core.validity.find_invalid` does that.

    Args:
        reply: the decoded JSON.
        prompt: token ids as they were sent.
        require_kept_ids: the request asked for the sampling mask.

    Raises:
        ReplyError: for an error reply, or one that does not fit its request. What is of another type than SGLang sends
            raises as it is read.
    """
    meta, prompt = _meta_info(reply), list(prompt)
    seen = reply.get("prompt_token_ids")
    if seen is not None and list(seen) != prompt:
        raise ReplyError("prompt", f"the server saw another prompt ({_first_difference(prompt, seen)})")
    log_probs, ids = _output(meta, reply.get("output_ids"))
    n = len(ids)
    for count in ("completion_tokens", "output_token_logprobs_length"):
        if meta.get(count) not in (None, n):
            raise ReplyError("length", f"{count} is {meta[count]}, but {n} tokens came")
    if (told := meta.get("prompt_tokens")) not in (None, len(prompt)):
        raise ReplyError("prompt", f"{len(prompt)} prompt tokens were sent, the server saw {told}")
    reason = meta.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    spans, version = meta.get("weight_versions"), meta.get("weight_version")
    if spans is None and version is not None:  # of a server that tells only one version, for all tokens
        spans = [{"version": version, "start": 0, "end": n}]
    kept_ids, behaviour = _kept(meta, ids, require_kept_ids)
    served = last_told(meta.get(META_KEY))
    fields: dict[str, Any] = {
        "prompt_ids": prompt,
        "response_ids": ids,
        "rollout_log_probs": log_probs,
        "sampling": sampling or SamplingParameters(),
        "finish_reason": reason,
        "weight_versions": spans or (),
        "kept_ids": kept_ids,
        "behaviour_log_probs": behaviour,
        "text": reply.get("text"),
        "request_id": meta.get("id"),
        "dp_rank": meta.get("dp_rank"),
        "cached_tokens": meta.get("cached_tokens"),
        "served": served,
    }
    if isinstance(served, Mapping) and "log_probs_of" in served:
        fields["log_probs_of"] = served["log_probs_of"]
    try:
        return Sample(**fields)
    except ValueError as error:
        raise ReplyError("form", str(error)) from None


def parse_prompt_log_probs(reply: Any, sequence: Sequence[int], *, vocab_size: int | None = None) -> Floats:
    """What rescoring (`max_new_tokens` 0, `logprob_start_len` 0) says of each token of `sequence`, at temperature 1.

    [n] float64. The first is NULL, and only the first: a sequence that comes back with gaps raises ReplyError.

    vocab_size: ids of the model, if known. SGLang reports the last one as 0 (its log-prob is right).
    """
    meta, sent = _meta_info(reply), list(sequence)
    if not meta.get("input_token_logprobs"):
        raise ReplyError("log_probs_lost", "no input_token_logprobs: send logprob_start_len 0")
    values, ids = _entries(meta, "input_token_logprobs")
    # SGLang reports the vocabulary's last id as 0. Where nobody knows the size, that can only be the largest sent.
    last = max(sent) if vocab_size is None else vocab_size - 1
    if ids != sent and ids != [0 if token == last else token for token in sent]:
        difference = _first_difference(sent, ids)
        raise ReplyError("token_ids", f"input_token_logprobs are of another prompt ({difference})")
    invalid = ~((values > FLOOR) & (values <= POSITIVE_TOLERANCE))
    invalid[0] &= not np.isnan(values[0])
    if invalid.any():
        at = int(invalid.argmax())
        value = None if np.isnan(values[at]) else values[at]
        raise ReplyError("log_probs_lost", f"the log-prob of prompt position {at} is {value}: it is invalid")
    return values


def _meta_info(reply: Any) -> Mapping[str, Any]:
    """Raises ReplyError where there is none: it is the server's error, or nothing that is known."""
    if reply.get("meta_info") is not None:
        return reply["meta_info"]
    error = reply.get("error", reply if reply.get("object") == "error" else None)
    if error is None:
        raise ReplyError("form", f"no meta_info among {sorted(reply)[:8]}: this is no reply of /generate")
    message = error.get("message", error) if isinstance(error, Mapping) else error
    raise ReplyError("error_reply", f"the server answered: {message}")


def _output(meta: Mapping[str, Any], output_ids: Sequence[int] | None) -> tuple[Floats, list[int]]:
    if meta.get("output_token_logprobs") is None:
        if output_ids is None:
            raise ReplyError("form", "neither output_ids nor output_token_logprobs: which tokens are these?")
        if len(output_ids):
            message = f"{len(output_ids)} tokens and no output_token_logprobs: send return_logprob true"
            raise ReplyError("log_probs_lost", message)
        return as_floats([]), []  # of one that was aborted before its first token
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


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> str:
    for position, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return f"position {position}: {ours} against {theirs}"
    return f"{len(expected)} against {len(got)} tokens"
