"""slime's full loop where something is wrong, or is set up in another way: what our side says, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.trainers.columns import Shown
from tests.trainers.slime.loop import dumps, inspect, reported, reverse
from tests.trainers.slime.trainer import Sources, Trained

JOBS = {
    "temperature": reverse("--use-tis --custom-generate-function-path slime_faults.other_temperature", rollouts=3),
    "stale": reverse("--use-tis --custom-update-weight-post-write-path slime_faults.stale_files", rollouts=6),
    "killed": reverse("--use-tis --custom-generate-function-path slime_faults.killed_server", rollouts=6),
}


@pytest.mark.shows("fault_named")
def test_a_server_at_another_temperature_is_named(trained: Callable[[str], Trained], sources: Sources, shows: Shown):
    run = trained("temperature")
    assert run.finished.status == 0, run.text[-3000:]
    status, found = inspect(sources, dumps(run, range(3)))
    assert status == 1 and found["findings"][0]["fault"] == "temperature", found
    status, found = inspect(sources, run.folder / "report")  # metrics alone cannot tell a temperature
    assert status == 1 and found["verdict"] == "large", found
    shows("fault_named", "by inspect: another temperature, weights that do not arrive or in part")


@pytest.mark.shows("fault_named")
def test_weights_that_do_not_arrive_are_named(trained: Callable[[str], Trained], sources: Sources, shows: Shown):
    """Nothing arrives under rollouts 1 and 2, one of two layers under 3 to 5; all versions are as they should be."""
    run = trained("stale")
    assert run.finished.status == 0, run.text[-3000:]
    status, found = inspect(sources, dumps(run, range(3), "rollout"), dumps(run, range(3)))
    assert status == 1 and found["findings"][0]["fault"] == "weights_not_updated", found
    both = ["--checkpoint", run.folder / "now/6", "--reference-checkpoint", sources.inputs / "warm"]
    status, found = inspect(sources, dumps(run, [5], "rollout"), dumps(run, [5]), *both)
    assert status == 1 and found["findings"][0]["fault"] == "weights_partly_updated", found
    status, found = inspect(sources, run.folder / "report")
    grown = next(f["evidence"] for f in found["findings"] if f["fault"] == "growth")
    assert status == 1 and re.search(r"at step 4\b|since step 4\b", grown), found
    shows("fault_named", "by inspect: another temperature, weights that do not arrive or in part")


@pytest.mark.shows("fault_named")
def test_a_killed_server_ends_the_run_with_an_error(trained: Callable[[str], Trained], shows: Shown):
    run = trained("killed")
    assert run.said("the server is killed")
    assert run.finished.status not in (0, 124), run.text[-3000:]
    assert run.said(r"Max retries \(60\) reached")  # slime's own, one a second
    assert len(reported(run)) == 4 * 2  # the steps before it are there
    shows("fault_named", "a killed server (after slime's 60 retries, some four minutes)")
