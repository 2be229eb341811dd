"""Health check of a step's metrics, as a table of rules: how large the mismatch of the data is, and what is left of it
after the correction. Thresholds: rollout-correction guide, but for those whose comment says otherwise. And the gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.validity import ROLLOUT_DEFECTS, TRAIN_DEFECTS
from mismatch_plugin.limits import MIN_EFFECTIVE_SAMPLE_SIZE, MIN_MEAN_WEIGHT, UPPER_BOUNDS, VANISHING_LOG_WEIGHT

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

About = Literal["data", "correction", "fault"]

MEAN_RANGE = (MIN_MEAN_WEIGHT, 2.0)
MAX_VETO_FRACTION = 0.1
MAX_STD = 1.0
MAX_KL = 0.1
MAX_CHI2 = 1.0
MIN_UNITS = 30  # ours: below this many sequences the moments of their products say nothing
MIN_ACCEPTED = 0.5  # ours: a filter that drops more than it keeps
MAX_BYPASS_CLIPPED = 0.2  # ours: PPO's clip is active for a few percent of tokens where there is no mismatch
MAX_CLIPPED = 0.3
"""Ours: updates of PPO reach a few percent; of unrelated policies half is clipped, on the side that its sign picks."""
MIN_EPS = 0.1  # ours: below this ε PPO's clip is no sign of a policy far away
MAX_INVALID_SHARE = 0.01
"""Ours: invalid rollout log-probs, as a share of the response tokens. Single ones happen, more is a fault."""
MAX_NORMALIZED_WEIGHT = 10.0  # ours: after batch normalisation a weight above this many times hi


@dataclass(frozen=True)
class HealthWarning:
    """One finding: which metric, its value, what it means, what to do, and what it is about.

    about: `data` = the mismatch itself; `correction` = what is left after it; `fault` = numbers not to be trusted.
    """

    metric: str
    value: float
    meaning: str
    advice: str
    about: About = "data"

    def __str__(self) -> str:
        return f"{self.metric} = {self.value:.3g}: {self.meaning}. {self.advice}"


_Judge = Callable[[Mapping[str, float], "MismatchConfig"], bool]


@dataclass(frozen=True)
class Rule:
    """A metric warns where it `is_wrong`, if the rule `applies` to this step and configuration (metrics are given
    without their prefix). when: the threshold in words. only: to what the rule applies, in words. per: what the metric
    is divided by before it is judged."""

    metric: str
    about: About
    is_wrong: Callable[[float], bool]
    when: str
    meaning: str
    advice: str
    applies: _Judge = lambda metrics, config: True
    only: str = ""
    per: Callable[[MismatchConfig], float] = lambda config: 1.0


def _enough_units(metrics: Mapping[str, float], config: MismatchConfig) -> bool:
    return metrics.get("sequences", 0.0) >= MIN_UNITS


def _mostly_kept_in(measure: str) -> _Judge:
    """Weights of such units; but where most is rejected, that is what to change first."""
    return lambda metrics, config: (
        config.weighted and config.unit.measure == measure and metrics.get("accepted_token_fraction", 1) > MIN_ACCEPTED
    )


_SOURCES = "Check that both engines run the same weights, tokens, temperature and filters (mismatch-plugin inspect)"
_FIND = f"{_SOURCES}."
_PRODUCTS = (
    "A product of ratios (turn, sequence, prefix) spreads with its length: choose geometric or token level, or bounds "
    "that grow with it (--tis-bound-growth 0.5). At geometric level find the shift that all tokens share "
    "(mismatch-plugin inspect)."
)
_UNIT_SHIFT = (
    "Find the shift that all tokens share (mismatch-plugin inspect); in a product of ratios (turn, sequence, prefix) "
    "it is multiplied by the length, at token level it is not."
)
_SPREAD = (
    "Lower the upper bound, or raise the lower one with mode clip; in place of a product of ratios (turn, sequence, "
    "prefix) choose geometric or token."
)
_ANCHOR = (
    "Check that old_log_probs and log_probs have the same tokens (shifted by one?), temperature and dropout: in a "
    "rollout's first step they are equal."
)
_ESS = f"below {MIN_EFFECTIVE_SAMPLE_SIZE:g}"
_MEAN = f"below {MEAN_RANGE[0]:g} or above {MEAN_RANGE[1]:g}"
_UNITS = f"from {MIN_UNITS} sequences on; not at token level"

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("kl", "data", lambda v: MAX_KL < abs(v) < math.inf, f"beyond ±{MAX_KL:g}", "the two policies are far apart",
         f"{_SOURCES}; lower the staleness of the rollouts."),
    Rule("rollout_is_ratio_mean", "data", lambda v: not MEAN_RANGE[0] <= v <= MEAN_RANGE[1], _MEAN,
         "the mean ratio of the tokens is far from 1: a systematic shift, not noise", _FIND),
    Rule("rollout_is_ratio_std", "data", lambda v: v > MAX_STD, f"above {MAX_STD:g}",
         "the ratios of the tokens spread widely", _FIND),
    Rule("rollout_is_ratio_eff_sample_size", "data", lambda v: v < MIN_EFFECTIVE_SAMPLE_SIZE, _ESS,
         "a few tokens hold most of the ratio's mass", _FIND),
    Rule("chi2_token", "data", lambda v: v > MAX_CHI2, f"above {MAX_CHI2:g}",
         "the ratio's second moment is so large that its mean is unreliable", _FIND),
    Rule("rollout_is_ratio_unit_mean", "data", lambda v: not MEAN_RANGE[0] <= v <= MEAN_RANGE[1], _MEAN,
         "the mean ratio of the level's units is far from 1", _UNIT_SHIFT, _enough_units, _UNITS),
    Rule("rollout_is_ratio_unit_std", "data", lambda v: v > MAX_STD, f"above {MAX_STD:g}",
         "the ratios of the level's units spread widely", _PRODUCTS, _enough_units, _UNITS),
    Rule("rollout_is_ratio_unit_eff_sample_size", "data", lambda v: v < MIN_EFFECTIVE_SAMPLE_SIZE, _ESS,
         "a few units of the level hold most of the ratio's mass", _PRODUCTS, _enough_units, _UNITS),
    Rule("rollout_is_weight_after_mean", "correction", lambda v: v < MEAN_RANGE[0], f"below {MEAN_RANGE[0]:g}",
         "the weights shrink the gradient to less than half",
         "--tis-batch-normalize keeps the step size; the shift itself is in the data.",
         lambda metrics, config: (
             config.weighted and not config.tis.batch_normalize and not metrics.get("all_rejected")
         ), "weights not normalised, something kept"),
    Rule("rollout_is_weight_after_eff_sample_size", "correction", lambda v: v < MIN_EFFECTIVE_SAMPLE_SIZE, _ESS,
         "few tokens carry the gradient", _SPREAD, _mostly_kept_in("tokens"),
         "weights at token and prefix level, most tokens kept"),
    Rule("rollout_is_weight_after_unit_eff_sample_size", "correction", lambda v: v < MIN_EFFECTIVE_SAMPLE_SIZE, _ESS,
         "few turns (or other units) carry the gradient", _SPREAD, _mostly_kept_in("units"),
         "weights at turn level, most tokens kept"),
    Rule("rollout_is_weight_after_seq_eff_sample_size", "correction", lambda v: v < MIN_EFFECTIVE_SAMPLE_SIZE, _ESS,
         "few sequences carry the gradient", _SPREAD, _mostly_kept_in("sequences"),
         "weights at sequence and geometric level, most tokens kept"),
    Rule("seq_log_ratio_mean", "correction", lambda v: v < VANISHING_LOG_WEIGHT, f"below {VANISHING_LOG_WEIGHT:g}",
         "the mean log-ratio times the length makes product weights vanish",
         "Long responses lose their gradient: use geometric or token level, or find the shift that all tokens share.",
         lambda metrics, config: config.weighted and config.unit.multiplies and config.unit.cut == "sequence",
         "weights at sequence and prefix level"),
    Rule("rollout_is_veto_fraction", "correction", lambda v: v > MAX_VETO_FRACTION, f"above {MAX_VETO_FRACTION:g}",
         "many sequences are vetoed",
         "Look at the log-probs of the vetoed tokens first (fills, filters, bf16); then lower the veto threshold."),
    Rule("accepted_token_fraction", "correction", lambda v: v < MIN_ACCEPTED, f"below {MIN_ACCEPTED:g}",
         "most tokens are rejected",
         "See what rejects them (rollout_rs_*, rollout_is_veto_fraction, invalid_*) and widen that bound: "
         "--mismatch-metrics full shows each criterion's values, --mismatch-dry-run what another would keep.",
         lambda metrics, config: config.dry_run or not metrics.get("all_rejected"), "something is left, or a dry run"),
    Rule("pg_clipfrac", "correction", lambda v: v > MAX_BYPASS_CLIPPED, f"above {MAX_BYPASS_CLIPPED:g}",
         "the clip, which begins at π_rollout, cuts tokens for the mismatch itself",
         "Anchor the clip at π_old and weigh the rest: algorithm 2, --use-tis without --use-rollout-log-probs.",
         lambda metrics, config: config.algorithm == 1, "algorithm 1"),
    Rule("pg_clipfrac", "correction", lambda v: v > MAX_CLIPPED, f"above {MAX_CLIPPED:g}",
         "π_θ is farther from π_old than updates lead", _ANCHOR,
         lambda metrics, config: (
             not config.use_rollout_log_probs and config.policy_objective == "ppo"
             and min(config.ppo.eps_clip_low, config.ppo.eps_clip_high) >= MIN_EPS
         ), f"algorithms 0 and 2, objective ppo, ε from {MIN_EPS:g} on"),
    Rule("tokens", "fault", lambda v: v == 0, "0", "nothing trains: every loss mask is 0",
         "Set the mask to 1 where a response token trains."),
    Rule("all_rejected", "correction", lambda v: v > 0, "1", "nothing is left in the loss",
         "See what rejects it (rollout_rs_*, rollout_is_veto_fraction, invalid_*) and widen that bound; try it with "
         "--mismatch-dry-run first.",
         lambda metrics, config: not config.dry_run, "not in a dry run"),
    Rule("rollout_is_weight_after_max", "correction", lambda v: v > MAX_NORMALIZED_WEIGHT,
         f"above {MAX_NORMALIZED_WEIGHT:g} upper bounds", "batch normalisation produced an outlier weight",
         "Nearly everything else was bounded to little: raise the lower bound.",
         lambda metrics, config: config.tis.batch_normalize and config.tis.growth == 0,
         "batch normalisation, bounds that do not grow", lambda config: max(config.tis.upper, config.tis.positive[1])),
    *(Rule(metric, "fault", lambda v: not math.isfinite(v), "NaN or infinite", "it is not finite",
           "Look for NaN in the training side's log-probs and advantages.") for metric in ("kl", "pg_loss")),
)
_UPPER = Rule("tis.upper_bound", "correction", lambda v: not UPPER_BOUNDS[0] <= v <= UPPER_BOUNDS[1],
    f"below {UPPER_BOUNDS[0]:g} or above {UPPER_BOUNDS[1]:g}",
    "no weight reaches 1, or one weight can outweigh 100 others", "2 is usual.", only="weights")
_INVALID = Rule("invalid_{kind}", "fault",
    lambda v: v > MAX_INVALID_SHARE,  # as a share of the tokens
    f"above {MAX_INVALID_SHARE:.0%} of the tokens, all kinds of a side together", "rollout log-probs are invalid",
    "Find out why the rollout engine does not return them: mismatch-plugin inspect names sample and position.")
_INVALID_TRAIN = Rule("invalid_train_{kind}", "fault", _INVALID.is_wrong, _INVALID.when,
    "training log-probs are invalid",
    "Look at what the trainer computes: NaN, −inf, or a flipped sign; packed.invalid names sample and position.")
# fmt: on
ALL_RULES = (*RULES, _UPPER, _INVALID, _INVALID_TRAIN)  # also those that are not of one metric


def check_health(metrics: Mapping[str, float], config: MismatchConfig) -> list[HealthWarning]:
    """Warnings for one step's metrics, empty where all is well: data first (how large the mismatch is), then the
    correction (what is left of it), then faults. A metric that is not there is not judged."""
    values = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    if values.get("tokens") == 0:
        values = {"tokens": 0.0}  # figures of nothing say nothing
    found = []
    for rule in RULES:
        value = values.get(rule.metric)
        if value is not None and rule.applies(values, config) and rule.is_wrong(value / rule.per(config)):
            would = "without dry-run: " if config.dry_run and rule.about == "correction" else ""
            found.append(HealthWarning(PREFIX + rule.metric, value, would + rule.meaning, rule.advice, rule.about))
    if config.weighted and (fault := config.tis.upper_bound_fault):
        found.append(HealthWarning(_UPPER.metric, config.tis.upper_bound, fault, _UPPER.advice, _UPPER.about))
    tokens = values["tokens"] if values.get("tokens") else math.inf
    for rule, kinds in ((_INVALID, ROLLOUT_DEFECTS), (_INVALID_TRAIN, TRAIN_DEFECTS)):
        counts = {kind: values.get(f"invalid_{kind}", 0.0) for kind in kinds}
        if rule.is_wrong(sum(counts.values()) / tokens):
            worst = max(counts, key=lambda kind: counts[kind])
            meaning = f"{sum(counts.values()):g} of {tokens:g} {rule.meaning}"
            found.append(HealthWarning(f"{PREFIX}invalid_{worst}", counts[worst], meaning, rule.advice, rule.about))
    return found


# The gate: a step above a bar is an error, for CI and a run's first steps at learning rate 0 ----------------

DEFAULT_GATE_KL = 1e-3
"""Bar of `inspect --gate`, nats of k3 a token: about the square of the log-ratio's deviation, halved.

