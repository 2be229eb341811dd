"""`make test-megatron-rl` runs this folder: Megatron-LM's own train_rl.py, whole, on CPU. `make test` leaves it out.

MEGATRON_SRC: a checkout. MISMATCH_HOST_PYTHON: the environment. TRAINERS_REUSE=1: take a run that is there already,
of the same command line, for work on the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mismatch_plugin.patching import apply, patches_of
from tests.trainers.columns import commit_of, facts, versions_of
from tests.trainers.jobs import is_made, made_from, needed, one_by_one, shimmed
from tests.trainers.megatron_rl.trainer import HERE, Job, Sources, Trained, train
from tests.trainers.trained import RUNS

COMMAND = "make test-megatron-rl MEGATRON_SRC=…"
VERSIONS = ("torch", "transformers", "numpy")
BIAS = {"MEGATRON_ENGINE_BIAS": "0.5"}
Start = Callable[[str, Job], Trained]


def pytest_configure() -> None:
    needed("MEGATRON_SRC", "MISMATCH_HOST_PYTHON")


@pytest.fixture(scope="session")
def sources() -> Sources:
    """With a tokenizer, and what one run of the checkout makes: a checkpoint to start from, and rollouts."""
    megatron = Path(os.environ["MEGATRON_SRC"]).resolve()
    python, runs = Path(os.environ["MISMATCH_HOST_PYTHON"]), RUNS / "megatron_rl"
    found = Sources(megatron, python, runs / "inputs", runs / "patched")
    made = made_from(megatron)
    if not is_made(found.inputs / "made", made):
        for folder in (found.inputs, found.patched):
            shutil.rmtree(folder, ignore_errors=True)
        found.inputs.mkdir(parents=True)
        subprocess.run([str(python), str(HERE / "inputs.py"), str(found.inputs)], check=True)
        recorded = found.inputs / "rollouts.jsonl"
        save = ("--lr", "0", "--save", str(found.inputs / "checkpoint"), "--save-interval", "100")
        env = {**BIAS, "MEGATRON_ROLLOUTS_TO": str(recorded)}
        run = train(Job(save, launch=False, patched=False, rollouts=None, start=False, env=env), found, runs / "first")
        assert run.finished.status == 0, run.text[-3000:]
        subprocess.run(["git", "clone", "-q", "--shared", str(megatron), str(found.patched)], check=True)
        apply(patches_of("megatron-lm"), found.patched)
        (found.inputs / "made").write_text(made)
    return found


@pytest.fixture(scope="session")
def start(sources: Sources, record: Callable[..., None], say: Callable[[str], None]) -> Iterator[Start]:
    """Run a job to its end, `name` a folder below runs/trainers/megatron_rl."""

    def ended(runs: list[Trained], seconds: float) -> None:
        commits, versions = {"Megatron-LM": commit_of(sources.megatron)}, versions_of(sources.python, VERSIONS)
        peaks = (run.finished.peak_gib for run in runs)
        record(facts("megatron_rl", COMMAND, commits, versions, seconds, peaks), shimmed(runs))

    with one_by_one(train, sources, RUNS / "megatron_rl", ended, say) as one:
        yield one
