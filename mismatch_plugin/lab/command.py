"""The `compare` command: options, live progress, and what is said at the end. Heavy imports wait until it runs."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mismatch_plugin.lab.chosen import Chosen
    from mismatch_plugin.lab.compare import Job

_DRAWN = ("scipy", "matplotlib", "jinja2")
_MEGATRON = ("megatron", "transformers")


def compare(
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="0 to 3, ALGORITHM:LEVEL:MODE, 0:dual_clip, 2:geo_rs, or presets; separated by commas. Default: those "
            "of each setting.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="How many seeds, the same for every algorithm. Default: 12; 8 with --quick, 4 with transformers or "
            "sglang."
        ),
    ] = None,
    first_seed: Annotated[
        int | None,
        typer.Option(
            help="The first of them. Default: 100 (0 to 9 were used to choose the settings); 0 with transformers or "
            "sglang."
        ),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            help="Mismatch settings, with commas between: control, int2, stale24, stale32, int2_stale8, moe_flips, "
            "int2_long (default: all but the last). With transformers or sglang: control, int4, stale16, bfloat16.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps of a run. Default: 360; 280 with transformers or sglang.")
    ] = None,
    lab: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of the lab's settings (lr=0.003), for all runs; may be given again."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every algorithm of the problem in every setting.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three settings, three algorithms, eight seeds, no cross-check.")
    ] = False,
    trainer: Annotated[
        str, typer.Option(help="batched: many runs in one program; megatron: real megatron-core, run by run.")
    ] = "batched",
    cross_check: Annotated[
        bool, typer.Option(help="End with a few runs of the collapse through real megatron-core.")
    ] = True,
    rollout_dtype: Annotated[
        str | None,
        typer.Option(
            help="One setting of your own, next to the control: precision of the rollout engine, as int4 or bfloat16."
        ),
    ] = None,
    staleness: Annotated[
        int | None, typer.Option(help="The same: optimizer steps that its weights lag behind.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="The same, with transformers or sglang: its top-p filter.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="With megatron, what samples: batched, transformers, or sglang, a real server.")
    ] = "batched",
    start_server: Annotated[
        bool, typer.Option("--start-server", help="With sglang: start servers on CPU for the time of the comparison.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="With sglang: a server of the lab's model that nobody else uses.")
    ] = None,
    tp: Annotated[int, typer.Option(help="With megatron: tensor-parallel ranks of each run.")] = 1,
    pp: Annotated[int, typer.Option(help="With megatron: pipeline stages of each run.")] = 1,
    cp: Annotated[int, typer.Option(help="With megatron: context-parallel ranks of each run.")] = 1,
    workers: Annotated[int, typer.Option(help="Tasks side by side; 0: one a core, with sglang 1.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the run and its report.")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option(help="Go on with the run in that folder.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard events of every run, too.")
    ] = False,
) -> None:
    """Train a small model under each algorithm and mismatch, and write a report.

    A rollout engine samples with weights that are rounded or some steps old,
    and a trainer learns from it under each algorithm, with the same seeds.
    By default many runs share one tensor program, and a few of them are
    repeated through real megatron-core at the end. --trainer megatron runs all
    through it, with --engine transformers or sglang on a Llama.
    Ctrl-C leaves a report of what is there; --resume goes on.
    """
    from mismatch_plugin.lab import compare as runs
    from mismatch_plugin.lab.chosen import choose
    from mismatch_plugin.lab.servers import server_dtype_of, servers_for
    from mismatch_plugin.lab.workers import run_all
    from mismatch_plugin.rollout.server import ServerError, find_python

    if workers < 0:
        raise typer.BadParameter(f"workers is {workers}: give 1 or more, or 0 for one a core.")
    own = {"rollout_dtype": rollout_dtype, "staleness": staleness, "top_p": top_p}
    try:
        _check_engine(trainer, engine, start_server, url, workers)
        chosen = choose(
            trainer=trainer,
            engine=engine,
            algorithms=_listed(algorithms),
            seeds=seeds,
            first_seed=first_seed,
            settings=_listed(settings),
            steps=steps,
            lab=lab or (),
            own={name: value for name, value in own.items() if value is not None},
            layout={name: size for name, size in (("tp", tp), ("pp", pp), ("cp", cp)) if size != 1},
            server_dtype=None if url is None else server_dtype_of(url),
            full=full,
            quick=quick,
            cross_check=cross_check,
        )
        _check_installed(chosen, tensorboard)
        jobs, checked = chosen.jobs(output)
        starts = start_server and not all(job.done for job in jobs)
        if starts:
            find_python()
        runs.open_folder(output, {**chosen.description(), "command": _command()}, resume)
        lock = runs.hold(output)
    except ValidationError as error:
        from mismatch_plugin.config.fields import plain_error
        from mismatch_plugin.lab.settings import LabSettings

        raise typer.BadParameter(str(plain_error(error, LabSettings))) from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None

    cores = 1 if engine == "sglang" else os.cpu_count() or 1
    count = workers or max(1, cores // (tp * pp * cp))
    typer.echo(f"{chosen.said(len(jobs), len(checked))} on {count} workers; into {output}")
    stopped, began = False, time.monotonic()
    failures: list[str] = []
    try:
        if starts:
            typer.echo("starting SGLang on CPU")
        with servers_for(jobs, url) as urls:
            failures = _run([*jobs, *checked], partial(run_all, workers=count, urls=urls))
    except ServerError as error:
        failures = [str(error)]
    except KeyboardInterrupt:
        stopped = True
        typer.echo("stopped; writing a report of what is there")
    for sentence in failures:
        typer.echo(f"failed: {sentence}", err=True)
    if tensorboard:
        runs.write_events([*jobs, *checked])
    try:
        if any(job.steps_done for job in jobs):
            from mismatch_plugin.compare.report import write_report

            typer.echo(write_report(output))
    except OSError as error:  # the runs are there, the room for a page may not be
        failures.append(f"report: {error}")
        typer.echo(f"failed: {failures[-1]}", err=True)
    lock.close()
    typer.echo(_cost(time.monotonic() - began))
    if stopped:
        typer.echo(f"go on with: {_command()} --resume")
        raise typer.Exit(130)
    if failures:
        raise typer.Exit(1)


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


def _command() -> str:
    """The line that was typed."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["mismatch-plugin", *words])


