"""The `compare` command: options, live progress, and what is said at the end. Heavy imports wait until it runs."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mismatch_plugin.lab.compare import Job

_NEEDED = ("megatron", "transformers", "matplotlib", "jinja2", "tensorboard")
DEFAULT_ALGORITHMS = "0,1,2:token:truncate,3:sequence:truncate"
_DEFAULT_SHOWN = DEFAULT_ALGORITHMS.replace(",", ", ")  # help is broken at spaces; they may be typed, too


def compare(
    algorithms: Annotated[
        str,
        typer.Option(
            help=f"0 to 3, ALGORITHM:LEVEL:MODE, or presets; separated by commas. Default: {_DEFAULT_SHOWN}.",
            show_default=False,
        ),
    ] = DEFAULT_ALGORITHMS,
    seeds: Annotated[int, typer.Option(help="Seeds 0 to N - 1, the same for every algorithm.")] = 4,
    settings: Annotated[
        str | None, typer.Option(help="Mismatch settings: control, int4, stale16, bfloat16. Default: by engine.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run.")] = 280,
    task: Annotated[str, typer.Option(help="What is learned: reverse or swap.")] = "reverse",
    rollout_dtype: Annotated[
        str | None, typer.Option(help="One setting of your own: precision of the rollout engine.")
    ] = None,
    staleness: Annotated[int | None, typer.Option(help="The same: optimizer steps its weights lag behind.")] = None,
    top_p: Annotated[float | None, typer.Option(help="The same: its nucleus filter.")] = None,
    engine: Annotated[str, typer.Option(help="What samples: transformers, or sglang, a real server.")] = "transformers",
    start_server: Annotated[
        bool, typer.Option("--start-server", help="With sglang: start servers on CPU for the time of the comparison.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="With sglang: a server of the lab's model that nobody else uses.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of each run.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages of each run.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks of each run.")] = 1,
    workers: Annotated[int, typer.Option(help="Runs side by side; 0: one a core, with sglang 1.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the run and its report.")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option(help="Go on with the run in that folder.")] = False,
    exact: Annotated[bool, typer.Option(help="Add the tables computed by enumeration, without seeds.")] = True,
) -> None:
    """Train a small model under each algorithm and mismatch, and write a report.

    A real megatron-core model is trained on rollouts of a separate engine that
    computes the same weights in another form: transformers in the same process,
    or an SGLang server that gets the new weights before every rollout batch.
    Ctrl-C leaves a report of what is there; --resume goes on.
    """
    from mismatch_plugin.lab import compare as lab
    from mismatch_plugin.lab.servers import servers_for
    from mismatch_plugin.rollout.server import ServerError, find_python

    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise typer.BadParameter(f"{', '.join(missing)} cannot be imported: pip install 'mismatch-plugin[lab]'.")
    if workers < 0:
        raise typer.BadParameter(f"workers is {workers}: give 1 or more, or 0 for one a core.")
    own = {"rollout_dtype": rollout_dtype, "staleness": staleness, "top_p": top_p}
    own = {name: value for name, value in own.items() if value is not None}
    try:
        _check_engine(engine, start_server, url, workers, lab.DEFAULT_SETTINGS)
        shared = {"engine": engine, "steps": steps, "task": task, "tp": tp, "pp": pp, "cp": cp}
        default = lab.DEFAULT_SETTINGS[engine]
        if url is not None:
            dtype = _dtype_of(url)
            shared["rollout_dtype"] = dtype
            default = dtype if dtype in lab.SETTINGS else "control"
        chosen = _settings(settings, default, lab.SETTINGS, own)
        _check_server_dtype(chosen, shared.get("rollout_dtype"))
        labels = [label.strip() for label in algorithms.split(",") if label.strip()]
        jobs = lab.plan(output, labels, seeds, chosen, shared)
        starts = start_server and not all(job.done for job in jobs)
        if starts:
            find_python()
        description: dict[str, Any] = {"settings": list(chosen), "variants": labels, "seeds": seeds}
        description["lab"] = {**shared, "of_setting": chosen}
        lab.open_folder(output, description, resume)
    except ValidationError as error:
        from mismatch_plugin.config.fields import plain_error

        raise typer.BadParameter(str(plain_error(error, lab.LabSettings))) from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None

    cores = 1 if engine == "sglang" else os.cpu_count() or 1
    count = workers or max(1, cores // (tp * pp * cp))
    typer.echo(
        f"{len(jobs)} runs of {steps} steps on {count} workers: algorithms {', '.join(labels)}; settings "
        f"{', '.join(chosen)}; seeds 0 to {seeds - 1}; into {output}"
    )
    stopped = False
    failures: list[str] = []
    try:
        if starts:
            typer.echo("starting SGLang on CPU")
        with servers_for(jobs, url) as urls:
            failures = _run(jobs, count, urls)
    except ServerError as error:
        failures = [str(error)]
    except KeyboardInterrupt:
        stopped = True
        typer.echo("stopped; writing a report of what is there")
    for sentence in failures:
        typer.echo(f"failed: {sentence}", err=True)
    lab.write_events(jobs)
    if any(job.steps_done for job in jobs):
        from mismatch_plugin.report.data import read_run_folder
        from mismatch_plugin.report.page import build_report, final_table
        from mismatch_plugin.report.statistics import summarise
        from mismatch_plugin.report.terminal import terminal

        final = final_table(summarise(read_run_folder(output)))
        console = terminal()
        console.print(final.to_rich())
        for note in final.notes:
            console.print(note)
        typer.echo(f"report: {build_report(output, exact=exact and not stopped)}")
    if stopped:
        typer.echo(f"go on with: mismatch-plugin compare --resume --output {output} and the same options")
        raise typer.Exit(130)
    if failures:
        raise typer.Exit(1)


def _check_engine(engine: str, start_server: bool, url: str | None, workers: int, engines: Iterable[str]) -> None:
    """Raises ValueError for options that contradict each other."""
    if engine not in engines:
        raise ValueError(f"engine {engine!r} is unknown: choose {' or '.join(engines)}.")
    if engine != "sglang" and (start_server or url is not None):
        raise ValueError(f"{'--start-server' if start_server else '--url'} is for a server: add --engine sglang.")
    if engine == "sglang" and start_server == (url is not None):
        raise ValueError("--engine sglang needs --start-server or --url, and not both.")
    if engine == "sglang" and workers > 1:
        raise ValueError(f"workers is {workers}: one server has one set of weights, so leave it out or give 1.")


def _dtype_of(url: str) -> str:
    """The precision of the server at `url`. Raises ValueError if it does not answer, or does not tell."""
    from mismatch_plugin.lab.servers import server_dtype
    from mismatch_plugin.rollout.address import shown
    from mismatch_plugin.rollout.outcomes import RequestError

    try:
        dtype = server_dtype(url)
    except RequestError as error:
        raise ValueError(f"the server at {shown(url)} does not answer: {error}") from None
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"the server at {shown(url)} computes in {dtype}: start it with --dtype float32, bfloat16 or float16."
        )
    return dtype


def _check_server_dtype(chosen: dict[str, dict[str, Any]], dtype: object) -> None:
    """Raises ValueError if a setting asks for another precision than `dtype`, the server's (None: any will do)."""
    for name, changes in chosen.items():
        wanted = changes.get("rollout_dtype", dtype)
        if dtype is not None and wanted != dtype:
            raise ValueError(
                f"setting {name} is rollout_dtype {wanted}, and the server computes in {dtype}: leave it out, or use "
                f"--start-server, which starts one for each precision."
            )


def _settings(
    names: str | None, default: str, known: dict[str, dict[str, Any]], own: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The chosen mismatch settings by name; with settings of one's own these next to the control."""
    if own and names is not None:
        raise ValueError(f"--settings {names} and {', '.join(own)} are two ways to choose: leave one out.")
    if own:
        return {"control": {}, "_".join(f"{value}" for value in own.values()): own}
    names = default if names is None else names
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise ValueError(f"settings {names!r} names none that exist: choose from {', '.join(known)}.")
    return {name: known[name] for name in chosen}


def _run(jobs: Sequence[Job], workers: int, urls: Mapping[str, str]) -> list[str]:
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

        return run_all(jobs, workers, watch, urls)
