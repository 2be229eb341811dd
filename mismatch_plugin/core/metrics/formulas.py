"""From merged sums and maxima to figures: the arithmetic behind the declarations in `registry.py`, on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from mismatch_plugin.core.metrics import full
from mismatch_plugin.core.rejection import BUDGET_LAST, budget_threshold
from mismatch_plugin.core.units import acting_bounds
from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.config.criteria import Criterion


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
        """Tokens, turns or sequences that were measured, or that train.

        Where invalid log-probs are left out, `one` is what was measured, and the loss runs over more.
        """
        measured = self.sums[f"one@{measure}"]
        return self.sums.get(f"trained_{measure}", measured) if trained else measured

    def mean(self, row: str, measure: str = "tokens") -> float:
        """Σ of a row over its measure; 0 where there is nothing."""
        return ratio(self.sums[f"{row}@{measure}"], self.sums[f"one@{measure}"])

    def maximum(self, name: str, default: float = 0.0) -> float:
        """A maximum; the default where there was nothing to take it of."""
        value = self.maxima[name]
        return value if math.isfinite(value) else default

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


def measure(over: str, config: MismatchConfig) -> str:
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
    if s.unit == "sequences":
        return log_extreme(s, "log_aggregate", sign)
    value = s.maximum(f"{sign}ratio_seq")
    return 1.0 - value if sign else 1.0 + value


def unit_std(s: State) -> float:
    """Of the level's units, from the second moment about 1, or about 0 where the mean is nearer to that."""
    mean = s.mean("unit_plain", s.unit)
    if mean < 0.5:
        return deviation(s.mean("unit_square", s.unit), mean)
    return deviation(s.mean("unit_ratio_squared", s.unit), s.mean("unit_ratio", s.unit))


def unit_ess(s: State) -> float:
    """(Σ ρ)² / (n Σ ρ²) of the level's units."""
    return min(ratio(s.mean("unit_plain", s.unit) ** 2, s.mean("unit_square", s.unit), 1.0), 1.0)


def log_extreme(s: State, name: str, sign: str) -> float:
    """exp of the largest value, or ("-") of the smallest, at most e^20."""
    value = s.maximum(sign + name)
    return bounded_exp(-value if sign else value)


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
    values = {}
    for criterion in measured_criteria(s):
        name = f"value_{criterion.name}"
        value = s.maximum(sign + name)
        values[criterion.name] = log_extreme(s, name, sign) if criterion.in_log_space else -value if sign else value
    return values


def thresholds(s: State) -> dict[str, float]:
    """The upper bound that each budget gives the next step; 1e12 where nothing is to be rejected."""
    budgets = [criterion for criterion in s.config.budgets if s.has(f"budget_{criterion.name}")]
    counts = [torch.tensor(s.vector(f"budget_{criterion.name}"), dtype=torch.float64) for criterion in budgets]
    bounds = [float(budget_threshold(*each)) for each in zip(counts, budgets, strict=True)]
    return {criterion.name: min(bound, BUDGET_LAST) for criterion, bound in zip(budgets, bounds, strict=True)}


def quantiles(s: State) -> dict[str, float]:
    """Of ρ_t, interpolated inside the bins of its histogram."""
    histogram = s.vector("histogram")
    shares = {"p1": 0.01, "p50": 0.5, "p99": 0.99, "p99_9": 0.999}
    return {name: math.exp(full.quantile(histogram, share)) for name, share in shares.items()}


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
    "position": edges(full.POSITION_EDGES),
    "probability": edges(full.PROBABILITY_EDGES),
    "length": edges(full.LENGTH_EDGES),
    "advantage": ["negative", "zero", "positive"],
    "version": [*(f"lag_{lag}" for lag in range(full.VERSION_LAGS)), "lag_older"],
}
"""The labels of each."""
