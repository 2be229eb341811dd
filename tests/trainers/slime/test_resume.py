"""Save and resume by slime's own checkpoints: the steps after it are those of the run that was not interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from tests.trainers.columns import Shown
from tests.trainers.slime.trainer import Job, Trained

FLAGS = ["--use-tis", "--tis-level", "sequence", "--rs-veto-threshold", "0.1", "--max-tokens-per-gpu", "96"]
SAVE = "--save-interval 2 --mismatch-report-dir {run}/../report --save {run}/../checkpoint"
# Megatron-LM's distributed optimizer cannot load the state of torch's Adam (it asserts that there is one already), and
# its own Adam needs a GPU; slime sets it with no flag against.
SETTINGS = {"use_distributed_optimizer": False}
JOBS = {
    "whole": Job(FLAGS, rollouts=4, config=SETTINGS),
    "first": Job([*FLAGS, *SAVE.split()], rollouts=2, config=SETTINGS),
}


@pytest.mark.shows("starts", "exit_status")
def test_a_resumed_run_goes_on_with_the_same_numbers(
    trained: Callable[[str], Trained], start: Callable[[str, Job], Future[Trained]], shows: Shown
) -> None:
    whole, first = trained("whole"), trained("first")
    # The scheduler knows another number of rollouts; the random state, which nothing draws from, has none of CUDA's.
    flags = [*FLAGS, *SAVE.split(), "--load", "{run}/../checkpoint", "--override-opt_param-scheduler", "--no-load-rng"]
    again = start("resume/again", Job(flags, rollouts=4, config=SETTINGS)).result()
    assert [run.finished.status for run in (whole, first, again)] == [0, 0, 0], again.text[-4000:]
    assert sorted(first.steps) == [0, 1, 2, 3] and sorted(again.steps) == [4, 5, 6, 7]
    for step, theirs in whole.steps.items():
        run = first if step < 4 else again
        for metric in ("loss", "grad_norm", "tis", "tis_weight", "tis_rejected", "ppo_kl"):
            assert run.steps[step][metric] == pytest.approx(theirs[metric], rel=1e-6, abs=1e-7), (step, metric)
    lines = (again.folder.parent / "report/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(8))
    shows("exit_status", "0 after a resume, whose steps are those of an uninterrupted run")
