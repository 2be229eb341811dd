"""Significance of paired differences: exact tests by counting, Student's t, and Holm's correction. numpy is enough.

All tests are two-sided. Up to EXACT_SEEDS pairs the p-value of a mean difference is that of the sign-flip test: were
the two variants exchangeable, each difference could have had either sign, so all 2^n signs are tried, and those counted
whose mean is at least as far from 0. No distribution is assumed (Fisher 1935; Pitman 1937). The smallest p is 2/2^n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mismatch_plugin.report.data import Array

LEVEL = 0.05
"""Two-sided level of significance, after Holm's correction."""
FEW_SEEDS = 3
"""Below this many paired seeds nothing is judged."""
EXACT_SEEDS = 20
"""Up to so many pairs all signs are tried; beyond them p is that of Student's t."""
_SAME = 1e-12
"""Differences up to this are rounding."""


@dataclass(frozen=True)
class Mean:
    """Mean over n values and its standard error; NaN where it cannot be had (no value; error with one value)."""

    n: int
    mean: float
    error: float


@dataclass(frozen=True)
class Paired:
    """Mean paired difference, standard error, 95 % interval of Student's t, p-value, and p after Holm's correction.

    Higher values are better.
    """

    n: int
    mean: float
    error: float
    low: float
    high: float
    p: float
    p_holm: float = math.nan

    @property
    def same(self) -> bool:
        """True where the two gave the same value on every seed."""
        return self.n > 0 and abs(self.mean) <= _SAME and not self.error > _SAME

    @property
    def verdict(self) -> str:
        """`same`, `too few seeds`, `not significant`, `better` or `worse`."""
        return _verdict(self.n, self.same, self.p_holm, self.mean > 0)

    @property
    def significant(self) -> bool:
        """True for `better` and `worse`."""
        return self.verdict in ("better", "worse")

    @property
    def effect_size(self) -> float:
        """Cohen's d_z: mean over standard deviation of the differences. NaN below two seeds, ±∞ where all are equal."""
        if self.error > _SAME:
            return self.mean / (self.error * math.sqrt(self.n))
        return math.nan if math.isnan(self.error) or self.same else math.copysign(math.inf, self.mean)


@dataclass(frozen=True)
class PairedCollapse:
    """Collapsed runs of two variants on the same n seeds, p-value of McNemar's exact test, and p after Holm.

    baseline, variant: how many collapsed; only_baseline, only_variant: on how many seeds one of the two alone did.
    """

    n: int
    baseline: int
    variant: int
    only_baseline: int
    only_variant: int
    p: float
    p_holm: float = math.nan

    @property
    def same(self) -> bool:
        """True where both collapsed on the same seeds."""
        return self.n > 0 and self.only_baseline == self.only_variant == 0

    @property
    def verdict(self) -> str:
        """As of `Paired`; `better` is fewer collapsed runs."""
        return _verdict(self.n, self.same, self.p_holm, self.only_baseline > self.only_variant)


Pair = TypeVar("Pair", Paired, PairedCollapse)


def _verdict(n: int, same: bool, p_holm: float, gain: bool) -> str:
    if same:
        return "same"
    if n < FEW_SEEDS:
        return "too few seeds"
    return ("better" if gain else "worse") if p_holm < LEVEL else "not significant"


