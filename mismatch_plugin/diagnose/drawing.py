"""The geometry of the pictures that the page (SVG) and `pictures` (PNG) both draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch_plugin.diagnose.normal import LOOSE
from mismatch_plugin.diagnose.result import Comparable, Diagnosis, Histograms
from mismatch_plugin.diagnose.words import Controls, controls_of

BARS = 90
_FAR = 8.0
"""A bound so many times further out than the data is not drawn: they would be a needle."""
_LONG = 4.0
"""The picture is at most so many times as wide as all data but `_TAILS`."""
_TAILS = 1e-4
"""Share on either side that may lie beyond the picture."""
UNIT_NAMES = {
    "token": "tokens",
    "turn": "turns (sum of log-ratios)",
    "sequence": "responses (sum of log-ratios)",
    "geometric": "responses (mean log-ratio)",
    "prefix": "prefixes (sum of log-ratios up to each token)",
}


@dataclass(frozen=True)
class Distribution:
    """Counts of the units' log-ratios between equally spaced edges. beyond: units left and right of them."""

    level: str
    edges: tuple[float, ...]
    counts: tuple[float, ...]
    beyond: tuple[int, int]

    @property
    def top(self) -> float:
        """Where the logarithmic axis of counts ends: the power of ten above all, at least 10."""
        return 10.0 ** math.ceil(math.log10(max(*self.counts, 10.0)))


def advised(diagnosis: Diagnosis) -> Controls | None:
    """Level, mode and bounds of the recommended setting."""
    return None if diagnosis.recommendation is None else controls_of(diagnosis.recommendation.settings)


def outside(controls: Controls) -> str:
    """What becomes of the units in the pale areas."""
    done = {"truncate": "weights are cut to the upper bound", "clip": "weights are cut to the bounds"}
    return f"in the pale area {done.get(controls.mode, 'they are rejected')}"


def distribution(diagnosis: Diagnosis, level: str, bounds: tuple[float | None, ...] = ()) -> Distribution | None:
    """From the fine histogram of a level; of tokens from `Size` where there is none. bounds: ratios to show."""
    if diagnosis.histograms is not None and level in diagnosis.histograms.levels:
        return _coarse(diagnosis.histograms, level, [math.log(b) for b in bounds if b])
    size = diagnosis.size
    if level != "token" or size is None or not size.counts:
        return None
    return Distribution(level, size.edges, tuple(map(float, size.counts)), (0, 0))


def _coarse(fine: Histograms, level: str, bounds: list[float]) -> Distribution:
    of, inner = fine.levels[level], np.array(fine.edges)
    counts = np.zeros(len(inner) + 1)
    counts[list(of.bins)] = of.units
    ends = np.concatenate([[inner[0] - 1.0], inner, [inner[-1] + 1.0]])
    below = np.concatenate([[0.0], np.cumsum(counts)])
    used = np.flatnonzero(counts)
    low, high = (ends[used[0]], ends[used[-1] + 1]) if len(used) else (-0.1, 0.1)
    near_low, near_high = (float(np.interp(share * below[-1], below, ends)) for share in (_TAILS, 1 - _TAILS))
    extent = max(abs(low), abs(high))
    if extent > _LONG * (near := max(abs(near_low), abs(near_high))):
        extent = _LONG * near
    shown = [abs(b) for b in bounds if abs(b) < _FAR * extent]
    extent = 1.08 * max(extent, *shown, 1e-6)
    edges = np.linspace(-extent, extent, BARS + 1)
    at = np.interp(edges, ends, below)
    return Distribution(
        level,
        tuple(edges.tolist()),
        tuple(np.diff(at).tolist()),
        (round(at[0]), round(below[-1] - at[-1])),
    )


def ticks(low: float, high: float, most: int = 9) -> list[float]:
    """Round numbers between two values."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(k * step, 12) + 0.0 for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True)
class Plot:
    """A distribution as rectangles and ticks, in the units of a viewBox WIDTH × HEIGHT. bars: (x, y, width, height).
    x_ticks, y_ticks: (place, label). lower, upper: places of the bounds with their labels, None where there is none
    or it is outside of the picture. left, width, bottom, top: the area of the bars."""

    of: Distribution
    bars: tuple[tuple[float, float, float, float], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    lower: tuple[float, str] | None
    upper: tuple[float, str] | None
    left: float = 48.0
    width: float = 464.0
    top: float = 24.0
    bottom: float = 236.0


WIDTH, HEIGHT = 520, 284


def plot(of: Distribution, bounds: tuple[float | None, float | None] = (None, None)) -> Plot:
    """bounds: (lower, upper) on ρ."""
    left, width, bottom, high = Plot.left, Plot.width, Plot.bottom, Plot.bottom - Plot.top
    first, last = of.edges[0], of.edges[-1]
    floor, ceiling = math.log10(0.5), math.log10(of.top)

    def x(value: float) -> float:
        return round(left + width * (value - first) / (last - first), 2)

    def up(count: float) -> float:
        return round(high * (math.log10(count) - floor) / (ceiling - floor), 2) if count > 0.5 else 0.0

    def bound(value: float | None) -> tuple[float, str] | None:
        return (x(math.log(value)), f"{value:.6g}") if value and first < math.log(value) < last else None

    spaced = zip(of.edges, of.edges[1:], of.counts, strict=False)
    bars = tuple((x(a), bottom - up(n), round(x(b) - x(a), 2), up(n)) for a, b, n in spaced if up(n) > 0)
    powers = range(0, round(ceiling) + 1, 1 + round(ceiling) // 6)
    return Plot(
        of,
        bars,
        tuple((x(value), f"{value:g}".replace("-", "−")) for value in ticks(first, last)),
        tuple((bottom - up(10.0**n), f"{10 ** (n % 3)}{('', 'k', 'M', 'G')[min(n // 3, 3)]}") for n in powers),
        bound(bounds[0]),
        bound(bounds[1]),
    )


def places_on_range(items: tuple[Comparable, ...]) -> list[tuple[Comparable, float, float, float, float, float]]:
    """(item, start and end of its published range, place of the value, start and end of what is `LOOSE` times below and
    above the range) in percent of one logarithmic axis a figure."""
    rows = []
    for item in items:
        same = [other for other in items if other.figure == item.figure]
        values = [v for other in same for v in (other.low / LOOSE, other.high * LOOSE, other.value) if v > 0]
        low, high = np.log(min(values, default=1.0) / 1.6), np.log(max(values, default=1.0) * 1.6)
        ends = (item.low, item.high, item.value, item.low / LOOSE, item.high * LOOSE)
        places = (100.0 * (math.log(v) - low) / (high - low) if v > 0 else 0.0 for v in ends)
        rows.append((item, *map(float, places)))
    return rows
