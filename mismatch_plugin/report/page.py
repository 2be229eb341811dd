"""From a run folder to `report.html`: one file that opens anywhere, without a network, complete or cut short."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import mismatch_plugin
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.files import write_whole
from mismatch_plugin.report.curves import CURVES, GUIDE
from mismatch_plugin.report.data import (
    BASELINE,
    HELD_OUT,
    RunFolder,
    describe,
    mean_over,
    mean_seconds,
    read_run_folder,
    short,
)
from mismatch_plugin.report.exact import cached_tables
from mismatch_plugin.report.run_settings import settings_tables
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
from mismatch_plugin.report.table import NOTHING, Table

if TYPE_CHECKING:
    from mismatch_plugin.report.plots import Picture

TEMPLATE = "report/report.html.j2"
_MEASURES = {"exact": "exact match", "reward": "reward"}


@dataclass
class SettingPart:
    """What the page shows of one setting. absent: titles of pictures for which nothing was recorded."""

    name: str
    summary: SettingSummary
    results: Table
    mismatch: Table
    seconds: Table
    pictures: list[Picture] = field(default_factory=list)
    guide: list[Picture] = field(default_factory=list)
    quantiles: list[Picture] = field(default_factory=list)
    times: list[Picture] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def build_report(run_folder: str | Path, *, exact: bool = True) -> Path:
    """Write `RUN/report.html` and `RUN/plots/*.png` from whatever the run folder holds, and return the page's path.

    exact: include the seed-free tables; computed the first time (some ten seconds), then kept in the folder.
    The old page stays until the new one is whole. Raises: FileNotFoundError where there is no such folder;
    ImportError where matplotlib or jinja2 is missing, naming the extra.
    """
    try:
        from mismatch_plugin.report import plots
        from mismatch_plugin.report.overview import overview
        from mismatch_plugin.report.templates import environment
    except ImportError as error:
        raise ImportError(f"{error}: a report needs the extra: pip install 'mismatch-plugin[lab]'") from error
    folder = read_run_folder(run_folder)
    summaries = summarise(folder)
    parts = [_setting_part(folder, summary) for summary in summaries]
    for part in parts[1:]:  # what holds for every setting is said once
        part.results, part.mismatch = replace(part.results, notes=()), replace(part.mismatch, notes=())
        part.seconds = replace(part.seconds, notes=())
    first = overview(folder)
    plots.save([first] if first else [], folder.root / "plots")
    for part in parts:
        plots.save([*part.pictures, *part.guide, *part.quantiles, *part.times], folder.root / "plots")
    html = (
        environment()
        .get_template(TEMPLATE)
        .render(
            folder=folder,
            parts=parts,
            title=str(folder.info.get("title", "Comparison of mismatch corrections")),
            judged=any(folder.has(folder.source(name)) for name in _MEASURES),
            timed=any(part.seconds.rows for part in parts),
            intro=_introduction(folder),
            first=first,
            overview=final_table(summaries),
            exact_tables=cached_tables(folder.root) if exact else [],
            settings_tables=settings_tables(folder),
            skipped=_skipped(folder, parts),
            made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            version=mismatch_plugin.__version__,
        )
    )
    page = folder.root / "report.html"
    write_whole(page, html)
    return page


def _introduction(folder: RunFolder) -> list[str]:
    """What the page is about: what `run.json` says of it, else what `compare` does."""
    about = folder.info.get("about")
    if isinstance(about, list):
        return [str(sentence) for sentence in about]
    held_out = folder.source("exact").startswith(HELD_OUT)
    seeds = folder.seeds
    which = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{len(seeds)} seed"
    where = "on held-out prompts" if held_out else "on the training batches"
    count, settings = len(folder.variants), len(folder.settings)
    differ = "s that differ in how far the two engines are apart" if settings != 1 else ""
    return [
        f"{count} way{'s' * (count != 1)} of correcting the mismatch between rollout engine and trainer "
        f"{'was' if count == 1 else 'were'} trained on the same small task, with {which}, in {settings} "
        f"setting{differ}.",
        f"Results are measured {where}; a final value is the mean of the last tenth of a run's evaluations, and ± is "
        "one standard error over seeds.",
        "Every difference is paired with algorithm 0 on the same seed; no seed was chosen, and a difference that may "
        "be chance is called that.",
    ]


def _setting_part(folder: RunFolder, summary: SettingSummary) -> SettingPart:
    from mismatch_plugin.report import plots

    plotter = plots.Plotter(folder, summary.setting)
    part = SettingPart(
        summary.setting,
        summary,
        _results_table(summary),
        _mismatch_table(folder, summary.setting),
        _seconds_table(folder, summary.setting),
    )

    def add(where: list[Picture], title: str, picture: Picture | None) -> None:
        if picture is None:
            part.absent.append(title)
        else:
            where.append(picture)

    add(part.pictures, "exact match", plotter.outcome("exact", "Exact match"))
    add(part.pictures, "reward", plotter.outcome("reward", "Reward"))
    add(part.pictures, "difference to algorithm 0", plotter.differences(summary))
    for panel in CURVES:
        add(part.pictures, panel.title, plotter.panel(panel))
    for panel in GUIDE:
        add(part.guide, panel.title, plotter.panel(panel))
    add(part.quantiles, "log-ratio quantiles (metrics level full)", plotter.quantiles())
    add(part.times, "wall time", plotter.seconds())
    return part


def _plus_minus(m: Mean, digits: int = 3) -> str:
    if not m.n:
        return NOTHING
    return number(m.mean, digits) + (f" ± {number(m.error, digits)}" if m.n > 1 else "")


def final_table(summaries: list[SettingSummary]) -> Table:
    """Final values, one row a variant and one column a setting."""
    measure = _MEASURES[summaries[0].measure] if summaries else "exact match"
    rows: dict[str, list[str]] = {}
    for summary in summaries:
        for s in summary.variants:
            mark = ""
            if s.difference is not None and s.difference.verdict == "significant":
                mark = " ▲" if s.difference.mean > 0 else " ▼"
            cell = _plus_minus(s.final[summary.measure], 2) + mark
            rows.setdefault(s.variant, []).append(cell)
    notes = (
        f"Mean {measure} at the end ± one standard error over seeds, finished runs only. ▲ significantly higher, "
        "▼ significantly lower than algorithm 0 in that column; no mark: no significant difference.",
    )
    headers = ("algorithm", *(summary.setting for summary in summaries))
    return Table(f"Final {measure}", headers, tuple((describe(v), *cells) for v, cells in rows.items()), notes=notes)


def _results_table(summary: SettingSummary) -> Table:
    """Everything measured in one setting."""
    measure = _MEASURES[summary.measure]

    def row(s: VariantSummary) -> tuple[str, ...]:
        other = s.final["reward"] if summary.measure == "exact" else None
        return (
            *(short(s.variant), str(s.seeds), _plus_minus(s.final[summary.measure])),
            *_difference_cells(s.difference, baseline=s.variant == BASELINE),
            *(_plus_minus(s.area), _error_cell(s.area_difference), number(s.drawdown.mean)),
            *([_plus_minus(other)] if other is not None else []),
        )

    headers = (
        *("algorithm", "seeds", measure, "minus algorithm 0", "95 % interval", "p (Holm)", "verdict"),
        *("area under curve", "area minus algorithm 0", "worst drawdown"),
        *(["reward"] if summary.measure == "exact" else []),
    )
    notes = (
        f"{measure.capitalize()} and differences at the end of the run. Intervals are Student's t, each by itself; "
        "p-values are corrected by Holm's method for the comparisons of this table. Not corrected: the number of "
        "tables, and the columns after the verdict.",
        "Area under the curve: the mean height of the curve over the steps. Worst drawdown: the largest fall below an "
        "earlier value of the same run, mean over seeds; noise of single evaluations adds to it.",
    )
    return Table(f"Results, {summary.setting}", headers, tuple(map(row, summary.variants)), notes=notes)


def _difference_cells(d: Paired | None, baseline: bool) -> tuple[str, ...]:
    if d is None or not d.n:
        return (NOTHING, NOTHING, NOTHING, "the reference" if baseline else "not compared")
    interval = f"{signed(d.low)} to {signed(d.high)}" if d.n > 1 else NOTHING
    verdict = "same values" if d.verdict == "same" else d.verdict
    return (_error_cell(d), interval, p_value(d.p_holm), verdict)


def _error_cell(d: Paired | None) -> str:
    if d is None or not d.n:
        return NOTHING
    return signed(d.mean) + (f" ± {number(d.error)}" if d.n > 1 else "")


def _mismatch_table(folder: RunFolder, setting: str) -> Table:
    """How far apart the policies were, and what the correction did about it: means over steps and seeds."""
    rows = []
    size = folder.recorded(f"{PREFIX}rollout_is_ratio_eff_sample_size", f"{PREFIX}rollout_is_eff_sample_size")
    for variant in folder.variants:
        runs = folder.shown(setting, variant)
        norms = [values for run in runs if len(values := run.curve("grad_norm")[1])]
        largest = max((float(values.max()) for values in norms), default=math.nan)
        accepted = mean_over(runs, f"{PREFIX}accepted_token_fraction")
        rows.append(
            (
                short(variant),
                number(mean_over(runs, f"{PREFIX}kl"), 4),
                number(mean_over(runs, size), 2),
                number(mean_over(runs, f"{PREFIX}rollout_is_weight_after_mean"), 2),
                number(mean_over(runs, f"{PREFIX}rollout_is_weight_after_eff_sample_size"), 2),
                number(100 * (1 - accepted), 1) + ("" if math.isnan(accepted) else " %"),
                number(float(np.median(np.concatenate(norms))) if norms else math.nan, 2),
                number(largest, 1),
            )
        )
    headers = (
        *("algorithm", "KL, nat a token", "ESS of the ratio", "mean weight used", "ESS of weights used"),
        *("rejected tokens", "median gradient norm", "largest gradient norm"),
    )
    notes = ("Means over all steps and seeds; gradient norms are before clipping, the largest is over all seeds.",)
    return Table(f"Mismatch and weights, {setting}", headers, tuple(rows), notes=notes)


def _seconds_table(folder: RunFolder, setting: str) -> Table:
    """Wall time of a step by part, and whether the old-log-prob pass ran."""
    times = {v: mean_seconds(runs) for v in folder.variants if (runs := folder.shown(setting, v))}
    base = sum(times.get(BASELINE, {}).values())
    rows = []
    for variant, parts in times.items():
        total = sum(parts.values())
        if not total:
            continue
        change = f"{signed(100 * (total / base - 1), 0)} %" if base and variant != BASELINE else NOTHING
        ran = "ran" if parts["old_log_probs"] else "skipped"
        cells = (number(parts[name]) for name in ("rollout", "old_log_probs", "train"))
        rows.append((short(variant), *cells, number(total), change, ran))
    headers = (
        *("algorithm", "rollout, s", "old log-probs, s", "train, s", "step, s"),
        *("step against algorithm 0", "old-log-prob pass"),
    )
    notes = ("Means over all steps and seeds. Runs that share a machine slow each other down.",)
    return Table(f"Wall time, {setting}", headers, tuple(rows), notes=notes)


def _skipped(folder: RunFolder, parts: list[SettingPart]) -> list[str]:
    """Sentences: who skipped the old-log-prob pass, and what share of a step it is for algorithm 0."""
    sentences = []
    for part in parts:
        skipping = [row[0] for row in part.seconds.rows if row[-1] == "skipped"]
        base = next((row for row in part.seconds.rows if row[0] == short(BASELINE)), None)
        if not skipping or base is None or base[-1] == "skipped":
            continue
        share = 100 * float(base[2]) / float(base[4])
        sentences.append(
            f"{part.name}: the old-log-prob pass takes {share:.0f} % of a step of algorithm 0; "
            f"{'; '.join(skipping)} skip{'s' * (len(skipping) == 1)} it."
        )
    return sentences
