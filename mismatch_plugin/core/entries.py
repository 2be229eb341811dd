"""What data preparation hands over, one entry a sequence, as flat tensors; and what is refused, naming the sequence."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.core.host import of_numbers


def validate_field_names(fields: Mapping[str, Any]) -> None:
    """Raise TypeError for a field that no batch has."""
    for name in fields:
        meant = "loss_masks, one mask a sequence" if "mask" in name else "one of those in the signature"
        raise TypeError(f"{name} is no field of a batch: pass {meant}.")


def validate_finite(
    name: str, values_T: Tensor, trained_T: Tensor, lengths: tuple[int, ...], ids: tuple[object, ...]
) -> None:
    """Raise ValueError if a trained token's value is NaN or inf. What the loss mask hides may be anything."""
    if values_T.sum().isfinite():  # then every value is
        return
    bad = trained_T & ~values_T.isfinite()
    if bad.any():
        token, sequence, position = _first(bad, lengths)
        raise ValueError(
            f"{name} of sequence {ids[sequence]} is {float(values_T[token])} at position {position}, a token that "
            f"trains: find where it comes from, or set its loss mask to 0."
        )


ONE_POLICY = (
    "old_log_probs and train_log_probs are two names of log π_old, the policy before the step: give one of them. "
    "π_θ goes to policy_loss as log_probs."
)


_MOST_UNITS = 1000
"""Or a response's tokens: memory is set aside for every unit up to the last, and a number above is an id."""


def checked_units(
    turn_ids_T: Tensor, counts: tuple[int, ...] | None, lengths: tuple[int, ...], ids: tuple[object, ...]
) -> tuple[int, ...]:
    """Units of each sequence: as given, else one more than its last number. Only what is on the CPU is checked."""
    if counts is not None and turn_ids_T.device.type != "cpu":
        return counts
    rows = turn_ids_T.cpu().split(list(lengths)) if lengths else ()
    known = tuple(int(row[-1]) + 1 if len(row) else 1 for row in rows) if counts is None else counts
    for row, count, label in zip(rows, known, ids, strict=True):
        wrong = torch.cat([row.new_zeros(1), row])[:-1] > row
        wrong |= (row < 0) | (row >= (count if counts is not None else max(len(row), _MOST_UNITS)))
        if wrong.any():
            position = int(wrong.nonzero()[0])
            among = "" if counts is None else f"{count} "
            raise ValueError(
                f"unit_ids of sequence {label} is {int(row[position])} at position {position}: number its {among}units "
                f"from 0 upwards, and give the tokens between two of them the number of either."
            )
    return known


def _first(bad_T: Tensor, lengths: tuple[int, ...]) -> tuple[int, int, int]:
    """(token, sequence, position in it) of the first True."""
    token = int(bad_T.nonzero()[0])
    ends = torch.tensor(lengths).cumsum(0)
    sequence = int((ends <= token).sum())
    return token, sequence, token - int(ends[sequence]) + lengths[sequence]


def version_number(version: Any) -> int:
    """The trainer's version as int. Raises ValueError for what is no whole number on the host."""
    if isinstance(version, (bool, Tensor)) or not hasattr(version, "__index__"):
        raise ValueError(
            f"trainer_version is {version!r}: pass the number of the weights that train, an int on the host, counted "
            f"as weight_versions are."
        )
    number = version.__index__()
    if abs(number) >= 2**62:
        raise ValueError(f"trainer_version is {number}: no number of versions is that large (64 bits).")
    return number


def whole_number(length: Any) -> int:
    """A length as int. Raises ValueError for what is no whole number."""
    if isinstance(length, bool) or not hasattr(length, "__index__"):
        raise ValueError(f"lengths holds {length!r}: pass whole numbers of tokens.")
    return length.__index__()


def flatten_entries(
    name: str, values: Sequence[Any], lengths: tuple[int, ...], ids: tuple[object, ...], integer: bool = False
) -> Tensor:
    """One entry a sequence as one flat tensor: [T] float32 or float64, or int64.

    Raises ValueError naming the sequence where an entry is missing, no list of numbers, or of another length.
    """
    if len(values) != len(lengths):
        raise ValueError(f"{name} has {len(values)} sequences, loss_masks {len(lengths)}: pass one entry a sequence.")
    rows = [_entry(name, row, length, label, integer) for row, length, label in zip(values, lengths, ids, strict=True)]
    flat = torch.cat(rows) if rows else torch.zeros(0)
    if flat.dtype == torch.bool and name.endswith("log_probs"):
        return flat  # refused where the batch is made
    if not integer:
        return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    if flat.is_floating_point() and flat.device.type == "cpu":
        odd = (flat.frac() != 0) | (flat.abs() >= 2**53)  # NaN and infinities as well
        if odd.any():
            token, sequence, position = _first(odd, lengths)
            raise ValueError(
                f"{name} of sequence {ids[sequence]} is {float(flat[token]):g} at position {position}: pass whole "
                f"numbers."
            )
    return flat.long()


def _entry(name: str, row: Any, length: int, label: object, integer: bool) -> Tensor:
    """One sequence's values, [length]."""
    if row is None:
        raise ValueError(
            f"{name} of sequence {label} is None: pass one number a response token (None for a single one that was "
            f"not returned), or leave the sequence out."
        )
    try:
        tensor = row if isinstance(row, Tensor) else _tensor(name, row, integer)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} of sequence {label} is no list of numbers ({str(error).splitlines()[0]}): pass one number a "
            f"response token."
        ) from None
    if tensor.dim() == 0 and name == "advantages":
        tensor = tensor.expand(length)
    if tensor.shape != (length,):
        fix = "the two must cover the same response tokens"
        if name == "advantages" and tensor.shape == (1,):
            fix = "for one advantage a sequence pass numbers (of a [B, 1] tensor, advantages.squeeze(1))"
        raise ValueError(
            f"{name} of sequence {label} has shape {tuple(tensor.shape)}, its loss mask {length} tokens: {fix}."
        )
    return tensor


def _tensor(name: str, row: Any, integer: bool) -> Tensor:
    """As torch makes one, with NaN for None."""
    if not isinstance(row, (list, tuple)):
        return torch.as_tensor(row)
    if name == "loss_masks" and row:
        with contextlib.suppress(TypeError, ValueError):
            return torch.frombuffer(bytearray(row), dtype=torch.uint8).to(torch.get_default_device())
    flat = of_numbers(row)
    if flat is None and None in row:
        row = [math.nan if item is None else item for item in row]
        flat = of_numbers(row)
    if flat is not None:
        flat = flat.to(torch.get_default_device())
        return flat if integer or not flat.is_floating_point() else flat.to(torch.get_default_dtype())
    whole = integer and not any(isinstance(item, float) for item in row)
    return torch.tensor(row, dtype=torch.int64 if whole else torch.float64 if integer else None)


def validate_parts(
    unit_counts: tuple[int, ...] | None, chunk_lengths: tuple[tuple[int, ...], ...] | None, lengths: tuple[int, ...]
) -> None:
    """Raise ValueError where units or chunks are those of other sequences."""
    if unit_counts is not None and len(unit_counts) != len(lengths):
        raise ValueError(f"unit_counts has {len(unit_counts)} entries for {len(lengths)} sequences.")
    if chunk_lengths is None:
        return
    if tuple(map(sum, chunk_lengths)) != lengths or len({*map(len, chunk_lengths)}) > 1:
        raise ValueError(
            f"chunk_lengths {list(chunk_lengths)[:4]} must have as many chunks for every sequence, and add up to its "
            f"tokens on this rank, {list(lengths)[:4]}."
        )
