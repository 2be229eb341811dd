"""The terminal: how text is printed on it, and a table with its notes below."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mismatch_plugin.report.table import Table

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console:
    """Rich's, which prints text as it is: names such as token:tv:0.1 hold no markup and no emoji."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def show(table: Table, markdown: bool = False) -> None:
    """Print a table: rich, or GitHub's markdown."""
    if markdown:
        typer.echo(table.to_markdown(), nl=False)
        return
    console = terminal()
    console.print(table.to_rich())
    for note in table.notes:
        console.print(note, soft_wrap=" --" in note)  # flags, which one may want to copy, stay on one line
