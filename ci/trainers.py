"""The tables of docs/trainers.md, from what `make test-slime` and the like measured: ci/measured/HOST.json.

A number is the largest that a session of all of a host's tests recorded (`record_property`, `--junit-xml`); what a test
shows is written here by hand, and is there only where every test of it passed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mismatch_plugin.report.table import NOTHING, Table

FOLDER = Path(__file__).resolve().parent / "measured"
COLUMNS = {
    "starts": "started",
    "flags_arrive": "our flags arrive",
    "loss_equals_reference": "loss minus `mp.policy_loss`, at most",
    "gradients_change": "gradients",
    "metrics_arrive": "metrics, read back",
    "weight_versions_arrive": "new weights in the engine",
    "exit_status": "exit status",
    "fault_named": "ends with a sentence at",
}
NAMES = {
    "slime": "slime",
    "miles": "miles",
    "verl": "verl",
    "megatron_rl": "Megatron-LM RL",
    "nemo_rl": "NeMo-RL",
}


@cache
def measured() -> dict[str, dict[str, Any]]:
    """Trainer → what its tests measured, in the order of the page."""
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for host, name in NAMES.items()
        if (path := FOLDER / f"{host}.json").is_file()
    }


def trainers_table() -> Table:
    """What was shown of each trainer, with the numbers. –: not shown."""
    rows = [
        (title, *(column["by"] if (column := run["columns"][key])["shown"] else NOTHING for run in measured().values()))
        for key, title in COLUMNS.items()
    ]
    return Table("Whole trainers", ("", *measured()), tuple(rows))


def runs_table() -> Table:
    """What was run: command, commits, versions, time, memory."""
    rows = [
        (
            name,
            run["command"],
            ", ".join(f"{checkout} {commit}" for checkout, commit in run["commits"].items()),
            ", ".join(f"{package} {version}" for package, version in run["versions"].items()),
            f"{run['seconds'] / 60:.0f} min",
            f"{run['peak_gib']:.1f} GiB",
        )
        for name, run in measured().items()
    ]
    headers = ("trainer", "command", "checkouts", "versions", "time", "memory of one run")
    return Table("Runs", headers, tuple(rows), code=frozenset({"command"}))


def shimmed_table() -> Table:
    """Everything that was put in place of something, and why."""
    rows = [(name, what, why) for name, run in measured().items() for what, why in run["shimmed"]]
    return Table("Shimmed", ("trainer", "what", "why"), tuple(rows))


TABLES: dict[str, Callable[[], Table]] = {
    "trainers": trainers_table,
    "trainers-runs": runs_table,
    "trainers-shimmed": shimmed_table,
}