def _check_installed(chosen: Chosen, tensorboard: bool) -> None:
    needed = [*_DRAWN, *(_MEGATRON if chosen.needs_megatron else ()), *(("tensorboard",) if tensorboard else ())]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{', '.join(missing)} cannot be imported: pip install 'mismatch-plugin[lab]'.")


def _check_engine(trainer: str, engine: str, start_server: bool, url: str | None, workers: int) -> None:
    """Raises ValueError for options that contradict each other."""
    if trainer not in ("batched", "megatron"):
        raise ValueError(f"trainer {trainer!r} is unknown: choose batched or megatron.")
    if engine not in ("batched", "transformers", "sglang"):
        raise ValueError(f"engine {engine!r} is unknown: choose batched, transformers or sglang.")
    if engine != "batched" and trainer == "batched":
        raise ValueError(f"--engine {engine} goes with --trainer megatron: add it.")
    if engine != "sglang" and (start_server or url is not None):
        raise ValueError(f"{'--start-server' if start_server else '--url'} is for a server: add --engine sglang.")
    if engine == "sglang" and start_server == (url is not None):
        raise ValueError("--engine sglang needs --start-server or --url, and not both.")
    if engine == "sglang" and workers > 1:
        raise ValueError(f"workers is {workers}: one server has one set of weights, so leave it out or give 1.")


def _cost(seconds: float) -> str:
    """Wall and CPU time and peak memory of what was just run, workers included."""
    import resource

    own, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in (own, workers))
    unit = 1 if sys.platform == "darwin" else 1024
    largest = max(own.ru_maxrss, workers.ru_maxrss) * unit / 2**30
    return f"took {seconds / 60:.1f} min, {cpu / 60:.1f} CPU min; the largest process held {largest:.2f} GiB"


def _run(jobs: Sequence[Job], run_all: Callable[..., list[str]]) -> list[str]:
    """Run everything with a live line: runs done, steps, seconds left, and the newest rewards."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
            left = seconds * (total - steps) / (steps - before) if before < steps < total else None
            finished = sum(job.done for job in current)
            eta = "" if left is None else f", about {left / 60:.0f} min left"
            text = f"{finished} of {len(current)} runs{eta}{_newest(current)}"
            progress.update(bar, completed=steps, description=text)
            if not progress.console.is_terminal and time.monotonic() - shown > 30:
                shown = time.monotonic()
                progress.console.print(text)

        return run_all(jobs, watch=watch)


def _newest(jobs: Iterable[Job]) -> str:
    for job in [job for job in jobs if not job.done and job.steps_done][-1:]:
        return f", {job.setting} {job.variant}: reward {job.last('reward') or 0:.2f}"
    return ""
