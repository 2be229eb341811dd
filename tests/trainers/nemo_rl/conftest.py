"""`make test-nemo-rl` runs this folder: NeMo-RL's own examples/run_grpo.py, whole, on CPU. NEMO_RL_SRC: a checkout."""

from __future__ import annotations

import subprocess

import pytest

from tests.trainers.nemo_rl.trainer import HERE
from tests.trainers.whole import RUNS, Host, Sources, commit_of, made_once, needed

COMMAND = "make test-nemo-rl NEMO_RL_SRC=…"
PACKAGES = ("torch", "transformers", "ray", "numpy")


def pytest_configure() -> None:
    needed("NEMO_RL_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def host() -> Host:
    nemo_rl, python = needed("NEMO_RL_SRC", "MISMATCH_HOST_PYTHON")
    sources = Sources(python, nemo_rl, RUNS / "nemo_rl/inputs")
    command = [str(python), str(HERE / "inputs.py"), str(sources.inputs), str(nemo_rl)]
    made_once(sources.inputs, [nemo_rl], lambda: subprocess.run(command, check=True))
    return Host("nemo_rl", COMMAND, sources, {"NeMo-RL": commit_of(nemo_rl)}, PACKAGES)
