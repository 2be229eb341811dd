"""What is wrong is named, in a bounded time and with an exit status other than 0: settings, and data of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.columns import Shown
from tests.trainers.run import OUT_OF_TIME
from tests.trainers.slime.test_losses import HOOKED, by_path
from tests.trainers.slime.trainer import Job, Sources, Trained

SETTINGS = {
    "misspelt": (Job(["--use-tis", "--tis-levle", "sequence"]), "--tis-levle.*--tis-level"),
    "contradictory": (
        Job(["--use-tis", "--tis-upper-bound", "3", "--tis-clip", "2.5"]),
        "--tis-upper-bound 3.* contradicts slime's --tis-clip 2.5",
    ),
    "unknown in YAML": (
        Job(by_path("tis_function", *HOOKED), launch=False, config={"use_tis": True, "tis_levle": "sequence"}),
        "tis_levle.*tis_level",
    ),
    "not hooked": (
        Job(by_path(*HOOKED), launch=False, config={"use_tis": True, "tis_level": "sequence"}),
        "no hook of the plugin would run",
    ),
}
JOBS = {name: job for name, (job, _) in SETTINGS.items()}
TIS = ["--use-tis", "--tis-level", "sequence", "--use-rs", "--rs-level", "geometric", "--rs-lower-bound", "0.5"]


def absent(samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        sample["rollout_log_probs"] = None


def nan(samples: list[dict[str, Any]]) -> None:
    samples[5]["rollout_log_probs"][2] = math.nan


def short(samples: list[dict[str, Any]]) -> None:
    samples[5]["rollout_log_probs"].pop()


# A sample is on one rank of two.
DATA = {
    "absent": (absent, 1, "the rollout batch has no rollout_log_probs"),
    "NaN on one rank": (nan, 2, r"rollout log-prob of sequence \d+, position 2 .*kind nan"),
    "short on one rank": (short, 2, "log_prob length mismatch: len.log_prob.=18, response_length=19"),
}


def check_refused(run: Trained, pattern: str) -> None:
    assert run.finished.status not in (0, OUT_OF_TIME), run.text[-4000:]
    assert run.said(pattern), run.text[-4000:]


@pytest.mark.shows("fault_named", "exit_status")
@pytest.mark.parametrize("name", SETTINGS)
def test_wrong_settings_are_named(name: str, trained: Callable[[str], Trained], shows: Shown) -> None:
    run = trained(name)
    check_refused(run, SETTINGS[name][1])
    assert not run.steps
    shows("fault_named", "misspelt, contradictory and unhooked settings")


@pytest.mark.shows("fault_named", "exit_status")
@pytest.mark.parametrize("name", DATA)
def test_wrong_data_are_named(
    name: str, start: Callable[[str, Job], Future[Trained]], sources: Sources, tmp_path: Path, shows: Shown
) -> None:
    """In the second rollout, after a first that is sound."""
    fault, ranks, pattern = DATA[name]
    for rollout in range(2):
        dump = torch.load(sources.inputs / f"dump/{rollout}.pt", weights_only=False)
        if rollout:
            fault(dump["samples"])
        torch.save(dump, tmp_path / f"{rollout}.pt")
    run = start(f"faults/{name}", replace(Job(TIS, ranks=ranks), dump=tmp_path)).result()
    check_refused(run, pattern)
    assert sorted(run.steps) == [0, 1]
    shows("fault_named", "log-probs that are missing, NaN or too few on one rank")
