"""A step's mergeable statistics as JSON, and the metrics of several steps as of one batch."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.metrics.registry import compute_metrics
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.files import read_lines

STATE = "statistics"
"""Its name in a line of `metrics.jsonl`."""
_FILL = {"sums": 0.0, "maxima": -math.inf}
_ELEMENT = re.compile(r"(.+)\[(\d+)\]")
_MAX_ELEMENTS = 1 << 16

State = dict[str, dict[str, Any]]
"""{"sums": …, "maxima": …}: name → number, or for a vector [elements, place of the first value, *values], without the
zeros (−∞ of maxima) at both ends."""


def state_of(statistics: Statistics) -> State | None:
    """The statistics of a step with `metrics: full`, None of others: their lines stay short. One transfer to the host.

    A histogram of 2048 bins, and about 200 sums and maxima: some kB, at most 64.
    """
    if statistics.config.metrics != "full":
        return None
    return {kind: _packed(values, _FILL[kind]) for kind, values in zip(_FILL, statistics.on_host(), strict=True)}


def merge_states(states: Iterable[State]) -> dict[str, dict[str, float]]:
    """Sums added, maxima taken: name → value, elements of vectors one by one.

    Raises ValueError where one is malformed or has other names than the first.
    """
    merged: dict[str, dict[str, float]] = {}
    for state in states:
        new = {kind: _unpacked(state.get(kind), fill) for kind, fill in _FILL.items()}
        if not merged:
            merged = new
            continue
        for kind, values in new.items():
            held = merged[kind]
            if held.keys() != values.keys():
                raise ValueError(f"the {kind} of two steps have different names")
            for name, value in values.items():
                held[name] = held[name] + value if kind == "sums" else max(held[name], value)
    return merged


def merged_metrics(path: str | Path, config: MismatchConfig, steps: int) -> dict[str, float] | None:
    """The metrics of the last `steps` lines of a `metrics.jsonl`, as of one batch that holds all of their tokens.

    None where one of these lines has no statistics (`metrics: full` writes them) or they do not belong together.
    """
    lines = deque((line for _, line in read_lines(Path(path)) if line.strip()), maxlen=steps)
    try:
        states = [json.loads(line)[STATE] for line in lines]
        merged = merge_states(states)
        return compute_metrics(merged["sums"], merged["maxima"], config)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _packed(values: Mapping[str, float], fill: float) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for name, value in values.items():
        short = int(value) if math.isfinite(value) and value.is_integer() else value
        element = _ELEMENT.fullmatch(name)
        if element is None:
            packed[name] = short
        else:
            packed.setdefault(element[1], []).append(short)
    return {name: _trimmed(value, fill) if isinstance(value, list) else value for name, value in packed.items()}


def _trimmed(values: list[float], fill: float) -> list[float]:
    places = [place for place, value in enumerate(values) if value != fill]
    first, end = (places[0], places[-1] + 1) if places else (0, 0)
    return [len(values), first, *values[first:end]]


def _unpacked(held: Any, fill: float) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in held.items():
        if not isinstance(value, list):
            values[name] = float(value)
            continue
        size, first, *given = value
        if not 0 <= first <= first + len(given) <= size <= _MAX_ELEMENTS:
            raise ValueError(f"the vector {name} has {len(given)} values from {first} on, of {size}")
        whole = [fill] * first + [float(v) for v in given] + [fill] * (size - first - len(given))
        values |= {f"{name}[{place}]": v for place, v in enumerate(whole)}
    return values
