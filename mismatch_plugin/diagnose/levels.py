"""The units of every level in a packed batch: their ratios, bounds that keep 99 % of them, a histogram."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import LEVELS, UNITS, Unit
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.core.segments import segment_max, segment_sum
from mismatch_plugin.core.units import acting_bounds, unit_log_ratio, unit_tokens
from mismatch_plugin.core.validity import select_tokens
from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.result import Histogram
from mismatch_plugin.limits import SAFETY_BOUND

KEPT = 0.99
"""Share of the units that the bounds from the data keep."""
SMALLEST_LOG_RATIO = 1e-6
"""Bounds are at least so far from ρ = 1; those of a statistic at least its square from 0."""
_FINENESS = 1e-3
_ROUNDING = 1e-12
_SLACK = 1e-9
"""1 − 0.99 is a little less than 0.01."""
BINS, _DRAWN = 90, 0.999
"""Of the histogram, which holds this share of the units between its ends."""

Bounds = Mapping[str, tuple[float, float]]
"""Level or criterion → (lower, upper)."""


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


def units_in(level: str, packed: PackedSequences) -> LevelUnits:
    """π_train is `packed.old_log_probs`. Units without response tokens have log-ratio 0."""
    assert packed.old_log_probs is not None
    tokens = select_tokens(packed.old_log_probs.detach(), packed.loss_mask, packed.rollout_log_probs)
    unit, log_ratio = UNITS[level], tokens.log_ratio.double()
    parts, mask = packed.parts(unit), packed.loss_mask.double()
    sums = {"log_ratio": segment_sum(log_ratio, parts.offsets), "tokens": segment_sum(mask, parts.offsets)}
    counts, aggregated = unit_tokens(unit, mask, sums, parts), unit_log_ratio(unit, log_ratio, sums, parts)
    if unit.one_ratio_per_token:
        return LevelUnits(unit, aggregated, counts, mask, None)
    return LevelUnits(unit, aggregated, counts, sums["tokens"], parts.index)


# Bounds from the data, in place of constants -------------------------------------------------------------------------


def bounds_for(packed: PackedSequences) -> dict[str, tuple[float, float]]:
    """Level or criterion → (lower, upper), which keep the share KEPT.

    Of a level (token, turn where a response has several, sequence, geometric, prefix) the bounds are on its ratio ρ: at
    most ⌊n (1 − KEPT) / 2⌋ of its n units lie beyond each, and ρ = 1 is always inside. Of a criterion
    ("sequence_mean_k3", "sequence_max_k2") lower is 0, and at most ⌊n (1 − KEPT)⌋ units are above upper. Rounded
    outwards to a thousandth of |log ρ|, or of the upper bound. An upper bound above e^20 is inf, which mask mode takes
    for e^20; a lower one below e^−20 is 0, which is none.
    """
    assert packed.old_log_probs is not None
    found: dict[str, tuple[float, float]] = {}
    for level in levels_of(packed):
        of = units_in(level, packed)
        found[level] = _two_sided(of.log_ratio_U[of.tokens_U > 0].numpy())
    tokens = select_tokens(packed.old_log_probs.detach(), packed.loss_mask, packed.rollout_log_probs)
    log_ratio = tokens.log_ratio.double()
    counts_N = segment_sum(packed.loss_mask, packed.offsets)
    means_N = segment_sum(k3(log_ratio), packed.offsets) / counts_N.clamp(min=1)
    maxima_N = segment_max(log_ratio.square() / 2, packed.offsets)
    for name, values_N in (("sequence_mean_k3", means_N), ("sequence_max_k2", maxima_N)):
        found[name] = 0.0, _above(values_N[counts_N > 0].numpy())
    return found


def _two_sided(values: Floats) -> tuple[float, float]:
    """Orders the values."""
    lost = int(len(values) * (1.0 - KEPT) / 2 + _SLACK)
    places = [lost, len(values) - 1 - lost]
    values.partition(places)
    low, high = values[places].tolist()
    return _outward(min(low, -SMALLEST_LOG_RATIO), -1), _outward(max(high, SMALLEST_LOG_RATIO), 1)


def _outward(log_ratio: float, sign: int) -> float:
    """e^l, moved away from 1 to a short decimal number, by at most a thousandth of |l|."""
    if abs(log_ratio) > SAFETY_BOUND:
        return math.inf if sign > 0 else 0.0
    ratio = math.exp(log_ratio + sign * _ROUNDING)
    return _short(ratio, abs(log_ratio) * ratio, sign)


def _above(values: Floats) -> float:
    """Orders the values."""
    kept = len(values) - 1 - int(len(values) * (1.0 - KEPT) + _SLACK)
    values.partition(kept)
    value = max(float(values[kept]), SMALLEST_LOG_RATIO**2) * (1.0 + _ROUNDING)
    return _short(value, value, 1) if value < 1e300 else math.inf


def _short(value: float, size: float, sign: int) -> float:
    """The value, rounded up (sign 1) or down by less than a thousandth of this size."""
    digits = -math.floor(math.log10(_FINENESS * size))
    return round((math.ceil if sign > 0 else math.floor)(value * 10.0**digits) / 10.0**digits, max(digits, 0))


# What the page draws -------------------------------------------------------------------------------------------------


def histogram(packed: PackedSequences, config: MismatchConfig) -> Histogram:
    """Log-ratios of the units that these settings weigh or reject (else of the tokens), with their bounds on ρ where
    those are the same for every length. The outermost bins hold what lies beyond."""
    bounds = acting_bounds(config) if config.weighted or config.rejects else None
    level = bounds.unit.level if bounds else "token"
    of = units_in(level, packed)
    log_ratio = of.log_ratio_U[of.tokens_U > 0].numpy()
    lower, upper = (bounds.lower, bounds.upper) if bounds and not bounds.growth else (0.0, math.inf)
    lower = 0.0 if config.weighted and config.tis.mode == "truncate" else lower
    shown = [abs(math.log(bound)) for bound in (lower, upper) if 0.0 < bound < math.inf]
    extent = 1.1 * max([float(np.quantile(np.abs(log_ratio), _DRAWN)), SMALLEST_LOG_RATIO, *shown])
    counts, edges = np.histogram(log_ratio.clip(-extent, extent), BINS, (-extent, extent))
    return Histogram(level=level, edges=edges.tolist(), counts=counts.tolist(), lower=lower, upper=upper)
