"""`make test-miles` runs this folder: miles's own train.py. MILES_SRC, MEGATRON_SRC (radixark's): checkouts."""

from __future__ import annotations

import pytest

from tests.trainers.miles.trainer import make_inputs
from tests.trainers.slime.conftest import PACKAGES
from tests.trainers.whole import RUNS, Host, Sources, commit_of, made_once, needed

COMMAND = "make test-miles MILES_SRC=… MEGATRON_SRC=…"


def pytest_configure() -> None:
    needed("MILES_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def sources() -> Sources:
    miles, megatron, python = needed("MILES_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")
    found = Sources(python, miles, RUNS / "miles/inputs", megatron)
    made_once(found.inputs, [miles, megatron], lambda: make_inputs(found))
    return found


@pytest.fixture(scope="session")
def host(sources: Sources) -> Host:
    commits = {"miles": commit_of(sources.checkout), "Megatron-LM (radixark)": commit_of(sources.megatron)}
    return Host("miles", COMMAND, sources, commits, PACKAGES)
