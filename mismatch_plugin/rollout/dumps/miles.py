"""miles (31f1ca9) and older slime: --save-debug-train-data, one file a rank.

{"rollout_id", "rank", "rollout_data": columns of this rank}, and of miles "cp_rank", "cp_size", "qkv_format". Ranks of
one tensor parallel group hold the same samples, pipeline stages before the last no log-probs, and context parallel
ranks slices of them: two chunks of 2 · cp_size, one from each end. All ranks of a rollout are joined by sample_indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_plugin.rollout.dumps import values
from mismatch_plugin.rollout.dumps.names import Columns
from mismatch_plugin.rollout.dumps.part import Format, Options, Part
from mismatch_plugin.rollout.dumps.rows import RowReader
from mismatch_plugin.rollout.dumps.source import Row, Source
from mismatch_plugin.rollout.responses import Floats

_SLICED = ("rollout_log_probs", "log_probs", "advantages", "entropy")
_WHOLE = (
    "tokens",
    "loss_masks",
    "response_lengths",
    "total_lengths",
    "weight_versions",
    "weight_fingerprint",
    "trainer_weight_version",
    "max_seq_lens",
)
_Key = tuple[int | None, int]


@dataclass
class _Sample:
    """One sample of a rollout, from every rank that has a part of it. slices: column → context parallel rank → part."""

    path: Path
    cp_size: int
    chunks_of: int
    row: dict[str, Any]
    slices: dict[str, dict[int, Floats]] = field(default_factory=dict)


@dataclass
class _Rank:
    """What one file holds, by (rollout, sample)."""

    options: Options
    samples: dict[_Key, tuple[int, _Sample]]


def _recognises(source: Source) -> bool:
    return source.kind == "torch" and {"rollout_id", "rollout_data"} <= {*source.keys}


def _of_slime(source: Source) -> bool:
    return _recognises(source) and not {"cp_rank", "cp_size"} & {*source.keys}


def _read(source: Source, options: Options) -> _Rank:
    pack = source.content
    columns = pack.get("rollout_data") if isinstance(pack, Mapping) else None
    if not isinstance(columns, Mapping) or not {"tokens", "response_lengths"} <= {*columns}:
        raise ValueError(f"{source.path} holds no rollout_data with tokens and response_lengths: it is no train dump.")
    total = len(columns["tokens"])
    names = [name for name in (*_WHOLE, *_SLICED) if columns.get(name) is not None]
    for name in names:
        if len(columns[name]) != total:
            raise ValueError(f"{source.path}: {name} has {len(columns[name])} samples, tokens {total}.")
    numbers = columns.get("sample_indices")
    if numbers is None:
        raise ValueError(f"{source.path} has no sample_indices: its ranks cannot be joined.")
    step, cp_rank, cp_size = pack.get("rollout_id"), pack.get("cp_rank") or 0, pack.get("cp_size") or 1
    samples: dict[_Key, tuple[int, _Sample]] = {}
    for at, number in enumerate(numbers):
        place = f"{source.path}, sample {number}"
        row = {name: columns[name][at] for name in _WHOLE if name in names}
        row["tokens"] = values.ids(row["tokens"], f"{place}: tokens")
        if "loss_masks" in row:
            row["loss_masks"] = values.mask(row["loss_masks"], f"{place}: loss_masks")
        length = values.count(row.get("max_seq_lens", len(row["tokens"])), f"{place}: max_seq_lens")
        sample = _Sample(source.path, cp_size, length if pack.get("qkv_format") == "bshd" else len(row["tokens"]), row)
        for name in _SLICED:
            if name in names and columns[name][at] is not None:
                sample.slices[name] = {cp_rank: values.floats(columns[name][at], f"{place}: {name}")[0]}
        key = (step, int(number))
        if key in samples:
            raise ValueError(f"{source.path} holds sample {number} twice.")
        samples[key] = (cp_rank, sample)
    return _Rank(options, samples)


def _join(files: Iterable[tuple[Path, _Rank]]) -> Part:
    whole: dict[_Key, _Sample] = {}
    options = Options()
    for path, rank in files:
        options = rank.options
        for key, (_, sample) in rank.samples.items():
            known = whole.setdefault(key, sample)
            if known is sample:
                continue
            if not np.array_equal(known.row["tokens"], sample.row["tokens"]) or known.cp_size != sample.cp_size:
                raise ValueError(f"{known.path} and {path} hold two samples {key[1]} of rollout {key[0]}.")
            for name, parts in sample.slices.items():
                for cp_rank, part in parts.items():
                    own = known.slices.setdefault(name, {})
                    if not np.array_equal(own.setdefault(cp_rank, part), part, equal_nan=True):
                        raise ValueError(
                            f"{known.path} and {path} hold other {name} of sample {key[1]} of rollout {key[0]}: files "
                            f"of two runs?"
                        )
    ordered = sorted(whole, key=lambda key: (key[0] is not None, key[0] or 0, key[1]))
    names = dict.fromkeys(name for sample in whole.values() for name in (*sample.row, *sample.slices))
    keys = [*names, "sample_indices", "rollout_id"]
    if not whole:
        raise ValueError("a train dump without samples")
    first = next(iter(whole.values())).path
    reader = RowReader(Columns(keys, str(first), leave=["total_length"]), options)
    return reader.part(_row(key, whole.pop(key)) for key in ordered)


def _row(key: _Key, sample: _Sample) -> Row:
    place = f"{sample.path}, sample {key[1]}"
    length = values.count(sample.row["response_lengths"], f"{place}: response_lengths")
    if length > (total := len(sample.row["tokens"])):
        raise ValueError(f"{place}: response_lengths is {length}, the sample has {total} tokens.")
    row = {**sample.row, "sample_indices": key[1], "rollout_id": key[0]}
    for name, parts in sample.slices.items():
        row[name] = _assembled(f"{place}: {name}", sample, parts, length)
    return place, row


def _assembled(called: str, sample: _Sample, parts: Mapping[int, Floats], length: int) -> Floats:
    """The slices of all context parallel ranks in the order of the response."""
    size, total = sample.cp_size, len(sample.row["tokens"])
    if size == 1:
        if len(parts[0]) != length:
            raise ValueError(
                f"{called} has {len(parts[0])} entries, the response {length} tokens: a context parallel slice of a "
                f"dump that does not name its cp_rank?"
            )
        return parts[0]
    if (lacking := next((rank for rank in range(size) if rank not in parts), None)) is not None:  # size may be anything
        raise ValueError(
            f"{called}: the slice of context parallel rank {lacking} of {size} is not there: give the folder with "
            f"the files of all ranks."
        )
    chunk, before = -(-sample.chunks_of // (2 * size)), total - length - 1
    whole = np.full(length, np.nan)
    for rank, part in parts.items():
        # A logit at position p is of token p + 1, so those of the response are [before, total − 1).
        spans = [
            (max(number * chunk, before), min((number + 1) * chunk, total - 1))
            for number in (rank, 2 * size - 1 - rank)
        ]
        places = np.concatenate([np.arange(start, stop) for start, stop in spans]) - before
        if len(places) != len(part):
            raise ValueError(
                f"{called}: rank {rank} of {size} has {len(part)} entries, not the {len(places)} that {total} tokens "
                f"with {length} of the response give it."
            )
        whole[places] = part
    return whole


SLIME_TRAIN = Format("slime_train", "older slime's --save-debug-train-data, one file a rank", _of_slime, _read, _join)
MILES_TRAIN = Format("miles_train", "miles' --save-debug-train-data, one file a rank", _recognises, _read, _join)
