"""A table on a terminal, with its notes below."""

from __future__ import annotations

import typer

from mismatch_plugin.report.table import Table


def show(table: Table, markdown: bool = False) -> None:
    """Print a table: rich, or GitHub's markdown."""
    if markdown:
        typer.echo(table.to_markdown(), nl=False)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table.to_rich())
    for note in table.notes:
        console.print(note, soft_wrap=" --" in note)  # flags, which one may want to copy, stay on one line
