"""Every metric, declared once: name, formula, unit, what it averages over, how it merges, and how it is formed.

They are formed on the host from merged sums and maxima, so they are the same for every split of the step.
docs/metrics.md is generated from `METRICS`. Names follow the rollout-correction guide (November 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from mismatch_plugin.core.rejection import BUDGET_LAST, budget_threshold
from mismatch_plugin.core.units import acting_bounds
from mismatch_plugin.core.validity import DEFECTS
from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.config.criteria import Criterion

PREFIX = "rollout_corr/"
_OPTIONAL = ("masked", "masked_any", "vetoed", "catastrophic", "clip_dual")
"""Rows that are not there where no setting could add to them: their sum is 0."""


HISTOGRAM_BINS = 2048
HISTOGRAM_SCALE = 1e-4
HISTOGRAM_EDGE = math.asinh(SAFETY_BOUND / HISTOGRAM_SCALE)
"""Bins are equal in asinh(l / 1e-4): 1.3 % of |l| wide, down to 1e-6 at 0, over l in ±20."""

POSITION_EDGES = (64, 256, 1024, 4096, 16384)
PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99)
LENGTH_EDGES = (256, 1024, 4096, 16384)
VERSION_LAGS = 16
"""Weight versions that a token lags behind the trainer's are counted one by one below this, and above it together."""

BOUND_UNITS, LEVEL_UNITS = "units of that bound", "level's units"
"""What the shares outside the bounds that act are over, and what is said of the level's own units."""


class State:
    """Merged sums and maxima as a metric's formula reads them."""

    def __init__(self, sums: Mapping[str, float], maxima: Mapping[str, float], config: MismatchConfig) -> None:
        self.sums, self.maxima, self.config = sums, maxima, config
        self.unit = config.unit.measure
        self.tokens, self.sequences = self.count("tokens"), self.count("sequences")
        self.trained_tokens, self.trained_sequences = self.count("tokens", True), self.count("sequences", True)

    def has(self, name: str) -> bool:
        """Whether a sum, a maximum or a vector of sums of that name is there."""
        return any(key in self.sums or key in self.maxima for key in (name, f"{name}@tokens", f"{name}[0]"))

    def count(self, measure: str, trained: bool = False) -> float:
        """Tokens, turns or sequences that were measured, or that train: more, where invalid log-probs are left out."""
        measured = self.sums[f"one@{measure}"]
        return self.sums.get(f"trained_{measure}", measured) if trained else measured

    def mean(self, row: str, measure: str = "tokens") -> float:
        """Σ of a row over its measure; 0 where there is nothing."""
        return ratio(self.sums[f"{row}@{measure}"], self.sums[f"one@{measure}"])

    def maximum(self, name: str) -> float:
        """A maximum; 0 where there was nothing to take it of."""
        value = self.maxima[name]
        return value if math.isfinite(value) else 0.0

    def vector(self, name: str) -> list[float]:
        """The elements of a vector, in order."""
        values = []
        while (value := self.sums.get(f"{name}[{len(values)}]")) is not None:
            values.append(value)
        return values

    @property
    def batch_factor(self) -> float:
        """Mean bounded weight over everything merged; 1 without batch normalisation."""
        if not self.has("weight_unit"):
            return 1.0
        mean = ratio(self.sums[f"weight_unit@{self.unit}"], self.sums[f"units@{self.unit}"], 1.0)
        return mean if mean > 0 else 1.0

    @property
    def factor(self) -> float:
        """What the merged weights are still to be divided by."""
        return 1.0 if self.config.tis.batch_normalize_scope == "micro_batch" else self.batch_factor


def ratio(numerator: float, denominator: float, default: float = 0.0) -> float:
    """Numerator over denominator, or the default where that is 0."""
    return numerator / denominator if denominator else default


def bounded_exp(log_value: float) -> float:
    """exp(min(·, 20)): no metric is infinite."""
    return math.exp(min(log_value, SAFETY_BOUND))


def measure_of(over: str, config: MismatchConfig) -> str:
    """What counts the units that a metric is over: tokens, units or sequences."""
    if over == LEVEL_UNITS:
        return config.unit.measure
    if over != BOUND_UNITS:
        return over
    bounds = acting_bounds(config)
    return "sequences" if bounds is None else bounds.unit.measure


def deviation(mean_square: float, mean: float) -> float:
    """Population deviation from two moments about one constant."""
    return math.sqrt(max(mean_square - mean * mean, 0.0))


