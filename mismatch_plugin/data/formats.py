"""The formats of dumps: how each is recognised, and what is special in it. `columns` reads what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mismatch_plugin.data.arrays import Ints, as_floats
from mismatch_plugin.data.columns import NAMES, TRAINER, Columns, Dump, closest, read_columns, read_rows, sample_at
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.source import Row, Source, each, plain


@dataclass(frozen=True)
class Format:
    """name: for --format. holds: what its files are, for messages. recognises: by content, cheaply. read: a source;
    where a sample is spread over files, all of them in order."""

    name: str
    holds: str
    recognises: Callable[[Source], bool]
    read: Callable[[Any], Dump]
    spread: bool = False


def _has(*names: str, kind: str = "") -> Callable[[Source], bool]:
    return lambda source: {*names} <= {*source.keys} and source.kind in (kind or source.kind)


# Our own files, JSONL: samples, and the training side's log-probs.

_OWN = {"sampling", "log_probs_of", "weight_versions", "kept_ids", "behaviour_log_probs", "served"}
_OF_TRAINER = {
    "token_ids": "trained_ids",
    "prompt_ids": "trained_prompt_ids",
    "loss_mask": "trained_mask",
    "weight_version": "trainer_version",
    "weight_fingerprint": "trainer_fingerprint",
    "temperature": "trainer_temperature",
    **{name: name for name in (*TRAINER, "advantages", "sample_id", "index") if name != "entropy"},
    **dict.fromkeys(NAMES["log_probs"], "train_log_probs"),
}
"""Name in a file of the training side alone → field of a sample."""


def _is_samples(source: Source) -> bool:
    """Our names, and of them one that only we write, or nothing of a trainer's side."""
    keys = {*source.keys}
    if source.kind == "parquet" and keys & (_OWN - {"weight_versions"}):
        raise ValueError(f"{source.path}: our own records are JSONL. Write them again, as a .jsonl file.")
    if source.kind != "jsonl" or not keys >= {"response_ids", "rollout_log_probs"}:
        return False
    if not keys & {*NAMES["log_probs"]}:
        return "prompt_ids" in keys or bool(keys & _OWN)
    return bool(keys & (_OWN - {"weight_versions"} | {*TRAINER} - {"train_log_probs", "entropy"}))


def _read_samples(source: Source) -> Dump:
    dump, fields = Dump(), {*Sample.model_fields} - {"index"}
    unknown = sorted({*source.keys} - fields)
    dump.notes = [f"not read: {', '.join(unknown)}"] * bool(unknown)
    dump.notes += [f"{name}: did you mean {near}?" for name in unknown if (near := closest(name, fields))]
    for place, row in source.rows():
        row = {name: value for name, value in row.items() if name not in unknown}
        if lacking := [name for name in ("response_ids", "rollout_log_probs") if row.get(name) is None]:
            raise ValueError(f"{place} has no {lacking[0]}: give one for each token of the response.")
        dump.samples.append(sample_at(place, row))
    return dump


def _is_training(source: Source) -> bool:
    """Log-probs of the trainer, by a name that may be misspelt, and nothing of a rollout."""
    others = {*NAMES["response_ids"], *NAMES["sequence"], *NAMES["rollout_log_probs"]} - {"token_ids"}
    meant = {closest(name, {*_OF_TRAINER, *others}) for name in source.keys}
    return source.kind == "jsonl" and not meant & others and bool(meant & {*NAMES["log_probs"]})


def _read_training(source: Source) -> Dump:
    dump = Dump(missing="it holds the training side's log-probs alone: give the rollout records first")
    dump.missing += " and it as TRAINING."
    allowed = ", ".join(name for name in _OF_TRAINER if name not in NAMES["log_probs"])
    rule = f"a line has train_log_probs and, if wanted, {allowed}."
    for place, line in source.rows():
        for name in sorted(line.keys() - _OF_TRAINER):
            near = closest(name, _OF_TRAINER)
            raise ValueError(f"{place} has {name}: " + (f"did you mean {near}?" if near else rule))
        row = {_OF_TRAINER[name]: value for name, value in line.items()}
        if row.get("train_log_probs") is None:
            raise ValueError(f"{place} has no train_log_probs: {rule}")
        dump.samples.append(sample := sample_at(place, row))
        if sample.trained_mask is not None and len(sample.trained_mask) != (n := len(sample.train_log_probs)):
            raise ValueError(f"{place}: loss_mask has {len(sample.trained_mask)} entries for {n} log-probs.")
    return dump


# slime (624b824) and miles (31f1ca9): {"rollout_id", "samples": [Sample.to_dict()]}; the training side's has
# "format_version" and "dp_shards" too, and samples already gathered over data and context parallel ranks.


