"""Numbers as one types them on a command line, packed: commas between tokens, `;` between sequences."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.config.values import number
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import POSITIVE_TOLERANCE

LOG_PROBS = ("train", "rollout", "old", "ref")
FIELDS = {
    "rollout": "rollout_log_probs",
    "mask": "loss_masks",
    "old": "old_log_probs",
    "ref": "ref_log_probs",
    "advantages": "advantages",
    "entropy": "entropy",
    "versions": "weight_versions",
}
"""Option (without dashes) → keyword of `PackedSequences.from_lists`; `train` is log π_θ, which is no field of it."""
_FILLED = {"mask": 1.0, "advantages": 1.0}
"""What an option that is left out stands for, at every token."""
_WHOLE = ("versions", "groups")
_HOW = "write numbers with commas between tokens and ; between sequences, as in --train '-1.2,-0.3; -0.7'"

Rows = list[list[float]]


class Numbers(NamedTuple):
    """log_probs: log π_θ, [T] float64, with gradient. packed: the rest. rewards, groups: [N], where there are any."""

    log_probs: Tensor
    packed: PackedSequences
    rewards: list[float] | None = None
    groups: list[float] | None = None


def read_numbers(given: Mapping[str, Sequence[str] | None], trainer_version: int | None = None) -> Numbers:
    """Texts by option as a batch, in float64. An option given several times is several sequences.

    given: by the names of `FIELDS`, `train`, `rewards` and `groups`. mask and advantages are 1 where they are left out,
    and a single number is taken for every token (of its sequence, where there are several); old is train's values where
    it is left out, as in the first step; groups are one group.
    Raises ValueError that names option, sequence, token and value: what is no number, lengths that differ, a log-prob
    above 0.
    """
    rows = {name: _rows(name, texts) for name, texts in given.items() if texts}
    for name in ("train", "rollout"):
        if name not in rows:
            raise ValueError(f"--{name} is missing: give --train and --rollout, the log-probs of the same tokens.")
    lengths = list(map(len, rows["train"]))
    of_sequences = [_of_sequences(name, rows.pop(name, None), len(lengths)) for name in ("rewards", "groups")]
    if of_sequences[0] and "advantages" in rows:
        raise ValueError("--rewards and --advantages both say the advantages: give one of them.")
    if of_sequences[1] and not of_sequences[0]:
        raise ValueError("--groups is for --rewards: give them, or leave the groups out.")
    for name in dict.fromkeys((*rows, *_FILLED)):
        rows[name] = _fitted(name, rows.get(name, [[_FILLED.get(name, 0.0)]]), lengths)
    if not any(map(any, rows["mask"])):
        raise ValueError("--mask has no 1, so that no token trains: set one.")
    for name in LOG_PROBS:
        _validate_possible(name, rows.get(name, []), rows["mask"])
    rows.setdefault("old", rows["train"])
    named: dict[str, Any] = {
        field: [torch.tensor(row, dtype=torch.float64) for row in rows[name]]
        for name, field in FIELDS.items()
        if name in rows
    }
    labels = tuple(map(sequence_name, range(len(lengths))))
    packed = PackedSequences.from_lists(**named, sequence_ids=labels, trainer_version=trainer_version)
    flat = torch.tensor([value for row in rows["train"] for value in row], dtype=torch.float64)
    return Numbers(torch.where(packed.loss_mask, flat, 0.0).requires_grad_(), packed, *of_sequences)


def sequence_name(index: int) -> str:
    """A to Z, then AA, AB, …"""
    letters = string.ascii_uppercase
    return (sequence_name(index // len(letters) - 1) if index >= len(letters) else "") + letters[index % len(letters)]


def _rows(name: str, texts: Sequence[str]) -> Rows:
    parts = [part for text in texts for part in text.split(";")]
    rows = []
    for index, part in enumerate(parts):
        words = part.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
        if not words:
            raise ValueError(f"--{name} has no number in sequence {sequence_name(index)}: {_HOW}.")
        place = f"of sequence {sequence_name(index)} in --{name}"
        rows.append([_number(word, f"token {at} {place}") for at, word in enumerate(words, start=1)])
    if name in _WHOLE and any(not value.is_integer() for row in rows for value in row):
        raise ValueError(f"--{name} holds a number that is not whole: write 3,3,4.")
    return rows


def _number(word: str, place: str) -> float:
    if word in ("None", "null"):  # what an engine did not return
        return float("nan")
    try:
        return number(word)
    except ValueError:
        raise ValueError(f"{place} is {word!r}, which is not a number: {_HOW}.") from None


def _fitted(name: str, rows: Rows, lengths: Sequence[int]) -> Rows:
    """The rows, where they have the lengths of --train; a single number is repeated where that is allowed."""
    if name in _FILLED:
        rows = rows * len(lengths) if len(rows) == 1 and len(rows[0]) == 1 else rows
        rows = [row * n if len(row) == 1 else row for row, n in zip(rows, lengths, strict=False)] + rows[len(lengths) :]
    if len(rows) != len(lengths):
        raise ValueError(
            f"--{name} has {_counted(len(rows), 'sequence')} and --train {_counted(len(lengths), 'sequence')}: {_HOW}."
        )
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length:
            raise ValueError(
                f"--{name} has {_counted(len(row), 'number')} in sequence {sequence_name(index)} and --train {length}: "
                f"give one a token{', or one for all of them' if name in _FILLED else ''}."
            )
    return rows


def _of_sequences(name: str, rows: Rows | None, count: int) -> list[float] | None:
    if rows is None:
        return None
    values = [value for row in rows for value in row]
    if len(values) != count:
        raise ValueError(
            f"--{name} has {_counted(len(values), 'number')} for {_counted(count, 'sequence')}: give one each."
        )
    return values


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _validate_possible(name: str, rows: Rows, masks: Rows) -> None:
    """What no log-prob can be. Of the rollout NaN and −inf are left to --rollout-log-prob-policy."""
    for index, (row, mask) in enumerate(zip(rows, masks, strict=False)):
        for at, (value, trains) in enumerate(zip(row, mask, strict=True), start=1):
            place = f"token {at} of sequence {sequence_name(index)} in --{name} is {value:g}"
            if trains and value > POSITIVE_TOLERANCE:
                raise ValueError(
                    f"{place}, above 0: log-probs are the natural logarithms of probabilities, 0.5 is written -0.693."
                )
            if trains and name != "rollout" and not math.isfinite(value):
                raise ValueError(f"{place}: a trainer's log-prob is a finite number.")
