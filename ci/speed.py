"""The tables of docs/speed.md, from ci/bench.json: what `make bench` wrote, with the machine of each part."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from examples.benchmarks.bench import table
from mismatch_plugin.report.table import Table

FILE = Path(__file__).resolve().parent / "bench.json"


@cache
def results() -> dict[str, Any]:
    """The run that is cited."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def bench_table(part: str) -> Table:
    """One part; what it ran on below it."""
    full = table(results()[part])
    machine = results()[part]["machine"]
    versions = ", ".join(
        f"{name} {value}" for name, value in machine.items() if name not in ("device", "cores", "threads")
    )
    note = f"{machine['device']}, {machine['threads']} thread; {versions}."
    shown = full.only(*(header for header in full.headers if header != "deviation"))
    return Table(shown.title, shown.headers, shown.rows, notes=(note,))


TABLES: dict[str, Callable[[], Table]] = {
    f"bench-{name.replace('_', '-')}": partial(bench_table, name) for name in results()
}
