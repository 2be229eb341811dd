"""`inspect` of a run's metrics: two verdicts, and pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.diagnose.result import Gate
    from mismatch_plugin.diagnose.run_sources import Source


@dataclass(frozen=True)
class Own:
    """What the user gave in the place of the settings that the run wrote: at most one of the three."""

    config: Path | None = None
    preset: str | None = None
    flags: str | None = None

    def of(self, path: Path) -> tuple[MismatchConfig, str | None]:
        """The settings, and what they come from: those given, else as written next to path, else defaults and None.

        Raises ValueError where several are given, or one cannot be read.
        """
        from mismatch_plugin.diagnose.diagnosis import own_settings

        if (given := own_settings(self.config, self.preset, self.flags)) is None:
            return _written(path)
        if self.config is not None:
            return given, str(self.config)
        return given, f"--flags {self.flags!r}" if self.preset is None else f"--preset {self.preset}"


def inspect_metrics(
    path: Path,
    own: Own,
    run: str | None,
    pictures: Path | None,
    no_pictures: bool,
    as_json: bool,
    host: str,
    gated: bool = False,
    bar: float | None = None,
    show_all: bool = False,
) -> None:
    """Judge a run by the metrics that it wrote, draw them, and end with the exit status.

    gated: the mean k3_kl of the judged steps is compared with the bar (None: the default one), too. show_all: the
    screen has every metric.

    Judged are the newest steps: the last tenth of the run, at least ten. Exit status: 0 sound; 1 where numbers are
    broken, all tokens share a shift (|KL| above 0.1 or a mean ratio outside [0.5, 2] in any judged step), k3 has grown
    more than 100 times, the correction does not hold, a large mismatch is not corrected, or the gate failed; 2 nothing
    to judge; 3 sound, but the gate could not be decided. Raises ValueError, OSError where there is nothing to judge.
    """
    from mismatch_plugin.diagnose.judge import counted, inspect_steps
    from mismatch_plugin.diagnose.recommend import recommend
    from mismatch_plugin.diagnose.run_sources import read_source
    from mismatch_plugin.diagnose.trends import sentence, trend_of
    from mismatch_plugin.report.log import to_json
    from mismatch_plugin.report.table import printable

    if no_pictures and pictures is not None:
        raise ValueError(f"--pictures {pictures} and --no-pictures contradict each other: leave one out.")
    source = read_source(path, run)
    settings, where = own.of(source.path)
    trend = trend_of(source.numbers, source.rows, source.others)
    known = where is not None
    result = inspect_steps(list(source.rows), settings, known, _together(source, settings), trend)
    gate = result.gate(bar) if gated else None
    status = 0 if result.sound and (gate is None or gate.passed) else 1
    if result.sound and gate is not None and gate.passed is None:
        status = 3
    plots = path / "plots" if path.is_dir() else path.with_name(f"{path.stem}_plots")
    drawn, note = ([], "") if no_pictures else _draw(source, settings, pictures or plots)
    figures = result.figures_for_rules()
    advice = None if result.state == "fault" or figures is None else recommend(figures)
    if as_json:
        warnings = [{**vars(warning), "steps": count} for warning, count in result.warnings]
        findings = [
            {"kind": w.metric, "severity": "fault" if w.about != "data" else "note", "confidence": "likely",
             "evidence": f"{w.value:.3g}: {w.meaning} ({counted(count)})", "first": None, "fix": w.advice}
            for w, count in result.warnings
        ]  # fmt: skip
        body = {"verdict": result.state, "headline": result.data, "source": str(source.path), "settings": where}
        if result.grown and trend is not None:
            findings.append({"kind": "growth", "severity": "note", "confidence": "likely", "evidence": str(trend),
                             "first": None, "fix": "find what changed (mismatch-plugin check)"})  # fmt: skip
        body |= {"steps": result.steps, "sound": result.sound, "data": result.data, "correction": result.correction}
        body |= {"findings": findings, "metrics": result.figures, "predictions": [], "warnings": warnings}
        body |= {"recommendation": advice and advice.model_dump(), "trend": trend and trend.to_json()}
        body["gate"] = gate and gate.model_dump()
        body |= {"notes": list(source.notes), "pictures": [str(picture) for picture in drawn]}
        typer.echo(to_json(body, indent=2))
    else:
        for said in source.notes:
            typer.echo(f"note: {printable(said)}.")
        from mismatch_plugin.report.terminal import terminal

        console = terminal()
        console.print(result.verdict)
        if advice is not None and (where is None or not (result.sound or result.correction.startswith("holds"))):
            console.print(f"setting: {advice.setting}: {advice.reasons[0]}. Predictions for it need a dump.")
            console.print(advice.flags[host], soft_wrap=True)  # to be copied: it stays on one line
        console.print(f"trend: {sentence(trend, result.steps)}")
        if gate is not None:
            console.print(_gate_line(gate))
        table = result.table if show_all else result.short
        console.print(table.to_rich(console.width))
        for said in table.notes:
            console.print(said)
        if show_all and result.full is not None:  # three columns: their names are longer
            console.print(result.full.only(*result.full.headers[:3]).to_rich(console.width))
        for warning, count in result.warnings:
            console.print(f"{warning} ({counted(count)})")
        if note:
            typer.echo(note)  # a path stays whole
    raise typer.Exit(status)


def _gate_line(gate: Gate) -> str:
    said = {True: "passed", False: "FAILED", None: "not decided, too few tokens"}[gate.passed]
    value = "k3_kl was not recorded" if math.isnan(gate.value) else f"k3_kl {gate.value:.2g}"
    said = "not decided" if math.isnan(gate.value) else said
    return f"gate: {said}: {value}, bar {gate.bar:g} nat a token, over the steps judged."


def follow_metrics(path: Path, own: Own, interval: float, seconds: float | None) -> None:
    """Follow the report folder of a run that is being written, and end with the exit status of the last verdict."""
    from mismatch_plugin.diagnose.follow import follow
    from mismatch_plugin.report.terminal import terminal

    def settings(file: Path) -> tuple[MismatchConfig, bool]:
        found, where = own.of(file)
        return found, where is not None

    raise typer.Exit(follow(path, settings, terminal(), interval, seconds))


def _together(source: Source, config: MismatchConfig) -> dict[str, float] | None:
    """The metrics of the judged steps as of one batch, where the run wrote their statistics."""
    from mismatch_plugin.diagnose.judge import judged
    from mismatch_plugin.report.log import METRICS
    from mismatch_plugin.report.state import merged_metrics

    return merged_metrics(source.path, config, judged(len(source.rows))) if source.path.name == METRICS else None


def _written(path: Path) -> tuple[MismatchConfig, str | None]:
    """The settings that the run wrote and their file; the defaults and None where there is none."""
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.config.documents import read_mapping
    from mismatch_plugin.report.log import METRICS, SETTINGS

    if path.name == METRICS:  # an export may lie next to files of anything
        written, described = path.with_name(SETTINGS), path.with_name("config.json")
        # Checked when the run began: a preset may hold what has no effect.
        if written.exists():
            return MismatchConfig.build(read_mapping(written)), str(written)
        if described.exists() and isinstance(of_run := read_mapping(described).get("mismatch"), dict):  # of `compare`
            return MismatchConfig.build(of_run), str(described)
    return MismatchConfig(), None


def _draw(source: Source, config: MismatchConfig, folder: Path) -> tuple[list[Path], str]:
    """The pictures that were written, and a sentence about them. The verdict does not need them."""
    try:
        from mismatch_plugin.diagnose.panels import write_panels
    except ImportError as error:
        return [], f"no pictures: {error}: pip install 'mismatch-plugin[lab]'"
    try:
        from mismatch_plugin.core.units import units_of

        paths = write_panels(source.rows, source.numbers, folder, units=units_of(config).ess)
    except OSError as error:
        return [], f"no pictures: {folder} cannot be written ({error.strerror}); choose another with --pictures"
    return paths, f"pictures: {paths[0]}, and {len(paths) - 1} panels next to it"
