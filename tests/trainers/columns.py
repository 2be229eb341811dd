"""What tests of whole trainers showed, written as `runs/trainers/HOST.json`: docs/trainers.md has its table from there.

A test ends with `shows(column, by)`. A column is shown where some test said so and none failed that is marked with it:
`@pytest.mark.shows("starts", …)`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLUMNS = (
    *("starts", "flags_arrive", "loss_equals_reference", "gradients_change", "metrics_arrive"),
    *("weight_versions_arrive", "exit_status", "fault_named"),
)


def largest(values: Iterable[float]) -> float:
    """The largest of differences, none of which may be NaN or infinite: `max` passes over a NaN."""
    found = [*values]
    assert found and all(math.isfinite(value) for value in found), found
    return max(found)


@dataclass
class Shown:
    """Of one session: column → by what → the largest number given with it; columns of tests that failed."""

    by: dict[str, dict[str, float | None]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def __call__(self, column: str, by: str, number: float | None = None) -> None:
        if column not in COLUMNS:
            raise KeyError(column)
        known = self.by.setdefault(column, {})
        before = known.get(by)
        known[by] = number if before is None or number is None else max(before, number)

    def table(self) -> dict[str, dict[str, Any]]:
        def said(column: str) -> str:
            parts = self.by.get(column, {}).items()
            return "; ".join(by if number is None else f"{by}: {number:.0e}" for by, number in parts)

        return {
            column: {
                "shown": column in self.by and column not in self.failed,
                "by": said(column) or "no test showed it",
            }
            for column in COLUMNS
        }


def commit_of(checkout: Path) -> str:
    """Its commit, with a + where files were changed; "no git" for a copy without."""
    if not (checkout / ".git").exists():
        return "no git"
    told = [["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
    head, changed = (
        subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, check=True).stdout
        for words in told
    )
    return head.strip() + ("+" if changed.strip() else "")


def versions_of(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Installed versions in an environment."""
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {tuple(names)}}}))"
    return json.loads(subprocess.run([str(python), "-c", code], capture_output=True, check=True).stdout)


def facts(
    host: str,
    command: str,
    commits: Mapping[str, str],
    versions: Mapping[str, str],
    seconds: float,
    peaks_gib: Iterable[float],
) -> dict[str, Any]:
    """What the table says of a session next to what it showed. peaks_gib: of its runs."""
    return {
        "host": host,
        "commits": dict(commits),
        "versions": dict(versions),
        "command": command,
        "seconds": round(seconds),
        "peak_gib": round(max(peaks_gib, default=0.0), 1),
    }


def write_shown(path: Path, shown: Shown, facts: Mapping[str, Any], shimmed: Sequence[Sequence[str]]) -> None:
    """facts: of `facts`. Of a session that took kept runs: their time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**facts, "shimmed": [list(entry) for entry in shimmed], "columns": shown.table()}
    if os.environ.get("TRAINERS_REUSE") == "1" and path.exists():
        record["seconds"] = json.loads(path.read_text(encoding="utf-8"))["seconds"]
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
