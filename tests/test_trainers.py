"""What the runs of whole trainers measured, as docs/trainers.md has it."""

from __future__ import annotations

import ci.trainers


def test_the_page_has_every_column_of_every_trainer() -> None:
    assert {path.stem for path in ci.trainers.FOLDER.glob("*.json")} == set(ci.trainers.NAMES)
    for record in ci.trainers.measured().values():
        assert record["columns"].keys() == ci.trainers.COLUMNS.keys() and record["commits"] and record["shimmed"]
