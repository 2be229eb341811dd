"""Every metric, declared once: name, formula, unit, what it averages over, how it merges, and how it is formed.

Metrics are formed on the host from merged sums and maxima, so they are the same for every split of the step. The
README's table is generated from `METRICS`. Names follow the rollout-correction guide (November 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mismatch_plugin.core import diagnostics as full
from mismatch_plugin.core.levels import MAX_CENTERED, SAFETY_BOUND
from mismatch_plugin.core.validity import DEFECTS

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

PREFIX = "rollout_corr/"


class State:
    """Merged sums and maxima as a metric's formula reads them."""

    def __init__(self, sums: Mapping[str, float], maxima: Mapping[str, float], config: MismatchConfig) -> None:
        self.sums, self.maxima, self.config = sums, maxima, config
        self.token_level = config.tis.level in ("token", "none")
        self.unit = "tokens" if self.token_level else "sequences"
        self.center = 1.0 if self.token_level and config.tis.upper <= MAX_CENTERED else 0.0
        self.tokens = sums["one@tokens"]
        self.sequences = sums["one@sequences"]

    def has(self, name: str) -> bool:
        return any(key in self.sums or key in self.maxima for key in (name, f"{name}@tokens", f"{name}[0]"))

    def share(self, row: str, measure: str) -> float:
        """`mean`, or 0 where the configuration never rejects by this cause."""
        return self.mean(row, measure) if self.has(row) else 0.0

    def mean(self, row: str, measure: str = "tokens", default: float = 0.0) -> float:
        """Σ of a row over its measure; `default` where there is nothing."""
        return _ratio(self.sums[f"{row}@{measure}"], self.sums[f"one@{measure}"], default)

    def maximum(self, name: str, default: float = 0.0) -> float:
        value = self.maxima[name]
        return value if math.isfinite(value) else default

    def vector(self, name: str) -> list[float]:
        source = self.sums if f"{name}[0]" in self.sums else self.maxima
        values = []
        while f"{name}[{len(values)}]" in source:
            values.append(source[f"{name}[{len(values)}]"])
        return values

    @property
    def batch_factor(self) -> float:
        """Mean bounded weight over everything merged; 1 without batch normalisation."""
        if not self.has("weight_unit"):
            return 1.0
        measure = "tokens" if self.config.tis.level == "token" else "sequences"
        mean = _ratio(self.sums[f"weight_unit@{measure}"], self.sums[f"units@{measure}"], 1.0)
        return mean if mean > 0 else 1.0

    @property
    def factor(self) -> float:
        """What the merged weights are still to be divided by."""
        return 1.0 if self.config.tis.batch_normalize_scope == "micro_batch" else self.batch_factor


@dataclass(frozen=True)
class Metric:
    """One declaration. `needs` names the state it is formed from: without it (another configuration) it is left out.

    A name with `{…}` stands for a family; `value` then returns a mapping from what replaces the braces.
    """

    name: str
    formula: str
    over: str
    needs: str
    value: Callable[[State], float | Mapping[str, float]]
    unit: str = ""
    merges: str = "sum"
    level: str = "basic"


def compute_metrics(sums: Mapping[str, float], maxima: Mapping[str, float], config: MismatchConfig) -> dict[str, float]:
    """Every metric whose state is there, in order of declaration, under `rollout_corr/`."""
    if config.metrics == "off":
        return {}
    state = State(sums, maxima, config)
    metrics: dict[str, float] = {}
    for metric in METRICS:
        if not state.has(metric.needs):
            continue
        value = metric.value(state)
        if isinstance(value, Mapping):
            head, tail = metric.name.split("{")[0], metric.name.split("}")[-1]
            metrics |= {f"{PREFIX}{head}{key}{tail}": item for key, item in value.items()}
        else:
            metrics[PREFIX + metric.name] = value
    return metrics


def _ratio(numerator: float, denominator: float, default: float = 0.0) -> float:
    return numerator / denominator if denominator else default


def _bounded_exp(log_value: float) -> float:
    return math.exp(min(log_value, SAFETY_BOUND))


def _ratio_mean(s: State, measure: str) -> float:
    return 1.0 + s.mean("ratio", measure)


