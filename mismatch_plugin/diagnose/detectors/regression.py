"""How the gap between the two sides depends on the log-prob itself and on repetition: one least-squares fit."""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.batch import Tokens

TRIM = 0.005
"""Of the gap's distribution on each side is pulled in to that quantile: one wild token must not decide a slope."""


class Effect(NamedTuple):
    """One regressor's coefficient. deviations: in standard errors. share: of the gap's variance that it explains
    beyond the others (partial R²)."""

    size: float
    deviations: float
    share: float


class Fit(NamedTuple):
    """d = a + slope · rollout + repeated · occurred + noise, by least squares.

    slope: centred log-probs of the training side follow the rollout side's with slope 1 + `slope.size`.
    upper: Var(d) / Cov(d, rollout), from the reverse regression; to first order a ratio of temperatures τ (training
    log-probs as sharp as rollout ones to the power τ) has slope ≤ τ − 1 ≤ upper in size, with equality on the right
    where there is no noise.
    noise: variance left, over that of the rollout log-probs. quarters: mean gap in the quarters of the tokens ordered
    by rollout log-prob, least likely first.
    """

    slope: Effect
    repeated: Effect
    upper: float
    noise: float
    quarters: tuple[float, ...]


def fit(tokens: Tokens) -> Fit:
    """At least 8 tokens are needed; without both kinds of token `repeated` is 0."""
    if tokens not in _FITS:
        _FITS[tokens] = _fit(tokens)
    return _FITS[tokens]


_FITS: WeakKeyDictionary[Tokens, Fit] = WeakKeyDictionary()
"""Several detectors ask for the same."""


def _fit(tokens: Tokens) -> Fit:
    gap, x = np.clip(tokens.gap, *np.quantile(tokens.gap, [TRIM, 1 - TRIM])), tokens.rollout
    columns = [np.ones(len(x)), x - x.mean()]
    both = 0 < tokens.occurred.sum() < len(x)
    if both:
        columns.append(tokens.occurred - tokens.occurred.mean())
    design = np.stack(columns, axis=1)
    covariance = np.linalg.pinv(design.T @ design)
    coefficients = covariance @ (design.T @ gap)
    left = gap - design @ coefficients
    freedom = max(len(x) - design.shape[1], 1)
    variance = float(left @ left) / freedom

    def effect(column: int) -> Effect:
        size = float(coefficients[column])
        deviations = size / math.sqrt(max(variance * covariance[column, column], 1e-30))
        return Effect(size, deviations, deviations**2 / (deviations**2 + freedom))

    together = float(np.cov(gap, x)[0, 1]) if x.std() > 0 else 0.0
    quarters = np.array_split(tokens.order, 4)
    return Fit(
        slope=effect(1),
        repeated=effect(2) if both else Effect(0.0, 0.0, 0.0),
        upper=float(gap.var(ddof=1)) / together if together else math.inf,
        noise=variance / max(float(x.var()), 1e-12),
        quarters=tuple(float(gap[quarter].mean()) for quarter in quarters),
    )


class Support(NamedTuple):
    """Does the one side put mass where the other has none? Of w = e^d − 1 for a gap d.

    Tokens are drawn from the rollout side, so the mean of e^d is the training side's mass on what could be drawn: 1
    whatever the two policies are, less where a filter renormalised the rollout's log-probs.
    one_sided: (Σ negative − Σ positive) / Σ |d|, +1 where every gap is negative. negative: share of gaps below 0 among
    those that are not 0.
    """

    missing: float
    deviations: float
    one_sided: float
    negative: float


def support(gap: Floats) -> Support:
    """Of at least 2 gaps, clamped to ±20."""
    weights = np.expm1(np.clip(gap, -20.0, 20.0))
    error = float(weights.std(ddof=1)) / math.sqrt(len(gap))
    total = float(np.abs(gap).sum())
    return Support(
        missing=-float(weights.mean()),
        deviations=float(weights.mean()) / max(error, 1e-12),
        one_sided=-float(gap.sum()) / total if total > 0 else 0.0,
        negative=float((gap[gap != 0] < 0).mean()) if (gap != 0).any() else 0.0,
    )


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's, without care for ties; NaN for fewer than 3 values or a constant."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
