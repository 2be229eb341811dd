"""What a setting would do to these data, without training: computed by the code that trains."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.groups import group_advantages, group_metrics
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import bounded_exp, segment_sum, spread
from mismatch_plugin.diagnose.levels import Bounds, LevelUnits, units_in
from mismatch_plugin.diagnose.packing import Groups, subset
from mismatch_plugin.diagnose.result import Prediction
from mismatch_plugin.diagnose.tried import OWN, Setting, setting_of, settings_for


def predict(
    packed: PackedSequences,
    own: MismatchConfig | None = None,
    bounds: Bounds | None = None,
    groups: Groups | None = None,
) -> list[Prediction]:
    """What every setting would do in the first optimizer step on these data; the user's own settings come first.

    With w the weight that multiplies a token's loss, 0 where it is rejected (in algorithm 1 times what the objective
    puts before A ∇ log π, the ratio, or 0 where its clip is active), ρ the ratio, A the advantages (1 where there are
    none), u a unit: a token, or at turn level a turn, at sequence and geometric level a response, over which w A is
    summed:
    kept: rollout_corr/accepted_token_fraction
    mean_weight, max_weight: of the kept tokens
    ess: (Σ w)² / (n Σ w²) over units
    variance: Σ_u (x_u − mean x)² / (Σ_u |x_u|)² with x = w A: the squared relative error of Σ w A for independent
        units. Divided by Σ |w A|, not by Σ w A, which is near 0 where advantages are centred; inf if nothing is left
    noise: Σ_u x_u² / (Σ_u |x_u|)² divided by that of x = A: 1 is as noisy as no correction, at every level alike;
        1 / ess where there are no advantages and units are tokens
    bias: |Σ_u (w − ρ) A| / Σ_u |ρ A|, ρ the level's own ratio before bounding, at geometric level the product:
        what the level itself leaves uncorrected is not in it
    clipped: rollout_corr/pg_clipfrac: share where the clip of algorithm 1 is active before any step was taken
    groups_changed, advantages_changed: `core.groups.group_metrics`, what `rs.group` exclude would change

    What training reports, too, is read from the statistics that it reports: equal to the last digit for the same batch.
    In algorithms 1 and 3, and under `rs.policy` current, the training side is π_θ, which is π_old in the first step.
    Under `rs.group` exclude and drop the advantages are those of the accepted responses. A dry run is predicted as if
    it were none. Above `packing.MAX_TOKENS` tokens a random part is taken (`packing.subset`, whose note says so).
    bounds: `bounds_for` these tokens, where the caller has it. groups: `packing.groups_of` these responses.
    Raises InvalidLogProbError, ValueError as `correct`.
    """
    if groups is None:
        packed, _ = subset(packed)
    return predict_settings(packed, settings_for(packed, own, bounds), groups)


def predict_settings(
    packed: PackedSequences, settings: Iterable[Setting], groups: Groups | None = None
) -> list[Prediction]:
    """As `predict`, of these settings and on all of the tokens."""
    data = _Data(packed, groups)
    return [_prediction(setting, data) for setting in settings]


def predict_one(packed: PackedSequences, config: MismatchConfig, name: str, groups: Groups | None = None) -> Prediction:
    """`predict` for one setting alone."""
    return predict_settings(packed, [setting_of(name, config)], groups)[0]


class _Reference(NamedTuple):
    """Of the ratios of a level before bounding. total, absolute: Σ ρ A and Σ |ρ A| over units. noise: Σ A² / (Σ |A|)².
    units: how many there are."""

    total: float
    absolute: float
    noise: float
    units: float


_HUGE = 1e30
"""Advantages above it are scaled: no sum of their squares is finite in float32."""


class _Data:
    """What all settings share: advantages, reference ratios, shares of tokens, and what was computed already.

    signs: indicator of tokens with A > 0 and with A < 0, and how many they are, where there are any. thirds: the
    responses by length, shortest first, in three parts; () where there are fewer, or all are as long.
    """

    def __init__(self, packed: PackedSequences, groups: Groups | None = None) -> None:
        assert packed.old_log_probs is not None
        self.groups = groups
        given = torch.ones_like(packed.old_log_probs) if packed.advantages is None else packed.advantages
        if given.numel() and (largest := float(given.abs().max())) > _HUGE:
            given = given / largest  # predictions are of ratios of sums, which would overflow
        self.advantages_T = torch.where(packed.loss_mask, given, 0.0).to(packed.old_log_probs.dtype)
        self.packed = packed.replace(advantages=self.advantages_T)
        self.tokens_N = segment_sum(packed.loss_mask.double(), packed.offsets)
        self.signs: dict[str, tuple[Tensor, float]] = {}
        if packed.advantages is not None:
            for name, mask in (("kept_positive", self.advantages_T > 0), ("kept_negative", self.advantages_T < 0)):
                if count := float(mask.sum()):
                    self.signs[name] = mask.to(self.advantages_T.dtype), count
        there = (self.tokens_N > 0).nonzero().flatten()
        lengths = self.tokens_N[there]
        equal = len(there) < 3 or lengths.min() == lengths.max()
        self.thirds = () if equal else torch.tensor_split(there[lengths.argsort(stable=True)], 3)
        self.known: dict[str, dict[str, Any]] = {}
        self._last: tuple[str, Correction] | None = None
        self._clips: dict[str, tuple[Tensor, float]] = {}
        self._levels: dict[str, tuple[LevelUnits, _Reference]] = {}

    def corrected(self, key: str, config: MismatchConfig) -> Correction:
        """`correct`, or what it gave last where the key is that of the last one."""
        if self._last is None or self._last[0] != key:
            self._last = None  # its memory is free before the next one needs as much
            self._last = key, correct(self.packed, config, log_probs=self.packed.old_log_probs)
        return self._last[1]

    def of_accepted(self, config: MismatchConfig) -> _Data:
        """These data with the advantages of the accepted responses, as `rs.group` has them."""
        assert self.groups is not None
        kept_N = correct(self.packed, config).kept_N
        least = config.rs.least_accepted
        advantages_N = group_advantages(self.groups.rewards, self.groups.ids, kept_N, min_accepted=least)
        return _Data(self.packed.replace(advantages=spread(advantages_N, self.packed.sequence_index)), self.groups)

    def level(self, name: str) -> tuple[LevelUnits, _Reference]:
        """Its units, without their ratios, and its reference: at geometric level, whose mean is no ratio of
        probabilities, that of the whole response."""
        if name not in self._levels:
            of = units_in(name, self.packed)
            if of.unit.multiplies or of.unit.per_token:
                advantages_U = of.total(self.advantages_T)
                values, there = bounded_exp(of.log_ratio_U) * advantages_U, float((of.tokens_U > 0).sum())
                reference = _Reference(float(values.sum()), float(values.abs().sum()), _noise(advantages_U), there)
            else:
                _, reference = self.level("sequence")
            none = torch.empty(0)  # to sum over units needs no values: they would be kept for nothing
            tokens_U = none if of.index_T is None else of.tokens_U
            self._levels[name] = replace(of, log_ratio_U=none, count_U=none, tokens_U=tokens_U), reference
        return self._levels[name]

    def clip(self, config: MismatchConfig) -> tuple[Tensor, float]:
        """Of bypass PPO in its first step: ([T] what multiplies A ∇ log π_θ, share of tokens where the clip is active).

        By differentiating the loss itself: the ratio, or 0 where the clip is active.
        """
        if (key := f"{config.objective} {config.ppo}") not in self._clips:
            given = config.model_dump(include={"use_rollout_log_probs", "objective", "ppo"})
            with ignore_mismatch_warnings():
                config = MismatchConfig.build({**given, "metrics": "off"})
            assert self.packed.old_log_probs is not None
            current = self.packed.old_log_probs.detach().clone().requires_grad_()
            loss = token_loss(current, self.packed, config)
            (gradient,) = torch.autograd.grad(loss.policy.sum(), current)
            factor = gradient.neg_().div_(self.advantages_T)
            ratio = bounded_exp(loss.correction.tokens.log_ratio)
            active = sum(
                float(column.sum()) for name, column in loss.clip_columns() if name in ("clip_high", "clip_low")
            )
            share = active / max(float(self.tokens_N.sum()), 1.0)
            self._clips[key] = torch.where(self.advantages_T != 0, factor, ratio), share
        return self._clips[key]


def _prediction(setting: Setting, data: _Data) -> Prediction:
    config = setting.config
    # In the first step algorithms 0 and 1, and 2 and 3, share weights and decisions; the clip of 1 is its own.
    decides = {"tis", "rs", "use_tis", "rollout_log_prob_policy"}
    shared = f"{config.model_dump(include=decides)} {config.uses_rollout_values}"
    key = f"{shared} {config.objective} {config.ppo}" if config.algorithm == 1 else shared
    if key not in data.known:
        with ignore_mismatch_warnings():
            # Without weights only the counts are read.
            applied = config.replace(metrics="basic" if config.weighted else "off", dry_run=False)
        used = data.of_accepted(applied) if applied.rs.group != "keep" and data.groups is not None else data
        data.known[key] = _figures(applied, used.corrected(shared, applied), used)
    return Prediction(
        setting=setting.name,
        settings=setting.settings,
        own=setting.name == OWN,
        algorithm=config.algorithm,
        second_pass=not config.use_rollout_log_probs,
        **data.known[key],
    )


@torch.no_grad()
def _figures(config: MismatchConfig, correction: Correction, data: _Data) -> dict[str, Any]:
    metrics, units = correction.statistics.metrics(), config.unit
    tokens_N, kept_N, weights_T = data.tokens_N, correction.kept_N, correction.applied
    found: dict[str, Any] = {"kept": float(kept_N.sum() / tokens_N.sum()), "unit": units.measure.removesuffix("s")}
    found |= {name: float(correction.keep.dot(sign) / count) for name, (sign, count) in data.signs.items()}
    found["kept_by_length"] = tuple(float(kept_N[part].sum() / tokens_N[part].sum()) for part in data.thirds)
    if config.weighted:
        after = f"{PREFIX}rollout_is_weight_after_"
        found |= {"mean_weight": metrics[f"{after}mean"], "max_weight": metrics[f"{after}max"]}
        found["ess"] = metrics[f"{after}{units.ess}eff_sample_size"]
    else:  # the core reports no weights: there are none but those of rejection and of the clip
        if config.algorithm == 1:
            with torch.enable_grad():
                factor, found["clipped"] = data.clip(config)
            weights_T = weights_T * factor
        total, square, kept = float(weights_T.sum()), float(weights_T.dot(weights_T)), float(kept_N.sum())
        found["mean_weight"] = total / kept if kept else 0.0
        found["max_weight"] = float(weights_T.max())
        found["ess"] = min(total**2 / (float(tokens_N.sum()) * square), 1.0) if square else 0.0
    if data.groups is not None and config.rejects and not config.needs_advantages:
        changed = group_metrics(data.groups.rewards, data.groups.ids, kept_N, config.rs.least_accepted)
        names = {"groups_changed": "group_changed", "advantages_changed": "advantage_changed"}
        found |= {name: changed[f"{PREFIX}rollout_rs_{metric}_fraction"] for name, metric in names.items()}
    level, of = data.level(units.level)
    values = level.total(weights_T * data.advantages_T)
    total, absolute, noise = float(values.sum()), float(values.abs().sum()), _noise(values)
    return found | {
        # Σ (x − mean)² = Σ x² − (Σ x)² / n
        "variance": max(noise - (total / absolute) ** 2 / of.units, 0.0) if absolute else math.inf,
        "noise": noise / of.noise if absolute else math.inf,
        "bias": abs(total - of.total) / of.absolute if of.absolute else 0.0,
    }


def _noise(values_U: Tensor) -> float:
    """Σ x² / (Σ |x|)²: 1 / n where all are of one size; inf where all are 0."""
    absolute = float(values_U.abs().sum())
    shares = values_U / absolute  # before it is squared: a square may be 0
    return float(shares.dot(shares)) if absolute else math.inf
