"""The log-ratios of every level in fine bins: what sliding a bound on the page is worked out from, without the data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mismatch_plugin.core.metrics.full import HISTOGRAM_EDGE, HISTOGRAM_SCALE
from mismatch_plugin.inspect.result import Histograms, LevelHistogram
from mismatch_plugin.limits import SAFETY_BOUND

BINS = 2000
DIGITS = 3
"""Of ρ − 1 at an edge (of ρ below ½ and above 2): a slider shows the very bound that its figures are for."""

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]


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


def histograms(
    log_ratio_T: Floats, sequence_T: Ints, advantage_T: Floats | None = None, bounds: Iterable[float] = ()
) -> Histograms:
    """Histograms of the levels token, sequence (Σ l) and geometric (Σ l / n).

    log_ratio_T: l of every response token, [T], nats, finite. sequence_T: [T], which response it is of, from 0, in any
    order. advantage_T: [T] or None. bounds: ratios that become edges, as those of the settings shown.
    A unit on an edge counts as above it.
    """
    edges = bound_edges(bounds)
    sign_T = None if advantage_T is None else np.sign(advantage_T).astype(np.int8)
    tokens_N = np.bincount(sequence_T)
    there = tokens_N > 0
    counted = [tokens_N[there], *(_count(sequence_T, sign_T, sign, len(tokens_N))[there] for sign in (1, -1))]
    sums_N = np.bincount(sequence_T, weights=log_ratio_T)[there].astype(np.float64)
    token_signs = [np.ones(len(log_ratio_T), np.int8), *(_is(sign_T, sign, len(log_ratio_T)) for sign in (1, -1))]
    levels = {
        "token": _level(edges, log_ratio_T, token_signs),
        "sequence": _level(edges, sums_N, counted),
        "geometric": _level(edges, sums_N / tokens_N[there], counted),
    }
    return Histograms(edges=tuple(edges.tolist()), levels=levels, signed=sign_T is not None)


def _is(sign_T: npt.NDArray[np.int8] | None, sign: int, size: int) -> npt.NDArray[np.bool_]:
    return np.zeros(size, bool) if sign_T is None else sign_T == sign


def _count(sequence_T: Ints, sign_T: npt.NDArray[np.int8] | None, sign: int, size: int) -> Ints:
    return np.bincount(sequence_T[_is(sign_T, sign, len(sequence_T))], minlength=size)


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
