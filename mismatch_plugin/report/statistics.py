"""From runs to statements: means and errors over seeds, paired differences, and what is and is not significant.

A value of a run is one number a seed. Differences are paired: variant minus algorithm 0 on the same seed. Their
interval and p-value come from Student's t with n − 1 degrees of freedom; p-values of one setting are corrected for
their number by Holm's method. Only finished runs count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from mismatch_plugin.report.data import BASELINE, Array, Run, RunFolder, describe

LEVEL = 0.05
"""Two-sided level of significance, after Holm's correction."""
FEW_SEEDS = 3
"""Below this many paired seeds nothing is judged."""
LAST_SHARE = 0.1
"""A run's final value is the mean over this share of its evaluations, the last ones."""
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
    """Mean paired difference, standard error, 95 % interval, two-sided p-value, and p after Holm's correction."""

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
        """`same`, `too few seeds`, `significant` or `not significant`."""
        if self.same:
            return "same"
        if self.n < FEW_SEEDS:
            return "too few seeds"
        return "significant" if self.p_holm < LEVEL else "not significant"


@dataclass(frozen=True)
class VariantSummary:
    """One variant in one setting. final, area, drawdown: by measure (`exact`, `reward`); drawdown of `exact`."""

    variant: str
    seeds: int
    final: dict[str, Mean]
    area: Mean
    drawdown: Mean
    difference: Paired | None = None
    area_difference: Paired | None = None
    values: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One sentence; kind is the verdict that it reports."""

    kind: str
    text: str


@dataclass(frozen=True)
class SettingSummary:
    """All variants of one setting, judged by `measure`, and the sentences about them."""

    setting: str
    measure: str
    variants: tuple[VariantSummary, ...]
    findings: tuple[Finding, ...]


def mean_and_error(values: Sequence[float] | Array) -> Mean:
    """Mean and standard error (sample deviation over √n) of the finite values."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    n = len(finite)
    error = float(finite.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Mean(n, float(finite.mean()) if n else math.nan, error)


def paired_difference(values: dict[int, float], baseline: dict[int, float]) -> Paired:
    """values − baseline (by seed) over the seeds that both have."""
    seeds = sorted(values.keys() & baseline.keys())
    m = mean_and_error([values[seed] - baseline[seed] for seed in seeds])
    if m.n < 2:
        return Paired(m.n, m.mean, math.nan, math.nan, math.nan, math.nan)
    half = t_quantile(0.975, m.n - 1) * m.error
    p = 1.0 if abs(m.mean) <= _SAME else 0.0
    if m.error > _SAME:
        p = t_two_sided_p(m.mean / m.error, m.n - 1)
    return Paired(m.n, m.mean, m.error, m.mean - half, m.mean + half, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    scaled = np.minimum(1.0, np.asarray(p_values, dtype=float)[order] * np.arange(count, 0, -1))
    return np.maximum.accumulate(scaled)[np.argsort(order)].tolist()


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


def final_value(values: Array) -> float:
    """Mean of the last tenth of the evaluations, at least one; NaN where there is none."""
    return float(values[-math.ceil(LAST_SHARE * len(values)) :].mean()) if len(values) else math.nan


def area_under_curve(steps: Array, values: Array) -> float:
    """Area by the trapezoid rule over the range of steps: the mean height of the curve. NaN where there is none."""
    if len(values) < 2:
        return float(values[0]) if len(values) else math.nan
    return float(np.diff(steps) @ (values[1:] + values[:-1]) / 2.0 / (steps[-1] - steps[0]))


def worst_drawdown(values: Array) -> float:
    """Largest fall below an earlier value of the same curve, ≥ 0. NaN where there is none."""
    return float((np.maximum.accumulate(values) - values).max()) if len(values) else math.nan


def summarise(folder: RunFolder) -> list[SettingSummary]:
    """One summary a setting, judged by exact match where it was recorded, else by the reward."""
    measure = "exact" if any(run.curve(folder.source("exact"))[0].size for run in folder.runs.values()) else "reward"
    return [_setting(folder, setting, measure) for setting in folder.settings]


def _setting(folder: RunFolder, setting: str, measure: str) -> SettingSummary:
    def by_seed(runs: list[Run], name: str) -> dict[int, tuple[Array, Array]]:
        curves = {run.seed: run.curve(folder.source(name)) for run in runs}
        return {seed: curve for seed, curve in curves.items() if curve[0].size}

    found: dict[str, VariantSummary] = {}
    areas: dict[str, dict[int, float]] = {}
    for variant in folder.variants:
        runs = folder.finished(setting, variant)
        curves = by_seed(runs, measure)
        finals = {seed: final_value(values) for seed, (_, values) in curves.items()}
        areas[variant] = {seed: area_under_curve(*curve) for seed, curve in curves.items()}
        reward = [final_value(values) for _, values in by_seed(runs, "reward").values()]
        found[variant] = VariantSummary(
            variant,
            seeds=len(curves),
            final={"reward": mean_and_error(reward), measure: mean_and_error(list(finals.values()))},
            area=mean_and_error(list(areas[variant].values())),
            drawdown=mean_and_error([worst_drawdown(values) for _, values in curves.values()]),
            values=finals,
        )
    if BASELINE in found:
        others = [variant for variant in folder.variants if variant != BASELINE]
        pairs = _corrected([paired_difference(found[v].values, found[BASELINE].values) for v in others])
        for variant, pair in zip(others, pairs, strict=True):
            area = paired_difference(areas[variant], areas[BASELINE])
            found[variant] = replace(found[variant], difference=pair, area_difference=area)
    summaries = tuple(found.values())
    return SettingSummary(setting, measure, summaries, tuple(_findings(summaries, measure)))


def _corrected(pairs: list[Paired]) -> list[Paired]:
    """Holm over the comparisons that can be judged (enough seeds, not the same values)."""
    judged = [i for i, pair in enumerate(pairs) if pair.n >= FEW_SEEDS and not pair.same]
    for i, p in zip(judged, holm([pairs[i].p for i in judged]), strict=True):
        pairs[i] = replace(pairs[i], p_holm=p)
    return pairs


def _findings(summaries: Sequence[VariantSummary], measure: str) -> list[Finding]:
    """Plain sentences about one setting."""
    name = "exact match" if measure == "exact" else "reward"
    of: dict[str, list[tuple[str, Paired]]] = defaultdict(list)
    for s in summaries:
        if s.difference is not None and s.difference.n:
            of[s.difference.verdict].append((describe(s.variant), s.difference))
    if not of:
        text = "No finished pair of runs with algorithm 0 on the same seed: nothing is compared."
        return [Finding("too few seeds", text)]
    found = [
        Finding(
            "significant",
            f"{who} ended {'higher' if d.mean > 0 else 'lower'} than algorithm 0 by {number(abs(d.mean))} in {name} "
            f"({_interval(d)}, {d.n} seeds, p {p_value(d.p_holm, equals=True)}). This difference is significant.",
        )
        for who, d in of["significant"]
    ]
    if open_ := of["not significant"]:
        listed = "; ".join(f"{who} {signed(d.mean)} ({_interval(d)})" for who, d in open_)
        seeds = " to ".join(map(str, sorted({min(d.n for _, d in open_), max(d.n for _, d in open_)})))
        text = f"Not significantly different from algorithm 0 with {seeds} seeds: {listed}."
        found.append(Finding("not significant", text))
        if alone := [who for who, d in open_ if d.p < LEVEL]:
            count = len(of["significant"]) + len(open_)
            whose = f"the difference of {_list(alone)} would pass the 5 % level"
            text = f"By itself {whose}; among {count} comparisons it does not."
            found.append(Finding("not significant", text))
    if of["same"]:
        whose = _list([who for who, _ in of["same"]])
        found.append(Finding("same", f"Exactly the values of algorithm 0 on every seed: {whose}."))
    if few := of["too few seeds"]:
        whose = "; ".join(f"{who} ({signed(d.mean)} on {d.n} seed{'s' if d.n > 1 else ''})" for who, d in few)
        found.append(Finding("too few seeds", f"Too few seeds to judge, fewer than {FEW_SEEDS}: {whose}."))
    widths = [0.5 * (d.high - d.low) for _, d in of["significant"] + open_]
    if widths:
        best, worst = number(min(widths)), number(max(widths))
        span = f"±{best}" if best == worst else f"±{best} to ±{worst}"
        text = f"The 95 % intervals reach {span} to either side: smaller differences are not resolved by these seeds."
        found.append(Finding("note", text))
    return found + _highest(summaries, name)


def _highest(summaries: Sequence[VariantSummary], name: str) -> list[Finding]:
    """Which variant has the highest mean, and which others cannot be told from it.

    The highest was found by looking at all, so p-values are corrected for all pairs.
    """
    ranked = sorted(
        (s for s in summaries if s.seeds >= FEW_SEEDS), key=lambda s: -float(np.mean(list(s.values.values())))
    )
    if len(ranked) < 2:
        return []
    top = ranked[0]
    every = _corrected([paired_difference(a.values, b.values) for a, b in combinations(ranked, 2)])
    pairs = every[: len(ranked) - 1]  # those with the highest come first
    if any(pair.n < FEW_SEEDS for pair in pairs):
        return []
    equal = [describe(o.variant) for o, d in zip(ranked[1:], pairs, strict=True) if d.verdict != "significant"]
    mean = number(float(np.mean(list(top.values.values()))))
    if not equal:
        told = "it differs significantly from every other one."
    elif len(equal) == len(ranked) - 1:
        told = "no other one differs significantly from it, so the order of the means says nothing."
    else:
        told = f"not significantly different from it: {_list(equal)}."
    text = f"The highest mean {name} at the end is that of {describe(top.variant)} ({mean}); {told}"
    return [Finding("note", text)]


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{'; '.join(names[:-1])} and {names[-1]}"


def _interval(d: Paired) -> str:
    return f"95 % interval {signed(d.low)} to {signed(d.high)}"


def number(value: float, digits: int = 3) -> str:
    """Fixed digits, the minus sign a real one; zero has none; – where there is no value."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}f}"
    return text.replace("-", "−" if float(text) else "")


def signed(value: float, digits: int = 3) -> str:
    """The same with a plus sign where it is positive."""
    text = number(value, digits)
    return f"+{text}" if value > 0 and float(text) else text


def p_value(p: float, equals: bool = False) -> str:
    """Three digits, or `< 0.001`; – where there is none. equals: with a leading "= "."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{'= ' if equals else ''}{p:.3f}"
