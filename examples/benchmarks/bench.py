"""What the plugin costs next to what else there is.

python -m examples.benchmarks.bench --help      # at the root of the repository, or `make bench`
"""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from examples.benchmarks.results import Section


class Part(str, Enum):
    """One topic of the benchmark, and the module that measures it."""

    log_probs = "log_probs"
    correction = "correction"
    linear = "linear"
    whole_step = "whole_step"
    communication = "communication"
    hook_share = "hook_share"
    scaling = "scaling"
    records = "records"


class Device(str, Enum):
    """Where it runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def bench(
    output: Annotated[Path, typer.Option(help="Folder of the results and their page.")] = Path("runs/bench"),
    only: Annotated[
        list[Part] | None,
        typer.Option(
            metavar="PART",
            help=f"{', '.join(part.value for part in Part)}. May be repeated. What the folder holds of the others "
            "stays.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: does everything run? The times say little.")
    ] = False,
    device: Annotated[
        Device, typer.Option(metavar="auto|cpu|cuda", help="auto: CUDA where there is one.")
    ] = Device.auto,
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="Threads of torch on CPU. With more than one, wall time is taken, not user + system time."
        ),
    ] = 1,
    repeats: Annotated[int, typer.Option(min=0, help="Repetitions that medians are taken of; 0: 5, quick 2.")] = 0,
    page: Annotated[bool, typer.Option(help="Write bench.html (needs the extra lab).")] = True,
) -> None:
    """Measure what the plugin costs next to what else there is.

    Log-probs from logits and from hidden states, correction and metrics, a
    whole train step, communication, and scaling. Other libraries take part
    where they are installed (make bench-contenders), slime's and NeMo-RL's own
    code where SLIME_SRC and NEMO_RL_SRC name a checkout; without, it is
    written from its description. Results go to results.json, and to a page.
    """
    import tempfile

    import torch
    from rich.console import Console

    from examples.benchmarks.findings import findings
    from examples.benchmarks.results import load, save
    from examples.benchmarks.tables import is_short, tables
    from examples.benchmarks.workers import in_processes

    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device: choose cpu or auto.", param_hint="--device")
    kind = "cuda" if device is Device.cuda or (device is Device.auto and torch.cuda.is_available()) else "cpu"
    try:  # before anything is measured
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            load(output)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{error}. Give another folder.", param_hint="--output") from None
    console = Console(highlight=False, markup=False)
    failed = False
    for part in only or list(Part):
        console.print(f"{part.value} …")
        settings = (part.value, kind, quick, repeats or (2 if quick else 5))
        try:  # a process of its own: megatron-core's stand-ins would slow down what comes after
            (section,) = in_processes(measure_part, 1, *settings, threads=threads, timeout_s=None)
        except RuntimeError as error:
            console.print(f"{part.value} failed: {error}", soft_wrap=True)
            failed = True
            continue
        save(section, output)
        for table in tables(section):
            console.print(table.only(*(header for header in table.headers if is_short(header))).to_rich())
        for sentence in findings(section):
            console.print(sentence)
        if quick:
            console.print("A quick run: sizes are so small that these times say little.")
    if page:
        from examples.benchmarks.page import build_page

        try:
            console.print(f"Page: {build_page(output)}", soft_wrap=True)
        except ImportError as error:
            console.print(f"No page was written: {error}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def measure_part(name: str, kind: str, quick: bool, repeats: int) -> Section:
    """One part on a device of this kind. Says on the standard output what comes next."""
    import torch

    from examples.benchmarks.machine import describe

    device = torch.device(kind)
    part = import_module(f"examples.benchmarks.{name}")
    section = part.section(device, quick, repeats, lambda what: print(f"  {what} …", flush=True))
    section.machine = describe(device)
    return section


if __name__ == "__main__":
    typer.run(bench)
