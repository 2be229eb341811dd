"""OpenAI-style chat replies with SGLang's `return_meta_info`, and streamed replies put together again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.replies import MetaInfo, ReplyError, error_reply
from mismatch_plugin.rollout.sampling import SamplingParameters

_DELTAS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)


def parse_chat(
    reply: Any,
    prompt: Sequence[int] | None = None,
    sampling: SamplingParameters | None = None,
    *,
    samples: Sequence[object] | None = None,
    require_kept_ids: bool = False,
) -> list[RolloutRecord]:
    """One record a choice of a `/v1/chat/completions` reply, in order of their `index`.

    The request must have `logprobs` and `return_meta_info` (plain chat log-probs carry no token ids), and
    `return_prompt_token_ids` unless the ids of the rendered prompt are handed in as `prompt`. Raises ReplyError.
    """
    if not isinstance(reply, Mapping):
        raise ReplyError(0, "form", f"a JSON object is expected, not {type(reply).__name__}")
    if not isinstance(reply.get("choices"), list):
        raise error_reply(0, reply, "choices", "chat reply")
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    names = list(range(len(choices))) if samples is None else list(samples)
    if len(names) != len(choices) or [choice["index"] for choice in choices] != list(range(len(choices))):
        raise ReplyError(0, "count", f"choices {[choice['index'] for choice in choices]} to {len(names)} requests")
    versions = {key: value for key, value in (reply.get("metadata") or {}).items() if key.startswith("weight_version")}
    records = []
    for choice, name in zip(choices, names, strict=True):
        meta = choice.get("meta_info")
        if meta is None:
            message = "no meta_info, and chat log-probs carry no token ids: send return_meta_info true"
            raise ReplyError(name, "form", message)
        rendered = choice.get("prompt_token_ids")
        rendered = prompt if rendered is None else rendered
        if rendered is None:
            raise ReplyError(name, "prompt", "the prompt's ids are unknown: send return_prompt_token_ids true")
        if prompt is not None and list(rendered) != list(prompt):
            raise ReplyError(name, "prompt", "the server rendered another prompt: tokenizer or chat template differ")
        records.append(
            MetaInfo({**versions, **meta}, name).record(
                list(rendered),
                choice.get("response_token_ids"),
                sampling or SamplingParameters(),
                text=(choice.get("message") or {}).get("content"),
                finish_reason=choice.get("finish_reason"),
                require_kept_ids=require_kept_ids,
            )
        )
    return records


def read_events(lines: Iterable[str]) -> list[Any]:
    """The JSON objects of a server-sent event stream, which must end with `[DONE]`. Raises ReplyError."""
    events: list[Any] = []
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return events
        try:
            events.append(json.loads(data))
        except ValueError:
            raise ReplyError(0, "form", f"event {len(events)} of the stream is no JSON: {data[:80]!r}") from None
    raise ReplyError(0, "form", f"the stream broke off after {len(events)} events, without [DONE]")


def merge_stream(chunks: Sequence[Any], sample: object = 0) -> dict[str, Any]:
    """A streamed `/generate` reply as one, ready for `parse_generate`.

    By default each chunk repeats everything before it; with the server's incremental streaming output it holds what is
    new. Which of the two it is follows from `completion_tokens`. Raises ReplyError if it is neither.
    """
    if not chunks:
        raise ReplyError(sample, "form", "a stream without chunks")
    for chunk in chunks:
        if not isinstance(chunk, Mapping) or not isinstance(chunk.get("meta_info"), Mapping):
            message = chunk.get("error", chunk) if isinstance(chunk, Mapping) else chunk
            raise ReplyError(sample, "error_reply", f"the server answered in mid-stream: {message}")
    last = dict(chunks[-1])
    told = last["meta_info"].get("completion_tokens")
    if told is None or len(last.get("output_ids") or ()) == told:
        return last
    tokens = sum(len(chunk.get("output_ids") or ()) for chunk in chunks)
    if tokens != told:
        raise ReplyError(sample, "length", f"completion_tokens is {told}, the chunks hold {tokens} tokens")
    meta = dict(last["meta_info"])
    for name in _DELTAS:
        if any(name in chunk["meta_info"] for chunk in chunks):
            meta[name] = [entry for chunk in chunks for entry in chunk["meta_info"].get(name) or ()]
    for chunk in chunks:
        if chunk["meta_info"].get("input_token_logprobs"):
            meta["input_token_logprobs"] = chunk["meta_info"]["input_token_logprobs"]
    return {
        **last,
        "output_ids": [token for chunk in chunks for token in chunk.get("output_ids") or ()],
        "text": "".join(chunk.get("text") or "" for chunk in chunks),
        "meta_info": meta,
    }
