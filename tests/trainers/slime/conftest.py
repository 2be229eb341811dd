"""`make test-slime` runs this folder: slime's own train.py, whole, on CPU. SLIME_SRC, MEGATRON_SRC: checkouts."""

from __future__ import annotations

import pytest

from tests.trainers.slime.trainer import make_inputs, patched_megatron
from tests.trainers.whole import RUNS, Host, Sources, commit_of, made_once, needed

COMMAND = "make test-slime SLIME_SRC=… MEGATRON_SRC=…"
PACKAGES = ("torch", "transformers", "ray", "sglang", "sglang-router", "numpy")


def pytest_configure() -> None:
    needed("SLIME_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def sources() -> Sources:
    slime, megatron, python = needed("SLIME_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")
    patched = patched_megatron(megatron, slime, RUNS / "slime/megatron")
    found = Sources(python, slime, RUNS / "slime/inputs", patched)
    made_once(found.inputs, [slime], lambda: make_inputs(found))
    return found


@pytest.fixture(scope="session")
def host(sources: Sources) -> Host:
    _, megatron, _ = needed("SLIME_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")
    commits = {"slime": commit_of(sources.checkout), "Megatron-LM": commit_of(megatron)}
    return Host("slime", COMMAND, sources, commits, PACKAGES)
