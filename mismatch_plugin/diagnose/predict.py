"""What settings would do to these data, without training: computed by the code that trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.groups import group_advantages, group_metrics
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import bounded_exp, segment_sum, spread
from mismatch_plugin.diagnose.flags import config_of
from mismatch_plugin.diagnose.levels import KEPT, Bounds, LevelUnits, levels_of, units_in
from mismatch_plugin.diagnose.packing import Groups
from mismatch_plugin.diagnose.result import Prediction
from mismatch_plugin.limits import SAFETY_BOUND

OWN = "your settings"
_UPPER = {"geometric": 1.001}
"""Level → the upper bound that is tried next to the one from the data; 2 at others. The lower one is its reciprocal."""
_KEEPS = f"(keeps {KEPT:.0%})"


# Which settings ------------------------------------------------------------------------------------------------------

Named = Iterator[tuple[str, dict[str, Any]]]


def _of_presets(bounds: Bounds) -> Named:
    """A parameter without a default has the value that keeps 99 % of the responses; without one there is no setting."""
    lowest = max(bounds["geometric"][0], math.exp(-SAFETY_BOUND))
    from_data = {
        "max_k2": bounds["sequence_max_k2"][1],
        "mean_k3": bounds["sequence_mean_k3"][1],
        "delta": -math.log(lowest),  # mean(log π_rollout − log π_θ) > δ: a geometric mean below e^−δ
    }
    for preset in PRESETS:
        given = {name: from_data[name] for name in preset.required}
        if not given:
            yield preset.short, {"preset": preset.short}
        elif all(0.0 < value < math.inf for value in given.values()):
            shown = ", ".join(f"{name} {value:.4g}" for name, value in given.items())
            yield f"{preset.short}, {shown} {_KEEPS}", preset.settings(**given)


def _of_bounds(levels: Sequence[str], bounds: Bounds) -> Named:
    for level in levels:
        constant, (low, high) = _UPPER.get(level, 2.0), bounds[level]
        for lower, upper, note in ((1.0 / constant, constant, ""), (low, high, f" {_KEEPS}")):
            if upper == math.inf:
                continue
            between = f"{lower:.7g} to {upper:.7g}{note}"
            for mode in ("truncate", "clip", "mask"):
                tis: dict[str, Any] = {"level": level, "mode": mode, "upper_bound": upper}
                shown = f"{upper:.7g}{note}" if mode == "truncate" else between
                tis |= {} if mode == "truncate" else {"lower_bound": lower}
                yield _setting(2, f"{level}, {mode} {shown}", {"tis": tis})
            if level in RS_LEVELS:
                rule = {"aggregate": level, "statistic": "ratio", "lower_bound": lower, "upper_bound": upper}
                yield _setting(0, f"reject {level} ratio outside {between}", {"rs": {"criteria": [rule]}})
    rule = {"aggregate": "sequence_mean", "statistic": "k3", "upper_bound": bounds["sequence_mean_k3"][1]}
    yield _setting(0, f"reject sequence_mean k3 above {rule['upper_bound']:g} {_KEEPS}", {"rs": {"criteria": [rule]}})
    for objective in ("gspo", "cispo", "sapo", "gmpo"):
        yield _setting(1, f"objective {objective}", {"objective": objective})


def _setting(algorithm: int, name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    switches = {"use_rollout_log_probs": bool(algorithm & 1), "use_tis": bool(algorithm & 2)}
    return f"algorithm {algorithm}, {name}", {key: True for key, on in switches.items() if on} | settings


def lacking(config: MismatchConfig, packed: PackedSequences, groups: Groups | None) -> str:
    """What these settings need and these data do not have; "" where they can be predicted."""
    if config.advantage_readers and packed.advantages is None:
        return "advantages"
    untold = packed.weight_versions is None or packed.trainer_version is None
    if config.rs.max_staleness is not None and untold:
        return "weight versions of all tokens and of the trainer"
    return "groups with rewards" if config.rs.group != "keep" and groups is None else ""


# What they do --------------------------------------------------------------------------------------------------------


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

    What training reports, too, is read from the statistics that it reports: equal to the last digit for the same batch.
    In algorithms 1 and 3, and under `rs.policy` current, the training side is π_θ, which is π_old in the first step.
    Under `rs.group` exclude and drop the advantages are those of the accepted responses. A dry run is predicted as if
    it were none. groups: `packing.groups_of` these responses.
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
        self._clips: dict[str, Tensor] = {}
        self._levels: dict[str, tuple[LevelUnits, float, float, float]] = {}

    def all(self, own: MismatchConfig | None, bounds: Bounds) -> list[Prediction]:
        """Of every setting, the user's own first, of which nothing is `lacking`. bounds: `bounds_for` the data."""
        return [self.prediction(config, name, settings) for name, settings, config in self._settings(own, bounds)]

    def prediction(self, config: MismatchConfig, name: str = "", settings: dict[str, Any] | None = None) -> Prediction:
        """Of one. settings: as a file for --mismatch-config has them; default: what is set."""
        with ignore_mismatch_warnings():  # without weights only the counts are read
            applied = config.replace(metrics="basic" if config.weighted else "off", dry_run=False)
        data = self
        if applied.rs.group != "keep" and self.groups is not None:
            kept_N, least = correct(self.packed, applied).kept_N, applied.rs.least_accepted
            advantages_N = group_advantages(self.groups.rewards, self.groups.ids, kept_N, min_accepted=least)
            data = Predictor(
                self.packed.replace(advantages=spread(advantages_N, self.packed.sequence_index)), self.groups
            )
        return Prediction(
            setting=name,
            settings=config.model_dump(mode="json", exclude_unset=True) if settings is None else settings,
            algorithm=config.algorithm,
            second_pass=not config.use_rollout_log_probs,
            own=name == OWN,
            **data._figures(applied, correct(data.packed, applied, log_probs=data.packed.old_log_probs)),
        )

    def _settings(
        self, own: MismatchConfig | None, bounds: Bounds
    ) -> Iterator[tuple[str, dict[str, Any] | None, MismatchConfig]]:
        """(name, settings, the same). The user's own, every preset, and every level × mode of algorithm 2 (which 3
        shares in the first step) at two bounds: a constant, and what keeps 99 % of these data. Ratio criteria of
        algorithm 0 at the same bounds. Objectives of algorithm 1, whose clip acts at once.

        Without advantages no setting whose criteria need them."""
        if own is not None:
            yield OWN, None, own
        for name, settings in (*_of_presets(bounds), *_of_bounds(levels_of(self.packed), bounds)):
            config = config_of(settings)
            if self.has_advantages or not config.advantage_readers:
                yield name, settings, config

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
        if (key := f"{config.objective} {config.ppo}") not in self._clips:
            config = config_of(
                {**config.model_dump(include={"use_rollout_log_probs", "objective", "ppo"}), "metrics": "off"}
            )
            assert self.packed.old_log_probs is not None
            current = self.packed.old_log_probs.detach().clone().requires_grad_()
            with torch.enable_grad():
                loss = token_loss(current, self.packed, config)
                (gradient,) = torch.autograd.grad(loss.policy.sum(), current)
            ratio, factor = bounded_exp(loss.correction.tokens.log_ratio), gradient.neg_().div_(self.advantages_T)
            self._clips[key] = torch.where(self.advantages_T != 0, factor, ratio)
        return self._clips[key]

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
        bias = abs(float(values.sum()) - total) / absolute if absolute else 0.0
        return found | {"noise": _noise(values) / noise if values.any() else math.inf, "bias": bias}


def _noise(values_U: Tensor) -> float:
    """Σ x² / (Σ |x|)²: 1 / n where all are of one size; inf where all are 0."""
    absolute = float(values_U.abs().sum())
    shares = values_U / absolute  # before it is squared: a square may be 0
    return float(shares.dot(shares)) if absolute else math.inf
