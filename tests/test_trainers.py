"""What the tests of whole trainers are built on: runs that end with those who asked, and started once."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

import ci.trainers
from tests.trainers.run import OUT_OF_TIME, descendants, run
from tests.trainers.whole import largest, made_once


def test_a_run_has_its_status_log_and_limit(tmp_path: Path) -> None:
    done = run(["bash", "-c", "echo said; exit 3"], tmp_path / "log", limit=60, env=dict(os.environ), cwd=tmp_path)
    assert (done.status, done.text) == (3, "said\n")
    late = run(["sleep", "60"], tmp_path / "log", limit=0.3, env=dict(os.environ), cwd=tmp_path)
    assert late.status == OUT_OF_TIME and 0.3 <= late.seconds < 30
    assert not [pid for pid in descendants(os.getpid()) if "sleep" in Path(f"/proc/{pid}/comm").read_text()]


@pytest.mark.parametrize("values", [[], [0.0, math.nan], [math.nan, 0.0], [math.inf]])
def test_what_is_not_a_number_is_no_agreement(values: list[float]) -> None:
    with pytest.raises(AssertionError):
        largest(values)
    assert largest([1e-7, 2e-7]) == 2e-7


def test_inputs_are_made_again_for_another_checkout(tmp_path: Path) -> None:
    made = list[str]()
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        made_once(tmp_path / "inputs", [tmp_path / name], lambda name=name: made.append(name))
    assert made == ["one", "two"]


def test_the_page_has_every_column_of_every_trainer() -> None:
    assert {path.stem for path in ci.trainers.FOLDER.glob("*.json")} == set(ci.trainers.NAMES)
    for record in ci.trainers.measured().values():
        assert record["columns"].keys() == ci.trainers.COLUMNS.keys() and record["commits"] and record["shimmed"]