def _deviation(mean_square: float, mean: float) -> float:
    return math.sqrt(max(mean_square - mean * mean, 0.0))


def _seq_std(s: State) -> float:
    """Sample deviation (n − 1) of the per-sequence ratio, as the guide's code has it."""
    if s.sequences < 2:
        return 0.0
    variance = s.mean("ratio_squared", "sequences") - s.mean("ratio", "sequences") ** 2
    return math.sqrt(max(variance, 0.0) * s.sequences / (s.sequences - 1))


def _effective_sample_size(s: State) -> float:
    mean = s.center + s.mean("clamped")
    mean_square = s.center * s.center + 2.0 * s.center * s.mean("clamped") + s.mean("clamped_squared")
    return _ratio(mean * mean, mean_square, 1.0)


def _seq_extreme(s: State, sign: str) -> float:
    if s.token_level:
        value = s.maximum(f"{sign}ratio_seq")
        return 1.0 - value if sign else 1.0 + value
    value = s.maximum(f"{sign}log_aggregate")
    return _bounded_exp(-value if sign else value)


def _after_mean(s: State) -> float:
    return _ratio(s.sums["weight@tokens"], s.sums["kept@tokens"]) / s.factor


def _after_std(s: State) -> float:
    mean = _ratio(s.sums["weight@tokens"], s.sums["kept@tokens"])
    mean_square = _ratio(s.sums["weight_squared@tokens"], s.sums["kept@tokens"])
    return _deviation(mean_square, mean) / s.factor


def _after_ess(s: State, measure: str, squared: str) -> float:
    total, square = s.sums[f"weight@{measure}"], s.sums[f"{squared}@{measure}"]
    return _ratio(total * total, square * s.sums[f"one@{measure}"])


def _criteria(s: State, measure: str) -> dict[str, float]:
    """Share outside each criterion; by sequences only for those that reject all of a sequence or nothing."""
    return {
        criterion.name: s.mean(f"out_{criterion.name}", measure)
        for criterion in s.config.criteria
        if measure == "tokens" or criterion.aggregate != "token"
    }


def _quantiles(s: State) -> dict[str, float]:
    histogram = s.vector("histogram")
    shares = {"p1": 0.01, "p50": 0.5, "p99": 0.99, "p99_9": 0.999}
    return {name: math.exp(full.quantile(histogram, share)) for name, share in shares.items()}


def _edges(edges: tuple[float, ...]) -> list[str]:
    marks = [f"{edge:g}" for edge in edges]
    inner = [f"{low}_to_{high}" for low, high in pairwise(marks)]
    return [f"below_{marks[0]}", *inner, f"from_{marks[-1]}"]


def _bucket_means(s: State, bucket: str, labels: list[str], column: str, count: str = "tokens") -> dict[str, float]:
    values, counts = s.vector(f"{bucket}_{column}"), s.vector(f"{bucket}_{count}")
    return {label: value / number for label, value, number in zip(labels, values, counts, strict=True) if number}


def _version_drift(s: State) -> dict[str, float]:
    """Mean log-ratio by how many versions a token's weights lag behind the newest one seen in the step."""
    newest = max(s.vector("version"))
    sums: dict[str, list[float]] = {}
    rows = zip(
        s.vector("version"),
        s.vector("-version"),
        s.vector("version_tokens"),
        s.vector("version_log_ratio"),
        strict=True,
    )
    for largest, smallest, count, log_ratio in rows:
        if not count:
            continue
        lag = int(newest - largest)
        label = f"lag_{lag}" if largest == -smallest and lag < full.VERSION_SLOTS else "lag_older"
        total = sums.setdefault(label, [0.0, 0.0])
        total[0] += count
        total[1] += log_ratio
    return {label: log_ratio / count for label, (count, log_ratio) in sorted(sums.items())}


def _invalid(s: State) -> dict[str, float]:
    return {kind: s.sums[f"invalid_{kind}"] for kind in DEFECTS}


def _measure(s: State, row: str) -> float:
    return s.mean(row, s.unit)


_POSITION = _edges(full.POSITION_EDGES)
_PROBABILITY = _edges(full.PROBABILITY_EDGES)
_LENGTH = _edges(full.LENGTH_EDGES)
_SIGN = ["negative", "zero", "positive"]

