"""What is said of a setting: summaries of its variants, and sentences that claim no more than the tests do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from mismatch_plugin.report.data import BASELINE, describe, short
from mismatch_plugin.report.significance import (
    FEW_SEEDS,
    LEVEL,
    Mean,
    Paired,
    PairedCollapse,
    corrected,
    mean_and_error,
    out_of_reach,
    paired_difference,
    smallest_p,
)

FINAL, AREA, COLLAPSED = "final", "area", "collapsed"
"""Outcomes that a finding is about: the primary one, and the secondary ones."""
NAMES = {"exact": "exact match", "reward": "reward"}


@dataclass(frozen=True)
class VariantSummary:
    """One variant in one setting. final: by measure (`exact`, `reward`); area, drawdown: of the setting's own measure.

    values, areas, peaks, collapsed: one a seed. difference, area_difference, collapse_difference: to algorithm 0.
    """

    variant: str
    seeds: int
    final: dict[str, Mean]
    area: Mean
    drawdown: Mean
    difference: Paired | None = None
    area_difference: Paired | None = None
    collapse_difference: PairedCollapse | None = None
    values: dict[int, float] = field(default_factory=dict[int, float])
    areas: dict[int, float] = field(default_factory=dict[int, float])
    peaks: dict[int, float] = field(default_factory=dict[int, float])
    collapsed: dict[int, bool] = field(default_factory=dict[int, bool])

    @property
    def collapsed_runs(self) -> int:
        """How many runs collapsed, of `len(collapsed)` that had enough evaluations to tell."""
        return sum(self.collapsed.values())


@dataclass(frozen=True)
class Finding:
    """One sentence; kind is the verdict that it reports, or `note`; outcome is what it is about."""

    kind: str
    text: str
    outcome: str = FINAL


@dataclass(frozen=True)
class SettingSummary:
    """All variants of one setting, judged by `measure`; one sentence on what happened, and the sentences in detail."""

    setting: str
    measure: str
    variants: tuple[VariantSummary, ...]
    findings: tuple[Finding, ...]
    headline: str = ""


Judged = Mapping[str, Sequence[tuple[VariantSummary, Paired]]]
"""Verdict → variants of it, with their difference."""
_UNRESOLVED = "no significant difference"


def headline(summaries: Sequence[VariantSummary]) -> str:
    """What happened, in one sentence: how algorithm 0 did, who ended significantly higher or lower, who did not.

    Values are of the setting's measure; with a sign they are differences to algorithm 0, the largest first.
    """
    of = _by_verdict(summaries, lambda s: s.difference)
    base = next((s for s in summaries if s.variant == BASELINE), None)
    if base is None or not base.seeds:
        return "No run of algorithm 0 has finished: nothing is compared."
    end, ran, fell = number(_mean(base.values), 2), len(base.collapsed), base.collapsed_runs
    seeds = "" if ran == base.seeds else f" (mean of {base.seeds} seed{'s' * (base.seeds > 1)})"
    if fell:
        count = f"{fell} of {ran} runs" if ran > 1 else "its run"
        told = f"reached {number(_mean(base.peaks), 2)} and ended at {end}{seeds}, {count} collapsed"
    else:
        none = f", none of {ran} runs collapsed" if ran > 1 else ", its run did not collapse" if ran else ""
        told = f"ended at {end}{seeds}{none}"
    parts = [f"Uncorrected PPO {told}"]

    def listed(kind: str) -> str:
        ranked = sorted(of[kind], key=lambda pair: -abs(pair[1].mean))
        return ", ".join(f"{short(s.variant)} {signed(d.mean, 2)}" for s, d in ranked)

    kinds = {"better": "significantly higher", "worse": "significantly lower", "not significant": _UNRESOLVED}
    parts += [f"{told}: {listed(kind)}" for kind, told in kinds.items() if of[kind]]
    if floor := _floor(of):
        parts.append(floor)
    if of["same"]:
        parts.append(f"the same values: {', '.join(short(s.variant) for s, _ in of['same'])}")
    if of["too few seeds"]:
        parts.append(f"too few seeds to judge: {listed('too few seeds')}")
    return "; ".join(parts) + "."


def findings(summaries: Sequence[VariantSummary], measure: str) -> list[Finding]:
    """Plain sentences about one setting: the primary outcome, gains and harms apart, then the secondary ones."""
    name, of = NAMES[measure], _by_verdict(summaries, lambda s: s.difference)
    if not of:
        text = "No finished pair of runs with algorithm 0 on the same seed: nothing is compared."
        return [Finding("too few seeds", text)]
    found = [
        Finding(
            kind,
            f"{describe(s.variant)} ended {'higher' if d.mean > 0 else 'lower'} than algorithm 0 by "
            f"{number(abs(d.mean))} in {name} ({_interval(d)}, {d.n} seeds, d_z {signed(d.effect_size, 1)}, p "
            f"{p_value(d.p_holm, equals=True)}). This {'gain' if kind == 'better' else 'harm'} is significant.",
        )
        for kind in ("better", "worse")
        for s, d in of[kind]
    ]
    if open_ := of["not significant"]:
        listed = "; ".join(f"{describe(s.variant)} {signed(d.mean)} ({_interval(d)})" for s, d in open_)
        seeds = " to ".join(map(str, sorted({min(d.n for _, d in open_), max(d.n for _, d in open_)})))
        text = f"Not significantly different from algorithm 0 with {seeds} seeds: {listed}."
        found.append(Finding("not significant", text))
        if alone := [describe(s.variant) for s, d in open_ if d.p < LEVEL]:
            whose = f"the difference of {_list(alone)} would pass the 5 % level"
            text = f"By itself {whose}; among {len(_judged(of))} comparisons it does not."
            found.append(Finding("not significant", text))
        if floor := _floor(of):
            found.append(Finding("note", f"{floor[0].upper()}{floor[1:]}."))
    if of["same"]:
        whose = _list([describe(s.variant) for s, _ in of["same"]])
        found.append(Finding("same", f"Exactly the values of algorithm 0 on every seed: {whose}."))
    if few := of["too few seeds"]:
        whose = "; ".join(
            f"{describe(s.variant)} ({signed(d.mean)} on {d.n} seed{'s' if d.n > 1 else ''})" for s, d in few
        )
        found.append(Finding("too few seeds", f"Too few seeds to judge, fewer than {FEW_SEEDS}: {whose}."))
    widths = [0.5 * (d.high - d.low) for d in _judged(of)]
    if widths:
        best, worst = number(min(widths)), number(max(widths))
        span = f"±{best}" if best == worst else f"±{best} to ±{worst}"
        text = (
            f"The 95 % intervals (Student's t) reach {span} to either side: smaller differences are not resolved by "
            "these seeds."
        )
        found.append(Finding("note", text))
    return [*found, *_highest(summaries, name), *_area(summaries), *_collapse(summaries)]


def _area(summaries: Sequence[VariantSummary]) -> list[Finding]:
    def show(d: Paired) -> str:
        return f"{signed(d.mean)}, p {p_value(d.p_holm, equals=True)}"

    of, words = _by_verdict(summaries, lambda s: s.area_difference), ("higher", "lower")
    return _secondary(AREA, "Area under the curve", words, {kind: [(s, show(d)) for s, d in of[kind]] for kind in of})


def _collapse(summaries: Sequence[VariantSummary]) -> list[Finding]:
    """Nothing where no run of the setting collapsed."""
    if not any(s.collapsed_runs for s in summaries):
        return []
    of: dict[str, list[tuple[VariantSummary, str]]] = defaultdict(list)
    for s in summaries:
        if (d := s.collapse_difference) is not None and d.n:
            shown = f"{d.variant} of {d.n} against {d.baseline}"
            shown += f", p {p_value(d.p_holm, equals=True)}" if not math.isnan(d.p_holm) else ""
            of[d.verdict].append((s, shown))
    return _secondary(COLLAPSED, "Collapsed runs", ("fewer", "more"), of)


def _secondary(
    outcome: str, title: str, words: tuple[str, str], of: Mapping[str, Sequence[tuple[VariantSummary, str]]]
) -> list[Finding]:
    told = {
        "better": f"significantly {words[0]} than with algorithm 0",
        "worse": f"significantly {words[1]} than with algorithm 0",
        "not significant": "no significant difference to algorithm 0",
    }
    return [
        Finding(kind, f"{title}, {what}: {'; '.join(f'{describe(s.variant)} ({text})' for s, text in who)}.", outcome)
        for kind, what in told.items()
        if (who := of.get(kind))
    ]


def _highest(summaries: Sequence[VariantSummary], name: str) -> list[Finding]:
    """Which variant has the highest mean, and which others cannot be told from it.

    The highest was found by looking at all, so p-values are corrected for all pairs.
    """
    ranked = sorted((s for s in summaries if s.seeds >= FEW_SEEDS), key=lambda s: -_mean(s.values))
    if len(ranked) < 2:
        return []
    top = ranked[0]
    every = corrected([paired_difference(a.values, b.values) for a, b in combinations(ranked, 2)])
    pairs = every[: len(ranked) - 1]  # those with the highest come first
    if any(pair.n < FEW_SEEDS for pair in pairs):
        return []
    equal = [describe(o.variant) for o, d in zip(ranked[1:], pairs, strict=True) if not d.significant]
    judged = [pair.n for pair in every if not math.isnan(pair.p_holm)]
    if not equal:
        told = "it differs significantly from every other one."
    elif judged and out_of_reach(judged):
        told = f"{max(judged)} seeds are too few to order them ({len(judged)} pair{'s' * (len(judged) > 1)})."
    elif len(equal) == len(ranked) - 1:
        told = "no other one differs significantly from it, so the order of the means says nothing."
    else:
        told = f"not significantly different from it: {_list(equal)}."
    mean = number(_mean(top.values))
    text = f"The highest mean {name} at the end is that of {describe(top.variant)} ({mean}); {told}"
    return [Finding("note", text)]


def _by_verdict(
    summaries: Sequence[VariantSummary], pair_of: Callable[[VariantSummary], Paired | None]
) -> defaultdict[str, list[tuple[VariantSummary, Paired]]]:
    of: defaultdict[str, list[tuple[VariantSummary, Paired]]] = defaultdict(list)
    for s in summaries:
        if (pair := pair_of(s)) is not None and pair.n:
            of[pair.verdict].append((s, pair))
    return of


def _judged(of: Judged) -> list[Paired]:
    """Comparisons that Holm's correction counts."""
    return [d for kind in ("better", "worse", "not significant") for _, d in of.get(kind, ())]


def _floor(of: Judged) -> str:
    """Why no difference can be significant with so few seeds; empty where one can."""
    judged = [d.n for d in _judged(of)]
    if not judged or not out_of_reach(judged):
        return ""
    least = smallest_p(max(judged))
    among = f", {p_value(min(1.0, len(judged) * least))} after Holm's correction for {len(judged)} comparisons"
    return (
        f"with {max(judged)} seeds the smallest possible p is {p_value(least)}{among if len(judged) > 1 else ''}: no "
        "difference at the end can be significant"
    )


def _mean(values: Mapping[int, float]) -> float:
    return mean_and_error(list(values.values())).mean


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
    return f"+{text}" if 0 < value < math.inf and float(text) else text


def p_value(p: float, equals: bool = False) -> str:
    """Three digits, or `< 0.001`; – where there is none. equals: with a leading "= "."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{'= ' if equals else ''}{p:.3f}"