def seq_std(s: State) -> float:
    """Sample deviation (n − 1) of the per-sequence ratio, as the guide's code has it."""
    if s.sequences < 2:
        return 0.0
    own = deviation(s.mean("level_ratio_squared", "sequences"), s.mean("level_ratio", "sequences"))
    return own * math.sqrt(s.sequences / (s.sequences - 1))


def token_ess(s: State, row: str) -> float:
    """From sums about 1, which float32 tokens leave without digits where every ρ is far below 1e-3."""
    mean = 1.0 + s.mean(row)
    mean_square = 1.0 + 2.0 * s.mean(row) + s.mean(f"{row}_squared")
    return min(mean * mean / mean_square, 1.0) if mean_square > 1e-6 and mean > 0 else 0.0


def seq_extreme(s: State, sign: str) -> float:
    """Largest (or with - smallest) ρ of a sequence: its tokens' mean, or its own where it is the unit."""
    return log_extreme(s, "log_aggregate", sign) if s.unit == "sequences" else 1.0 + extreme(s, "ratio_seq", sign)


def unit_std(s: State) -> float:
    """Of the level's units, from the second moment about 1, or about 0 where the mean is nearer to that."""
    mean = s.mean("unit_plain", s.unit)
    if mean < 0.5:
        return deviation(s.mean("unit_square", s.unit), mean)
    return deviation(s.mean("unit_ratio_squared", s.unit), s.mean("unit_ratio", s.unit))


def unit_ess(s: State) -> float:
    """(Σ ρ)² / (n Σ ρ²) of the level's units."""
    return min(ratio(s.mean("unit_plain", s.unit) ** 2, s.mean("unit_square", s.unit), 1.0), 1.0)


def extreme(s: State, name: str, sign: str) -> float:
    """The largest value, or ("-") the smallest."""
    return -s.maximum(sign + name) if sign else s.maximum(name)


def log_extreme(s: State, name: str, sign: str) -> float:
    """exp of it, at most e^20."""
    return bounded_exp(extreme(s, name, sign))


def after_std(s: State) -> float:
    """Its deviation, from the second moment about 1, or about 0 where the mean is nearer to that: products of long
    responses, before the factor brings their mean to 1, have no digits left about 1."""
    kept = s.sums["kept@tokens"]
    if not kept:
        return 0.0
    mean = s.sums["weight@tokens"] / kept
    if mean < 0.5:
        return deviation(s.sums["weight_squared@tokens"] / kept, mean) / s.factor
    return deviation(s.sums["weight_deviation@tokens"] / kept, mean - 1.0) / s.factor


def after_ess(s: State, measure: str, squared: str) -> float:
    """(Σ w)² / (n Σ w²) over all units, the rejected ones with w = 0."""
    total, square = s.sums[f"weight@{measure}"], s.sums[f"{squared}@{measure}"]
    return ratio(total * total, square * s.sums[f"one@{measure}"])


def criteria(s: State, measure: str) -> dict[str, float]:
    """Share outside each criterion; by sequences only for those that reject all of a sequence or nothing."""
    return {
        criterion.name: s.mean(f"out_{criterion.name}", measure)
        for criterion in s.config.criteria
        if measure == "tokens" or not criterion.unit.per_token
    }


def measured_criteria(s: State) -> list[Criterion]:
    """Those whose statistic was collected: all at level full."""
    return [criterion for criterion in s.config.criteria if s.has(f"value_{criterion.name}")]


def criterion_shares(s: State, side: str) -> dict[str, float]:
    """Share above or below a criterion's bounds, 0 where it has none on that side."""
    shares = {}
    for criterion in measured_criteria(s):
        measure = criterion.unit.measure
        low, high = criterion.log_bounds
        outside = s.mean(f"out_{criterion.name}", measure)
        above = 0.0 if high is None else outside if low is None else s.mean(f"above_{criterion.name}", measure)
        shares[criterion.name] = above if side == "above" else max(outside - above, 0.0)
    return shares


def criterion_means(s: State) -> dict[str, float]:
    """Of ratio and k1 the row holds ρ − 1."""
    return {c.name: float(c.in_log_space) + s.mean(f"value_{c.name}", c.unit.measure) for c in measured_criteria(s)}


