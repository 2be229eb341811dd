"""The units of every level in a packed batch: their ratios, bounds that keep a wished share, fine histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.config.units import LEVELS, UNITS, Unit
from mismatch_plugin.core.metrics.full import HISTOGRAM_EDGE, HISTOGRAM_SCALE
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.core.segments import segment_max, segment_sum
from mismatch_plugin.core.tokens import select_tokens
from mismatch_plugin.core.units import unit_log_ratio, unit_tokens
from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.limits import SAFETY_BOUND

GROWN = 0.5
"""`tis.bound_growth` of the bounds that are tried: the share outside hardly depends on the length."""
SHARES = {"99%": 0.99, "99.9%": 0.999}
KEEPS = "99%"
"""Of the bounds that are tried and recommended."""
SMALLEST_LOG_RATIO = 1e-6
"""Bounds are at least so far from ρ = 1; those of a statistic at least its square from 0."""
_FINENESS = 1e-3
_ROUNDING = 1e-12
_SLACK = 1e-9
"""1 − 0.99 is a little less than 0.01."""
BINS = 2000
DIGITS = 3
"""Of ρ − 1 at an edge (of ρ below ½ and above 2): a slider shows the very bound that its figures are for."""

Bounds = Mapping[str, Mapping[str, tuple[float, float]]]
"""Level or criterion → wished share kept ("99%") → (lower, upper)."""


@dataclass(frozen=True)
class LevelUnits:
    """log_ratio_U, float64: of every unit, unclamped. count_U: tokens that it is the sum over. tokens_U: tokens that
    have it for their ratio. index_T: the unit of each token; None where every token is one."""

    unit: Unit
    log_ratio_U: Tensor
    count_U: Tensor
    tokens_U: Tensor
    index_T: Tensor | None

    def total(self, values_T: Tensor) -> Tensor:
        """Σ over the tokens of each unit."""
        if self.index_T is None:
            return values_T
        return torch.zeros(len(self.tokens_U), dtype=values_T.dtype).index_add_(0, self.index_T, values_T)

    def at_tokens(self, values_U: Tensor) -> Tensor:
        """Each unit's value at each of its tokens."""
        return values_U if self.index_T is None else values_U.index_select(0, self.index_T)


def levels_of(packed: PackedSequences) -> tuple[str, ...]:
    """The levels, without those that are another one here: a turn is the whole response where each has one."""
    several = any(count > 1 for count in packed.unit_numbers()[1])
    return tuple(level for level in LEVELS if several or UNITS[level].measure != "units")


def growing(packed: PackedSequences) -> dict[str, str]:
    """Level whose bounds may grow with the length → what such bounds are called in `bounds_for`."""
    return {level: f"{level}_growing" for level in levels_of(packed) if UNITS[level].multiplies}


def units_in(level: str, packed: PackedSequences) -> LevelUnits:
    """π_train is `packed.old_log_probs`. Units without response tokens have log-ratio 0."""
    assert packed.old_log_probs is not None
    unit, log_ratio = UNITS[level], select_tokens(packed.old_log_probs.detach(), packed).log_ratio.double()
    parts, mask = packed.parts(unit), packed.loss_mask.double()
    offsets = packed.offsets if parts is None else parts.offsets
    sums = {"log_ratio": segment_sum(log_ratio, offsets), "tokens": segment_sum(mask, offsets)}
    counts, aggregated = unit_tokens(unit, mask, sums, parts), unit_log_ratio(unit, log_ratio, sums, parts)
    if unit.one_ratio_per_token:
        return LevelUnits(unit, aggregated, counts, mask, None)
    index = packed.sequence_index if parts is None else parts.index
    return LevelUnits(unit, aggregated, counts, sums["tokens"], index)


# Bounds from the data, in place of constants -------------------------------------------------------------------------


