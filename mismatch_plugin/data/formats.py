"""The formats of dumps: how each is recognised, and what is special in it. `columns` reads what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_plugin.data.arrays import as_experts, as_floats, as_ids, as_mask, one_or_many, shown
from mismatch_plugin.data.columns import (
    NAMES,
    TRAINER,
    Columns,
    Table,
    closest,
    count,
    named,
    read_columns,
    read_rows,
)
from mismatch_plugin.data.files import EXPERTS, FLOATS, IDS, MASKS, own_fields
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.source import DataProto, Row, Source, each, inner_torch, plain


@dataclass(frozen=True)
class Format:
    """name: for --format. holds: what its files are, for messages. recognises: by content, cheaply. read: one file.

    join: all files in order → one table, where a sample is spread over files; else one follows the other.
    """

    name: str
    holds: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Table]
    join: Callable[[Iterable[tuple[Path, Table]]], Table] | None = None


# Our own files: samples as JSONL or Parquet, and JSONL of the training side's log-probs.

_ARRAYS = {**dict.fromkeys(IDS, as_ids), **dict.fromkeys(MASKS, as_mask), **dict.fromkeys(FLOATS, as_floats)}
_ARRAYS |= dict.fromkeys(("advantages", "entropy"), one_or_many) | dict.fromkeys(EXPERTS, as_experts)
_OWN = {"sampling", "log_probs_of", "weight_versions", "kept_ids", "behaviour_log_probs", "top_log_probs", "served"}
_OF_TRAINER = {
    "token_ids": "trained_ids",
    "prompt_ids": "trained_prompt_ids",
    "loss_mask": "trained_mask",
    "weight_version": "trainer_version",
    "weight_fingerprint": "trainer_fingerprint",
    "temperature": "trainer_temperature",
    "index": "at",
    **{name: name for name in (*TRAINER, "advantages", "sample_id") if name != "entropy"},
    **dict.fromkeys(NAMES["log_probs"], "train_log_probs"),
}
"""Name in a file of the training side alone → field of a sample."""


def _is_samples(source: Source) -> bool:
    """Our names, and of them one that only we write, or nothing of a trainer's side."""
    keys = {*source.keys}
    if source.kind not in ("jsonl", "parquet") or not keys >= {"response_ids", "rollout_log_probs"}:
        return False
    if not keys & {*NAMES["log_probs"]}:
        return "prompt_ids" in keys or bool(keys & _OWN)
    return bool(keys & (_OWN - {"weight_versions"} | {*TRAINER} - {"train_log_probs", "entropy"}))


