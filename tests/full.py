"""MISMATCH_FULL=1 (`make test-all`) runs whole matrices and whole tables; `make test` a few cases of each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

FULL = os.environ.get("MISMATCH_FULL") == "1"
full_only = pytest.mark.skipif(not FULL, reason="part of the full suite")
"""On a test, or on a case: pytest.param(..., marks=full_only)."""


def a_few(cases: Sequence[Any], count: int) -> list[Any]:
    """All cases in the full suite, else `count` of them, evenly spaced, the first and the last among them."""
    if FULL or count >= len(cases):
        return [*cases]
    return [cases[round(number * (len(cases) - 1) / max(count - 1, 1))] for number in range(count)]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination in the full suite, else so few that any two values of two axes occur together."""
    everything = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {row: {*itertools.combinations(enumerate(row), 2)} for row in everything}
    left = set().union(*pairs.values())
    chosen = everything if FULL else []
    while left and not FULL:
        chosen.append(max(everything, key=lambda row: len(pairs[row] & left)))
        left -= pairs[chosen[-1]]
    return [tuple(axis[at] for axis, at in zip(axes, row, strict=True)) for row in chosen]
