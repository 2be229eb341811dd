"""The command `mismatch-plugin inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The folder of --mismatch-report-dir, or a metrics.jsonl.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON with the run's settings. Default: settings.json beside the metrics."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Judge a run's mismatch by the metrics that it wrote.

    Judged are the newest steps: the last tenth of the run, at least ten.

    Exit status: 0 sound, 1 warnings in the newest steps, 2 nothing to judge.
    """
    from mismatch_plugin.config import MismatchConfig
    from mismatch_plugin.fields import read_file
    from mismatch_plugin.report.inspect import counted, inspect_steps
    from mismatch_plugin.report.log import SETTINGS, read_steps, to_json

    try:
        folder = path if path.is_dir() else path.parent
        settings = MismatchConfig()
        if config is not None:
            settings = MismatchConfig.from_file(config)
        elif (
            written := folder / SETTINGS
        ).exists():  # checked when the run began; a preset may hold what has no effect
            settings = MismatchConfig.build(read_file(written))
        result = inspect_steps(list(read_steps(path)), settings)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="PATH") from None
    if as_json:
        tables = [result.table] if result.full is None else [result.table, result.full]
        rows = [dict(zip(table.headers, row, strict=True)) for table in tables for row in table.rows]
        warnings = [{**vars(warning), "steps": count} for warning, count in result.warnings]
        body = {"steps": result.steps, "sound": result.sound, "data": result.data, "correction": result.correction}
        body["warnings"] = warnings
        typer.echo(to_json({**body, "metrics": rows}, indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False)
        console.print(result.table.to_rich())
        if result.full is not None:  # three columns: their names are longer
            console.print(result.full.only(*result.full.headers[:3]).to_rich())
        for warning, count in result.warnings:
            console.print(f"{warning} ({counted(count)})")
        console.print(result.verdict)
    raise typer.Exit(0 if result.sound else 1)
