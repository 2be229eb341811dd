"""`make test-slime` runs this folder: slime's own train.py, whole, on CPU. Plain `make test` leaves it out.

SLIME_SRC, MEGATRON_SRC: checkouts. MISMATCH_HOST_PYTHON: the environment of ci/slime_cpu.sh. TRAINERS_AT_ONCE: runs at
once (2); one of a single rank keeps about one core busy. TRAINERS_REUSE=1: take a run that is there already, of the
same command line, for work on the tests.

A module's `JOBS` are all started before the first test; a test asks for one by name: `trained("name")`. Where only some
tests were chosen (-k, a file, ::), a job starts when a test asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.columns import commit_of, facts, versions_of
from tests.trainers.conftest import WHOLE
from tests.trainers.jobs import needed, shimmed, submitting
from tests.trainers.slime.trainer import Job, Sources, Trained, make_inputs, patched_megatron, train
from tests.trainers.trained import RUNS

COMMAND = "make test-slime SLIME_SRC=… MEGATRON_SRC=…"
VERSIONS = ("torch", "transformers", "ray", "sglang", "sglang-router", "numpy")
Start = Callable[[str, Job], "Future[Trained]"]


def pytest_configure() -> None:
    needed("SLIME_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def sources() -> Sources:
    slime = Path(os.environ["SLIME_SRC"]).resolve()
    megatron = patched_megatron(Path(os.environ["MEGATRON_SRC"]).resolve(), slime, RUNS / "slime/megatron")
    found = Sources(slime, megatron, Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "slime/inputs")
    make_inputs(found)
    return found


@pytest.fixture(scope="session")
def start(sources: Sources, record: Callable[..., None], say: Callable[[str], None]) -> Iterator[Start]:
    """Start a run, `name` a path below runs/trainers/slime."""

    def ended(runs: list[Trained], seconds: float) -> None:
        commits = {"slime": commit_of(sources.slime), "Megatron-LM": commit_of(Path(os.environ["MEGATRON_SRC"]))}
        peaks = (run.finished.peak_gib for run in runs)
        record(facts("slime", COMMAND, commits, versions(sources), seconds, peaks), shimmed(runs))

    with submitting(train, sources, RUNS / "slime", ended, say) as submit:
        yield submit


@pytest.fixture(scope="session")
def _job(request: pytest.FixtureRequest, start: Start) -> Callable[[str], Future[Trained]]:
    modules = dict.fromkeys(getattr(item, "module", None) for item in request.session.items)
    jobs = {f"{_short(module)}/{name}": job for module in modules for name, job in getattr(module, "JOBS", {}).items()}
    started = cache(lambda name: start(name, jobs[name]))
    for name in jobs if request.config.stash[WHOLE] else ():
        started(name)
    return started


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, _job: Callable[[str], Future[Trained]]) -> Callable[[str], Trained]:
    """The end of the module's job of that name."""
    return lambda name: _job(f"{_short(request.module)}/{name}").result()


def _short(module: Any) -> str:
    return module.__name__.rpartition(".")[2].removeprefix("test_")


def versions(sources: Any) -> dict[str, str]:
    """Of the environment, and of the checkout of Megatron-LM."""
    megatron = (sources.megatron / "megatron/core/package_info.py").read_text()
    core = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", megatron, re.MULTILINE))
    return {**versions_of(sources.python, VERSIONS), "megatron-core": core}
