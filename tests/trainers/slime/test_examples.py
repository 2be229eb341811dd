"""The lines that examples/slime adds to slime's own launch script, in slime's train.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainers.columns import Shown
from tests.trainers.slime.reference import agreement, config_of
from tests.trainers.slime.trainer import ROOT, Job, Sources, Trained

EXAMPLES = ROOT / "examples/slime"
FLAGS = "--use-tis --tis-level sequence --tis-mode truncate --tis-upper-bound 2.0 --rs-veto-threshold 1e-4"
# mis.yaml's bounds of 0.1 % are for engines that hardly differ; the dumps have noise put in.
WIDE: dict[str, Any] = {"rs_lower_bound": 0.6, "rs_upper_bound": 1.1}
WIDE_FLAGS = "--use-rs --rs-level geometric --rs-lower-bound 0.6 --rs-upper-bound 1.1"


def added(diff: str) -> list[str]:
    """The arguments that a diff adds, with its files where they are here."""
    lines = re.findall(r"^\+\s+(--\S.*)$", (EXAMPLES / diff).read_text(), re.MULTILINE)
    return " ".join(lines).replace("/root/", f"{EXAMPLES}/").split()


def by_path() -> Job:
    flags = added("run-qwen3-4B-by-path.diff")
    at = flags.index("--custom-config-path")
    config = yaml.safe_load(Path(flags[at + 1]).read_text())
    return Job(flags[:at] + flags[at + 2 :], launch=False, config={**config, **WIDE})


JOBS = {
    "flags": Job(added("run-qwen3-4B.diff")),
    "yaml": Job(added("run-qwen3-4B-yaml.diff")),
    "by path": by_path(),
}
OURS = {"flags": FLAGS, "yaml": FLAGS, "by path": f"{FLAGS} {WIDE_FLAGS}"}


@pytest.mark.shows("starts", "loss_equals_reference")
@pytest.mark.parametrize("name", JOBS)
def test_an_example_runs_as_it_says(
    name: str, trained: Callable[[str], Trained], sources: Sources, shows: Shown
) -> None:
    run = trained(name)
    assert run.finished.status == 0, run.text[-4000:]
    agreement(run, config_of(OURS[name].split()), sources.inputs / run.job.checkpoint).check()
    shows("starts", "the lines that examples/slime adds")