def mean_and_error(values: Sequence[float] | Array) -> Mean:
    """Mean and standard error (sample deviation over √n) of the finite values."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    n = len(finite)
    error = float(finite.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Mean(n, float(finite.mean()) if n else math.nan, error)


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> Paired:
    """values − baseline (by seed) over the seeds that both have."""
    differences = np.array([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())])
    m = mean_and_error(differences)
    if m.n < 2:
        return Paired(m.n, m.mean, math.nan, math.nan, math.nan, math.nan)
    half = t_quantile(0.975, m.n - 1) * m.error
    if m.n <= EXACT_SEEDS:
        p = sign_flip_p(differences)
    elif m.error > _SAME:
        p = t_two_sided_p(m.mean / m.error, m.n - 1)
    else:
        p = 1.0 if abs(m.mean) <= _SAME else 0.0
    return Paired(m.n, m.mean, m.error, m.mean - half, m.mean + half, p)


def paired_collapse(collapsed: dict[int, bool], baseline: dict[int, bool]) -> PairedCollapse:
    """Collapsed runs against those of the baseline (by seed) over the seeds that both have."""
    pairs = [(collapsed[seed], baseline[seed]) for seed in sorted(collapsed.keys() & baseline.keys())]
    only_variant = sum(mine and not its for mine, its in pairs)
    only_baseline = sum(its and not mine for mine, its in pairs)
    counts = (sum(its for _, its in pairs), sum(mine for mine, _ in pairs))
    return PairedCollapse(len(pairs), *counts, only_baseline, only_variant, mcnemar_p(only_baseline, only_variant))


def sign_flip_p(differences: Sequence[float] | Array) -> float:
    """Share of the 2^n signs of the differences under which |Σ| is at least the observed one. NaN without any.

    Raises ValueError for more than EXACT_SEEDS differences.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(d) > EXACT_SEEDS:
        raise ValueError(f"{len(d)} differences have 2^{len(d)} signs: at most {EXACT_SEEDS} can be counted.")
    if not len(d):
        return math.nan
    d = np.where(np.abs(d) <= _SAME, 0.0, d)
    sums = d[:1]  # |Σ| is the same with all signs turned, so that the first may stay
    for value in d[1:].tolist():
        sums = np.concatenate((sums + value, sums - value))
    return float(np.mean(np.abs(sums) >= abs(sums[0]) - _SAME * np.abs(d).sum()))  # equal sums count, up to rounding


def smallest_p(n: int) -> float:
    """The smallest p-value that n paired seeds can have: 2/2^n where all signs are tried, none (0) beyond."""
    return min(1.0, 2.0 ** (1 - n)) if n <= EXACT_SEEDS else 0.0


def mcnemar_p(one: int, other: int) -> float:
    """McNemar's exact test: P of a split of one + other fair coins at least as uneven, by the binomial distribution."""
    tail = sum(math.comb(one + other, k) for k in range(min(one, other) + 1))
    return min(1.0, 2.0 * tail / 2 ** (one + other))


def out_of_reach(seeds: Sequence[int]) -> bool:
    """Whether no comparison can be significant. seeds: pairs of each that is judged, at least one.

    Their number times the smallest p, which is that of the one with most seeds, is not below LEVEL.
    """
    return len(seeds) * smallest_p(max(seeds)) >= LEVEL


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    scaled = np.minimum(1.0, np.asarray(p_values, dtype=float)[order] * np.arange(count, 0, -1))
    return np.maximum.accumulate(scaled)[np.argsort(order)].tolist()


def corrected(pairs: Sequence[Pair]) -> list[Pair]:
    """Holm over the comparisons that can be judged: enough seeds, and not the same on all, whose p is 1 in any case."""
    result = list(pairs)
    judged = [i for i, pair in enumerate(result) if pair.n >= FEW_SEEDS and not pair.same]
    for i, p in zip(judged, holm([result[i].p for i in judged]), strict=True):
        result[i] = replace(result[i], p_holm=p)
    return result


def t_two_sided_p(t: float, df: int) -> float:
    """P(|T| ≥ |t|) for Student's t with whole degrees of freedom, a finite sum (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    angle, odd = math.atan2(abs(t), math.sqrt(df)), df % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1, df // 2 + 1):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k - 1 + odd) / (2 * k + odd)
    total *= math.sin(angle)
    return max(0.0, 1.0 - (2.0 / math.pi * (angle + total) if odd else total))


def t_quantile(share: float, df: int) -> float:
    """Quantile (share > ½) of Student's t, by bisection of `t_two_sided_p`."""
    target, low, high = 2.0 * (1.0 - share), 0.0, 1.0
    while t_two_sided_p(high, df) > target:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if t_two_sided_p(middle, df) > target else (low, middle)
    return 0.5 * (low + high)