def criterion_extremes(s: State, sign: str) -> dict[str, float]:
    """Largest (or with - smallest) value that each criterion compares."""
    extremes = {True: log_extreme, False: extreme}
    return {c.name: extremes[c.in_log_space](s, f"value_{c.name}", sign) for c in measured_criteria(s)}


def thresholds(s: State) -> dict[str, float]:
    """The upper bound that each budget gives the next step; 1e12 where nothing is to be rejected."""
    counts = {one: torch.tensor(s.vector(f"budget_{one.name}"), dtype=torch.float64) for one in s.config.budgets}
    return {one.name: min(float(budget_threshold(of, one)), BUDGET_LAST) for one, of in counts.items() if len(of)}


def quantile(histogram: list[float], share: float) -> float:
    """The log-ratio below which `share` of the counted tokens lie, interpolated inside its bin (host arithmetic)."""
    total = sum(histogram)
    width = 2 * HISTOGRAM_EDGE / HISTOGRAM_BINS
    below, target = 0.0, share * total
    for index, count in enumerate(histogram):
        if count and below + count >= target:
            place = -HISTOGRAM_EDGE + width * (index + (target - below) / count)
            return HISTOGRAM_SCALE * math.sinh(place)
        below += count
    return 0.0


def quantiles(s: State) -> dict[str, float]:
    """Of ρ_t, interpolated inside the bins of its histogram."""
    histogram = s.vector("histogram")
    shares = {"p1": 0.01, "p50": 0.5, "p99": 0.99, "p99_9": 0.999}
    return {name: math.exp(quantile(histogram, share)) for name, share in shares.items()}


def edges(edges: tuple[float, ...]) -> list[str]:
    """Labels of the buckets that the edges make."""
    marks = [f"{edge:g}" for edge in edges]
    inner = [f"{low}_to_{high}" for low, high in pairwise(marks)]
    return [f"below_{marks[0]}", *inner, f"from_{marks[-1]}"]


def bucket_means(s: State, bucket: str, column: str, count: str = "tokens") -> dict[str, float]:
    """Mean of a column in each bucket that holds something."""
    rows = zip(BUCKETS[bucket], s.vector(f"{bucket}_{column}"), s.vector(f"{bucket}_{count}"), strict=True)
    return {label: value / number for label, value, number in rows if number}


BUCKETS = {
    "position": edges(POSITION_EDGES),
    "probability": edges(PROBABILITY_EDGES),
    "length": edges(LENGTH_EDGES),
    "advantage": ["negative", "zero", "positive"],
    "version": [*(f"lag_{lag}" for lag in range(VERSION_LAGS)), "lag_older"],
}
"""The labels of each."""


class Mean(NamedTuple):
    """A value that is a sum divided by the count of tokens or sequences which its metric is `over`.
    total: that sum, or the name of it or of the row that it is the sum of.
    left_out: what a token (sequence) whose invalid log-prob is only measured adds where a host counts it all the same.
    empty: the mean of nothing.
    """

    total: str | Callable[[State], float]
    left_out: float = 0.0
    empty: float = 0.0


@dataclass(frozen=True)
class Metric:
    """One declaration. `needs` names the state it is formed from: without it (another configuration) it is left out.

    A name with `{…}` stands for a family; `value` then returns a mapping from what replaces the braces.
    trained: over everything that trains; the others are over what was measured, and absent where that is nothing.
    averaged: its mean over micro-batches means something, though its count is its own. That of a `Mean` always does,
        and a host that knows the count of the step may add it up over micro-batches.
    """

    name: str
    formula: str
    over: str
    needs: str
    value: Mean | Callable[[State], float | Mapping[str, float]]
    unit: str = ""
    merges: str = "sum"
    level: str = "basic"
    trained: bool = False
    averaged: bool = False

    def total(self, s: State) -> float:
        """What a `Mean` divides."""
        assert isinstance(self.value, Mean)
        total = self.value.total
        if callable(total):
            return total(s)
        row = f"{total}@{measure_of(self.over, s.config)}"
        name = row if row in s.sums else total
        return s.sums.get(name, 0.0) if total in _OPTIONAL else s.sums[name]

    def form(self, s: State) -> float | Mapping[str, float]:
        """The value, or the values of a family."""
        if not isinstance(self.value, Mean):
            return self.value(s)
        return ratio(self.total(s), s.count(measure_of(self.over, s.config), self.trained), self.value.empty)


