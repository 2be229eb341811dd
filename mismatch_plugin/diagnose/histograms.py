"""The log-ratios of every level in fine bins: what sliding a bound on the page is worked out from, without the data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from mismatch_plugin.core.metrics.full import HISTOGRAM_EDGE, HISTOGRAM_SCALE
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.diagnose.levels import levels_of, units_in
from mismatch_plugin.diagnose.result import Histograms, LevelHistogram
from mismatch_plugin.limits import SAFETY_BOUND

BINS = 2000
DIGITS = 3
"""Of ρ − 1 at an edge (of ρ below ½ and above 2): a slider shows the very bound that its figures are for."""

Floats = npt.NDArray[np.floating]


def bound_edges(also: Iterable[float] = ()) -> npt.NDArray[np.float64]:
    """Log-ratios at which a bound can be, ascending, none of them 0: equal in asinh(l / 1e-4), as the histogram of the
    full metrics, which is 1.3 % of |l|, then rounded to `DIGITS` of ρ. also: ratios that must be among them."""
    places = np.linspace(-HISTOGRAM_EDGE, HISTOGRAM_EDGE, BINS)  # an even number of them: none is 0
    ratios = {_rounded(math.exp(HISTOGRAM_SCALE * math.sinh(place))) for place in places}
    known = [ratio for ratio in (*ratios, *also) if math.exp(-SAFETY_BOUND) < ratio < math.exp(SAFETY_BOUND)]
    return np.log(sorted(set(known) - {1.0}))


def _rounded(ratio: float) -> float:
    if not 0.5 < ratio < 2.0:
        return float(f"{ratio:.{DIGITS}g}")
    return float(f"{1.0 + float(f'{ratio - 1.0:.{DIGITS}g}'):.12g}")  # without 1.0 + x's own rounding


def histograms(packed: PackedSequences, bounds: Iterable[float] = ()) -> Histograms:
    """Histograms of every level of the batch.

    packed: with both sides; advantages where there are any. bounds: ratios that become edges, as those of the settings
    shown. A unit on an edge counts as above it. Bounds that grow with the length are not of these bins.
    """
    edges = bound_edges(bounds)
    mask, signs = packed.loss_mask.double(), [torch.zeros(len(packed.loss_mask), dtype=torch.float64)] * 2
    if packed.advantages is not None:
        signs = [mask * (packed.advantages > 0), mask * (packed.advantages < 0)]
    levels = {}
    for level in levels_of(packed):
        of = units_in(level, packed)
        there = of.tokens_U > 0
        counted = [of.total(values)[there].numpy() for values in (mask, *signs)]
        levels[level] = _level(edges, of.log_ratio_U[there].numpy(), counted)
    return Histograms(edges=tuple(edges.tolist()), levels=levels, signed=packed.advantages is not None)


def _level(edges: Floats, log_ratio_U: Floats, counted: list[npt.NDArray[np.generic]]) -> LevelHistogram:
    """counted: [U] tokens of each unit: all, with A > 0, with A < 0."""
    size = len(edges) + 1
    place = np.searchsorted(edges, log_ratio_U, side="right")
    ratio = np.exp(np.clip(log_ratio_U, -SAFETY_BOUND, SAFETY_BOUND))
    units = np.bincount(place, minlength=size)
    used = np.flatnonzero(units)

    def whole(values: npt.NDArray[np.generic]) -> tuple[int, ...]:
        return tuple(np.bincount(place, weights=values, minlength=size)[used].astype(np.int64).tolist())

    def total(values: Floats) -> tuple[float, ...]:
        return tuple(np.bincount(place, weights=values, minlength=size)[used].tolist())

    tokens, positive, negative = map(whole, counted)
    return LevelHistogram(
        bins=tuple(used.tolist()),
        units=tuple(units[used].tolist()),
        tokens=tokens,
        positive=positive,
        negative=negative,
        ratio=total(ratio),
        squared=total(ratio * ratio),
        by_token=total(ratio * counted[0]),
    )
