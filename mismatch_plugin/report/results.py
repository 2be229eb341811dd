"""Tables of outcomes: one setting's results, and what another trainer found on the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_plugin.report.data import RunFolder, short
from mismatch_plugin.report.findings import NAMES
from mismatch_plugin.report.overview import MARKS
from mismatch_plugin.report.statistics import (
    Mean,
    Paired,
    SettingSummary,
    VariantSummary,
    number,
    p_value,
    signed,
    summarise,
)
from mismatch_plugin.report.table import NOTHING, Table, figure


def results_table(summary: SettingSummary, title: str) -> Table:
    """Final value, difference with interval, p and effect size, area and collapsed runs of every variant."""
    measure = NAMES[summary.measure]

    def row(s: VariantSummary) -> tuple[str, ...]:
        collapsed = f"{s.collapsed_runs} of {len(s.collapsed)}" if s.collapsed else NOTHING
        return (short(s.variant), _plus_minus(s.final[summary.measure]), *_difference(s.difference),
                _plus_minus(s.area), collapsed)  # fmt: skip

    headers = ("algorithm", f"final {measure}", "minus algorithm 0", "95 % interval", "p (Holm)", "d_z",
               "area under the curve", "collapsed")  # fmt: skip
    notes = (
        "▲ ▼: significant (p < 0.05) after Holm's correction over the comparisons of this table. p: exact sign-flip "
        "test (Student's t above 20 seeds). Intervals are Student's t, each by itself: near the edge "
        "one has 0 in it where the test finds a difference, or the other way round. d_z: mean of the paired "
        "differences over their standard deviation.",
        "Area under the curve: mean height of the curve over the steps. Collapsed: the final value is less than half "
        "of the highest mean of three neighbouring evaluations of the same run.",
    )
    return Table(f"Results, {title}", headers, tuple(map(row, summary.variants)), notes=notes)


def _difference(d: Paired | None) -> tuple[str, str, str, str]:
    if d is None or not d.n:
        return NOTHING, NOTHING, NOTHING, NOTHING
    interval = f"{signed(d.low)} to {signed(d.high)}" if d.n > 1 else NOTHING
    return signed(d.mean) + MARKS.get(d.verdict, ""), interval, p_value(d.p_holm), signed(d.effect_size, 1)


def _plus_minus(m: Mean) -> str:
    if not m.n:
        return NOTHING
    return number(m.mean) + (f" ± {number(m.error)}" if m.n > 1 else "")


@dataclass(frozen=True)
class CrossCheck:
    """The table of the cross-check, and a sentence a setting on whether signs agree."""

    table: Table
    sentences: tuple[str, ...]


def cross_check(folder: RunFolder, summaries: Sequence[SettingSummary]) -> CrossCheck | None:
    """The runs of the other trainer next to those of this one; None where there are none."""
    other = folder.cross_check
    if other is None or not other.runs:
        return None
    mine = {summary.setting: {s.variant: s for s in summary.variants} for summary in summaries}
    rows: list[tuple[str, ...]] = []
    sentences: list[str] = []
    for summary in summarise(other):
        setting, title = summary.setting, folder.about(summary.setting).title
        for s in summary.variants:
            here = mine.get(setting, {}).get(s.variant)
            if not s.seeds:
                continue
            rows.append((title, short(s.variant), *_figures(folder, setting, here, summary.measure),
                         *_figures(other, setting, s, summary.measure)))  # fmt: skip
            one, two = here.difference if here else None, s.difference
            if one is not None and two is not None and one.n and two.n:
                agree = "yes" if one.mean * two.mean > 0 else "no"
                sentences.append(
                    f"{title}, {short(s.variant)} minus algorithm 0: {signed(one.mean)} in the batched lab, "
                    f"{signed(two.mean)} through megatron-core. Agrees in sign: {agree}."
                )
    headers = ("setting", "algorithm", *(f"{what}, {where}" for where in ("batched lab", "megatron-core")
               for what in ("final", "collapsed", "largest gradient norm")))  # fmt: skip
    note = (
        "Final value and collapsed runs of each trainer; largest gradient norm: of a run, median over seeds. Compare "
        "sign and rough size: single runs of a seed differ between the two."
    )
    return CrossCheck(Table("Cross-check through megatron-core", headers, tuple(rows), notes=(note,)), tuple(sentences))


def _figures(folder: RunFolder, setting: str, s: VariantSummary | None, measure: str) -> tuple[str, str, str]:
    """Final value, collapsed runs, largest gradient norm."""
    if s is None or not s.seeds or measure not in s.final:
        return NOTHING, NOTHING, NOTHING
    norms = [run.curve("grad_norm")[1] for run in folder.finished(setting, s.variant)]
    largest = [float(values.max()) for values in norms if len(values)]
    return (_plus_minus(s.final[measure]), f"{s.collapsed_runs} of {s.seeds}",
            figure(float(np.median(largest)), 2) if largest else NOTHING)  # fmt: skip
