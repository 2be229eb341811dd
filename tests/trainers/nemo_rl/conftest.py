"""`make test-nemo-rl` runs this folder: NeMo-RL's own examples/run_grpo.py, whole, on CPU. `make test` leaves it out.

NEMO_RL_SRC: a checkout. MISMATCH_HOST_PYTHON: the environment. TRAINERS_REUSE=1: take a run that is there already, of
the same command line, for work on the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainers.columns import commit_of, versions_of
from tests.trainers.jobs import needed, one_by_one, shimmed
from tests.trainers.nemo_rl.trainer import HERE, ROOT, Job, Sources, Trained, train

RUNS = ROOT / "runs/trainers"
Start = Callable[[str, Job], Trained]


def pytest_configure() -> None:
    needed("NEMO_RL_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def sources() -> Sources:
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", 1))  # which ends what runs
    python, inputs = Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "nemo_rl/inputs"
    found = Sources(Path(os.environ["NEMO_RL_SRC"]).resolve(), python, inputs)
    subprocess.run([str(python), str(HERE / "inputs.py"), str(inputs), str(found.nemo_rl)], check=True)
    return found


@pytest.fixture(scope="session")
def start(sources: Sources, record: Callable[..., None], say: Callable[[str], None]) -> Iterator[Start]:
    """Run a job to its end, `name` a folder below runs/trainers/nemo_rl."""

    def ended(runs: list[Trained], seconds: float) -> None:
        facts = {
            "host": "nemo_rl",
            "commits": {"NeMo-RL": commit_of(sources.nemo_rl)},
            "versions": versions_of(sources.python, ("torch", "transformers", "ray", "numpy")),
            "command": "make test-nemo-rl NEMO_RL_SRC=…",
            "seconds": round(seconds),
            "peak_gib": round(max(run.finished.peak_gib for run in runs), 1),
        }
        record(facts, shimmed(runs))

    with one_by_one(train, sources, RUNS / "nemo_rl", ended, say) as one:
        yield one
