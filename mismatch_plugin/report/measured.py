"""What was measured along the way: the mismatch and the weights of a setting, and where CPU time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.report.data import BASELINE, Run, RunFolder, mean_over, short
from mismatch_plugin.report.statistics import number
from mismatch_plugin.report.table import NOTHING, Table, figure

KL = f"{PREFIX}kl"
_PARTS = ("rollout", "old_log_probs", "train")
_VISIBLE = 1e-5
"""nat a token: what float32 rounds stays below."""


def mismatch_table(folder: RunFolder, setting: str, title: str) -> Table:
    """How far apart the policies were, and what the correction did about it: means over steps and seeds."""
    rows = []
    size = folder.recorded(f"{PREFIX}rollout_is_ratio_eff_sample_size", f"{PREFIX}rollout_is_eff_sample_size")
    for variant in folder.variants_of(setting):
        runs = folder.shown(setting, variant)
        norms = [values for run in runs if len(values := run.curve("grad_norm")[1])]
        largest = max((float(values.max()) for values in norms), default=math.nan)
        accepted = mean_over(runs, f"{PREFIX}accepted_token_fraction")
        rows.append(
            (
                short(variant),
                number(mean_over(runs, KL), 4),
                number(mean_over(runs, size), 2),
                number(mean_over(runs, f"{PREFIX}rollout_is_weight_after_mean"), 2),
                number(mean_over(runs, f"{PREFIX}rollout_is_weight_after_eff_sample_size"), 2),
                number(100 * (1 - accepted), 1) + ("" if math.isnan(accepted) else " %"),
                number(float(np.median(np.concatenate(norms))) if norms else math.nan, 2),
                figure(largest) if norms else NOTHING,
            )
        )
    headers = (
        *("algorithm", "KL, nat a token", "ESS of the ratio", "mean weight used", "ESS of weights used"),
        *("rejected tokens", "median gradient norm", "largest gradient norm"),
    )
    notes = ("Means over all steps and seeds; gradient norms are before clipping, the largest is over all seeds.",)
    return Table(f"Mismatch and weights, {title}", headers, tuple(rows), notes=notes)


def moved_note(folder: RunFolder, setting: str) -> str:
    """Why the KL of algorithms 1 and 3 is above 0 where the engines agree; empty where there is nothing to explain."""
    base = abs(mean_over(folder.shown(setting, BASELINE), KL))
    if not base < _VISIBLE:  # also where it was not recorded
        return ""
    moved = []
    for variant in folder.variants_of(setting):
        runs = folder.shown(setting, variant)
        kl = mean_over(runs, KL)
        if runs and _without_old(runs[0]) and kl > max(_VISIBLE, 100 * base):
            moved.append(f"{short(variant)} {figure(kl, 2)}")
    if not moved:
        return ""
    return (
        f"The engines agree here (KL of algorithm 0: {figure(base, 1) if base else '0'}), and yet the KL of some is "
        f"above 0: {', '.join(moved)}. Without a pass for π_old, algorithms 1 and 3 measure against π_θ, which the "
        "first mini-batch of a rollout moves: from the second on, this is the distance trained since, not a mismatch."
    )


def _without_old(run: Run) -> bool:
    mismatch = run.config.get("mismatch")
    return isinstance(mismatch, dict) and bool(mismatch.get("use_rollout_log_probs"))


@dataclass(frozen=True)
class CpuTime:
    """Seconds a run by part, one row a setting, and what the old-log-prob pass costs in words."""

    table: Table
    sentence: str


def cpu_seconds(folder: RunFolder, titles: Mapping[str, str]) -> CpuTime | None:
    """Where the CPU time of a run goes; None where no time was recorded."""
    rows, shares, skipping = [], list[float](), dict[str, None]()
    for setting in folder.settings:
        of = {variant: _seconds(folder.finished(setting, variant)) for variant in folder.variants_of(setting)}
        of = {variant: seconds for variant, seconds in of.items() if sum(seconds)}
        needing = [seconds for seconds in of.values() if seconds[1]]
        skipping |= dict.fromkeys(short(variant) for variant, seconds in of.items() if not seconds[1])
        if not of:
            continue
        rollout, old, train = np.mean(needing or list(of.values()), axis=0).tolist()
        total = rollout + old + train
        shares += [100 * old / total] if needing else []
        share = f"{100 * old / total:.0f} %" if needing else NOTHING
        rows.append((titles.get(setting, setting), *(number(s, 2) for s in (rollout, old, train, total)), share))
    if not rows:
        return None
    headers = ("setting", "rollout, s", "old log-probs, s", "training, s", "one run, s", "old-log-prob pass")
    sentence = ""
    if shares:
        span = sorted({f"{min(shares):.0f}", f"{max(shares):.0f}"}, key=float)
        sentence = f"The old-log-prob pass is {' to '.join(span)} % of the CPU time of a run that needs it"
        sentence += f"; {', '.join(skipping)} skip{'s' * (len(skipping) == 1)} it." if skipping else "."
    note = "CPU seconds of a run that needs the pass, mean over algorithms and seeds; evaluation is not counted."
    return CpuTime(Table("CPU time of a run", headers, tuple(rows), notes=(note,)), sentence)


def _seconds(runs: Sequence[Run]) -> list[float]:
    """CPU seconds of a whole run by part, mean over the runs."""
    sums = [[float(np.nansum(run.column(f"seconds/{part}"))) for part in _PARTS] for run in runs]
    return np.mean(sums, axis=0).tolist() if sums else [0.0] * len(_PARTS)