def means(config: MismatchConfig) -> Iterator[tuple[Metric, Mean, str]]:
    """Every metric that is a `Mean`, and what counts it: tokens or sequences. No host counts other units."""
    for metric in METRICS if config.metrics != "off" else ():
        if isinstance(metric.value, Mean) and (measure := measure_of(metric.over, config)) != "units":
            yield metric, metric.value, measure


def compute_metrics(
    sums: Mapping[str, float], maxima: Mapping[str, float], config: MismatchConfig, averaged_only: bool = False
) -> dict[str, float]:
    """Every metric whose state is there, in order of declaration, under `rollout_corr/`. averaged_only: those
    whose mean over micro-batches means something, for hosts that take it of all they are given."""
    if config.metrics == "off":
        return {}
    state = State(sums, maxima, config)
    none_valid = state.trained_tokens > 0 and not state.tokens
    metrics: dict[str, float] = {}
    for metric in METRICS:
        if not state.has(metric.needs) or (averaged_only and not (metric.averaged or isinstance(metric.value, Mean))):
            continue
        if none_valid and not metric.trained:
            continue  # a mean of nothing would be read as perfect agreement
        value = metric.form(state)
        if isinstance(value, Mapping):
            head, tail = metric.name.split("{")[0], metric.name.split("}")[-1]
            metrics |= {f"{PREFIX}{head}{key}{tail}": item for key, item in value.items()}
        else:
            metrics[PREFIX + metric.name] = value
    return metrics