def _own_row(place: str, row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A row of our names, null left out."""
    found: dict[str, Any] = {"place": place}
    for name, value in row.items():
        field = names.get(name, name)
        if value is not None:
            found[field] = named(f"{place}: {name}", _ARRAYS[field], value) if field in _ARRAYS else value
    return found


def _read_samples(source: Source) -> Table:
    table, fields = Table(), {*Sample.model_fields} - {"index"}
    unknown = sorted({*source.keys} - fields)
    table.notes = [f"not read: {', '.join(unknown)}"] * bool(unknown)
    table.notes += [f"{name}: did you mean {near}?" for name in unknown if (near := closest(name, fields))]
    for place, row in source.rows():
        row = {name: value for name, value in row.items() if name not in unknown}
        table.rows.append(_own_row(place, own_fields(row) if source.kind == "parquet" else row, {}))
        if lacking := [name for name in ("response_ids", "rollout_log_probs") if name not in table.rows[-1]]:
            raise ValueError(f"{place} has no {lacking[0]}: give one for each token of the response.")
    return table


def _read_training(source: Source) -> Table:
    table = Table(missing="it holds the training side's log-probs alone: give the rollout records first")
    table.missing += " and it as TRAINING"
    for place, line in source.rows():
        unknown = line.keys() - _OF_TRAINER
        row = {"place": place} if unknown else _own_row(place, line, _OF_TRAINER)
        for name in row.keys() & {"sample_id", "at"}:
            if not isinstance(row[name], (str, int)):
                raise ValueError(f"{place}: {name} is {shown(row[name])}: give text or a number.")
        if "sample_id" in row:
            row["sample_id"] = str(row["sample_id"])
        if "train_log_probs" not in row:
            says = f"has {min(unknown)}" if unknown else "has no train_log_probs"
            allowed = ", ".join(name for name in _OF_TRAINER if name not in NAMES["log_probs"])
            raise ValueError(f"{place} {says}: a line has train_log_probs and, if wanted, {allowed}.")
        table.rows.append(row)
        n = len(row["train_log_probs"])
        for name in ("loss_mask", "trained_mask", "advantages"):
            if isinstance(line.get(name), list) and len(line[name]) != n:
                raise ValueError(f"{place}: {name} has {len(line[name])} entries for {n} log-probs: give one for each.")
    return table


# slime (624b824) and miles (31f1ca9): {"rollout_id", "samples": [Sample.to_dict()]}; the training side's has
# "format_version" and "dp_shards" too, and samples already gathered over data and context parallel ranks.


def _is_slime(source: Source) -> bool:
    return source.kind == "torch" and {"rollout_id", "samples"} <= {*source.keys}


def _read_slime(source: Source) -> Table:
    samples = source.content.get("samples") if isinstance(source.content, Mapping) else None
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, Mapping) for sample in samples):
        raise ValueError(f"{source.path} holds no list of samples: it is no dump of slime or miles, or it is empty.")
    trained = "dp_shards" in source.keys
    keys = dict.fromkeys(str(key) for sample in samples for key in sample)
    if not trained and all(sample.get("rollout_log_probs") is None for sample in samples):
        raise ValueError(
            f"{source.path}: no sample has rollout_log_probs. Keep what SGLang returned in Sample.rollout_log_probs "
            f"(the built-in rollout functions do; a custom one has to)."
        )
    leave = ("reward", "finish_reason") if trained else ()  # what the trainer normalised is no reward
    columns = Columns([*keys], str(source.path), leave=("step", "total_length", *leave))
    step = number if isinstance(number := source.content.get("rollout_id"), int) else None
    places = [sample.get("rollout_position") for sample in samples]
    table = read_rows(columns, each(samples, f"{source.path}, sample"), step=step)
    for row, place in zip(table.rows, places, strict=True):
        if "log_probs" in columns.names and place is not None:
            at = named("rollout_position", count, place)
            row["at"] = at if step is None else (step, at)
    if "rollout_top_p_token_ids" in keys:
        table.notes.append("top-p was on in sampling: the ids it kept are not read")
    return table


# miles and older slime, one file a rank: {"rollout_id", "rank", "rollout_data": columns}, of miles "cp_rank", "cp_size"
# and "qkv_format". Ranks of one tensor parallel group hold the same samples, pipeline stages before the last no
# log-probs, and context parallel ranks slices of them: two chunks of 2 · cp_size, one from each end.

_SLICED = ("rollout_log_probs", "log_probs", "advantages", "entropy")
_WHOLE = (
    *("tokens", "loss_masks", "response_lengths", "total_lengths", "weight_versions", "weight_fingerprint"),
    *("trainer_weight_version", "max_seq_lens"),
)


def _is_rank(source: Source) -> bool:
    return source.kind == "torch" and {"rollout_id", "rollout_data"} <= {*source.keys}


def _read_rank(source: Source) -> Table:
    path, pack = source.path, source.content
    columns = pack.get("rollout_data") if isinstance(pack, Mapping) else None
    if not isinstance(columns, Mapping) or not {"tokens", "response_lengths"} <= {*columns}:
        raise ValueError(f"{path} holds no rollout_data with tokens and response_lengths: it is no train dump.")
    names = [name for name in (*_WHOLE, *_SLICED) if columns.get(name) is not None]
    total, numbers = len(columns["tokens"]), columns.get("sample_indices")
    for name in names:
        if len(columns[name]) != total:
            raise ValueError(f"{path}: {name} has {len(columns[name])} samples, tokens {total}.")
    if numbers is None:
        raise ValueError(f"{path} has no sample_indices: its ranks cannot be joined.")
    table, shared = Table(), {"cp_size": pack.get("cp_size") or 1, "format": pack.get("qkv_format")}
    for at, number in enumerate(numbers):
        place = f"{path}, sample {number}"
        row = {name: plain(columns[name][at]) for name in names if columns[name][at] is not None}
        for name, convert in (("tokens", as_ids), ("loss_masks", as_mask), *((name, as_floats) for name in _SLICED)):
            if name in row:
                row[name] = named(f"{place}: {name}", convert, row[name]).copy()
        for name in ("response_lengths", "max_seq_lens"):
            if name in row:
                row[name] = named(f"{place}: {name}", count, row[name])
        slices = {name: {pack.get("cp_rank") or 0: row.pop(name)} for name in _SLICED if name in row}
        row |= {"sample_indices": int(number), "rollout_id": pack.get("rollout_id")}
        table.rows.append({"place": place, "row": row, "slices": slices, **shared})
    return table


def _join_ranks(files: Iterable[tuple[Path, Table]]) -> Table:
    whole: dict[Any, dict[str, Any]] = {}
    for path, table in files:
        own = set()
        for rank in table.rows:
            row, step, number = rank["row"], rank["row"]["rollout_id"], rank["row"]["sample_indices"]
            if (step, number) in own:
                raise ValueError(f"{path} holds sample {number} twice.")
            own.add((step, number))
            known = whole.setdefault((step, number), rank)
            called = f"{known['place'].rsplit(',', 1)[0]} and {path} hold"
            if not np.array_equal(known["row"]["tokens"], row["tokens"]) or known["cp_size"] != rank["cp_size"]:
                raise ValueError(f"{called} two samples {number} of rollout {step}.")
            for name, parts in rank["slices"].items():
                for cp_rank, part in parts.items():
                    other = known["slices"].setdefault(name, {}).setdefault(cp_rank, part)
                    if not np.array_equal(other, part, equal_nan=True):
                        raise ValueError(
                            f"{called} other {name} of sample {number} of rollout {step}: files of two runs?"
                        )
    if not whole:
        raise ValueError("a train dump without samples")
    ranks = [whole[key] for key in sorted(whole, key=lambda key: (key[0] is not None, key[0] or 0, key[1]))]
    keys = dict.fromkeys(name for rank in ranks for name in (*rank["row"], *rank["slices"]))
    columns = Columns([*keys], ranks[0]["place"].rsplit(",", 1)[0], leave=["total_length"])
    return read_rows(columns, (_gathered(rank) for rank in ranks))


def _gathered(rank: Mapping[str, Any]) -> Row:
    """A sample with the slices of all context parallel ranks in the order of the response."""
    place, row, size = rank["place"], rank["row"], rank["cp_size"]
    total, length = len(row["tokens"]), row["response_lengths"]
    if length > total:
        raise ValueError(f"{place}: response_lengths is {length}, the sample has {total} tokens.")
    chunk = -(-(row.get("max_seq_lens", total) if rank["format"] == "bshd" else total) // (2 * size))
    before, unnamed = total - length - 1, ": a slice of a dump that does not name its cp_rank?" if size == 1 else "."
    for name, parts in rank["slices"].items():
        lacking = next((number for number in range(size) if number not in parts), None)  # size may be anything
        if lacking is not None:
            raise ValueError(
                f"{place}: {name}: the slice of context parallel rank {lacking} of {size} is not there: give the "
                f"folder with the files of all ranks."
            )
        row[name] = np.full(length, np.nan)
        for number, part in parts.items():
            # A logit at position p is of token p + 1, so those of the response are [before, total − 1).
            chunks = [number, 2 * size - 1 - number] if size > 1 else [0, 1]
            spans = [(max(at * chunk, before), min((at + 1) * chunk, total - 1)) for at in chunks]
            places = np.concatenate([np.arange(start, stop) for start, stop in spans]) - before
            if len(places) != len(part):
                raise ValueError(
                    f"{place}: {name}: rank {number} of {size} has {len(part)} entries, not the {len(places)} that "
                    f"{total} tokens with {length} of the response give it{unnamed}"
                )
            row[name][places] = part
    return place, row


# verl (0.9): a DataProto or TensorDict saved with torch.save, or its tensors in a dict. responses, response_mask,
# rollout_log_probs, old_log_probs, advantages [B, R], padded on the right; prompts [B, P], padded on the left;
# attention_mask [B, P + R].

_SAVE = (
    "torch.save(dict(batch.batch.items()), path) after old_log_probs are computed (in verl's fit: next to its metrics)"
)


def _is_verl(source: Source) -> bool:
    keys = {*source.keys}
    own = "responses" in keys and bool(keys & {"response_mask", "rollout_log_probs", "old_log_probs"})
    return own or _is_text(source) or "batch" in keys or "tensordict" in keys


def _is_text(source: Source) -> bool:
    return source.kind == "jsonl" and {"input", "output", "score", "step"} <= {*source.keys}


def _read_verl(source: Source) -> Table:
    path, content, extra = source.path, source.content, None
    if _is_text(source):
        raise ValueError(
            f"{path} is of trainer.rollout_data_dir: verl writes text and scores there, no token ids and no log-probs, "
            f"so nothing can be compared. Save {_SAVE}."
        )
    step = content.get("global_steps") if isinstance(content, Mapping) else None
    wrapped = isinstance(content, DataProto) or (isinstance(content, Mapping) and {"tensordict", "batch"} & {*content})
    if isinstance(content, DataProto):
        data, extra, _ = content.state if isinstance(content.state, tuple) else (None, None, None)
        if not isinstance(data, bytes):
            raise ValueError(f"{path} is a DataProto without a batch: save {_SAVE}.")
        content = inner_torch(path, data)
    elif wrapped:
        content, extra = content.get("tensordict", content.get("batch")), content.get("non_tensor_batch")
    if wrapped:
        if not isinstance(content, Mapping):
            raise ValueError(f"{path} holds a {type(content).__name__} where its tensors belong: save {_SAVE}.")
        content = {
            **content,
            **{name: extra[name] for name in ("uid",) if isinstance(extra, Mapping) and name in extra},
        }
    if isinstance(content, Mapping) and "rollout_log_probs" not in content and "old_log_probs" in content:
        raise ValueError(f"{path} has no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs=True.")
    table = read_columns(source, content, padded=["response_ids", "prompt_ids"])
    sides = [(row.get("train_log_probs", ()), row.get("rollout_log_probs", None)) for row in table.rows]
    if sides and all(rollout is not None and np.array_equal(train, rollout) for train, rollout in sides):
        table.notes.append("old_log_probs are rollout_log_probs to the last bit: verl's bypass_mode copies them")
    for row in table.rows if wrapped and isinstance(step, int) else ():
        row["step"] = step
    return table


# NeMo-RL (7ea279a): train_data_step*.jsonl of its logger, or its train data saved as tensors: whole sequences [B, S]
# padded on the right; entry t of generation_logprobs and prev_logprobs is of token t, and entry 0 is 0. The response
# begins at the first token of token_mask. A line of the log holds a batch of one: each value in a list.


def _read_nemo(source: Source) -> Table:
    if source.kind != "jsonl":
        return read_columns(source, source.content, padded=["sequence"])
    columns = Columns(source.keys, str(source.path), leave=["sample_id"])  # idx is the place in the file
    return read_rows(columns, _unlisted(source, {*columns.names.values()}), padded=["sequence"])


def _unlisted(source: Source, names: set[str]) -> Iterator[Row]:
    for place, row in source.rows():
        one = {name: value for name, value in row.items() if name in names}
        if any(isinstance(value, list) and len(value) != 1 for value in one.values()):
            raise ValueError(f"{place} is not one sample: NeMo-RL's log has lists of one in each line.")
        yield place, {name: value[0] if isinstance(value, list) else value for name, value in one.items()}


# What TRL's GRPOTrainer makes of a batch, saved as a dict or as Parquet rows: prompt_ids, prompt_mask (left-padded),
# completion_ids, completion_mask, advantages [B], tool_mask. It asks vLLM for log-probs after temperature and filters.


def _read_trl(source: Source) -> Table:
    return read_columns(source, source.content, padded=["response_ids"], log_probs_of="filtered")


# SkyRL (a956457): torch.save(dict(batch), path) of its TrainingInputBatch. sequences [B, S] are padded on the left, and
# what is of the response, [B, R], ends at the right. It asks vLLM for log-probs without a mode: raw ones.


def _read_skyrl(source: Source) -> Table:
    columns = {name: plain(values) for name, values in source.content.items() if values is not None}
    rows: list[dict[str, Any]] = []
    for at, mask in enumerate(columns["response_mask"]):
        length, row = int(sum(mask)), {name: columns[name][at] for name in columns}
        tokens = row.pop("sequences")
        seen = int(sum(row.pop("attention_mask", [1] * len(tokens))))
        row = {name: values[len(values) - length :] for name, values in row.items() if np.ndim(values) == 1}
        rows.append({**row, "response_ids": tokens[len(tokens) - length :]})
        rows[-1]["prompt_ids"] = tokens[len(tokens) - seen : len(tokens) - length]
    return read_columns(
        source, {name: [row[name] for row in rows] for name in rows[0]} if rows else columns, log_probs_of="raw"
    )


# What vLLM answers: (chat) completions, batch results and RequestOutputs, one a line or one document. Log-probs are of
# the raw logits unless the server runs with --logprobs-mode processed_logprobs.

AS_RAW = "log-probs are taken as raw: before temperature and filters, vLLM's default logprobs_mode"
_ASK = "ask for return_token_ids=true (or return_tokens_as_token_ids=true) and logprobs"


def _is_vllm(source: Source) -> bool:
    keys = {*source.keys}
    told = "choices" in keys or {"prompt_token_ids", "outputs"} <= keys or {"custom_id", "response"} <= keys
    return source.kind in ("json", "jsonl") and told


def _read_vllm(source: Source) -> Table:
    keys = ("response_ids", "prompt_ids", "rollout_log_probs", "sample_id", "group", "finish_reason", "temperature")
    columns = Columns(keys, str(source.path))
    table = read_rows(columns, _choices(source), log_probs_of="raw")
    table.notes.append(AS_RAW)
    return table


def _choices(source: Source) -> Iterator[Row]:
    """One row a choice."""
    for place, line in source.rows():
        reply, asked = line, line.get("request")
        if isinstance(line.get("response"), Mapping):
            reply = line["response"].get("body", line["response"])
        if not isinstance(reply, Mapping) or line.get("error"):
            raise ValueError(f"{place} is a request that failed: {str(line.get('error'))[:120]}.")
        choices = reply.get("choices", reply.get("outputs"))
        if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
            raise ValueError(f"{place} holds no choices: {str(reply)[:80]}.")
        name = line.get("custom_id") or reply.get("id") or reply.get("request_id")
        for number, choice in enumerate(choices):
            called = f"{place}, choice {number}" if len(choices) > 1 else place
            ids, log_probs = _tokens(called, choice)
            row = {
                "response_ids": ids,
                "prompt_ids": choice.get("prompt_token_ids") or reply.get("prompt_token_ids"),
                "rollout_log_probs": log_probs,
                "sample_id": None if name is None else str(name) + (f"/{number}" if len(choices) > 1 else ""),
                "group": name,
                "finish_reason": choice.get("finish_reason"),
                "temperature": asked.get("temperature") if isinstance(asked, Mapping) else None,
            }
            yield called, row


def _tokens(place: str, choice: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """(ids, log-probs) of a choice."""
    told, ids, names = choice.get("logprobs"), choice.get("token_ids"), []
    if isinstance(told, Mapping) and isinstance(told.get("content"), list):
        names = [entry.get("token") for entry in told["content"]]
        log_probs = [entry.get("logprob") for entry in told["content"]]
    elif isinstance(told, Mapping) and isinstance(told.get("token_logprobs"), list):
        names, log_probs = told.get("tokens") or [], told["token_logprobs"]
    elif isinstance(told, list) and isinstance(ids, list):  # RequestOutput: {id: {"logprob"}} a token
        log_probs = [
            entry.get(str(token), entry.get(token)) if isinstance(entry, Mapping) else entry
            for entry, token in zip_longest(told, ids[: len(told)])
        ]
        log_probs = [value.get("logprob") if isinstance(value, Mapping) else value for value in log_probs]
    else:
        raise ValueError(f"{place} holds no log-probs of its tokens: {_ASK}.")
    if ids is None:
        ids = [str(name).removeprefix("token_id:") for name in names]
        if text := next(
            (name for name, number in zip(names, ids, strict=True) if number == str(name) or not number.isdigit()), None
        ):
            raise ValueError(f"{place} holds text ({str(text)[:20]!r}) but no token ids: {_ASK}.")
        ids = [int(number) for number in ids]
    return list(ids), log_probs


def _is_training(source: Source) -> bool:
    keys = {*source.keys}
    others = {*NAMES["response_ids"], *NAMES["sequence"], *NAMES["rollout_log_probs"]} - {"token_ids"}
    return source.kind == "jsonl" and bool(keys & {*NAMES["log_probs"]}) and not keys & others


def _has(*names: str) -> Callable[[Source], bool]:
    return lambda source: {*names} <= {*source.keys}


def _read_known(source: Source) -> Table:
    return read_columns(source, source.content)


def _is_older_slime(source: Source) -> bool:
    return _is_rank(source) and not {"cp_rank", "cp_size"} & {*source.keys}


_ALL = (
    Format("records", "rollout records of this package, .jsonl or .parquet", _is_samples, _read_samples),
    Format("training", "the training side's log-probs, .jsonl", _is_training, _read_training),
    Format("slime", "slime's and miles' --save-debug-rollout-data, slime's train data", _is_slime, _read_slime),
    Format("slime_train", "older slime's train data, one file a rank", _is_older_slime, _read_rank, _join_ranks),
    Format("miles_train", "miles' --save-debug-train-data, one file a rank", _is_rank, _read_rank, _join_ranks),
    Format("verl", "verl's DataProto, TensorDict or tensors", _is_verl, _read_verl),
    Format("nemo_rl", "NeMo-RL's train_data_step*.jsonl, or its tensors", _has("generation_logprobs"), _read_nemo),
    # prime-rl (559b447), enable_token_export: a sequence a line, entry t is of token t.
    Format("prime_rl", "prime-rl's token_exports, .jsonl", _has("trainer_logprobs", "inference_logprobs"), _read_known),
    Format("trl", "TRL's batch", _has("completion_ids", "sampling_per_token_logps"), _read_trl),
    Format("skyrl", "SkyRL's TrainingInputBatch as a dict", _has("sequences", "rollout_logprobs"), _read_skyrl),
    Format("vllm", "replies of vLLM's OpenAI server or RequestOutputs, .json or .jsonl", _is_vllm, _read_vllm),
    # The last that is asked: what it cannot read, it says with the names it knows.
    Format("generic", "columns or rows with known names", _has(), _read_known),
)
FORMATS: dict[str, Format] = {one.name: one for one in _ALL}
"""By the name that --format takes. The first that recognises a file reads it."""
