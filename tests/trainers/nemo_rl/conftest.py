"""`make test-nemo-rl` runs this folder: NeMo-RL's own examples/run_grpo.py, whole, on CPU. `make test` leaves it out.

NEMO_RL_SRC: a checkout. MISMATCH_HOST_PYTHON: the environment. TRAINERS_REUSE=1: take a run that is there already, of
the same command line, for work on the tests.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainers.columns import commit_of, facts, versions_of
from tests.trainers.jobs import needed, one_by_one, shimmed
from tests.trainers.nemo_rl.trainer import HERE, Job, Sources, Trained, train
from tests.trainers.trained import RUNS

COMMAND = "make test-nemo-rl NEMO_RL_SRC=…"
VERSIONS = ("torch", "transformers", "ray", "numpy")
Start = Callable[[str, Job], Trained]


def pytest_configure() -> None:
    needed("NEMO_RL_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def sources() -> Sources:
    python, inputs = Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "nemo_rl/inputs"
    found = Sources(Path(os.environ["NEMO_RL_SRC"]).resolve(), python, inputs)
    subprocess.run([str(python), str(HERE / "inputs.py"), str(inputs), str(found.nemo_rl)], check=True)
    return found


@pytest.fixture(scope="session")
def start(sources: Sources, record: Callable[..., None], say: Callable[[str], None]) -> Iterator[Start]:
    """Run a job to its end, `name` a folder below runs/trainers/nemo_rl."""

    def ended(runs: list[Trained], seconds: float) -> None:
        commits, versions = {"NeMo-RL": commit_of(sources.nemo_rl)}, versions_of(sources.python, VERSIONS)
        peaks = (run.finished.peak_gib for run in runs)
        record(facts("nemo_rl", COMMAND, commits, versions, seconds, peaks), shimmed(runs))

    with one_by_one(train, sources, RUNS / "nemo_rl", ended, say) as one:
        yield one
