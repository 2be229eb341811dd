"""`make test-verl-whole` runs this folder, in the environment that it makes: `verl.trainer.main_ppo` on CPU."""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.trainers.verl.trainer import make_inputs
from tests.trainers.whole import RUNS, Host, Sources, made_once

PACKAGES = ("verl", "torch", "transformers", "sglang", "ray", "TransferQueue", "tensordict", "numpy")


@pytest.fixture(scope="session")
def host() -> Host:
    sources = Sources(Path(sys.executable), RUNS / "verl", RUNS / "verl/inputs")
    made_once(sources.inputs, [], lambda: make_inputs(sources.inputs))
    commits = {"verl": f"{version('verl')} from PyPI"}
    return Host("verl", "make test-verl-whole", sources, commits, PACKAGES, at_once=1)
