"""`make test-megatron-rl` runs this folder: Megatron-LM's own train_rl.py, whole, on CPU. MEGATRON_SRC: a checkout."""

from __future__ import annotations

import pytest

from tests.trainers.megatron_rl.trainer import make_inputs
from tests.trainers.whole import RUNS, Host, Sources, commit_of, made_once, needed

COMMAND = "make test-megatron-rl MEGATRON_SRC=…"
PACKAGES = ("torch", "transformers", "numpy")


def pytest_configure() -> None:
    needed("MEGATRON_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def host() -> Host:
    megatron, python = needed("MEGATRON_SRC", "MISMATCH_HOST_PYTHON")
    sources = Sources(python, megatron, RUNS / "megatron_rl/inputs")
    found = Host("megatron_rl", COMMAND, sources, {"Megatron-LM": commit_of(megatron)}, PACKAGES)
    made_once(sources.inputs, [megatron], lambda: make_inputs(found))
    return found
