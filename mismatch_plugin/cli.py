"""The `mismatch-plugin` command."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import mismatch_plugin
from mismatch_plugin.bisect.command import bisect, certify
from mismatch_plugin.compare.command import compare
from mismatch_plugin.diagnose.command import inspect
from mismatch_plugin.explain.command import SETTINGS, explain
from mismatch_plugin.patching import app as patching
from mismatch_plugin.report.table import printable

# What a command needs beyond this is imported inside it, so that --help and --version answer at once.

INTERRUPTED, STOPPED = 130, 4

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Markdown = Annotated[bool, typer.Option("--markdown", help="Print GitHub markdown instead of a terminal table.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mismatch-plugin {mismatch_plugin.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Correct the training-inference mismatch in RL post-training.

    The engine that samples responses and the one that trains on them give
    the same token different probabilities. These commands show what the
    corrections do and which presets there are, judge a dump, a server or a
    run, compare the algorithms, and patch a host.

    Exit status: 0 done, nothing wrong; 1 a fault was found, or a gate failed;
    2 the input or an option cannot be used; 3 not decided; 4 stopped before
    the end: too little memory, stdout full or closed, or an error of ours;
    130 Ctrl-C.
    """


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the dump and its page.")] = Path(
        "mismatch-demo"
    ),
) -> None:
    """Inspect a small dump that comes with the package: one of two servers kept old weights.

    384 responses of two real SGLang servers in bfloat16, scored in float32 by
    the weights that trained on. The second server is two optimizer steps
    behind and says that it is not.
    """
    import lzma
    from importlib.resources import files

    dump = folder / "rollouts.jsonl"
    if folder.exists():
        more = f", or look at it again: mismatch-plugin inspect {dump}" if dump.exists() else ""
        raise typer.BadParameter(f"{folder} is there already: name a new folder{more}.", param_hint="FOLDER")
    folder.mkdir(parents=True)
    dump.write_bytes(lzma.decompress((files("mismatch_plugin.diagnose") / "demo.jsonl.xz").read_bytes()))
    status = app(["inspect", str(dump)], standalone_mode=False)
    typer.echo(
        f"\nThe fault was planted; {dump} has a sample a line. The same of your own: mismatch-plugin inspect DUMP"
    )
    raise typer.Exit(0 if status == 1 else status)


app.command(context_settings=SETTINGS)(explain)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show every setting of this preset.")] = None,
    markdown: Markdown = False,
) -> None:
    """List the presets and when to use each, or show every setting of one.

    A preset's name goes to --mismatch-preset on the launch line, or to
    mismatch_plugin.preset() in Python.
    """
    from mismatch_plugin.report.presets import PRESET_NAMES, preset_table, presets_table
    from mismatch_plugin.report.table import show

    try:
        table = presets_table() if name is None else preset_table(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    short = replace(table.only(PRESET_NAMES, "#", "when to use it"), notes=()) if name is None else table
    show(table if markdown else short, markdown)


app.command()(compare)
app.command()(inspect)
app.command()(bisect)
app.command()(certify)
app.add_typer(patching, name="patch")


def main() -> None:
    """Entry point of the console script: the exit statuses of --help, and one sentence where a command did not end."""
    try:
        try:
            app()
        finally:  # what the interpreter cannot write when it ends is told to nobody
            if sys.stdout is not None:  # closed with `>&-`
                sys.stdout.flush()
    except BaseException as ended:
        error = ended
        if isinstance(ended, SystemExit):  # typer makes 1 of a closed stdout, and older versions of Ctrl-C
            error = ended.__context__
            error = error.__cause__ if isinstance(error, typer.Abort) else error
            if not isinstance(error, OSError | EOFError | KeyboardInterrupt):
                raise
        with contextlib.suppress(OSError):  # or stderr is closed, too
            if not isinstance(error, KeyboardInterrupt):
                print(f"mismatch-plugin: {_why(error)}", file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left for stdout is written at the end of the process
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else STOPPED)


def _why(error: BaseException | None) -> str:
    """One sentence about what stopped a command."""
    said = printable(str(error).partition("\n")[0])
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in said:
        return "stopped, there is not enough memory: give fewer files or samples."
    if isinstance(error, BrokenPipeError):
        return "stopped, since nobody reads its output any more."
    if isinstance(error, OSError):
        return f"stopped: {said}."
    frame = traceback.extract_tb(error and error.__traceback__)[-1]
    return f"stopped by an error of ours, {type(error).__name__} at {frame.filename}:{frame.lineno}: {said}"
