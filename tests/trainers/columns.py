"""What tests of whole trainers showed, written as `runs/trainers/HOST.json`: docs/trainers.md has its table from there.

A test ends with `shows(column, by)`. A column is shown where some test said so and none failed that is marked with it:
`@pytest.mark.shows("starts", …)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLUMNS = (
    *("starts", "flags_arrive", "loss_equals_reference", "gradients_change", "metrics_arrive"),
    *("weight_versions_arrive", "exit_status", "fault_named"),
)


@dataclass
class Shown:
    """Of one session: what was shown by what, and the columns of tests that failed."""

    by: dict[str, list[str]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def __call__(self, column: str, by: str) -> None:
        if column not in COLUMNS:
            raise KeyError(column)
        self.by.setdefault(column, []).append(by)

    def table(self) -> dict[str, dict[str, Any]]:
        return {
            column: {
                "shown": column in self.by and column not in self.failed,
                "by": "; ".join(dict.fromkeys(self.by.get(column, ()))) or "no test showed it",
            }
            for column in COLUMNS
        }


def write_shown(path: Path, shown: Shown, facts: Mapping[str, Any], shimmed: Sequence[Sequence[str]]) -> None:
    """facts: host, commit, versions, command, seconds, peak_gib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**facts, "shimmed": [list(entry) for entry in shimmed], "columns": shown.table()}
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