def bounds_for(
    packed: PackedSequences, shares: Mapping[str, float] = SHARES
) -> dict[str, dict[str, tuple[float, float]]]:
    """Level or criterion → wished share kept ("99%", "99.9%") → (lower, upper).

    Of a level (token, turn where a response has several, sequence, geometric, prefix) the bounds are on its ratio ρ: at
    most ⌊n (1 − share) / 2⌋ of its n units lie beyond each, and ρ = 1 is always inside. Those of "turn_growing",
    "sequence_growing" and "prefix_growing" are for one token, and grow with √n (`tis.bound_growth` 0.5). Of a criterion
    ("sequence_mean_k3", "sequence_max_k2") lower is 0, and at most ⌊n (1 − share)⌋ units are above upper. Rounded
    outwards to a thousandth of |log ρ|, or of the upper bound. An upper bound above e^20 is inf, which mask mode takes
    for e^20; a lower one below e^−20 is 0, which is none.
    """
    assert packed.old_log_probs is not None
    found: dict[str, dict[str, tuple[float, float]]] = {}
    grown = growing(packed)
    for level in levels_of(packed):
        of = units_in(level, packed)
        there = of.tokens_U > 0
        found[level] = _two_sided(of.log_ratio_U[there].numpy(), shares)
        if level in grown:
            scaled = (of.log_ratio_U / of.count_U.clamp(min=1).pow(GROWN))[there].numpy()
            found[grown[level]] = _two_sided(scaled, shares)
    log_ratio = select_tokens(packed.old_log_probs.detach(), packed).log_ratio.double()
    counts_N = segment_sum(packed.loss_mask, packed.offsets)
    means_N = segment_sum(k3(log_ratio), packed.offsets) / counts_N.clamp(min=1)
    maxima_N = segment_max(log_ratio.square() / 2, packed.offsets)
    for name, values_N in (("sequence_mean_k3", means_N), ("sequence_max_k2", maxima_N)):
        values = values_N[counts_N > 0].numpy()
        found[name] = {wished: (0.0, _above(values, share)) for wished, share in shares.items()}
    return found


def _two_sided(values: Floats, shares: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Orders the values."""
    found: dict[str, tuple[float, float]] = {}
    for wished, share in shares.items():
        lost = int(len(values) * (1.0 - share) / 2 + _SLACK)
        places = [lost, len(values) - 1 - lost]
        values.partition(places)
        low, high = values[places].tolist()
        found[wished] = (_outward(min(low, -SMALLEST_LOG_RATIO), -1), _outward(max(high, SMALLEST_LOG_RATIO), 1))
    return found


def _outward(log_ratio: float, sign: int) -> float:
    """e^l, moved away from 1 to a short decimal number, by at most a thousandth of |l|."""
    if abs(log_ratio) > SAFETY_BOUND:
        return math.inf if sign > 0 else 0.0
    ratio = math.exp(log_ratio + sign * _ROUNDING)
    return _short(ratio, abs(log_ratio) * ratio, sign)


def _above(values: Floats, share: float) -> float:
    """Orders the values."""
    kept = len(values) - 1 - int(len(values) * (1.0 - share) + _SLACK)
    values.partition(kept)
    value = max(float(values[kept]), SMALLEST_LOG_RATIO**2) * (1.0 + _ROUNDING)
    return _short(value, value, 1) if value < 1e300 else math.inf


def _short(value: float, size: float, sign: int) -> float:
    """The value, rounded up (sign 1) or down by less than a thousandth of this size."""
    digits = -math.floor(math.log10(_FINENESS * size))
    return round((math.ceil if sign > 0 else math.floor)(value * 10.0**digits) / 10.0**digits, max(digits, 0))


# Histograms, from which the page works out other bounds without the data ----------------------------------------------


def bound_edges(also: Iterable[float] = ()) -> Floats:
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


def histograms(packed: PackedSequences, bounds: Iterable[float] = ()) -> dict[str, Any]:
    """Histograms of every level, from which the page's sliders are worked out, exactly for bounds that are edges.

    packed: with both sides; advantages where there are any. bounds: ratios that become edges, as those of the settings
    shown. Bounds that grow with the length are not of these bins.

    edges: on the log-ratio. levels: by name, turn where a response has several; of each, column by column, the bins
    that any unit falls into. bins: i holds edges[i − 1] ≤ l < edges[i], 0 and len(edges) are open outwards. units: how
    many. tokens, positive, negative: their response tokens, those with A > 0 and with A < 0. ratio, squared: Σ ρ and
    Σ ρ² over units. by_token: Σ ρ over their tokens. ρ within e^±20.
    """
    edges, mask = bound_edges(bounds), packed.loss_mask.double()
    advantages = torch.zeros_like(mask) if packed.advantages is None else packed.advantages
    counted = {"tokens": mask, "positive": mask * (advantages > 0), "negative": mask * (advantages < 0)}
    levels = {}
    for level in levels_of(packed):
        of = units_in(level, packed)
        there = of.tokens_U > 0
        log_ratio = of.log_ratio_U[there].numpy()
        ratio = np.exp(np.clip(log_ratio, -SAFETY_BOUND, SAFETY_BOUND))
        columns = {name: of.total(values_T)[there].numpy() for name, values_T in counted.items()}
        columns |= {"units": np.ones_like(ratio), "ratio": ratio, "squared": ratio * ratio}
        columns["by_token"] = ratio * columns["tokens"]
        place = np.searchsorted(edges, log_ratio, side="right")
        sums = {name: np.bincount(place, weights, len(edges) + 1) for name, weights in columns.items()}
        bins = np.flatnonzero(sums["units"])
        levels[level] = {"bins": bins.tolist(), **{name: of_bins[bins].tolist() for name, of_bins in sums.items()}}
    return {"edges": edges.tolist(), "levels": levels}
