"""Mistakes in miles's own train.py: named in a sentence, and the exit status is not 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers.columns import Shown
from tests.trainers.miles.trainer import Job, Trained

JOBS = {
    "a misspelt flag": Job(["--use-tis", "--tis-levl", "sequence"]),
    "a flag of two meanings": Job(["--use-tis", "--custom-tis-function-path", "somebody.s_own"]),
    "an invalid log-prob": Job(["--use-tis"], dump=Path("invalid"), rollouts=1),
    "no log-probs": Job(["--use-tis"], dump=Path("missing"), rollouts=1),
}
SAID = {
    "a misspelt flag": "--tis-levl is unknown: did you mean --tis-level",
    "a flag of two meanings": "--custom-tis-function-path somebody.s_own is another correction",
    "an invalid log-prob": "rollout log-prob of sequence .* is missing or NaN",
    "no log-probs": "rollout_log_probs is missing: algorithm 2",
}


@pytest.mark.shows("fault_named")
@pytest.mark.parametrize("name", JOBS)
def test_a_fault_ends_the_run_and_is_named(name: str, trained: Callable[[str], Trained], shows: Shown) -> None:
    run = trained(name)
    assert run.finished.status not in (0, 124), run.text[-2000:]
    said = run.said(SAID[name])
    assert said, run.text[-4000:]
    shows("fault_named", "misspelt and contradictory flags, log-probs that are missing or NaN")
