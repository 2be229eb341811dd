"""What the tests of whole trainers are built on: nothing of the host is replaced unseen, and columns are earned."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

import ci.trainers
from tests.trainers.columns import COLUMNS, Shown, write_shown
from tests.trainers.slime.reference import Agreement
from tests.trainers.untouched import OURS, replaced


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


def test_the_page_has_every_column_of_every_trainer() -> None:
    assert tuple(ci.trainers.COLUMNS) == COLUMNS
    assert {path.stem for path in ci.trainers.FOLDER.glob("*.json")} <= set(ci.trainers.NAMES)
    for record in ci.trainers.measured().values():
        assert tuple(record["columns"]) == COLUMNS and record["commits"] and record["shimmed"]


HOST = """
import functools
import json
from math import sqrt
from helper import near, far

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

class Trainer:
    def step(self):
        return loss(4)

    @property
    def rank(self):
        return 0
"""
PLANTS = {
    "host.loss": "host.loss = lambda x: 0",
    "host.clip": "host.clip = wraps(host.clip)(lambda x: 0)",
    "host.Trainer.step": "host.Trainer.step = wraps(host.Trainer.step)(lambda self: 0)",
    "host.Trainer.rank": "host.Trainer.rank = property(wraps(host.Trainer.rank.fget)(lambda self: 0))",
    "host.sqrt": "host.sqrt = lambda x: 1.0",
    "host.near": "host.near = host.far",
    "host.json": "host.json = SimpleNamespace(dumps=str)",
    "": "import helper; helper.near = host.near = lambda: 0",  # `helper` is asked for itself
}


@pytest.mark.parametrize("names", [[*PLANTS], *([name] for name in ("host.loss", ""))], ids="-".join)
def test_what_a_shim_puts_in_place_is_seen(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(HOST)
    (tmp_path / "helper.py").write_text("def near(): ...\n\ndef far(): ...\n")
    planted = "\n".join(PLANTS[name] for name in names if name or len(names) == 1)
    shim = f"from functools import wraps\nfrom types import SimpleNamespace\nimport host\n{planted}\n"
    (tmp_path / "sitecustomize.py").write_text(f"exec(compile({shim!r}, {OURS[0] + 'shim.py'!r}, 'exec'))\n")
    found = replaced(Path(sys.executable), ["host"], {"PYTHONPATH": str(tmp_path)}, tmp_path)
    assert found == {name for name in names if name}


def test_the_first_value_that_differs_is_named_with_both() -> None:
    metrics = {f"rollout_corr/{number}": (0.5, 0.5) for number in range(40)}
    sound = {"loss": (0.1, 0.1 + 1e-7), "grad_norm": (2.0, 2.0), **metrics, "rollout_corr/none": (math.nan, math.nan)}
    Agreement([sound, sound]).check()
    wrong = {**sound, "rollout_corr/kl": (0.2, 1.42), "rollout_corr/k3_kl": (0.0, 9.0)}
    with pytest.raises(AssertionError, match=r"^step 1: rollout_corr/kl is 0\.2 in slime and 1\.42 in the reference"):
        Agreement([sound, wrong, {**wrong, "loss": (0.1, 7.0)}]).check()
