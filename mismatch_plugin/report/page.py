"""From a run folder to `report.html`: one file that opens anywhere, without a network, complete or cut short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import mismatch_plugin
from mismatch_plugin.files import encodable, write_whole
from mismatch_plugin.report.curves import CURVES, GUIDE
from mismatch_plugin.report.data import BASELINE, HELD_OUT, Run, RunFolder, read_run_folder, short
from mismatch_plugin.report.exact import cached_tables
from mismatch_plugin.report.findings import NAMES
from mismatch_plugin.report.measured import cpu_seconds, mismatch_table, moved_note
from mismatch_plugin.report.overview import baseline_of, final_table, focus, headline, what_did_not_help
from mismatch_plugin.report.results import cross_check, results_table
from mismatch_plugin.report.run_info import AboutSetting
from mismatch_plugin.report.run_settings import about_algorithms, about_seeds, about_task, changes, settings_tables
from mismatch_plugin.report.statistics import SettingSummary, summarise
from mismatch_plugin.report.table import Table

if TYPE_CHECKING:
    from mismatch_plugin.report.plots import Picture

TEMPLATE = "report/report.html.j2"


@dataclass
class SettingPart:
    """What the page shows of one setting.

    zeros, absent: titles of panels that hold zeros alone, or for which nothing was recorded. lower: what did not help.
    """

    about: AboutSetting
    changes: str
    task: str
    summary: SettingSummary
    results: Table
    mismatch: Table
    lower: str
    moved: str
    outcome: list[Picture] = field(default_factory=list)
    curves: list[Picture] = field(default_factory=list)
    guide: list[Picture] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @property
    def pictures(self) -> list[Picture]:
        """All of them."""
        return [*self.outcome, *self.curves, *self.guide]


def build_report(run_folder: str | Path, *, exact: bool = True) -> Path:
    """Read a run folder and write its page, whatever it holds (`write_page`). Raises also FileNotFoundError where there
    is no such folder."""
    folder = read_run_folder(run_folder)
    return write_page(folder, summarise(folder), exact=exact)


def write_page(folder: RunFolder, summaries: Sequence[SettingSummary], *, exact: bool = True) -> Path:
    """Write `RUN/report.html` and `RUN/plots/*.png`, and return the page's path.

    exact: include the seed-free tables; computed the first time (some ten seconds), then kept in the folder.
    The old page stays until the new one is whole. Raises ImportError where matplotlib or jinja2 is missing, naming the
    extra.
    """
    try:
        from mismatch_plugin.report import plots
        from mismatch_plugin.report.mechanism import mechanism
        from mismatch_plugin.report.templates import environment
    except ImportError as error:
        raise ImportError(f"{error}: a report needs the extra: pip install 'mismatch-plugin[lab]'") from error
    parts = [_setting_part(folder, summary) for summary in summaries]
    for part in parts[1:]:  # what holds for every setting is said once
        part.results, part.mismatch = replace(part.results, notes=()), replace(part.mismatch, notes=())
    judged = any(folder.has(folder.source(name)) for name in NAMES)
    chosen = focus(summaries) if judged else None
    first, shown = None, []
    if chosen is not None:
        first = plots.Plotter(folder, chosen.setting).outcome(chosen.measure, seeds_of=BASELINE)
        shown = mechanism(folder, chosen.setting)
    collapse = [first] if first else []
    pictures = [picture for part in parts for picture in part.pictures] + [one.picture for one in shown]
    plots.save([*pictures, *(replace(picture, name="collapse.png") for picture in collapse)], folder.root / "plots")
    titles = {part.summary.setting: part.about.title for part in parts}
    html = (
        environment()
        .get_template(TEMPLATE)
        .render(
            folder=folder,
            parts=parts,
            title=str(folder.info.get("title", "Comparison of mismatch corrections")),
            judged=judged,
            intro=_introduction(folder),
            opening=_opening(folder, summaries),
            chosen=chosen,
            first=first,
            collapsed=bool(chosen and (base := baseline_of(chosen)) and base.collapsed_runs),
            headline=headline(chosen) if chosen else "",
            titles=titles,
            mechanism=shown,
            overview=final_table(summaries, titles),
            algorithms=about_algorithms(folder),
            measured=_how_measured(folder),
            exact_tables=cached_tables(folder.root) if exact else [],
            check=cross_check(folder, summaries),
            cpu=cpu_seconds(folder, titles),
            seeds=about_seeds(folder),
            settings_tables=settings_tables(folder),
            made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            version=mismatch_plugin.__version__,
        )
    )
    page = folder.root / "report.html"
    write_whole(page, encodable(html))
    return page


def _introduction(folder: RunFolder) -> list[str]:
    """What `run.json` says that the page is about, as reports of runs made elsewhere have it."""
    about = folder.info.get("about")
    return [str(sentence) for sentence in about] if isinstance(about, list) else []


def _opening(folder: RunFolder, summaries: Sequence[SettingSummary]) -> str:
    """The task, where all settings have the same, and how to read the sentences that follow."""
    tasks = {folder.about(summary.setting).task for summary in summaries} - {""}
    name = NAMES[summaries[0].measure] if summaries else NAMES["exact"]
    return (
        f"{tasks.pop() if len(tasks) == 1 else ''} Numbers are the mean {name} over seeds; those with a sign are the "
        "difference to uncorrected PPO (algorithm 0)."
    ).strip()


def _how_measured(folder: RunFolder) -> list[str]:
    """Sentences: where the outcome is measured, what a final value is, and which outcomes were named before the run."""
    where = "on held-out prompts" if folder.source("exact").startswith(HELD_OUT) else "on the training batches"
    sentences = [
        f"Results are measured {where}. A final value is the mean of the last tenth of a run's evaluations, at least "
        "three; ± is one standard error over seeds. Every difference is paired with algorithm 0 on the same seed."
    ]
    if named := folder.outcomes:
        secondary = f"; secondary: {', '.join(named.secondary)}" if named.secondary else ""
        sentences.append(f"Outcomes named before the run: {named.primary}{secondary}.")
    check = folder.cross_check.diverged if folder.cross_check is not None else []
    broken = ((folder.diverged, ""), (check, "in the cross-check "))
    return sentences + [_diverged(runs, where) for runs, where in broken if runs]


def _diverged(runs: Sequence[Run], where: str) -> str:
    listed = "; ".join(f"{run.setting}, {short(run.variant)}, seed {run.seed}" for run in runs)
    return f"Diverged {where}(the gradient was no longer finite; 0 from there on, and counted as collapsed): {listed}."


def _setting_part(folder: RunFolder, summary: SettingSummary) -> SettingPart:
    from mismatch_plugin.report import plots

    setting = summary.setting
    plotter = plots.Plotter(folder, setting)
    about = folder.about(setting)
    part = SettingPart(
        about,
        changes(about),
        about_task(folder, setting),
        summary,
        results_table(summary, about.title),
        mismatch_table(folder, setting, about.title),
        what_did_not_help(summary),
        moved_note(folder, setting),
    )
    outcome = [plotter.outcome(summary.measure), plotter.differences(summary)]
    part.outcome = [picture for picture in outcome if picture is not None]
    for panels, where in ((CURVES, part.curves), (GUIDE, part.guide)):
        for panel in panels:
            picture = plotter.panel(panel)
            if picture is not None:
                where.append(picture)
            else:
                (part.zeros if plotter.all_zero(panel) else part.absent).append(panel.title)
    quantiles = plotter.quantiles()
    part.curves += [quantiles] if quantiles else []
    return part
