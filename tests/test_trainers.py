"""What the tests of whole trainers are built on: runs that end with those who asked, and started once."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ci.trainers
from tests.trainers.run import OUT_OF_TIME, descendants, run
from tests.trainers.whole import largest, made_once

ROOT = Path(__file__).resolve().parent.parent
TWO_RUNS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.trainers.run import run

def one(number):
    words = ["bash", "-c", f"setsid sleep 60.{sys.argv[2]}{number} & sleep 60.{sys.argv[2]}{number}"]
    return run(words, Path(sys.argv[1], str(number)), limit=60, env=dict(os.environ), cwd=Path(sys.argv[1]))

if len(sys.argv) == 3:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, (1, 2)))
one(3)
"""


def _asleep(tag: str) -> list[str]:
    command = ["pgrep", "-f", f"^sleep 60.{tag}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.parametrize(("how", "at_once"), [(signal.SIGKILL, True), (signal.SIGINT, False), (signal.SIGTERM, False)])
def test_runs_end_with_the_process_that_asked(how: signal.Signals, at_once: bool, tmp_path: Path) -> None:
    tag = str(os.getpid())
    words = [sys.executable, "-c", TWO_RUNS, str(tmp_path), tag, *([] if at_once else ["one"])]
    asker = subprocess.Popen(words, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(_asleep(tag)) < (4 if at_once else 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_asleep(tag)) == (4 if at_once else 2)
    asker.send_signal(how)
    asker.wait()
    while _asleep(tag) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _asleep(tag) == []


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