def _read_slime(source: Source) -> Dump:
    samples, step, trained = source.content["samples"], source.content["rollout_id"], "dp_shards" in source.keys
    keys = dict.fromkeys(str(key) for sample in samples for key in sample)
    if not trained and all(sample.get("rollout_log_probs") is None for sample in samples):
        raise ValueError(
            f"{source.path}: no sample has rollout_log_probs. Keep what SGLang returned in Sample.rollout_log_probs "
            f"(the built-in rollout functions do; a custom one has to)."
        )
    leave = ("reward", "finish_reason") if trained else ()  # what the trainer normalised is no reward
    columns = Columns([*keys], str(source.path), leave=("step", "total_length", *leave))
    dump = read_rows(columns, each(samples, f"{source.path}, sample"), step=step if isinstance(step, int) else None)
    if "rollout_top_p_token_ids" in keys:
        dump.notes.append("top-p was on in sampling: the ids it kept are not read")
    return dump


# miles and older slime, one file a rank: {"rollout_id", "rank", "rollout_data": columns}, of miles "cp_rank", "cp_size"
# and "qkv_format". Ranks of one tensor parallel group hold the same samples, pipeline stages before the last no
# log-probs, and context parallel ranks slices of them: two chunks of 2 · cp_size, one from each end.

_is_rank = _has("rollout_id", "rollout_data")
_is_miles = _has("rollout_id", "rollout_data", "cp_size")
_SLICED = ("rollout_log_probs", "log_probs", "advantages", "entropy")
_WHOLE = (
    *("tokens", "loss_masks", "response_lengths", "total_lengths", "weight_versions", "weight_fingerprint"),
    *("trainer_weight_version", "max_seq_lens"),
)


def _read_ranks(sources: Iterable[Source]) -> Dump:
    found: dict[Any, tuple[str, dict[str, Any], dict[str, set[int]]]] = {}
    path, size = "", 1
    for source in sources:
        path, pack, columns = str(source.path), source.content, source.content["rollout_data"]
        step, rank, size = pack.get("rollout_id"), pack.get("cp_rank") or 0, pack.get("cp_size") or 1
        names = [name for name in (*_WHOLE, *_SLICED) if columns.get(name) is not None]
        for at, number in enumerate(map(int, columns["sample_indices"])):
            told = {name: plain(columns[name][at]) for name in names if columns[name][at] is not None}
            slices = {name: as_floats(told.pop(name)) for name in _SLICED if name in told}
            told |= {"sample_indices": number, "rollout_id": step}
            place, row, ranks = found.setdefault((step, number), (f"{path}, sample {number}", told, {}))
            if not np.array_equal(row["tokens"], told["tokens"]):
                raise ValueError(f"{place}: {path} holds another sample {number} of rollout {step}.")
            places = _places(told, rank, size, padded=pack.get("qkv_format") == "bshd")
            for name, values in slices.items():
                if len(places) != len(values):
                    raise ValueError(
                        f"{place}: {name}: rank {rank} of {size} has {len(values)} entries, not the {len(places)} that "
                        f"{len(told['tokens'])} tokens with {told['response_lengths']} of the response give it."
                    )
                whole = row.setdefault(name, np.full(int(told["response_lengths"]), np.nan))
                if rank in ranks.setdefault(name, set()) and not np.array_equal(whole[places], values, equal_nan=True):
                    raise ValueError(f"{place}: {path} holds other {name} of it: files of two runs?")
                whole[places] = values
                ranks[name].add(rank)
    ordered = [found[key] for key in sorted(found, key=lambda key: (key[0] is not None, key[0] or 0, key[1]))]
    for place, _, ranks in ordered:
        for name, came in ranks.items():
            if (lacking := next((number for number in range(size) if number not in came), None)) is not None:
                raise ValueError(
                    f"{place}: {name}: the slice of context parallel rank {lacking} of {size} is not there: give the "
                    f"folder with the files of all ranks."
                )
    keys = dict.fromkeys(name for _, row, _ in ordered for name in row)
    columns = Columns([*keys], path, leave=["total_length"])
    return read_rows(columns, ((place, row) for place, row, _ in ordered))


