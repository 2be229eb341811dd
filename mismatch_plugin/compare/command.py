"""The `compare` command: what its options choose, the folder of the runs, and the processes that fill it.

RUN/run.json                          what was chosen: to go on with it, the same must be chosen again
RUN/<setting>/<variant>/seed<k>/      config.json, metrics.jsonl (the records of `Runs.steps`), at the end done.json
RUN/.warm/                            warm weights, a file a seed

A run that was cut, or whose files are damaged, is made again from its start, with the same numbers.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import typer
from pydantic import ValidationError

import mismatch_plugin as mp
from mismatch_plugin.compare import experiments
from mismatch_plugin.compare.experiments import Setting, Settings, get_task, variant_config, variant_name
from mismatch_plugin.compare.loop import Runs, warm_weights
from mismatch_plugin.config.fields import plain_error
from mismatch_plugin.files import lock_file, read_json_object, write_whole
from mismatch_plugin.report.log import differences, to_json

CONFIG, METRICS, DONE, WARM = "config.json", "metrics.jsonl", "done.json", ".warm"
UNFINISHED = 4
"""Exit status where some runs failed: 1 would be a fault that was found."""
BLOCK = 24
"""Runs in one tensor program: more are not faster."""


@dataclass(frozen=True)
class Run:
    """One run, and its folder."""

    folder: Path
    setting: str
    variant: str
    seed: int
    settings: Settings
    config: mp.MismatchConfig

    @property
    def finished(self) -> bool:
        """Whether it ended, and its files are whole."""
        try:
            end = read_json_object(self.folder / DONE)["step"]
            return json.loads((self.folder / METRICS).read_bytes().splitlines()[-1])["step"] == end
        except (OSError, ValueError, LookupError, TypeError):
            return False


Block = Sequence[Run]
"""Runs of one tensor program: whole seeds of one setting, each with every variant."""


def compare(
    algorithms: Annotated[
        str | None,
        typer.Option(help="PPO, bypass, dual_clip, geo_rs_token_tis (bounds 0.8 to 1.25), presets, 0 to 3 or "
                     "ALGORITHM:LEVEL:MODE, with commas between. Default: those of each setting.", show_default=False),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=10_000, help="How many. Default: 12; 8 with --quick.")] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="0 to 9 were used to choose the settings.")] = 100,
    settings: Annotated[
        str | None,
        typer.Option(help="Mismatch settings, with commas between: control, int2, stale24, stale32, int2_stale8, "
                     "moe_flips, int2_long (default: all but the last), or your own: staleness=9+lr=1e-3.",
                     show_default=False),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of a run. Default: 360.")] = None,
    lab: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of the problem (lr=0.001), for all runs; may be given again.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every algorithm of the problem in every setting.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Three settings, three algorithms, eight seeds.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes side by side; 0: one a core.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the runs and their report.")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option(help="Go on with the runs in that folder.")] = False,
) -> None:  # fmt: skip
    """Train a small model under each algorithm and mismatch, and write a report.

    A rollout engine samples with weights that are rounded or some steps old,
    and a trainer learns from it under each algorithm, with the same seeds.
    Ctrl-C leaves a report of what is there; --resume goes on.
    """
    try:
        if missing := [name for name in ("matplotlib", "jinja2", "scipy") if importlib.util.find_spec(name) is None]:
            raise ValueError(f"{', '.join(missing)} cannot be imported: pip install 'mismatch-plugin[lab]'.")
        given = [*(lab or ()), *([] if steps is None else [f"steps={steps}"])]
        chosen = choose(_listed(algorithms), seeds, first_seed, _listed(settings), given, full, quick)
        planned = blocks(output, chosen)
        open_folder(output, chosen, resume)
        lock = lock_file(output / ".lock")
    except BlockingIOError:
        said = f"another compare is writing to {output}: wait for it, or choose another --output."
        raise typer.BadParameter(said) from None
    except ValidationError as error:
        raise typer.BadParameter(str(plain_error(error, Settings))) from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    from mismatch_plugin.compare.report import write_report  # its libraries are an extra

    count, began, failures, stopped = workers or os.cpu_count() or 1, time.monotonic(), list[str](), False
    typer.echo(f"{sum(map(len, planned))} runs on {count} workers; into {output}")
    try:
        failures = run_all(planned, output / WARM, count)
    except KeyboardInterrupt:
        stopped = True
        typer.echo("stopped; writing a report of what is there")
    try:
        typer.echo(write_report(output))
    except OSError as error:  # the runs are there, the room for a page may not be
        failures.append(f"report: {error}")
    for sentence in failures:
        typer.echo(f"failed: {sentence}", err=True)
    if lock is not None:
        lock.close()
    typer.echo(f"report: {output / 'report.html'}; took {(time.monotonic() - began) / 60:.1f} min")
    if stopped:
        typer.echo(f"go on with: {_command()} --resume")
    if stopped or failures:
        raise typer.Exit(130 if stopped else UNFINISHED)


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


def _command() -> str:
    """The line that was typed."""
    return shlex.join(["mismatch-plugin", *(word for word in sys.argv[1:] if word != "--resume")])


def choose(
    algorithms: Sequence[str] | None,
    seeds: int | None,
    first_seed: int,
    settings: Sequence[str] | None,
    given: Sequence[str],
    full: bool,
    quick: bool,
) -> dict[str, Any]:
    """What the options mean, as run.json has it. given: NAME=VALUE for all runs.

    Raises ValueError for options that contradict each other or name what is not there.
    """
    if (full and (quick or algorithms is not None)) or (quick and settings is not None):
        raise ValueError("--full chooses the algorithms and --quick the settings: leave out what chooses them, too.")
    known, fields = {**experiments.SETTINGS, **experiments.MORE_SETTINGS}, _fields(given)
    names = settings if settings is not None else experiments.QUICK if quick else tuple(experiments.SETTINGS)
    for name in names:
        if "=" in name:  # a setting of one's own
            variants = experiments.SETTINGS["control"].variants
            known[name] = Setting(name.replace("+", ", "), "Given by options.", _fields(name.split("+")), variants)
    if not 0 < len(set(names) & known.keys()) == len(names):
        raise ValueError(f"settings {','.join(names)!r}: give each once, and choose from {', '.join(known)}.")
    chosen = {name: known[name] for name in names}
    for name, setting in chosen.items():
        if both := sorted(fields.keys() & setting.changes):
            raise ValueError(f"--lab {both[0]}: setting {name} has its own, {setting.changes[both[0]]}: leave one out.")
    tasks = {s: get_task(Settings.model_validate({**fields, **of.changes}).task) for s, of in chosen.items()}

    if algorithms is None and (full or quick):
        algorithms = experiments.VARIANTS if full else experiments.SETTINGS["control"].variants
    labels = None if algorithms is None else [variant_name(label) for label in algorithms]
    if labels is not None and not 0 < len(set(labels)) == len(labels):
        raise ValueError(f"algorithms {','.join(labels)!r} is empty or names one twice: give each once.")
    plan = {name: setting.variants if labels is None else labels for name, setting in chosen.items()}

    count = seeds if seeds is not None else experiments.QUICK_SEEDS if quick else experiments.SEEDS
    numbers = list(range(first_seed, first_seed + count))
    used = [str(seed) for seed in numbers if seed in experiments.CHOSEN_ON]
    changed = f" Changed for all settings: {', '.join(given)}." if given else ""
    return {
        "command": _command(),
        "settings": list(chosen),
        "variants": list(dict.fromkeys(label for labels in plan.values() for label in labels)),
        "seeds": numbers,
        "plan": {name: list(labels) for name, labels in plan.items()},
        "about_settings": {
            name: {"title": s.title, "what": s.what + changed, "task": tasks[name].about, "changes": dict(s.changes)}
            for name, s in chosen.items()
        },
        "about_seeds": f"Learning rate, staleness and precision were chosen on seeds 0 to 9; of those reported here, "
        f"{', '.join(used) or 'none'} {'are' if len(used) > 1 else 'is'} among them.",
        "lab": {**Settings.model_validate({}).model_dump(mode="json"), **fields},
    }


def _fields(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as fields of Settings. Raises ValueError for what is no field, has no value, or is given twice."""
    fields: dict[str, Any] = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or name not in Settings.model_fields or name in fields:
            raise ValueError(f"{entry}: write NAME=VALUE, each once, with one of {', '.join(Settings.model_fields)}.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def blocks(folder: Path, chosen: Mapping[str, Any]) -> list[Block]:
    """What a worker runs at a time: about BLOCK runs; the first seeds of every setting come first.

    Blocks follow from what was chosen, not from what is done: one that was cut runs again as a whole.
    """
    found: list[tuple[int, Block]] = []
    seeds: list[int] = chosen["seeds"]
    for name, labels in chosen["plan"].items():
        settings = Settings.model_validate({**chosen["lab"], **chosen["about_settings"][name]["changes"]})
        configs = {label: variant_config(label) for label in labels}
        count = -(-len(seeds) // max(1, BLOCK // len(labels)))
        for part in range(count):
            own = seeds[part * len(seeds) // count : (part + 1) * len(seeds) // count]
            block = [
                Run(folder / name / label.replace(":", "_") / f"seed{seed}", name, label, seed, settings, config)
                for label, config in configs.items()
                for seed in own
            ]
            found.append((part, block))
    return [block for _, block in sorted(found, key=lambda entry: entry[0])]


def open_folder(folder: Path, chosen: dict[str, Any], resume: bool) -> None:
    """Make the run folder, or take it up again. Raises ValueError where it holds another run or something else."""
    record = folder / "run.json"
    if not record.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no run: choose another --output.")
        folder.mkdir(parents=True, exist_ok=True)
        versions = {"python": platform.python_version(), "torch": torch.__version__, "mismatch-plugin": mp.__version__}
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_whole(record, json.dumps({**chosen, "versions": versions, "started": started}, indent=2) + "\n")
        return
    if not resume:
        raise ValueError(f"{folder} holds a run already: add --resume to go on with it, or choose another --output.")
    before = read_json_object(record)
    same = ("settings", "plan", "seeds", "lab", "about_settings")
    for name, old, new in differences({key: before.get(key) for key in same}, {key: chosen[key] for key in same}):
        raise ValueError(
            f"{folder} holds a run with {name} {old!s:.80}, now {new!s:.80}: resume it with the same, or choose "
            f"another --output."
        )


def run_block(block: Block, warm: Path, report: Callable[[int], None]) -> None:
    """Train the runs of a block in one program, into their folders. report: gets the steps made, of all runs.

    A run whose gradient stopped being finite is `diverged` in done.json: its weights stayed as they were.
    """
    settings, seeds, start = block[0].settings, list(dict.fromkeys(run.seed for run in block)), time.process_time()
    runs = Runs(settings, seeds, [run.config for run in block[:: len(seeds)]], warm_weights(settings, seeds, warm))
    with ExitStack() as stack:
        files: list[IO[str]] = []
        for run in block:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / DONE).unlink(missing_ok=True)
            parts = {"settings": settings.model_dump(mode="json"), "mismatch": run.config.model_dump(mode="json")}
            write_whole(run.folder / CONFIG, to_json({"variant": run.variant, **parts}, indent=2) + "\n")
            files.append(stack.enter_context((run.folder / METRICS).open("w")))
        for records in runs.steps():
            for file, record in zip(files, records, strict=True):
                file.write(to_json(record) + "\n")
                if "held_out_exact" in record:
                    file.flush()
            report(len(block) if records[0]["step"] else 0)
    seconds = (time.process_time() - start) / len(block)
    for run, live in zip(block, runs.optimizer.live.tolist(), strict=True):
        outcome = {"status": "finished" if live else "diverged", "step": settings.steps, "cpu_seconds": seconds}
        write_whole(run.folder / DONE, to_json(outcome, indent=2) + "\n")


def run_all(planned: Sequence[Block], warm: Path, workers: int) -> list[str]:
    """Run the blocks that are not done, each in a process of its own, `workers` at a time, with a live line.

    Returns sentences about blocks that failed. KeyboardInterrupt ends the processes and is raised again.
    """
    from rich.progress import Progress

    waiting = [block for block in planned if not all(run.finished for run in block)]
    # A server that has imported everything forks the processes, so that they start at once.
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    context.set_forkserver_preload([__name__])
    running: dict[Connection, tuple[Any, Block]] = {}
    failures = list[str]()
    with Progress() as progress, ExitStack() as stack:
        bar = progress.add_task("training", total=sum(len(block) * block[0].settings.steps for block in waiting))
        stack.callback(lambda: [process.terminate() for process, _ in running.values()])
        while waiting or running:
            while waiting and len(running) < workers:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(waiting[0], warm, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = process, waiting.pop(0)
            wait(list(running))
            for receiver, (process, block) in list(running.items()):
                if not receiver.poll():
                    continue
                where = f"{block[0].setting}, seeds {block[0].seed} to {block[-1].seed}"
                try:
                    message = receiver.recv()
                except EOFError:  # it has ended
                    process.join()
                    del running[receiver]
                    progress.console.print(f"{len(waiting) + len(running)} blocks of runs are left")
                    if process.exitcode:
                        failures.append(f"{where}: its process ended with {process.exitcode} (out of memory?)")
                    continue
                if isinstance(message, str):
                    failures.append(f"{where}: {message}")
                else:
                    progress.advance(bar, message)
    return failures


def _work(block: Block, warm: Path, sender: Connection) -> None:
    """One process: a block on one thread. It ends, too, where nobody is left to hear of its steps."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(1)  # at this size a second thread costs more than it does
    warnings.simplefilter("ignore")
    with suppress(BrokenPipeError):
        try:
            run_block(block, warm, sender.send)
        except Exception as error:  # one block that failed must not end the others
            sender.send(f"{error or type(error).__name__}")
