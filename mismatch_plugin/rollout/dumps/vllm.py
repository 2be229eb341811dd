"""What vLLM answers: (chat) completions, batch results and RequestOutputs, one a line or one JSON document.

Log-probs are of the raw logits, before temperature and filters, unless the server runs with --logprobs-mode
processed_logprobs; then say so with `log_probs_of` (filtered).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mismatch_plugin.rollout.dumps.names import Columns
from mismatch_plugin.rollout.dumps.part import Format, Options, Part
from mismatch_plugin.rollout.dumps.rows import RowReader
from mismatch_plugin.rollout.dumps.source import Row, Source

_ASK = "ask for return_token_ids=true (or return_tokens_as_token_ids=true) and logprobs"
_KEYS = ("response_ids", "prompt_ids", "rollout_log_probs", "sample_id", "group", "finish_reason", "temperature")


def _recognises(source: Source) -> bool:
    keys = {*source.keys}
    return source.kind in ("json", "jsonl") and (
        "choices" in keys or {"prompt_token_ids", "outputs"} <= keys or {"custom_id", "response"} <= keys
    )


def _read(source: Source, options: Options) -> Part:
    columns = Columns(_KEYS, str(source.path))
    reader = RowReader(columns, options, log_probs_of="raw")
    part = reader.part(_rows(source))
    if options.log_probs_of is None:
        part.notes.append("log-probs are taken as raw: before temperature and filters, vLLM's default logprobs_mode")
    return part


def _rows(source: Source) -> Iterator[Row]:
    """One row a choice."""
    for place, line in source.rows():
        reply, asked = _body(place, line)
        choices = reply.get("choices", reply.get("outputs"))
        if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
            raise ValueError(f"{place} holds no choices: {str(reply)[:80]}.")
        name = line.get("custom_id") or reply.get("id") or reply.get("request_id")
        for number, choice in enumerate(choices):
            called = f"{place}, choice {number}" if len(choices) > 1 else place
            ids, log_probs = _tokens(called, choice)
            prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
            sample = None if name is None else str(name) + (f"/{number}" if len(choices) > 1 else "")
            yield (
                called,
                {
                    "response_ids": ids,
                    "prompt_ids": prompt,
                    "rollout_log_probs": log_probs,
                    "sample_id": sample,
                    "group": name,
                    "finish_reason": choice.get("finish_reason"),
                    "temperature": asked.get("temperature"),
                },
            )


def _body(place: str, line: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(reply, request) of a line: the reply itself, a batch result, or {"request", "response"}."""
    reply, asked = line, line.get("request") or {}
    if isinstance(line.get("response"), Mapping):
        reply = line["response"].get("body", line["response"])
    if not isinstance(reply, Mapping) or line.get("error"):
        raise ValueError(f"{place} is a request that failed: {str(line.get('error'))[:120]}.")
    return reply, asked if isinstance(asked, Mapping) else {}


def _tokens(place: str, choice: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """(ids, log-probs) of a choice."""
    told, ids = choice.get("logprobs"), choice.get("token_ids")
    if isinstance(told, Mapping) and isinstance(told.get("content"), list):
        names = [entry.get("token") for entry in told["content"]]
        log_probs = [entry.get("logprob") for entry in told["content"]]
    elif isinstance(told, Mapping) and isinstance(told.get("token_logprobs"), list):
        names, log_probs = told.get("tokens") or [], told["token_logprobs"]
    elif isinstance(told, list) and isinstance(ids, list):  # RequestOutput: {id: {"logprob"}} a token
        names, log_probs = [], [_of(entry, ids[at] if at < len(ids) else None) for at, entry in enumerate(told)]
    else:
        raise ValueError(f"{place} holds no log-probs of its tokens: {_ASK}.")
    if ids is None:
        ids = [_id(place, name) for name in names]
    return list(ids), log_probs


def _of(entry: Any, token: Any) -> Any:
    """The log-prob of the sampled token in the dict of one position."""
    found = entry.get(str(token), entry.get(token)) if isinstance(entry, Mapping) else entry
    return found.get("logprob") if isinstance(found, Mapping) else found


def _id(place: str, name: Any) -> int:
    number = str(name).removeprefix("token_id:")
    if number == str(name) or not number.isdigit():
        raise ValueError(f"{place} holds text ({str(name)[:20]!r}) but no token ids: {_ASK}.")
    return int(number)


VLLM = Format("vllm", "replies of vLLM's OpenAI server or RequestOutputs, .json or .jsonl", _recognises, _read)
