"""What a benchmark found, as data: sections of rows, in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mismatch_plugin.files import write_whole

FILE = "results.json"
MEASURED = "measured"

Row = dict[str, Any]
"""Plain values by name. `status` is "measured", or in words why there is no figure."""


class NotHereError(RuntimeError):
    """A contender that cannot run on this machine; the message says why."""


@contextmanager
def noted(row: Row) -> Iterator[None]:
    """Sets the row's status: measured, or why the block could not go on, whatever the contender raised."""
    row["status"] = MEASURED
    try:
        yield
    except NotHereError as missing:
        row["status"] = str(missing)
    except Exception as error:  # a compiler that is not there, a package that has changed
        row["status"] = f"failed: {first_line(error)}"


def first_line(error: Exception) -> str:
    """What an error says first, cut where it is long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


@dataclass
class Section:
    """One topic. facts: figures that hold for all of its rows. notes: what the figures mean, with formulas."""

    name: str
    title: str
    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, str | int] = field(default_factory=dict)

    def measured(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if row["status"] == MEASURED]


def save(section: Section, folder: Path) -> None:
    """Put a section into the folder's results, in place of an older one of that name. Other sections stay."""
    sections = [item for item in load(folder) if item.name != section.name]
    write_whole(
        folder / FILE, json.dumps([asdict(item) for item in [*sections, section]], indent=1, ensure_ascii=False)
    )


def load(folder: Path) -> list[Section]:
    """The sections there are; none where nothing was saved. Raises ValueError where the file holds something else."""
    path = folder / FILE
    try:
        return [Section(**item) for item in json.loads(path.read_text())] if path.exists() else []
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no results of this benchmark ({error})") from None