# fmt: off
METRICS: tuple[Metric, ...] = (
    # The ratio before bounding.
    Metric("rollout_is_mean", "mean of ρ, clamped to e^±20", "tokens", "ratio", lambda s: _ratio_mean(s, "tokens")),
    Metric("rollout_is_std", "deviation of ρ clamped to [1/hi, hi]", "tokens", "clamped",
           lambda s: _deviation(s.mean("clamped_squared"), s.mean("clamped")) if s.tokens > 1 else 0.0),
    Metric("rollout_is_min", "smallest ρ, from the unclamped log-ratio", "level's units", "-log_aggregate",
           lambda s: _bounded_exp(-s.maximum("-log_aggregate")), merges="max"),
    Metric("rollout_is_max", "largest ρ, at most e^20", "level's units", "log_aggregate",
           lambda s: _bounded_exp(s.maximum("log_aggregate")), merges="max"),
    Metric("rollout_is_eff_sample_size", "(mean c)² / mean c², c = ρ clamped to [1/hi, hi]", "tokens", "clamped",
           _effective_sample_size, unit="share"),
    Metric("rollout_is_ratio_fraction_high", "share with ρ > hi", "level's units", "high",
           lambda s: _measure(s, "high"), unit="share"),
    Metric("rollout_is_ratio_fraction_low", "share with ρ < lo", "level's units", "low",
           lambda s: _measure(s, "low"), unit="share"),
    Metric("rollout_is_seq_mean", "mean of each sequence's mean ρ", "sequences", "ratio",
           lambda s: _ratio_mean(s, "sequences")),
    Metric("rollout_is_seq_std", "sample deviation of each sequence's mean ρ", "sequences", "ratio_squared", _seq_std),
    Metric("rollout_is_seq_max", "largest mean ρ of a sequence", "sequences", "ratio",
           lambda s: _seq_extreme(s, ""), merges="max"),
    Metric("rollout_is_seq_min", "smallest mean ρ of a sequence", "sequences", "ratio",
           lambda s: _seq_extreme(s, "-"), merges="max"),
    Metric("rollout_is_seq_max_deviation", "largest |mean ρ − 1| of a sequence", "sequences", "ratio",
           lambda s: max(_seq_extreme(s, "") - 1.0, 1.0 - _seq_extreme(s, "-")) if s.sequences else 0.0, merges="max"),
    Metric("rollout_is_seq_fraction_high", "share of sequences with mean ρ > hi", "sequences", "high",
           lambda s: s.mean("seq_high" if s.token_level else "high", "sequences"), unit="share"),
    Metric("rollout_is_seq_fraction_low", "share of sequences with mean ρ < lo", "sequences", "low",
           lambda s: s.mean("seq_low" if s.token_level else "low", "sequences"), unit="share"),
    # The weights really used.
    Metric("rollout_is_weight_after_mean", "mean weight", "accepted tokens", "weight", _after_mean),
    Metric("rollout_is_weight_after_std", "deviation of the weights", "accepted tokens", "weight", _after_std),
    Metric("rollout_is_weight_after_max", "largest weight", "accepted tokens", "weight",
           lambda s: s.maximum("weight") / s.factor, merges="max"),
    Metric("rollout_is_weight_after_eff_sample_size", "(Σ w)² / (n Σ w²), rejected tokens have w = 0", "tokens",
           "weight",
           lambda s: _after_ess(s, "tokens", "weight_squared"), unit="share"),
    Metric("rollout_is_weight_after_seq_eff_sample_size", "the same of each sequence's mean weight", "sequences",
           "seq_weight_squared", lambda s: _after_ess(s, "sequences", "seq_weight_squared"), unit="share"),
    Metric("rollout_is_batch_norm_factor", "mean bounded weight that batch normalisation divides by", "level's units",
           "weight_unit", lambda s: s.batch_factor),
    # Rejection.
    Metric("rollout_is_masked_fraction", "share rejected by mask mode and criteria", "tokens", "one",
           lambda s: s.share("masked", "tokens"), unit="share"),
    Metric("rollout_is_seq_masked_fraction", "share of sequences with a token rejected by them", "sequences", "one",
           lambda s: s.share("masked_any", "sequences"), unit="share"),
    Metric("rollout_rs_masked_fraction", "same as rollout_is_masked_fraction", "tokens", "one",
           lambda s: s.share("masked", "tokens"), unit="share"),
    Metric("rollout_rs_seq_masked_fraction", "same as rollout_is_seq_masked_fraction", "sequences", "one",
           lambda s: s.share("masked_any", "sequences"), unit="share"),
    Metric("rollout_rs_{criterion}_masked_fraction", "share that this criterion alone rejects (or would, in a dry run)",
           "tokens", "one", lambda s: _criteria(s, "tokens"), unit="share"),
    Metric("rollout_rs_{criterion}_seq_masked_fraction",
           "share of sequences that this sequence criterion alone rejects",
           "sequences", "one", lambda s: _criteria(s, "sequences"), unit="share"),
    Metric("rollout_is_veto_fraction", "share vetoed", "sequences", "one",
           lambda s: s.share("vetoed", "sequences"), unit="share"),
    Metric("rollout_is_catastrophic_token_fraction", "share with ρ below the veto threshold", "tokens", "one",
           lambda s: s.share("catastrophic", "tokens"), unit="share"),
    Metric("accepted_token_fraction", "share that stays in the loss", "tokens", "kept",
           lambda s: s.mean("kept"), unit="share"),
    Metric("accepted_seq_fraction", "share with a token that stays in the loss", "sequences", "kept_any",
           lambda s: s.mean("kept_any", "sequences"), unit="share"),
    Metric("all_rejected", "1 where the step has tokens and none is left", "step", "kept",
           lambda s: float(s.tokens > 0 and not s.sums["kept@tokens"])),
    Metric("tokens", "response tokens", "step", "one", lambda s: s.tokens, unit="tokens"),
    Metric("sequences", "sequences with a response token", "step", "one", lambda s: s.sequences, unit="sequences"),
    # How far apart the two policies are.
    Metric("kl", "mean of log π_rollout − log π_train", "tokens", "log_ratio", lambda s: -s.mean("log_ratio"),
           unit="nat"),
    Metric("k3_kl", "mean of e^l − 1 − l, l clamped to ±20", "tokens", "k3", lambda s: s.mean("k3"), unit="nat"),
    Metric("training_ppl", "exp of the mean −log π_train of a sequence", "sequences", "training_ppl",
           lambda s: s.mean("training_ppl", "sequences")),
    Metric("training_log_ppl", "mean −log π_train of a sequence", "sequences", "train",
           lambda s: -s.mean("train", "sequences"), unit="nat"),
    Metric("rollout_ppl", "exp of the mean −log π_rollout of a sequence", "sequences", "rollout_ppl",
           lambda s: s.mean("rollout_ppl", "sequences")),
    Metric("rollout_log_ppl", "mean −log π_rollout of a sequence", "sequences", "rollout",
           lambda s: -s.mean("rollout", "sequences"), unit="nat"),
    Metric("ppl_ratio", "training over rollout perplexity of a sequence", "sequences", "ppl_ratio",
           lambda s: s.mean("ppl_ratio", "sequences", 1.0)),
    Metric("log_ppl_diff", "training_log_ppl − rollout_log_ppl of a sequence", "sequences", "log_ratio",
           lambda s: -s.mean("log_ratio", "sequences"), unit="nat"),
    Metric("log_ppl_abs_diff", "its absolute value", "sequences", "log_ratio_abs",
           lambda s: s.mean("log_ratio_abs", "sequences"), unit="nat"),
    Metric("log_ppl_diff_max", "its largest value", "sequences", "-log_ratio_seq",
           lambda s: s.maximum("-log_ratio_seq"), unit="nat", merges="max"),
    Metric("log_ppl_diff_min", "its smallest value", "sequences", "log_ratio_seq",
           lambda s: -s.maximum("log_ratio_seq"), unit="nat", merges="max"),
    Metric("chi2_token", "mean ρ² − 1, l clamped to ±20", "tokens", "chi2", lambda s: s.mean("chi2")),
    Metric("chi2_seq", "mean (Π ρ)² − 1, the log clamped to ±20", "sequences", "chi2_seq",
           lambda s: s.mean("chi2_seq", "sequences")),
    Metric("seq_log_ratio_mean", "mean of Σ l: log of the typical product weight", "sequences", "log_ratio",
           lambda s: _ratio(s.sums["log_ratio@tokens"], s.sequences), unit="nat"),
    Metric("invalid_{kind}", "rollout log-probs that are none, by kind", "tokens", "invalid_nan", _invalid,
           unit="tokens"),
    # The loss.
    Metric("pg_loss", "policy term", "denominator", "pg_loss", lambda s: _ratio(s.sums["pg_loss"],
           s.sums["denominator"]) / s.factor),
    Metric("pg_clipfrac", "share where the upper clip is active", "tokens", "clip_high",
           lambda s: _ratio(s.sums["clip_high"], s.tokens), unit="share"),
    Metric("pg_clipfrac_lower", "share where the lower clip is active", "tokens", "clip_low",
           lambda s: _ratio(s.sums["clip_low"], s.tokens), unit="share"),
    Metric("ppo_kl", "mean of log π_anchor − log π_θ", "tokens", "ppo_kl", lambda s: _ratio(s.sums["ppo_kl"], s.tokens),
           unit="nat"),
    Metric("entropy", "mean entropy of π_θ", "tokens", "entropy", lambda s: _ratio(s.sums["entropy"], s.tokens),
           unit="nat"),
    Metric("ref_kl", "mean of the chosen estimator of KL(π_θ ‖ π_ref)", "tokens", "ref_kl",
           lambda s: _ratio(s.sums["ref_kl"], s.tokens), unit="nat"),
    # Full diagnostics.
    Metric("rollout_is_ratio_{quantile}", "quantile of ρ (1 % of |l| wide bins)", "tokens", "histogram", _quantiles,
           level="full"),
    Metric("log_ratio_by_position_{bucket}", "mean l by position in the response", "tokens", "position_tokens",
           lambda s: _bucket_means(s, "position", _POSITION, "log_ratio"), unit="nat", level="full"),
    Metric("log_ratio_abs_by_position_{bucket}", "mean |l| by position in the response", "tokens", "position_tokens",
           lambda s: _bucket_means(s, "position", _POSITION, "log_ratio_abs"), unit="nat", level="full"),
    Metric("log_ratio_by_probability_{bucket}", "mean l by π_rollout", "tokens", "probability_tokens",
           lambda s: _bucket_means(s, "probability", _PROBABILITY, "log_ratio"), unit="nat", level="full"),
    Metric("log_ratio_abs_by_probability_{bucket}", "mean |l| by π_rollout", "tokens", "probability_tokens",
           lambda s: _bucket_means(s, "probability", _PROBABILITY, "log_ratio_abs"), unit="nat", level="full"),
    Metric("log_ratio_by_version_{lag}", "mean l by how many weight versions a token lags", "tokens", "version_tokens",
           _version_drift, unit="nat", level="full"),
    Metric("probability_difference_mean", "mean |π_train − π_rollout|", "tokens", "probability_difference",
           lambda s: _ratio(s.sums["probability_difference[0]"], s.tokens), level="full"),
    Metric("probability_difference_max", "largest |π_train − π_rollout|", "tokens", "probability_difference",
           lambda s: s.maximum("probability_difference"), merges="max", level="full"),
    Metric("accepted_by_advantage_{sign}", "share that stays, by sign of the advantage", "tokens", "advantage_tokens",
           lambda s: _bucket_means(s, "advantage", _SIGN, "kept"), unit="share", level="full"),
    Metric("accepted_by_length_{bucket}", "share of sequences that stay, by response length", "sequences",
           "length_sequences", lambda s: _bucket_means(s, "length", _LENGTH, "kept", "sequences"), unit="share",
           level="full"),
)
# fmt: on


def metric_rows() -> Iterator[tuple[str, ...]]:
    """(name, formula, unit, averaged over, merges by, level) of every declaration, for the README."""
    for metric in METRICS:
        yield PREFIX + metric.name, metric.formula, metric.unit, metric.over, metric.merges, metric.level
