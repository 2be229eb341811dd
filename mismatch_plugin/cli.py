"""The `mismatch-plugin` command."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

import mismatch_plugin
from mismatch_plugin.check.command import check
from mismatch_plugin.inspect.command import inspect
from mismatch_plugin.lab.command import compare
from mismatch_plugin.patching import app as patching

if TYPE_CHECKING:
    from mismatch_plugin.report.table import Table

# What a command needs beyond this is imported inside it, so that --help and --version answer at once.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Mode(str, Enum):
    """What is done with a ratio outside its bounds."""

    truncate = "truncate"
    clip = "clip"
    mask = "mask"


class Level(str, Enum):
    """How ratios are aggregated."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"


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
    corrections do and which presets there are, check an engine's log-probs,
    judge a run and compare the algorithms, and patch a host.
    """


@app.command()
def explain(
    mode: Annotated[
        list[Mode] | None, typer.Option(metavar="truncate|clip|mask", help="Show only this mode. May be repeated.")
    ] = None,
    level: Annotated[
        list[Level] | None,
        typer.Option(metavar="token|sequence|geometric", help="Show only this level. May be repeated."),
    ] = None,
    markdown: Markdown = False,
) -> None:
    """Show what each mode and level makes of the same eight tokens.

    Every weight is computed by the function that the training loss uses.
    Where all modes are shown, batch normalisation, a rejection criterion
    and the veto follow.
    """
    from mismatch_plugin.explain import LEVELS, MODES, explain_table

    modes, levels = mode or MODES, level or LEVELS
    table = explain_table([name for name in MODES if name in modes], [name for name in LEVELS if name in levels])
    _show(table, markdown)


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

    try:
        table = presets_table() if name is None else preset_table(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    _show(table if markdown or name else table.only(PRESET_NAMES, "#", "when to use it"), markdown)


app.command()(compare)
app.command()(inspect)
app.command()(check)
app.add_typer(patching, name="patch")


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench() -> None:
    """Say where the benchmark is: in the repository, not in the package."""
    typer.echo("The benchmark is in the repository: `make bench`, or `python -m examples.benchmarks.bench`.")
    raise typer.Exit(2)


def _show(table: Table, markdown: bool) -> None:
    if markdown:
        typer.echo(table.to_markdown(), nl=False)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table.to_rich())
    for note in table.notes:
        console.print(note, soft_wrap=" --" in note)  # flags, which one may want to copy, stay on one line


def main() -> None:
    """Entry point of the console script."""
    app()
