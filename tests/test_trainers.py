"""What the tests of whole trainers are built on: runs that end with those who asked, and columns that are earned."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ci.trainers
from tests.trainers.columns import COLUMNS, Shown, largest, write_shown
from tests.trainers.jobs import is_made, made_from
from tests.trainers.run import OUT_OF_TIME, descendants, run
from tests.trainers.slime.reference import Agreement
from tests.trainers.untouched import OURS, replaced

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
    return subprocess.run(
        ["pgrep", "-f", f"^sleep 60.{tag}"], capture_output=True, text=True, check=False
    ).stdout.split()


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


def test_a_column_is_shown_where_a_test_said_so_and_none_failed(tmp_path: Path) -> None:
    shown = Shown()
    for number in (2e-8, 1e-7, 3e-8):
        shown("loss_equals_reference", "algorithms", number)
    shown("starts", "train.py")
    shown("fault_named", "a flag")
    shown.failed.add("fault_named")
    write_shown(tmp_path / "host.json", shown, {"host": "host", "seconds": 1}, [])
    columns = json.loads((tmp_path / "host.json").read_text())["columns"]
    assert [name for name, column in columns.items() if column["shown"]] == ["starts", "loss_equals_reference"]
    assert columns["loss_equals_reference"]["by"] == "algorithms: 1e-07"
    with pytest.raises(KeyError):
        shown("speed", "x")


@pytest.mark.parametrize("values", [[], [0.0, math.nan], [math.nan, 0.0], [math.inf]])
def test_what_is_not_a_number_is_no_agreement(values: list[float]) -> None:
    with pytest.raises(AssertionError):
        largest(values)
    assert largest([1e-7, 2e-7]) == 2e-7


def test_another_checkout_is_another_input(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (mark := tmp_path / "made").write_text(made_from(tmp_path / "one"))
    assert is_made(mark, made_from(tmp_path / "one")) and not is_made(mark, made_from(tmp_path / "two"))


def test_the_page_has_every_column_of_every_trainer() -> None:
    assert tuple(ci.trainers.COLUMNS) == COLUMNS
    assert {path.stem for path in ci.trainers.FOLDER.glob("*.json")} <= set(ci.trainers.NAMES)
    for record in ci.trainers.measured().values():
        assert tuple(record["columns"]) == COLUMNS and record["commits"] and record["shimmed"]


_CONFTEST = """
from concurrent.futures import Future
from pathlib import Path
import pytest
from tests.trainers.conftest import *
from tests.trainers.slime.conftest import _job, trained

@pytest.fixture(scope="session")
def start():
    def one(name, job):
        with Path("started").open("a") as told:
            told.write(f"{name}\\n")
        found = Future()
        found.set_result(job)
        return found
    return one
"""
_FAULTS = """
import pytest
JOBS = {"misspelt": 1, "contradictory": 2, "absent": 3}

@pytest.mark.parametrize("name", JOBS)
def test_wrong(name, trained):
    assert trained(name) == trained(name) == JOBS[name]
"""


@pytest.mark.parametrize(
    ("chosen", "started"), [((), ["misspelt", "contradictory", "absent"]), (("-k", "misspelt"), ["misspelt"])]
)
def test_one_case_starts_one_run(chosen: tuple[str, ...], started: list[str], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_faults.py").write_text(_FAULTS)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", *chosen]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "started").read_text().splitlines() == [f"faults/{name}" for name in started]


_HOST = """
import functools
import json
from math import floor, sqrt
try:
    from math import fast_sqrt
except ImportError:
    fast_sqrt = None
from helper import near, far
floor = round

def timed(function):
    @functools.wraps(function)
    def call(*values):
        return function(*values)
    return call

def loss(x):
    return sqrt(x)

@timed
def clip(x):
    return x

@functools.lru_cache
def table():
    return {}

class Trainer:
    def step(self):
        return loss(4)

    @property
    def rank(self):
        return 0
"""


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        ("", set()),
        ("host.loss = lambda x: 0", {"host.loss"}),
        ("host.loss = wraps(host.loss)(lambda x: 0)", {"host.loss"}),
        ("host.clip = wraps(host.clip)(lambda x: 0)", {"host.clip"}),
        ("host.table = wraps(host.table)(lambda: 0)", {"host.table"}),
        ("host.Trainer.step = wraps(host.Trainer.step)(lambda self: 0)", {"host.Trainer.step"}),
        ("host.Trainer.rank = property(wraps(host.Trainer.rank.fget)(lambda self: 0))", {"host.Trainer.rank"}),
        ("host.loss = partial(host.loss, 4)", {"host.loss"}),
        ("host.sqrt = lambda x: 1.0", {"host.sqrt"}),
        ("host.near = host.far", {"host.near"}),
        ("host.json = SimpleNamespace(dumps=str)", {"host.json"}),
        ("import helper; helper.near = host.near = lambda: 0", set()),  # `helper` is asked for itself
    ],
)
def test_what_a_shim_puts_in_place_is_seen(plant: str, seen: set[str], tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(_HOST)
    (tmp_path / "helper.py").write_text("def near(): ...\n\ndef far(): ...\n")
    shim = f"from functools import partial, wraps\nfrom types import SimpleNamespace\nimport host\n{plant}\n"
    (tmp_path / "sitecustomize.py").write_text(f"exec(compile({shim!r}, {OURS[0] + 'shim.py'!r}, 'exec'))\n")
    assert replaced(Path(sys.executable), ["host"], {"PYTHONPATH": str(tmp_path)}, tmp_path) == seen


def test_the_first_value_that_differs_is_named_with_both() -> None:
    metrics = {f"rollout_corr/{number}": (0.5, 0.5) for number in range(40)}
    sound = {"loss": (0.1, 0.1 + 1e-7), "grad_norm": (2.0, 2.0), **metrics, "rollout_corr/none": (math.nan, math.nan)}
    Agreement([sound, sound]).check()
    wrong = {**sound, "rollout_corr/kl": (0.2, 1.42), "rollout_corr/k3_kl": (0.0, 9.0)}
    with pytest.raises(AssertionError, match=r"^step 1: rollout_corr/kl is 0\.2 in slime and 1\.42 in the reference"):
        Agreement([sound, wrong, {**wrong, "loss": (0.1, 7.0)}]).check()
    with pytest.raises(AssertionError, match=r"^step 0: loss is nan in slime and 0\.1 in the reference"):
        Agreement([{**sound, "loss": (math.nan, 0.1)}, wrong]).check()
