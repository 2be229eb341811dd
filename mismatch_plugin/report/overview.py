"""The first screen: which setting to look at first, and the final values of every variant in every setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mismatch_plugin.report.data import BASELINE, short
from mismatch_plugin.report.findings import NAMES
from mismatch_plugin.report.significance import out_of_reach
from mismatch_plugin.report.statistics import SettingSummary, VariantSummary, number, signed
from mismatch_plugin.report.table import NOTHING, Table

MARKS = {"better": " ▲", "worse": " ▼"}
"""By verdict. ▲ and ▼ differ in form; the page gives them two colours on top."""
_NOTES = (
    "▲ higher, ▼ lower than algorithm 0 in the same column, significant after Holm's correction over the column; no "
    "mark: no significant difference.",
    "(c/n): c of n runs collapsed, to less than half of their own peak; no bracket: none did. –: no finished run.",
)

_FEW = "With so few seeds no difference can be significant: that there is no mark says nothing."


def baseline_of(summary: SettingSummary) -> VariantSummary | None:
    """Algorithm 0 in this setting; None where it has no finished run."""
    return next((s for s in summary.variants if s.variant == BASELINE and s.seeds), None)


def focus(summaries: Sequence[SettingSummary]) -> SettingSummary | None:
    """The setting to look at first: where most runs of algorithm 0 collapsed, then the largest difference to it."""

    def rank(summary: SettingSummary) -> tuple[float, float]:
        base = baseline_of(summary)
        sizes = [abs(s.difference.mean) for s in summary.variants if s.difference is not None and s.difference.n]
        return (base.collapsed_runs / base.seeds if base else -1.0, max(sizes, default=0.0))

    judged = [summary for summary in summaries if any(s.seeds for s in summary.variants)]
    return max(judged, key=rank, default=None)


def headline(summary: SettingSummary) -> str:
    """What the first picture shows: how many runs collapsed, without and with a correction."""
    base = baseline_of(summary)
    if base is None:
        return "No finished run of algorithm 0"
    if not base.collapsed:
        return "Too few evaluations to tell whether algorithm 0 collapses"
    if not base.collapsed_runs:
        return (
            f"Algorithm 0 collapses in none of {base.seeds} runs" if base.seeds > 1 else "Algorithm 0 does not collapse"
        )
    others = [s for s in summary.variants if s.variant != BASELINE and s.seeds]
    spared = [short(s.variant) for s in others if not s.collapsed_runs]
    text = f"Algorithm 0 collapses in {base.collapsed_runs} of {base.seeds} runs"
    if spared:
        return f"{text}; {_joined(spared)} in none"
    if not others:
        return text
    least = min(others, key=lambda s: s.collapsed_runs / s.seeds)
    return f"{text}; least often of the others {short(least.variant)}, in {least.collapsed_runs} of {least.seeds}"


def final_table(summaries: Sequence[SettingSummary], titles: Mapping[str, str] | None = None) -> Table:
    """Final values, one row a variant, algorithm 0 first, and one column a setting.

    titles: of settings, for the headers; without them their names, which a terminal of 80 columns has room for.
    """
    measure = NAMES[summaries[0].measure] if summaries else "exact match"
    by_length = sorted(summaries, key=lambda summary: -len(summary.variants))  # the longest says the order
    of = {(summary.setting, s.variant): (summary, s) for summary in by_length for s in summary.variants}
    variants = sorted(dict.fromkeys(variant for _, variant in of), key=lambda variant: variant != BASELINE)
    rows = []
    for variant in variants:
        cells = [_cell(*of[key]) if (key := (summary.setting, variant)) in of else NOTHING for summary in summaries]
        rows.append((short(variant), *cells))
    headers = ("algorithm", *((titles or {}).get(summary.setting, summary.setting) for summary in summaries))
    seeds = sorted({s.seeds for _, s in of.values() if s.seeds})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}" if seeds else "no"
    first = f"Mean {measure} at the end over {count} seed{'s' * (seeds != [1])}, finished runs only."
    notes = (first, *_NOTES, _FEW) if summaries and all(map(_blind, summaries)) else (first, *_NOTES)
    return Table(f"Final {measure}", headers, tuple(rows), notes=notes)


def _blind(summary: SettingSummary) -> bool:
    """Whether variants differ from algorithm 0, and none could do so significantly: there are too few seeds."""
    pairs = [s.difference for s in summary.variants if s.difference is not None and s.difference.n]
    judged = [pair.n for pair in pairs if not math.isnan(pair.p_holm)]
    few = not judged or out_of_reach(judged)
    return few and any(not pair.same for pair in pairs)


def _cell(summary: SettingSummary, s: VariantSummary) -> str:
    if not s.seeds:
        return NOTHING
    mark = MARKS.get(s.difference.verdict, "") if s.difference is not None else ""
    fell = f" ({s.collapsed_runs}/{s.seeds})" if s.collapsed_runs else ""
    return number(s.final[summary.measure].mean, 2) + mark + fell


def what_did_not_help(summary: SettingSummary) -> str:
    """One sentence: which variants ended lower than algorithm 0, and which no different; empty where none did."""
    by: dict[str, list[str]] = {}
    pairs = [(s, s.difference) for s in summary.variants if s.difference is not None and s.difference.n]
    blind = _blind(summary)
    for s, pair in pairs:
        kind = "too few seeds" if blind and not pair.same else pair.verdict
        by.setdefault(kind, []).append(f"{short(s.variant)} ({signed(pair.mean, 2)})")
    parts = []
    if "worse" in by:
        parts.append(f"lower than algorithm 0: {_joined(by['worse'])}")
    if alike := [*by.get("not significant", []), *by.get("same", [])]:
        parts.append(f"no significant difference: {_joined(alike)}")
    if "too few seeds" in by:
        parts.append(f"too few seeds to tell: {_joined(by['too few seeds'])}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
