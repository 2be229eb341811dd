"""What a setting would do to these data, without training: computed by the code that trains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig, PPOClip
from mismatch_plugin.config.criteria import LEVEL_TO_AGGREGATE
from mismatch_plugin.config.presets import COMPLETE
from mismatch_plugin.config.values import no_notes
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import bounded_exp, segment_sum
from mismatch_plugin.core.units import UNITS, units_of
from mismatch_plugin.inspect.bounds import LEVELS, Bounds, bounds_for
from mismatch_plugin.inspect.packing import subset
from mismatch_plugin.inspect.result import Prediction

OWN = "your settings"
CONSTANTS = {"token": (2.0, 5.0), "sequence": (2.0, 5.0), "geometric": (1.001, 1.01)}
"""Upper bounds that are tried, next to those that keep 99 % of these data. The lower one is the reciprocal."""
_SHARE = 0.99


class Setting(NamedTuple):
    """name: as `Prediction.setting`. settings: as in a file for --mismatch-config."""

    name: str
    settings: dict[str, Any]
    config: MismatchConfig


def predict(
    packed: PackedSequences, own: MismatchConfig | None = None, bounds: Bounds | None = None
) -> list[Prediction]:
    """What every setting would do in the first optimizer step on these data; the user's own settings come first.

    With w the weight that multiplies a token's loss, 0 where it is rejected (in algorithm 1 times the ratio of
    PPO-clip, 0 where the clip is active, which is what multiplies A ∇ log π there), ρ the ratio, A the advantages (1
    where there are none), u a unit: a token, or at sequence and geometric level a response, over which w A is summed:
    kept: rollout_corr/accepted_token_fraction
    mean_weight, max_weight: of the kept tokens
    ess: (Σ w)² / (n Σ w²) over units
    variance: Σ_u (x_u − mean x)² / (Σ_u |x_u|)² with x = w A: the squared relative error of Σ w A for independent
        units. Divided by Σ |w A|, not by Σ w A, which is near 0 where advantages are centred; inf if nothing is left
    noise: Σ_u x_u² / (Σ_u |x_u|)² divided by that of x = A: 1 is as noisy as no correction, at every level alike;
        1 / ess where there are no advantages and units are tokens
    bias: |Σ_u (w − ρ) A| / Σ_u |ρ A|, ρ that of the token for units that are tokens, else the product
    clipped: rollout_corr/pg_clipfrac: share where the clip of algorithm 1 is active before any step was taken

    What training reports, too, is read from the statistics that it reports: equal to the last digit for the same batch.
    In algorithms 1 and 3 the training side is π_θ, which is π_old in the first step. A dry run is predicted as if it
    were none. Above `packing.MAX_TOKENS` tokens a random part is taken (`packing.subset`, whose note says so).
    bounds: `bounds_for` these tokens, where the caller has it. Raises InvalidLogProbError, ValueError as `correct`.
    """
    packed, _ = subset(packed)
    return predict_settings(packed, settings_for(packed, own, bounds))


def predict_settings(packed: PackedSequences, settings: Iterable[Setting]) -> list[Prediction]:
    """As `predict`, of these settings and on all of the tokens."""
    data = _Data(packed)
    return [_prediction(setting, data) for setting in settings]


def predict_one(packed: PackedSequences, config: MismatchConfig, name: str) -> Prediction:
    """`predict` for one setting alone."""
    return predict_settings(packed, [setting_of(name, config)])[0]


def settings_for(
    packed: PackedSequences, own: MismatchConfig | None = None, bounds: Bounds | None = None
) -> Iterator[Setting]:
    """The user's own, every preset, and every algorithm × level × mode × bounds: two constants of the level, and what
    keeps 99 % of these data. Without weights the bounds are those of a ratio criterion."""
    if own is not None:
        yield setting_of(OWN, own)
    with no_notes():
        for preset in COMPLETE:
            yield Setting(preset.short, {"preset": preset.short}, MismatchConfig.build(preset.settings()))
        measured = bounds_for(packed, (_SHARE,)) if bounds is None else bounds
        share = f"{_SHARE:.0%}"
        for level in LEVELS:
            tried = [(upper, (1.0 / upper, upper), "") for upper in CONSTANTS[level]]
            low, high = measured[level][share]
            for upper, (lower, _), note in [*tried, (high, (low, high), f" (keeps {share})")]:
                if math.isfinite(upper):
                    yield from _of_bounds(level, lower, upper, note)
        aggregate, statistic = "sequence_mean", "k3"
        criterion = {"aggregate": aggregate, "statistic": statistic}
        upper = measured[f"{aggregate}_{statistic}"][share][1]
        yield from _rejections(
            f"reject {aggregate} {statistic} above {upper:g} (keeps {share})", criterion, None, upper
        )


def setting_of(name: str, config: MismatchConfig) -> Setting:
    """A configuration as a setting to be predicted."""
    return Setting(name, config.model_dump(mode="json", exclude_unset=True), config)


def _of_bounds(level: str, lower: float, upper: float, note: str) -> Iterator[Setting]:
    for algorithm in (2, 3):
        for mode in ("truncate", "clip", "mask"):
            tis: dict[str, Any] = {"level": level, "mode": mode, "upper_bound": upper}
            if mode != "truncate":
                tis["lower_bound"] = lower
            shown = f"{upper:.7g}" if mode == "truncate" else f"{lower:.7g} to {upper:.7g}"
            yield _setting(algorithm, f"{level}, {mode} {shown}{note}", {"tis": tis})
    criterion = {"aggregate": LEVEL_TO_AGGREGATE[level], "statistic": "ratio"}
    yield from _rejections(f"reject {level} ratio outside {lower:.7g} to {upper:.7g}{note}", criterion, lower, upper)


def _rejections(name: str, criterion: dict[str, Any], lower: float | None, upper: float) -> Iterator[Setting]:
    whole = {**criterion, "upper_bound": upper} | ({} if lower is None else {"lower_bound": lower})
    for algorithm in (0, 1):
        yield _setting(algorithm, name, {"rs": {"criteria": [whole]}})


def _setting(algorithm: int, name: str, settings: dict[str, Any]) -> Setting:
    switches = {"use_rollout_log_probs": bool(algorithm & 1), "use_tis": bool(algorithm & 2)}
    given = {key: True for key, on in switches.items() if on} | settings
    return Setting(f"algorithm {algorithm}, {name}", given, MismatchConfig.build(given))


@dataclass(frozen=True)
class _Reference:
    """total, absolute: Σ ρ A and Σ |ρ A| over units. noise: Σ A² / (Σ |A|)². units: how many there are."""

    total: float
    absolute: float
    noise: float
    units: float

    @classmethod
    def of(cls, ratio_U: Tensor, advantages_U: Tensor, units: float) -> _Reference:
        """From what is one a unit."""
        values = ratio_U * advantages_U
        return cls(float(values.sum()), float(values.abs().sum()), _noise(advantages_U), units)


_HUGE = 1e30
"""Advantages above it are scaled: no sum of their squares is finite in float32."""


class _Data:
    """What all settings share: advantages, reference ratios, shares of tokens, and what was computed already."""

    def __init__(self, packed: PackedSequences) -> None:
        assert packed.old_log_probs is not None
        self.real = packed.advantages is not None
        given = torch.ones_like(packed.old_log_probs) if packed.advantages is None else packed.advantages
        if given.numel() and (largest := float(given.abs().max())) > _HUGE:
            given = given / largest  # predictions are of ratios of sums, which would overflow
        self.advantages_T = torch.where(packed.loss_mask, given, 0.0).to(packed.old_log_probs.dtype)
        self.packed = packed.replace(advantages=self.advantages_T)
        self.plain = correct(self.packed, MismatchConfig(metrics="off"))
        self.tokens_N = self.plain.tokens_N
        self.known: dict[str, dict[str, Any]] = {}
        self._last: tuple[str, Correction] | None = None
        self._clips: dict[PPOClip, tuple[Tensor, float]] = {}

    def corrected(self, key: str, config: MismatchConfig) -> Correction:
        """`correct`, or what it gave last where the key is that of the last one."""
        if self._last is None or self._last[0] != key:
            self._last = None  # its memory is free before the next one needs as much
            self._last = key, correct(self.packed, config)
        return self._last[1]

    @cached_property
    def signs(self) -> dict[str, Tensor]:
        """Indicator of tokens with A > 0 and A < 0."""
        chosen = {"kept_positive": self.advantages_T > 0, "kept_negative": self.advantages_T < 0}
        return {name: mask.to(self.advantages_T.dtype) for name, mask in chosen.items()}

    @cached_property
    def thirds(self) -> tuple[Tensor, ...]:
        """The responses by length, shortest first, in three parts; () where there are fewer, or all are as long."""
        there = (self.tokens_N > 0).nonzero().flatten()
        lengths = self.tokens_N[there]
        if len(there) < 3 or lengths.min() == lengths.max():
            return ()
        return torch.tensor_split(there[lengths.argsort(stable=True)], 3)

    def reference(self, per_token: bool) -> _Reference:
        return self._of_tokens if per_token else self._of_sequences

    @cached_property
    def _of_tokens(self) -> _Reference:
        ratio = bounded_exp(self.plain.tokens.log_ratio)
        return _Reference.of(ratio, self.advantages_T, float(self.tokens_N.sum()))

    @cached_property
    def _of_sequences(self) -> _Reference:
        sums = {"log_ratio": segment_sum(self.plain.tokens.log_ratio, self.packed.offsets), "tokens": self.tokens_N}
        product = bounded_exp(UNITS["sequence"].aggregate(self.plain.tokens.log_ratio, sums))
        advantages = segment_sum(self.advantages_T, self.packed.offsets)
        return _Reference.of(product, advantages, float((self.tokens_N > 0).sum()))

    def clip(self, ppo: PPOClip) -> tuple[Tensor, float]:
        """Of bypass PPO in its first step: ([T] what multiplies A ∇ log π_θ, share of tokens where the clip is active).

        By differentiating the loss itself: the ratio, or 0 where the clip is active.
        """
        if ppo not in self._clips:
            config = MismatchConfig(use_rollout_log_probs=True, ppo=ppo, metrics="off")
            assert self.packed.old_log_probs is not None
            current = self.packed.old_log_probs.detach().clone().requires_grad_()
            loss = token_loss(current, self.packed, config)
            (gradient,) = torch.autograd.grad(loss.policy.sum(), current)
            factor = gradient.neg_().div_(self.advantages_T)
            ratio = bounded_exp(loss.correction.tokens.log_ratio)
            active = {name: float(column.sum()) for name, column in loss.clip_columns() if name.startswith("clip_")}
            share = (active["clip_high"] + active["clip_low"]) / max(float(self.tokens_N.sum()), 1.0)
            self._clips[ppo] = torch.where(self.advantages_T != 0, factor, ratio), share
        return self._clips[ppo]


def _prediction(setting: Setting, data: _Data) -> Prediction:
    config = setting.config
    # In the first step algorithms 0 and 1, and 2 and 3, share weights and decisions; the clip of 1 is its own.
    decides = {"tis", "rs", "use_tis", "rollout_log_prob_policy"}
    shared = f"{config.model_dump(include=decides)} {config.uses_rollout_values}"
    key = f"{shared} {config.ppo}" if config.algorithm == 1 else shared
    if key not in data.known:
        with no_notes():
            applied = config.replace(metrics="basic", dry_run=False)
        data.known[key] = _figures(applied, data.corrected(shared, applied), data)
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
    metrics = correction.statistics.metrics()
    found: dict[str, Any] = {"kept": metrics[f"{PREFIX}accepted_token_fraction"]}
    keep = correction.keep
    if data.real:
        found |= {
            name: float(keep.dot(sign) / count) for name, sign in data.signs.items() if (count := float(sign.sum()))
        }
    found["kept_by_length"] = tuple(
        float(correction.kept_N[part].sum() / data.tokens_N[part].sum()) for part in data.thirds
    )
    per_token = units_of(config).per_token
    found["unit"] = "token" if per_token else "sequence"
    weights = correction.applied
    if config.weighted:
        after = f"{PREFIX}rollout_is_weight_after_"
        found |= {"mean_weight": metrics[f"{after}mean"], "max_weight": metrics[f"{after}max"]}
        found["ess"] = metrics[f"{after}eff_sample_size" if per_token else f"{after}seq_eff_sample_size"]
    else:
        if config.algorithm == 1:
            with torch.enable_grad():
                factor, found["clipped"] = data.clip(config.ppo)
            weights = weights * factor
        found |= _of_weights(weights, correction, data)
    return found | _errors(weights, data, per_token)


def _of_weights(weights_T: Tensor, correction: Correction, data: _Data) -> dict[str, float]:
    """Where the core reports no weights, for there are none but those of rejection and of the clip."""
    total, square, kept = float(weights_T.sum()), float(weights_T.dot(weights_T)), float(correction.kept_N.sum())
    return {
        "mean_weight": total / kept if kept else 0.0,
        "max_weight": float(weights_T.max()) if len(weights_T) else 0.0,
        "ess": min(total**2 / (float(data.tokens_N.sum()) * square), 1.0) if square else 0.0,
    }


def _errors(weights_T: Tensor, data: _Data, per_token: bool) -> dict[str, float]:
    values = weights_T * data.advantages_T
    if not per_token:
        values = segment_sum(values, data.packed.offsets)
    of = data.reference(per_token)
    total, absolute, noise = float(values.sum()), float(values.abs().sum()), _noise(values)
    return {
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
