"""Units of every level in a batch, bounds from the data, and what settings would do to it: by the code that trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.config.units import LEVELS, UNITS, Unit
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.groups import group_advantages, group_metrics
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.core.segments import bounded_exp, segment_max, segment_sum, spread
from mismatch_plugin.core.units import acting_bounds, unit_log_ratio, unit_tokens
from mismatch_plugin.core.validity import select_tokens
from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.flags import config_of
from mismatch_plugin.diagnose.measure import Groups
from mismatch_plugin.diagnose.result import Histogram, Prediction
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.report.presets import as_flags

KEPT = 0.99
"""Share of the units that the bounds from the data keep."""
SMALLEST_LOG_RATIO = 1e-6
"""Bounds are at least so far from ρ = 1; those of a statistic at least its square from 0."""
_FINENESS = 1e-3
_ROUNDING = 1e-12
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
    several = any(count > 1 for count in packed.unit_numbers()[1])  # else a turn is the whole response
    for level in LEVELS:
        if several or UNITS[level].measure != "units":
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
    lost = int(len(values) * (1.0 - KEPT) / 2)
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
    kept = len(values) - 1 - int(len(values) * (1.0 - KEPT))
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


# What settings would do -----------------------------------------------------------------------------------------------

OWN = "your settings"


def lacking(config: MismatchConfig, packed: PackedSequences, groups: Groups | None) -> str:
    """What these settings need and these data do not have; "" where they can be predicted."""
    if config.advantage_readers and packed.advantages is None:
        return "advantages"
    untold = packed.weight_versions is None or packed.trainer_version is None
    if config.rs.max_staleness is not None and untold:
        return "weight versions of all tokens and of the trainer"
    return "groups with rewards" if config.rs.group != "keep" and groups is None else ""


class Predictor:
    """What settings would do in the first optimizer step on these data.

    With w the weight that multiplies a token's loss, 0 where it is rejected (in algorithm 1 times what the objective
    puts before A ∇ log π, the ratio, or 0 where its clip is active), ρ the ratio, A the advantages (1 where there are
    none), u a unit: a token, or at turn level a turn, at sequence and geometric level a response, over which w A is
    summed:
    ess: (Σ w)² / (n Σ w²) over units. mean_weight, max_weight: of the kept tokens
    noise: Σ_u x_u² / (Σ_u |x_u|)² with x = w A, divided by that of x = A: 1 is as noisy as no correction, at every
        level alike; inf if nothing is left
    bias: |Σ_u (w − ρ) A| / Σ_u |ρ A|, ρ the level's own ratio before bounding, at geometric level the product:
        what the level itself leaves uncorrected is not in it

    What training reports, too, is read from its statistics. π_θ is π_old in the first step.
    Under `rs.group` exclude and drop the advantages are those of the accepted responses. A dry run is predicted as if
    it were none. groups: `measure.groups_of` these responses.
    Raises InvalidLogProbError, ValueError as `correct`.
    """

    def __init__(self, packed: PackedSequences, groups: Groups | None) -> None:
        assert packed.old_log_probs is not None
        self.groups, self.has_advantages = groups, packed.advantages is not None
        given = torch.ones_like(packed.old_log_probs) if packed.advantages is None else packed.advantages
        self.advantages_T = torch.where(packed.loss_mask, given, 0.0).to(packed.old_log_probs.dtype)
        self.packed = packed.replace(advantages=self.advantages_T)
        self.tokens_N = segment_sum(packed.loss_mask.double(), packed.offsets)
        self.signs: dict[str, tuple[Tensor, float]] = {}
        if self.has_advantages:
            for name, mask in (("kept_positive", self.advantages_T > 0), ("kept_negative", self.advantages_T < 0)):
                if count := float(mask.sum()):
                    self.signs[name] = mask.to(self.advantages_T.dtype), count
        self._levels: dict[str, tuple[LevelUnits, float, float, float]] = {}

    def all(self, own: MismatchConfig | None, bounds: Bounds) -> list[Prediction]:
        """Of the user's own settings and every preset, of which nothing is `lacking`. bounds: `bounds_for` the data: a
        parameter without a default has the value that keeps 99 % of the responses; without one there is no setting."""
        from_data = {
            "max_k2": bounds["sequence_max_k2"][1],
            "mean_k3": bounds["sequence_mean_k3"][1],
            # mean(log π_rollout − log π_θ) > δ: a geometric mean below e^−δ
            "delta": -math.log(max(bounds["geometric"][0], math.exp(-SAFETY_BOUND))),
        }
        found = [self.prediction(own, OWN)] if own else []
        for preset in PRESETS:
            given = {name: from_data[name] for name in preset.required}
            if not all(0.0 < value < math.inf for value in given.values()):
                continue
            config = config_of(preset.settings(**given))
            if self.has_advantages or not config.advantage_readers:
                name = f"{preset.short}: {' '.join(as_flags(config))}" if given else preset.short
                found.append(self.prediction(config, name))
        return found

    def prediction(self, config: MismatchConfig, name: str = "") -> Prediction:
        """Of one."""
        metrics = "basic" if config.weighted else "off"  # without weights only the counts are read
        with ignore_mismatch_warnings():
            applied = config.replace(metrics=metrics, dry_run=False, gate_kl=None)
        data = self
        if applied.rs.group != "keep" and self.groups is not None:
            kept_N, least = correct(self.packed, applied).kept_N, applied.rs.least_accepted
            advantages_N = group_advantages(self.groups.rewards, self.groups.ids, kept_N, min_accepted=least)
            data = Predictor(
                self.packed.replace(advantages=spread(advantages_N, self.packed.sequence_index)), self.groups
            )
        return Prediction(
            setting=name,
            settings=config.model_dump(mode="json", exclude_unset=True),
            algorithm=config.algorithm,
            second_pass=not config.use_rollout_log_probs,
            own=name == OWN,
            **data._figures(applied, correct(data.packed, applied, log_probs=data.packed.old_log_probs)),
        )

    def level(self, name: str) -> tuple[LevelUnits, float, float, float]:
        """Its units; Σ ρ A and Σ |ρ A| over them, ρ before bounding, at geometric level, whose mean is no ratio of
        probabilities, that of the whole response; the noise of A."""
        if name not in self._levels:
            of = units_in(name, self.packed)
            if of.unit.multiplies or of.unit.per_token:
                advantages_U = of.total(self.advantages_T)
                values = bounded_exp(of.log_ratio_U) * advantages_U
                self._levels[name] = of, float(values.sum()), float(values.abs().sum()), _noise(advantages_U)
            else:
                self._levels[name] = of, *self.level("sequence")[1:]
        return self._levels[name]

    def clip(self, config: MismatchConfig) -> Tensor:
        """[T] what multiplies A ∇ log π_θ in the first step of bypass PPO: the ratio, or 0 where the clip is active.
        By differentiating the loss itself."""
        kept = config.model_dump(include={"use_rollout_log_probs", "objective", "ppo"})
        assert self.packed.old_log_probs is not None
        current = self.packed.old_log_probs.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = token_loss(current, self.packed, config_of({**kept, "metrics": "off"}))
            (gradient,) = torch.autograd.grad(loss.policy.sum(), current)
        ratio, factor = bounded_exp(loss.correction.tokens.log_ratio), gradient.neg_().div_(self.advantages_T)
        return torch.where(self.advantages_T != 0, factor, ratio)

    @torch.no_grad()
    def _figures(self, config: MismatchConfig, correction: Correction) -> dict[str, Any]:
        metrics, units = correction.statistics.metrics(), config.unit
        tokens_N, kept_N, weights_T = self.tokens_N, correction.kept_N, correction.applied
        found: dict[str, Any] = {"kept": float(kept_N.sum() / tokens_N.sum()), "unit": units.measure.removesuffix("s")}
        found |= {name: float(correction.keep.dot(sign) / count) for name, (sign, count) in self.signs.items()}
        if config.weighted:
            after = f"{PREFIX}rollout_is_weight_after_"
            found |= {"mean_weight": metrics[f"{after}mean"], "max_weight": metrics[f"{after}max"]}
            found["ess"] = metrics[f"{after}{units.ess}eff_sample_size"]
        else:  # the core reports no weights: there are none but those of rejection and of the clip
            weights_T = weights_T * self.clip(config) if config.algorithm == 1 else weights_T
            total, square, kept = float(weights_T.sum()), float(weights_T.dot(weights_T)), float(kept_N.sum())
            found |= {"mean_weight": total / kept if kept else 0.0, "max_weight": float(weights_T.max())}
            found["ess"] = min(total**2 / (float(tokens_N.sum()) * square), 1.0) if square else 0.0
        if self.groups is not None and config.rejects and not config.advantage_readers:
            changed = group_metrics(self.groups.rewards, self.groups.ids, kept_N, config.rs.least_accepted)
            found["groups_changed"] = changed[f"{PREFIX}rollout_rs_group_changed_fraction"]
        level, total, absolute, noise = self.level(units.level)
        values = level.total(weights_T * self.advantages_T)
        bias = round(abs(float(values.sum()) - total) / absolute, 12) if absolute else 0.0  # below is rounding
        return found | {"noise": _noise(values) / noise if values.any() else math.inf, "bias": bias}


def _noise(values_U: Tensor) -> float:
    """Σ x² / (Σ |x|)²: 1 / n where all are of one size; inf where all are 0."""
    absolute = float(values_U.abs().sum())
    shares = values_U / absolute  # before it is squared: a square may be 0
    return float(shares.dot(shares)) if absolute else math.inf
