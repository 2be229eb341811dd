"""From runs to statements: outcomes of runs, means and errors over seeds, paired differences, and what is significant.

Named before the run. Primary outcome: the final value (exact match where it was recorded, else reward). Secondary: area
under the curve, and collapsed or not. Differences are paired: variant minus algorithm 0 on the same seed. Each outcome
has its own p-values, corrected by Holm's method for the number of variants of a setting. Only finished runs count. One
that diverged ends at 0 and has collapsed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mismatch_plugin.report.data import BASELINE, Array, Run, RunFolder
from mismatch_plugin.report.findings import (
    Finding,
    SettingSummary,
    VariantSummary,
    findings,
    headline,
    number,
    p_value,
    signed,
)
from mismatch_plugin.report.significance import (
    FEW_SEEDS,
    LEVEL,
    Mean,
    Paired,
    PairedCollapse,
    corrected,
    mean_and_error,
    paired_collapse,
    paired_difference,
)

__all__ = [
    "FEW_SEEDS",
    "LEVEL",
    "Finding",
    "Mean",
    "Paired",
    "PairedCollapse",
    "SettingSummary",
    "VariantSummary",
    "area_under_curve",
    "final_value",
    "has_collapsed",
    "mean_and_error",
    "number",
    "p_value",
    "peak_value",
    "signed",
    "summarise",
    "worst_drawdown",
]

WINDOW = 3
"""Evaluations of a running mean; a final value is the mean of at least so many."""


def final_value(values: Array) -> float:
    """Mean of the last tenth of the evaluations, at least three; NaN where there is none."""
    return float(values[-max(WINDOW, -(-len(values) // 10)) :].mean()) if len(values) else math.nan


def peak_value(values: Array) -> float:
    """Largest mean of three evaluations in a row; NaN where there are fewer."""
    return float(np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid").max()) if len(values) >= WINDOW else math.nan


def has_collapsed(values: Array) -> bool:
    """Whether the final value is less than half of the run's own peak. False below three evaluations."""
    return peak_value(values) > 0.0 and final_value(values) < 0.5 * peak_value(values)


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
    for variant in folder.variants_of(setting):
        runs = folder.finished(setting, variant)
        curves = by_seed(runs, measure)
        diverged = {run.seed for run in runs if run.diverged}
        values = {seed: 0.0 if seed in diverged else final_value(curve) for seed, (_, curve) in curves.items()}
        areas = {seed: area_under_curve(*curve) for seed, curve in curves.items()}
        rewards = by_seed(runs, "reward").items()
        reward = [0.0 if seed in diverged else final_value(curve) for seed, (_, curve) in rewards]
        found[variant] = VariantSummary(
            variant,
            seeds=len(curves),
            final={"reward": mean_and_error(reward), measure: mean_and_error(list(values.values()))},
            area=mean_and_error(list(areas.values())),
            drawdown=mean_and_error([worst_drawdown(curve) for _, curve in curves.values()]),
            values=values,
            areas=areas,
            peaks={seed: peak_value(curve) for seed, (_, curve) in curves.items()},
            collapsed={
                seed: seed in diverged or has_collapsed(curve)
                for seed, (_, curve) in curves.items()
                if seed in diverged or len(curve) >= WINDOW
            },
        )
    if (base := found.get(BASELINE)) is not None:
        others = [s for s in found.values() if s is not base]
        ends = corrected([paired_difference(s.values, base.values) for s in others])
        areas = corrected([paired_difference(s.areas, base.areas) for s in others])
        collapses = corrected([paired_collapse(s.collapsed, base.collapsed) for s in others])
        for s, end, area, collapse in zip(others, ends, areas, collapses, strict=True):
            found[s.variant] = replace(s, difference=end, area_difference=area, collapse_difference=collapse)
    summaries = tuple(found.values())
    return SettingSummary(setting, measure, summaries, tuple(findings(summaries, measure)), headline(summaries))