# fmt: off
METRICS: tuple[Metric, ...] = (
    # The ratio before bounding.
    Metric("rollout_is_mean", "mean of ρ, clamped to e^±20", "tokens", "ratio",
           Mean(lambda s: s.tokens + s.sums["level_ratio@tokens"], left_out=1.0, empty=1.0)),
    Metric("rollout_is_ratio_mean", "mean of the tokens' ρ_t, clamped to e^±20", "tokens", "ratio",
           Mean(lambda s: s.tokens + s.sums["ratio@tokens"], left_out=1.0, empty=1.0)),
    Metric("rollout_is_ratio_std", "deviation of the tokens' ρ_t", "tokens", "ratio_squared",
           lambda s: deviation(s.mean("ratio_squared"), s.mean("ratio"))),
    Metric("rollout_is_ratio_eff_sample_size", "(Σ ρ_t)² / (n Σ ρ_t²); 0 where every ρ_t is below 1e-3", "tokens",
           "ratio_squared", lambda s: token_ess(s, "ratio"), unit="share"),
    Metric("rollout_is_ratio_unit_mean", "mean of the units' ρ (not at token level)", LEVEL_UNITS, "unit_ratio",
           Mean(lambda s: s.count(s.unit) + s.sums[f"unit_ratio@{s.unit}"], left_out=1.0, empty=1.0)),
    Metric("rollout_is_ratio_unit_std", "deviation of the units' ρ (not at token level)", LEVEL_UNITS,
           "unit_ratio_squared", unit_std),
    Metric("rollout_is_ratio_unit_eff_sample_size", "(Σ ρ)² / (n Σ ρ²) of the units' ρ (not at token level)",
           LEVEL_UNITS, "unit_ratio", unit_ess, unit="share"),
    Metric("rollout_is_std", "deviation of ρ clamped to [1/hi, hi], so at most (hi − 1/hi)/2: for comparison with "
           "other dashboards", "tokens", "clamped",
           lambda s: deviation(s.mean("clamped_squared"), s.mean("clamped")) if s.tokens > 1 else 0.0),
    Metric("rollout_is_min", "smallest ρ, from the unclamped log-ratio", LEVEL_UNITS, "-log_aggregate",
           lambda s: bounded_exp(-s.maximum("-log_aggregate")), merges="max"),
    Metric("rollout_is_max", "largest ρ, at most e^20", LEVEL_UNITS, "log_aggregate",
           lambda s: bounded_exp(s.maximum("log_aggregate")), merges="max"),
    Metric("rollout_is_eff_sample_size", "(mean c)² / mean c², c = ρ clamped to [1/hi, hi], so at least .64 at "
           "hi = 2, and 0 where every c is below 1e-3: for comparison with other dashboards", "tokens", "clamped",
           lambda s: token_ess(s, "clamped"), unit="share"),
    Metric("rollout_is_ratio_fraction_high", "share above the bound that acts: the weights' (unless the sign of A "
           "decides), else the first ratio criterion's, else a TIS bound from preset or hand", BOUND_UNITS, "high",
           Mean("high"), unit="share"),
    Metric("rollout_is_ratio_fraction_low", "share below it", BOUND_UNITS, "low", Mean("low"), unit="share"),
    Metric("rollout_is_seq_mean", "mean of each sequence's mean ρ (rollout_is_mean where lengths are equal)",
           "sequences", "ratio",
           Mean(lambda s: s.sequences + s.sums["level_ratio@sequences"], left_out=1.0, empty=1.0)),
    Metric("rollout_is_seq_std", "sample deviation of each sequence's mean ρ", "sequences", "ratio_squared", seq_std),
    Metric("rollout_is_seq_max", "largest mean ρ of a sequence", "sequences", "ratio", lambda s: seq_extreme(s, ""),
           merges="max"),
    Metric("rollout_is_seq_min", "smallest mean ρ of a sequence", "sequences", "ratio", lambda s: seq_extreme(s, "-"),
           merges="max"),
    Metric("rollout_is_seq_max_deviation", "largest |mean ρ − 1| of a sequence", "sequences", "ratio",
           lambda s: max(seq_extreme(s, "") - 1.0, 1.0 - seq_extreme(s, "-")) if s.sequences else 0.0,
           merges="max"),
    Metric("rollout_is_seq_fraction_high", "share of sequences with mean ρ above the bound that acts", "sequences",
           "high", Mean("seq_high"), unit="share"),
    Metric("rollout_is_seq_fraction_low", "share of sequences with mean ρ below it", "sequences", "low",
           Mean("seq_low"), unit="share"),
    # The weights really used.
    Metric("rollout_is_weight_after_mean", "mean weight", "accepted tokens", "weight",
           lambda s: ratio(s.sums["weight@tokens"], s.sums["kept@tokens"]) / s.factor, averaged=True),
    Metric("rollout_is_weight_after_std", "deviation of the weights", "accepted tokens", "weight", after_std),
    Metric("rollout_is_weight_after_max", "largest weight", "accepted tokens", "weight",
           lambda s: s.maximum("weight") / s.factor, merges="max"),
    Metric("rollout_is_weight_after_eff_sample_size", "(Σ w)² / (n Σ w²), rejected tokens have w = 0", "tokens",
           "weight", lambda s: after_ess(s, "tokens", "weight_squared"), unit="share"),
    Metric("rollout_is_weight_after_seq_eff_sample_size", "the same of each sequence's mean weight", "sequences",
           "seq_weight_squared", lambda s: after_ess(s, "sequences", "seq_weight_squared"), unit="share"),
    Metric("rollout_is_weight_after_unit_eff_sample_size", "the same of each unit's mean weight, at turn level",
           "units", "unit_weight_squared@units", lambda s: after_ess(s, "units", "unit_weight_squared"),
           unit="share"),
    Metric("rollout_is_batch_norm_factor", "mean bounded weight that batch normalisation divides by", LEVEL_UNITS,
           "weight_unit", lambda s: s.batch_factor, averaged=True),
    # Rejection.
    Metric("rollout_is_masked_fraction", "share rejected by mask mode, criteria and rs.max_staleness", "tokens", "one",
           Mean("masked"), unit="share"),
    Metric("rollout_is_seq_masked_fraction", "share of sequences with a token rejected by them", "sequences", "one",
           Mean("masked_any"), unit="share"),
    Metric("rollout_rs_masked_fraction", "same as rollout_is_masked_fraction", "tokens", "one",
           Mean("masked"), unit="share"),
    Metric("rollout_rs_seq_masked_fraction", "same as rollout_is_seq_masked_fraction", "sequences", "one",
           Mean("masked_any"), unit="share"),
    Metric("rollout_rs_staleness_masked_fraction", "share sampled more than rs.max_staleness versions before the "
           "trainer's", "tokens", "out_staleness", Mean("out_staleness"), unit="share"),
    Metric("rollout_rs_{criterion}_masked_fraction", "share that this criterion alone rejects (or would, in a dry run)",
           "tokens", "one", lambda s: criteria(s, "tokens"), unit="share", averaged=True),
    Metric("rollout_rs_{criterion}_seq_masked_fraction", "share of sequences that this sequence criterion alone "
           "rejects", "sequences", "one", lambda s: criteria(s, "sequences"), unit="share", averaged=True),
    Metric("rollout_rs_{criterion}_fraction_high", "share that it rejects above its upper bound", "criterion's units",
           "one", lambda s: criterion_shares(s, "above"), unit="share", averaged=True, level="full"),
    Metric("rollout_rs_{criterion}_fraction_low", "share that it rejects below its lower bound", "criterion's units",
           "one", lambda s: criterion_shares(s, "below"), unit="share", averaged=True, level="full"),
    Metric("rollout_rs_{criterion}_mean", "mean of what it compares (ratio, k1: ρ, at most e^20), also where its "
           "condition does not hold", "criterion's units", "one", criterion_means, level="full", averaged=True),
    Metric("rollout_rs_{criterion}_max", "its largest value", "criterion's units", "one",
           lambda s: criterion_extremes(s, ""), merges="max", level="full"),
    Metric("rollout_rs_{criterion}_min", "its smallest value", "criterion's units", "one",
           lambda s: criterion_extremes(s, "-"), merges="max", level="full"),
    Metric("rollout_rs_{criterion}_threshold", "upper bound that a criterion's budget gives the next step; 1e12 where "
           "it rejects nothing", "step", "one", thresholds),
    Metric("rollout_is_veto_fraction", "share vetoed", "sequences", "one", Mean("vetoed"), unit="share"),
    Metric("rollout_is_catastrophic_token_fraction", "share with the judged policy's ρ below the veto threshold",
           "tokens", "one", Mean("catastrophic"), unit="share"),
    Metric("accepted_token_fraction", "share that stays in the loss", "tokens", "kept", Mean("kept", left_out=1.0),
           unit="share"),
    Metric("accepted_seq_fraction", "share with a token that stays in the loss", "sequences", "kept_any",
           Mean("kept_any", left_out=1.0), unit="share"),
    Metric("all_rejected", "1 where the step has tokens and none is left", "step", "kept",
           lambda s: float(s.tokens > 0 and not s.sums["kept@tokens"]), averaged=True),
    Metric("tokens", "response tokens", "step", "one", lambda s: s.trained_tokens, unit="tokens", trained=True),
    Metric("sequences", "sequences with a response token", "step", "one", lambda s: s.trained_sequences,
           unit="sequences", trained=True),
    # How far apart the two policies are.
    Metric("kl", "mean of log π_rollout − log π_train", "tokens", "log_ratio",
           Mean(lambda s: -s.sums["log_ratio@tokens"]), unit="nat"),
    Metric("k3_kl", "mean of e^l − 1 − l, l clamped to ±20", "tokens", "k3", Mean("k3"), unit="nat"),
    Metric("training_ppl", "exp of the mean −log π_train of a sequence, at most e^20", "sequences", "training_ppl",
           Mean("training_ppl")),
    Metric("training_log_ppl", "mean −log π_train of a sequence", "sequences", "train",
           Mean(lambda s: -s.sums["train@sequences"]), unit="nat"),
    Metric("rollout_ppl", "exp of the mean −log π_rollout of a sequence, at most e^20", "sequences", "rollout_ppl",
           Mean("rollout_ppl")),
    Metric("rollout_log_ppl", "mean −log π_rollout of a sequence", "sequences", "rollout",
           Mean(lambda s: -s.sums["rollout@sequences"]), unit="nat"),
    Metric("ppl_ratio", "exp of log_ppl_diff: geometric mean of training over rollout perplexity", "sequences",
           "log_ratio", lambda s: bounded_exp(-s.mean("log_ratio", "sequences"))),
    Metric("log_ppl_diff", "training_log_ppl − rollout_log_ppl of a sequence", "sequences", "log_ratio",
           Mean(lambda s: -s.sums["log_ratio@sequences"]), unit="nat"),
    Metric("log_ppl_abs_diff", "its absolute value", "sequences", "log_ratio_mean_abs", Mean("log_ratio_mean_abs"),
           unit="nat"),
    Metric("log_ppl_diff_max", "its largest value", "sequences", "-log_ratio_seq",
           lambda s: s.maximum("-log_ratio_seq"), unit="nat", merges="max"),
    Metric("log_ppl_diff_min", "its smallest value", "sequences", "log_ratio_seq",
           lambda s: -s.maximum("log_ratio_seq"), unit="nat", merges="max"),
    Metric("chi2_token", "mean ρ² − 1, l clamped to ±20: an estimate, negative where ρ is mostly below 1", "tokens",
           "ratio_squared", Mean(lambda s: s.sums["ratio_squared@tokens"] + 2.0 * s.sums["ratio@tokens"])),
    Metric("chi2_seq", "mean (Π ρ)² − 1, the log clamped to ±20; may be negative, too", "sequences", "ratio",
           Mean(lambda s: s.sums["product_square@sequences"] - s.sequences)),
    Metric("seq_log_ratio_mean", "mean of Σ l: log of the typical product weight", "sequences", "log_ratio",
           lambda s: ratio(s.sums["log_ratio@tokens"], s.sequences), unit="nat", averaged=True),
    Metric("invalid_{kind}", "invalid log-probs, by kind", "tokens", "invalid_nan",
           lambda s: {kind: s.sums[f"invalid_{kind}"] for kind in DEFECTS}, unit="tokens", trained=True, averaged=True),
    # The loss.
    Metric("pg_loss", "policy term", "denominator", "pg_loss",
           lambda s: ratio(s.sums["pg_loss"], s.sums["denominator"]) / (1.0 if s.config.dry_run else s.factor),
           trained=True, averaged=True),
    Metric("pg_clipfrac", "share where the clip is active, on either side", "tokens", "clip_high",
           Mean(lambda s: s.sums["clip_high"] + s.sums["clip_low"]), unit="share", trained=True),
    Metric("pg_clipfrac_lower", "share cut by the dual clip", "tokens", "clip_high",
           Mean("clip_dual"), unit="share", trained=True),
    Metric("pg_clipfrac_high_side", "share where the clip is active above: r > 1 + ε, A > 0 (cispo: any A)", "tokens",
           "clip_high", Mean("clip_high"), unit="share", trained=True),
    Metric("pg_clipfrac_low_side", "share where it is active below: r < 1 − ε, A < 0 (cispo: any A)", "tokens",
           "clip_low", Mean("clip_low"), unit="share", trained=True),
    Metric("ppo_kl", "mean of log π_anchor − log π_θ (gspo: of its mean over the sequence), clamped to ±20", "tokens",
           "ppo_kl", Mean("ppo_kl"), unit="nat", trained=True),
    Metric("entropy", "mean entropy of π_θ", "tokens", "entropy", Mean("entropy"), unit="nat", trained=True),
    Metric("ref_kl", "mean of the chosen estimator of KL(π_θ ‖ π_ref)", "tokens", "ref_kl",
           Mean("ref_kl"), unit="nat", trained=True),
    Metric("rollout_kl", "mean of the penalty on the distance to π_rollout, before rejection and coefficient", "tokens",
           "rollout_kl", Mean("rollout_kl"), unit="nat", trained=True),
    # Full diagnostics.
    Metric("rollout_is_ratio_{quantile}", "quantile of ρ_t (bins are 1.3 % of |l| wide)", "tokens", "histogram",
           quantiles, level="full"),
    *(Metric(f"log_ratio{part}_by_{bucket}_{{bucket}}", f"mean {value} by {by}", "tokens", f"{bucket}_tokens",
             partial(bucket_means, bucket=bucket, column=f"log_ratio{part}"), unit="nat", level="full", averaged=True)
      for bucket, by in (("position", "position in the response"), ("probability", "π_rollout"))
      for part, value in (("", "l"), ("_abs", "|l|"))),
    Metric("log_ratio_by_version_{lag}", "mean l by how many weight versions a token lags behind the trainer's",
           "tokens", "version_tokens", lambda s: bucket_means(s, "version", "log_ratio"), unit="nat", level="full",
           averaged=True),
    Metric("probability_difference_mean", "mean |π_train − π_rollout|", "tokens", "probability_difference",
           Mean(lambda s: s.sums["probability_difference[0]"]), level="full"),
    Metric("probability_difference_max", "largest |π_train − π_rollout|", "tokens", "probability_difference",
           lambda s: s.maximum("probability_difference"), merges="max", level="full"),
    Metric("accepted_by_advantage_{sign}", "share that stays, by sign of the advantage", "tokens", "advantage_tokens",
           lambda s: bucket_means(s, "advantage", "kept"), unit="share", level="full", averaged=True),
    Metric("accepted_by_length_{bucket}", "share of sequences that stay, by response length", "sequences",
           "length_sequences", lambda s: bucket_means(s, "length", "kept", "sequences"), unit="share", level="full",
           averaged=True),
)
# fmt: on
