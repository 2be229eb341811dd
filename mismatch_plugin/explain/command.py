"""The command `mismatch-plugin explain`. Heavy imports wait until it runs."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Typer's: what is no option here is a flag of the launch line."""


def explain(
    context: typer.Context,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print GitHub markdown instead of terminal tables.")
    ] = False,
) -> None:
    """Show what a setting makes of every token: weight, rejection, loss and gradient.

    Alone: the weights of eight tokens under every mode and level. With
    settings as on a launch line (--use-tis --tis-level sequence, or
    --mismatch-preset NAME; docs/settings.md has them all): those eight tokens
    under these settings, from ratio to gradient.

    Everything is computed by the functions that the training loss uses.
    """
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.explain.account import account_tables, batch_for, current_log_probs, explain_table
    from mismatch_plugin.report.table import show

    if not context.args:
        tables = (explain_table(),)
    else:
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                config = MismatchConfig.from_words(context.args)
            tables = account_tables(current_log_probs(), batch_for(config), config)
        except ValueError as error:
            typer.echo(f"cannot explain: {error}", err=True)
            raise typer.Exit(2) from None
        typer.echo(config.describe())
        for note in notes:
            typer.echo(f"note: {note.message}")
        typer.echo()
    for place, table in enumerate(tables):
        if place:
            typer.echo()
        show(table, markdown)
