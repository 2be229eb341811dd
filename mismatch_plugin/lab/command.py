"""The `compare` command: options, live progress, and what is said at the end. Heavy imports wait until it runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mismatch_plugin.lab.compare import Job

DEFAULT_ALGORITHMS = "0,1,2:token:truncate,3:sequence:truncate"


def compare(
    algorithms: Annotated[
        str, typer.Option(help="0 to 3, ALGORITHM:LEVEL:MODE, or presets; separated by commas.")
    ] = DEFAULT_ALGORITHMS,
    seeds: Annotated[int, typer.Option(help="Seeds 0 to N - 1, the same for every algorithm.")] = 4,
    settings: Annotated[str, typer.Option(help="Mismatch settings: control, int4, stale16.")] = "control,int4,stale16",
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 200,
    task: Annotated[str, typer.Option(help="What is learned: reverse or swap.")] = "reverse",
    rollout_dtype: Annotated[
        str | None, typer.Option(help="One setting of your own: precision of the rollout engine.")
    ] = None,
    staleness: Annotated[int | None, typer.Option(help="The same: optimizer steps its weights lag behind.")] = None,
    top_p: Annotated[float | None, typer.Option(help="The same: its nucleus filter.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each run.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages of each run.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks of each run.")] = 1,
    workers: Annotated[int, typer.Option(help="Runs side by side; 0: one a core.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the run and its report.")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option(help="Go on with the run in that folder.")] = False,
    exact: Annotated[bool, typer.Option(help="Add the tables computed by enumeration, without seeds.")] = True,
) -> None:
    """Train a small model under each algorithm and mismatch, and write a report.

    A real megatron-core model is trained on rollouts of a separate engine that
    computes the same weights in another form. Ctrl-C leaves a report of what is
    there; --resume goes on.
    """
    from mismatch_plugin.lab import compare as lab

    if workers < 0:
        raise typer.BadParameter(f"workers is {workers}: give 1 or more, or 0 for one a core.")
    own = {"rollout_dtype": rollout_dtype, "staleness": staleness, "top_p": top_p}
    own = {name: value for name, value in own.items() if value is not None}
    try:
        chosen = _settings(settings, lab.SETTINGS, own)
        shared = {"steps": steps, "task": task, "tp": tp, "pp": pp, "cp": cp}
        labels = [label.strip() for label in algorithms.split(",") if label.strip()]
        jobs = lab.plan(output, labels, seeds, chosen, shared)
        description: dict[str, Any] = {"settings": list(chosen), "variants": labels, "seeds": seeds}
        description["lab"] = {**shared, "of_setting": chosen}
        lab.open_folder(output, description, resume)
    except ValidationError as error:
        sentences = [
            f"{'.'.join(map(str, fault['loc']))} is {fault['input']!r}: {fault['msg']}" for fault in error.errors()
        ]
        raise typer.BadParameter("; ".join(sentences)) from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None

    count = workers or max(1, (os.cpu_count() or 1) // (tp * pp * cp))
    typer.echo(
        f"{len(jobs)} runs of {steps} steps on {count} workers: algorithms {', '.join(labels)}; settings "
        f"{', '.join(chosen)}; seeds 0 to {seeds - 1}; into {output}"
    )
    stopped = False
    failures: list[str] = []
    try:
        failures = _run(jobs, count)
    except KeyboardInterrupt:
        stopped = True
        typer.echo("stopped; writing a report of what is there")
    for sentence in failures:
        typer.echo(f"failed: {sentence}", err=True)
    lab.write_events(jobs)
    if any(job.steps_done for job in jobs):
        from mismatch_plugin.report.page import build_report

        typer.echo(f"report: {build_report(output, exact=exact and not stopped)}")
    if stopped:
        typer.echo(f"go on with: mismatch-plugin compare --resume --output {output} and the same options")
        raise typer.Exit(130)
    if failures:
        raise typer.Exit(1)


def _settings(names: str, known: dict[str, dict[str, Any]], own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chosen mismatch settings by name; with settings of one's own these beside the control."""
    if own:
        return {"control": {}, "_".join(f"{value}" for value in own.values()): own}
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise ValueError(f"settings {names!r} names none that exist: choose from {', '.join(known)}.")
    return {name: known[name] for name in chosen}


def _run(jobs: Sequence[Job], workers: int) -> list[str]:
    """Run everything with a live line: runs done, steps, seconds left, and the newest rewards."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from mismatch_plugin.lab.compare import run_all

    total = sum(job.settings.steps for job in jobs)
    before = sum(job.steps_done for job in jobs)
    shown = 0.0
    percentage = TextColumn("{task.percentage:>3.0f}%")
    columns = (TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("starting", total=total)

        def watch(current: Sequence[Job], seconds: float) -> None:
            nonlocal shown
            steps = sum(min(job.steps_done, job.settings.steps) for job in current)
            left = seconds * (total - steps) / (steps - before) if steps > before else None
            reward = ""
            for job in [job for job in current if job.steps_done and not job.done][-1:]:
                reward = f", {job.setting} {job.variant}: reward {job.last('reward') or 0:.2f}"
            finished = sum(job.done for job in current)
            eta = "" if left is None else f", about {left / 60:.0f} min left"
            text = f"{finished} of {len(current)} runs{eta}{reward}"
            progress.update(bar, completed=steps, description=text)
            if not progress.console.is_terminal and time.monotonic() - shown > 30:
                shown = time.monotonic()
                progress.console.print(text)

        return run_all(jobs, workers, watch)
