"""Values of a file, reply or trainer as numpy arrays: token ids, log-probs, masks. Errors name position and value."""

from __future__ import annotations

from array import array
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Ids = Ints
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NULL_BITS = 0x7FF80000000007A2
NULL = float(np.array(_NULL_BITS, dtype=np.int64).view(np.float64))
"""A log-prob that was not returned (null in JSON): a NaN of its own bits, as R has one. Slices and copies keep it."""
_MAX_ID = 1 << 62


def is_null(values: Floats) -> Bools:
    """[n] where there was no value, as opposed to NaN."""
    return values.view(np.int64) == _NULL_BITS


def listed(values: np.ndarray[Any, Any]) -> list[Any]:
    """As JSON has them: null where there was no value, 1 and 0 for a mask."""
    found: list[Any] = (values.view(np.int8) if values.dtype.kind == "b" else values).tolist()
    for at in np.flatnonzero(is_null(values)) if values.dtype.kind == "f" else ():
        found[at] = None
    return found


def vector(value: Any, integers: bool = False) -> np.ndarray[Any, Any]:
    """[n] numbers of a list, tensor or array. Raises ValueError for another shape and for what is no number."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.double() if value.dtype.is_floating_point else value).numpy()
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ValueError(f"has the shape {list(value.shape)}, not one row of numbers")
        if value.dtype.kind not in "biuf" or (integers and value.dtype.kind == "f"):
            raise ValueError(f"holds {value.dtype}, not {'integers' if integers else 'numbers'}")
        return value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is {shown(value)}, not a list of numbers")
    try:
        return np.frombuffer(array("q" if integers else "d", value), dtype=np.int64 if integers else np.float64)
    except (TypeError, OverflowError, ValueError):
        fits, says = (int, "an integer") if integers else ((int, float), "a number")
        # The first of another type; else one that 64 bits do not hold.
        at = next((at for at, item in enumerate(value) if not isinstance(item, fits)), -1)
        at = max(range(len(value)), key=lambda i: abs(value[i])) if at < 0 else at
        raise ValueError(f"position {at} is {shown(value[at])}, not {says}") from None


def as_ids(value: Any) -> Ids:
    """[n] token ids, none below 0: int32 where all fit, else int64."""
    found = vector(value, integers=True)
    if len(found) and (found.min() < 0 or found.max() > _MAX_ID):
        at = int(np.flatnonzero((found < 0) | (found > _MAX_ID))[0])
        raise ValueError(f"position {at} is {found[at]}, no token id: is it padding inside the response?")
    return found.astype(np.int64 if len(found) and found.max() >= 2**31 else np.int32, copy=False)


def as_floats(value: Any) -> Floats:
    """[n] log-probs: NULL for null, and NaN and infinities also as the strings that JSON has for them."""
    if isinstance(value, (list, tuple)) and {*map(type, value)} & {NoneType, str}:
        value = [_WORDS.get(item, item) if item is None or isinstance(item, str) else item for item in value]
    found = vector(value).astype(np.float64, copy=False)
    return found if found.flags.writeable else found.copy()  # torch takes no array of Arrow's memory


_WORDS: dict[Any, float] = {None: NULL, "NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def one_or_many(value: Any) -> Floats:
    """One a token; or, of no dimension, one number for the response."""
    found = value if isinstance(value, (list, tuple)) else scalar(value)
    return np.array(float(found)) if isinstance(found, (int, float)) else as_floats(value)


def as_mask(value: Any) -> Bools:
    """[n] booleans of numbers that are 0 or 1."""
    found = vector(value)
    if found.dtype.kind != "b" and not ((found == 0) | (found == 1)).all():
        at = int(np.flatnonzero((found != 0) & (found != 1))[0])
        raise ValueError(f"holds {found[at]:g} at position {at}: 1 where a token trains, else 0")
    return found.astype(bool, copy=False)


def as_experts(value: Any) -> Ints:
    """[T, layers, k] experts by number, none below 0."""
    found = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if found.ndim != 3 or found.dtype.kind not in "iu":
        raise ValueError(f"has the shape {list(found.shape)} of {found.dtype}: give integers [tokens, layers, k]")
    if found.size and found.min() < 0:
        raise ValueError(f"holds {found.min()}: experts are numbered from 0")
    return found.astype(np.int32, copy=False)


def scalar(value: Any) -> Any:
    """The Python value of a tensor or array of one element; else what it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(()).item()
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
        return value.reshape(()).item()
    return value


def shown(value: Any) -> str:
    """A value in an error."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    return f"a {type(value).__name__}" if isinstance(value, (list, tuple, dict)) else repr(value)[:60]