Below it: prime-rl #3543 fails its CI above a mean |log ratio| of .015 over 20 steps at learning rate 0, for Gaussian
noise a k3 of (.015 √(π/2))²/2 = 1.8e-4; a tiny model in bf16 on SGLang's CPU server against fp32 Megatron has 8e-4.
Above it: fp8 with the two sides quantised differently, 8.7e-3 (xtuner #2044; 3.7e-4 once they were quantised alike).
"""


class GateError(RuntimeError):
    """A step's k3_kl is above the bar, or cannot be formed."""


def check_gate(k3_kl: float, bar: float, step: int | None = None) -> None:
    """Raise GateError unless k3_kl ≤ bar; NaN fails. Both in nats per token; step: its number where it is known."""
    if k3_kl <= bar:
        return
    where, gate = "" if step is None else f"step {step}: ", f"the bar of --mismatch-gate-kl, {bar:g}"
    what = f"k3_kl {k3_kl:.3g} nats per token is above {gate}"
    if k3_kl != k3_kl:
        what = f"k3_kl cannot be compared with {gate}: no token has valid log-probs"
    raise GateError(
        f"{where}{what}. Find the cause with mismatch-plugin inspect on a dump of this step, and on the "
        f"run's metrics; dense engines of one precision are below {DEFAULT_GATE_KL:g} (fp8, int4 and MoE "
        f"routing need more). If this much is meant, raise the bar or leave it out."
    )