def _places(row: dict[str, Any], rank: int, size: int, *, padded: bool) -> Ints:
    """Where in the response the entries of a context parallel rank are."""
    total = len(row["tokens"])
    chunk = -(-int(row.get("max_seq_lens", total) if padded else total) // (2 * size))
    # A logit at position p is of token p + 1, so those of the response are [first, total − 1).
    first = total - int(row["response_lengths"]) - 1
    chunks = [rank, 2 * size - 1 - rank] if size > 1 else [0, 1]
    spans = [(max(at * chunk, first), min((at + 1) * chunk, total - 1)) for at in chunks]
    return np.concatenate([np.arange(start, stop) for start, stop in spans]) - first


# verl (0.9): the tensors of a DataProto or TensorDict in a dict, saved with torch.save. responses, response_mask,
# rollout_log_probs, old_log_probs, advantages [B, R], padded on the right; prompts [B, P], padded on the left;
# attention_mask [B, P + R].


def _is_verl(source: Source) -> bool:
    keys = {*source.keys}
    own = "responses" in keys and bool(keys & {"response_mask", "rollout_log_probs", "old_log_probs"})
    return own or _is_text(source)


def _is_text(source: Source) -> bool:
    return source.kind == "jsonl" and {"input", "output", "score", "step"} <= {*source.keys}


def _read_verl(source: Source) -> Dump:
    if _is_text(source):
        raise ValueError(
            f"{source.path} is of trainer.rollout_data_dir: verl writes text and scores there, no token ids and no "
            f"log-probs, so nothing can be compared. Save torch.save(dict(batch.batch.items()), path) after "
            f"old_log_probs are computed (in verl's fit: next to its metrics)."
        )
    if "rollout_log_probs" not in source.keys and "old_log_probs" in source.keys:
        raise ValueError(
            f"{source.path} has no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    dump = read_columns(source, padded=["response_ids", "prompt_ids"])
    sides = [(sample.train_log_probs, sample.rollout_log_probs) for sample in dump.samples]
    if sides and all(np.array_equal(train, rollout) for train, rollout in sides):
        dump.notes.append("old_log_probs are rollout_log_probs to the last bit: verl's bypass_mode copies them")
    return dump


# NeMo-RL (7ea279a): train_data_step*.jsonl of its logger, or its train data saved as tensors: whole sequences [B, S]
# padded on the right; entry t of generation_logprobs and prev_logprobs is of token t, and entry 0 is 0. The response
# begins at the first token of token_mask. A line of the log holds a batch of one: each value in a list.


def _read_nemo(source: Source) -> Dump:
    if source.kind != "jsonl":
        return read_columns(source, padded=["sequence"])
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

_read_trl = partial(read_columns, padded=["response_ids"], log_probs_of="filtered")


# SkyRL (a956457): torch.save(dict(batch), path) of its TrainingInputBatch. sequences [B, S] are padded on the left, and
# what is of the response, [B, R], ends at the right. It asks vLLM for log-probs without a mode: raw ones.


def _read_skyrl(source: Source) -> Dump:
    columns = {name: plain(values) for name, values in source.content.items() if values is not None}

    def rows() -> Iterator[Row]:
        for at, mask in enumerate(columns["response_mask"]):
            length, row = int(sum(mask)), {name: values[at] for name, values in columns.items()}
            tokens = row.pop("sequences")
            seen = int(sum(row.pop("attention_mask", [1] * len(tokens))))
            row = {name: values[len(values) - length :] for name, values in row.items() if np.ndim(values) == 1}
            row["prompt_ids"] = tokens[len(tokens) - seen : len(tokens) - length]
            yield f"{source.path}, sample {at}", {**row, "response_ids": tokens[len(tokens) - length :]}

    keys = ["prompt_ids", "response_ids", *(name for name in columns if name not in ("sequences", "attention_mask"))]
    return read_rows(Columns(keys, str(source.path)), rows(), log_probs_of="raw")


_ALL = (
    Format("records", "rollout records of this package, .jsonl", _is_samples, _read_samples),
    Format("training", "the training side's log-probs, .jsonl", _is_training, _read_training),
    Format(
        "slime",
        "slime's and miles' --save-debug-rollout-data, slime's train data",
        _has("rollout_id", "samples", kind="torch"),
        _read_slime,
    ),
    Format("miles_train", "miles' --save-debug-train-data, one file a rank", _is_miles, _read_ranks, True),
    Format("slime_train", "older slime's train data, one file a rank", _is_rank, _read_ranks, True),
    Format("verl", "verl's tensors in a dict", _is_verl, _read_verl),
    Format("nemo_rl", "NeMo-RL's train_data_step*.jsonl, or its tensors", _has("generation_logprobs"), _read_nemo),
    # prime-rl (559b447), enable_token_export: a sequence a line, entry t is of token t.
    Format("prime_rl", "prime-rl's token_exports", _has("trainer_logprobs", "inference_logprobs"), read_columns),
    Format("trl", "TRL's batch", _has("completion_ids", "sampling_per_token_logps"), _read_trl),
    Format("skyrl", "SkyRL's TrainingInputBatch as a dict", _has("sequences", "rollout_logprobs"), _read_skyrl),
    # The last that is asked: what it cannot read, it says with the names it knows.
    Format("generic", "columns or rows with known names", _has(), read_columns),
)
FORMATS: dict[str, Format] = {one.name: one for one in _ALL}
"""By the name that --format takes. The first that recognises a file reads it."""
