"""What a benchmark found, as data: sections of rows, in one JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "results.json"
MEASURED = "measured"

Row = dict[str, Any]
"""Plain values by name. `status` is "measured", or in words why there is no figure."""


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
    path = folder / FILE
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps([asdict(item) for item in [*sections, section]], indent=1, ensure_ascii=False))
    os.replace(partial, path)


def load(folder: Path) -> list[Section]:
    """The sections there are; none where nothing was saved. Raises ValueError where the file holds something else."""
    path = folder / FILE
    try:
        return [Section(**item) for item in json.loads(path.read_text())] if path.exists() else []
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no results of this benchmark ({error})") from None
