"""`make test-miles` runs this folder: miles's own train.py, whole, on CPU. Plain `make test` leaves it out.

MILES_SRC, MEGATRON_SRC (radixark/Megatron-LM): checkouts. MISMATCH_HOST_PYTHON: the environment of ci/slime_cpu.sh.
TRAINERS_AT_ONCE, TRAINERS_REUSE and a module's `JOBS`: as slime's, whose fixtures these are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.trainers.columns import commit_of, facts
from tests.trainers.jobs import needed, shimmed, submitting
from tests.trainers.miles.trainer import Job, Sources, Trained, make_inputs, train
from tests.trainers.slime.conftest import _job, trained, versions
from tests.trainers.trained import RUNS

__all__ = ["_job", "trained"]
COMMAND = "make test-miles MILES_SRC=… MEGATRON_SRC=…"


def pytest_configure() -> None:
    needed("MILES_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def sources() -> Sources:
    miles, megatron = (Path(os.environ[name]).resolve() for name in ("MILES_SRC", "MEGATRON_SRC"))
    found = Sources(miles, megatron, Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "miles/inputs")
    make_inputs(found)
    return found


@pytest.fixture(scope="session")
def start(
    sources: Sources, record: Callable[..., None], say: Callable[[str], None]
) -> Iterator[Callable[[str, Job], Future[Trained]]]:
    """Start a run, `name` a path below runs/trainers/miles."""

    def ended(runs: list[Trained], seconds: float) -> None:
        commits = {"miles": commit_of(sources.miles), "Megatron-LM (radixark)": commit_of(sources.megatron)}
        peaks = (run.finished.peak_gib for run in runs)
        record(facts("miles", COMMAND, commits, versions(sources), seconds, peaks), shimmed(runs))

    with submitting(train, sources, RUNS / "miles", ended, say) as submit:
        yield submit
