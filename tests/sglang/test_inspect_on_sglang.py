"""`mismatch-plugin inspect` names what was done to real SGLang servers, and says nothing where nothing was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mismatch_plugin.diagnose.command import inspect
from tests.sglang.cases import write_case
from tests.sglang.world import SIZES, STEPS, Size, World

EXPECTED = {
    "weights_not_updated": "weights_not_updated",
    "weights_not_updated_one_step": "weights_not_updated",
    "weights_partly_updated": "weights_partly_updated",
    "stale_server": "stale_server",
    "wrong_prompt": "wrong_prompt",
    "retokenised": "retokenised",
    "temperature": "temperature",
    "truncation": "truncation",
    "eos_appended": "eos_appended",
    "shift_by_one": "shift_by_one",
}
"""Case -> the first finding. What each does, and how mild and strong differ: the docstrings in cases.py."""
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(inspect)


def inspected(*arguments: object) -> dict[str, Any]:
    """What the command prints; its exit status says the same."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    assert done.exit_code == (found["verdict"] == "fault"), done.output
    return found


def diagnosis(world: World, folder: Path, name: str, size: Size) -> dict[str, Any]:
    """What is said of a case."""
    made = folder / f"{name}-{size}"
    write_case(world, folder / "checkpoints", made, name, size)
    # Which tensors are old is told from both checkpoints.
    more = ("--checkpoint", made / "current") if name.startswith("weights_partly") else ()
    files = (made / "rollouts.jsonl", made / "training.jsonl")
    return inspected(*files, "--reference-checkpoint", made / "reference", *more)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_done_to_the_servers_is_named_first(world: World, folder: Path, name: str, size: Size) -> None:
    found = diagnosis(world, folder, name, size)
    assert found["verdict"] == "fault", found["headline"]
    assert found["findings"][0]["fault"] == EXPECTED[name], found["findings"]
    assert found["recommendation"] is None  # the fault first


@pytest.mark.parametrize(("name", "size"), [("clean", "mild"), ("clean_steps", "mild"), ("clean_steps", "strong")])
def test_sound_servers_are_normal(world: World, folder: Path, name: str, size: Size) -> None:
    found = diagnosis(world, folder, name, size)
    assert (found["verdict"], found["findings"]) == ("normal", []), found["headline"]
    assert found["recommendation"] is not None


def test_a_trainer_that_is_a_step_ahead_and_says_so_is_no_fault(world: World, folder: Path) -> None:
    found = diagnosis(world, folder, "clean", "strong")
    assert found["verdict"] in ("normal", "large") and found["findings"] == [], found["headline"]


def test_a_server_that_has_other_weights_than_the_checkpoint_is_named(world: World, folder: Path) -> None:
    made = folder / "served"
    write_case(world, folder / "checkpoints", made, "clean", "mild")
    both = [made / "rollouts.jsonl", made / "training.jsonl", "--checkpoint", made / "current"]
    both += [part for url in world.urls for part in ("--url", url)]
    assert inspected(*both)["findings"] == []
    for size in SIZES:
        states = world.moved[size]
        world.load([world.moved["mild"][STEPS], states[0] if size == "mild" else states[-1]], "step-9")
        found = inspected(*both)
        assert found["findings"][0]["fault"] == "server_differs", found["findings"]
        assert (
            world.urls[1] in found["findings"][0]["evidence"] and world.urls[0] not in found["findings"][0]["evidence"]
        )
