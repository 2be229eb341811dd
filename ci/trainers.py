"""The tables of docs/trainers.md, from what `make test-slime` and the like measured: tests/trainers/measured/HOST.json.

Such a file is `runs/trainers/HOST.json` of one run of the host's tests, which write a column only where they passed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mismatch_plugin.report.table import NOTHING, Table

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "trainers" / "measured"
COLUMNS = {
    "starts": "starts",
    "flags_arrive": "flags on every actor",
    "loss_equals_reference": "loss = `mp.policy_loss` on its own batch",
    "gradients_change": "gradients as they should be",
    "metrics_arrive": "metrics in its tracker and our folder",
    "weight_versions_arrive": "weights arrive",
    "exit_status": "exit status",
    "fault_named": "a fault is named",
}
ORDER = ("slime", "miles", "verl", "megatron_rl", "nemo_rl")


@cache
def measured() -> dict[str, dict[str, Any]]:
    """Host → what its tests measured, in the order of the page."""
    return {
        host: json.loads(path.read_text(encoding="utf-8"))
        for host in ORDER
        if (path := FOLDER / f"{host}.json").is_file()
    }


def trainers_table() -> Table:
    """Host × whether it was shown. –: not shown."""
    rows = [
        (host, *("yes" if run["columns"].get(key, {}).get("shown") else NOTHING for key in COLUMNS))
        for host, run in measured().items()
    ]
    return Table("Whole trainers", ("trainer", *COLUMNS.values()), tuple(rows))


def shown_table() -> Table:
    """What showed it, with the numbers."""
    rows = [
        (host, title, column["by"])
        for host, run in measured().items()
        for key, title in COLUMNS.items()
        if (column := run["columns"].get(key, {})).get("shown")
    ]
    return Table("Shown by", ("trainer", "what", "shown by"), tuple(rows))


def runs_table() -> Table:
    """What was run: command, commit, versions, time, memory."""
    rows = [
        (
            host,
            run["command"],
            run["commit"],
            ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
            f"{run['seconds'] / 60:.0f} min",
            f"{run['peak_gib']:.1f} GiB",
        )
        for host, run in measured().items()
    ]
    headers = ("trainer", "command", "commit or release", "versions", "time, two cores", "memory")
    return Table("Runs", headers, tuple(rows), code=frozenset({"command"}))


def shimmed_table() -> Table:
    """Everything that was put in place of something, and why."""
    rows = [(host, what, why) for host, run in measured().items() for what, why in run["shimmed"]]
    return Table("Shimmed", ("trainer", "what", "why"), tuple(rows))


TABLES: dict[str, Callable[[], Table]] = {
    "trainers": trainers_table,
    "trainers-shown": shown_table,
    "trainers-runs": runs_table,
    "trainers-shimmed": shimmed_table,
}
