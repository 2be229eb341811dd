"""One value of a dump, a list, tensor or array, as the array of a `Response`. Errors say sample, position and value."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from mismatch_plugin.rollout.dumps.tensors import plain
from mismatch_plugin.rollout.responses import Bools, Floats, Ints, as_floats, as_ids

_MAX_ID = 1 << 62


def vector(value: Any, what: str, kind: str = "d") -> np.ndarray[Any, Any]:
    """[n] numbers. kind: "q" integers, "d" floats. A list within a list, a string or null is refused."""
    value = plain(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_complex() or value.is_quantized:
            raise ValueError(f"{what} is a {value.layout} tensor of {value.dtype}: save a plain one of numbers.")
        value = value.detach()
        value = (value.double() if value.dtype.is_floating_point else value).numpy()
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ValueError(f"{what} has the shape {list(value.shape)}, not one row of numbers.")
        if value.dtype.kind not in "biuf" or (kind == "q" and value.dtype.kind == "f"):
            raise ValueError(f"{what} holds {value.dtype}, not {'integers' if kind == 'q' else 'numbers'}.")
        return value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is {_shown(value)}, not a list of numbers.")
    try:
        return np.frombuffer(array(kind, value), dtype=np.int64 if kind == "q" else np.float64)
    except (TypeError, OverflowError, ValueError):
        at = next((at for at, item in enumerate(value) if not _fits(item, kind)), 0)
        says = "an integer" if kind == "q" else "a number"
        raise ValueError(f"{what}, position {at} is {_shown(value[at])}, not {says}.") from None


def ids(value: Any, what: str) -> Ints:
    """[n] token ids, none below 0."""
    found = vector(value, what, "q")
    if len(found) and (found.min() < 0 or found.max() > _MAX_ID):
        at = int(np.flatnonzero((found < 0) | (found > _MAX_ID))[0])
        raise ValueError(f"{what}, position {at} is {found[at]}, no token id: is it padding inside the response?")
    return as_ids(found)  # type: ignore[arg-type]


def floats(value: Any, what: str) -> tuple[Floats, Bools | None]:
    """([n] log-probs, NaN for null; where there was null, None for nowhere)."""
    value = plain(value)
    if isinstance(value, (list, tuple)) and None in value:
        vector([0.0 if item is None else item for item in value], what)
        return as_floats(value)
    return np.array(vector(value, what), dtype=np.float64), None


def mask(value: Any, what: str) -> Bools:
    """[n] booleans of numbers that are 0 or 1."""
    found = vector(value, what)
    if found.dtype.kind != "b":
        wrong = np.flatnonzero((found != 0) & (found != 1))
        if len(wrong):
            raise ValueError(f"{what}, position {wrong[0]} is {found[wrong[0]]:g}: 1 where a token trains, else 0.")
    return found.astype(bool)


def number(value: Any, what: str) -> float:
    """One number, also of a tensor with one element."""
    found = scalar(value)
    if isinstance(found, (int, float)):
        return float(found)
    raise ValueError(f"{what} is {_shown(found)}, not a number.")


def count(value: Any, what: str) -> int:
    """A length."""
    found = number(value, what)
    if not (found.is_integer() and found >= 0):
        raise ValueError(f"{what} is {found:g}: a length is a whole number from 0.")
    return int(found)


def scalar(value: Any) -> Any:
    """The Python value of a tensor or array of one element, and of a list of one; else what it is."""
    value = plain(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(()).item()
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
        return value.reshape(()).item()
    return value


def _fits(item: Any, kind: str) -> bool:
    return isinstance(item, int) and -(2**63) <= item < 2**63 if kind == "q" else isinstance(item, (int, float))


def _shown(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    return f"a {type(value).__name__}" if isinstance(value, (list, tuple, dict)) else repr(value)[:60]
