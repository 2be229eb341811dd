"""slime's own example of this correction, mis.yaml, as it is: only the path of its function changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mismatch_plugin.hooks.slime.config import hook_path
from tests.trainers.columns import Shown
from tests.trainers.slime.reference import agreement, config_of
from tests.trainers.slime.trainer import Job, Sources, Trained

EXAMPLE = "examples/train_infer_mismatch_helper"
MIS = yaml.safe_load((Path(os.environ["SLIME_SRC"]) / EXAMPLE / "mis.yaml").read_text())
PATH, THEIRS = "--custom-tis-function-path", f"{EXAMPLE.replace('/', '.')}.mis.compute_mis_weights_with_cp"
OURS = """
    --use-tis --tis-level token --tis-mode truncate --tis-upper-bound 2 --use-rs --rs-level token --rs-lower-bound 0.5
    --rs-upper-bound 2 --rs-veto-threshold 1e-4 --tis-batch-normalize
"""
JOBS = {
    "ours": Job(["--use-tis", PATH, hook_path("slime", "tis_function")], launch=False, config=MIS),
    "theirs": Job(["--use-tis", PATH, THEIRS], launch=False, config=MIS),
}


@pytest.mark.shows("loss_equals_reference")
def test_the_example_with_our_path(trained: Callable[[str], Trained], sources: Sources, shows: Shown) -> None:
    """Each step is one micro-batch here, over which slime's own normalises."""
    ours, theirs = trained("ours"), trained("theirs")
    assert [run.finished.status for run in (ours, theirs)] == [0, 0], theirs.text[-4000:]
    for step, logged in theirs.steps.items():
        for metric in ("loss", "grad_norm"):
            assert ours.steps[step][metric] == pytest.approx(logged[metric], rel=1e-4, abs=1e-6), (step, metric)
    found = agreement(ours, config_of(OURS.split()), sources.inputs / ours.job.checkpoint)
    assert found.loss < 1e-5 and found.grad_norm < 1e-4
    assert {len(step) for step in found.steps} == {3}  # no metrics of ours: they need the step's hooks
    shows("loss_equals_reference", "mis.yaml as with slime's own function", found.loss)
