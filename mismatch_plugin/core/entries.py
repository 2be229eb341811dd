"""What data preparation hands over, one entry a sequence, as flat tensors; and what is refused, naming the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_UNITS = 1000
"""Or a response's tokens: memory is set aside for every unit up to the last, and a number above is an id."""


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
    """One sequence's values, [length]; NaN for None in a list."""
    try:
        if name.endswith("log_probs"):
            values = row if isinstance(row, Tensor) else np.asarray(row[:1])
            if values.dtype in (torch.bool, np.bool_):
                raise ValueError("it holds bools: is it a mask?")
        if isinstance(row, (list, tuple)):
            tensor = torch.as_tensor(np.array(row, dtype=np.float64))
            tensor = tensor if integer else tensor.to(torch.get_default_dtype())
        else:
            tensor = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} of sequence {label} is no list of numbers ({str(error).splitlines()[0]}): pass one number a "
            f"response token, None for one that was not returned."
        ) from None
    if tensor.dim() == 0 and name == "advantages":
        tensor = tensor.expand(length)
    if tensor.shape != (length,):
        raise ValueError(
            f"{name} of sequence {label} has shape {tuple(tensor.shape)}, its loss mask {length} tokens: the two must "
            f"cover the same response tokens (advantages may be one number a sequence)."
        )
    return tensor


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


def checked_units(
    unit_ids_T: Tensor, counts: tuple[int, ...] | None, lengths: tuple[int, ...], ids: tuple[object, ...]
) -> tuple[int, ...]:
    """Units of each sequence: as given, else one more than its last number. Only what is on the CPU is checked."""
    if counts is not None and unit_ids_T.device.type != "cpu":
        return counts
    rows = unit_ids_T.cpu().split(list(lengths)) if lengths else ()
    known = tuple(int(row[-1]) + 1 if len(row) else 1 for row in rows) if counts is None else counts
    for row, count, label in zip(rows, known, ids, strict=True):
        wrong = torch.cat([row.new_zeros(1), row])[:-1] > row
        wrong |= (row < 0) | (row >= (count if counts is not None else max(len(row), _MOST_UNITS)))
        if wrong.any():
            position = int(wrong.nonzero()[0])
            raise ValueError(
                f"unit_ids of sequence {label} is {int(row[position])} at position {position}: number its units from "
                f"0 upwards (below unit_counts), and give the tokens between two of them the number of either."
            )
    return known


def _first(bad_T: Tensor, lengths: tuple[int, ...]) -> tuple[int, int, int]:
    """(token, sequence, position in it) of the first True."""
    token = int(bad_T.nonzero()[0])
    ends = torch.tensor(lengths).cumsum(0)
    sequence = int((ends <= token).sum())
    return token, sequence, token - int(ends[sequence]) + lengths[sequence]
