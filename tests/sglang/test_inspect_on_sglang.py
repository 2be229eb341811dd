"""`mismatch-plugin inspect` names what was done to real SGLang servers, and says nothing where nothing was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

from mismatch_plugin.check.training import read_training
from mismatch_plugin.inspect.command import inspect
from mismatch_plugin.rollout.files import read_records
from tests.sglang import cases
from tests.sglang.cases import write_case
from tests.sglang.world import SIZES, Size, World, make_world

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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="session")
def world(folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield make_world(folder / "checkpoints", stack)


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


def _array(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_done_to_the_servers_is_named_first(world: World, folder: Path, name: str, size: Size) -> None:
    found = diagnosis(world, folder, name, size)
    assert found["verdict"] == "fault", found["headline"]
    assert found["findings"][0]["kind"] == EXPECTED[name], found["findings"]
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
        world.load([world.moved["mild"][cases.STEPS], states[0] if size == "mild" else states[-1]], "step-9")
        found = inspected(*both)
        assert found["findings"][0]["kind"] == "server_differs", found["findings"]
        assert (
            world.urls[1] in found["findings"][0]["evidence"] and world.urls[0] not in found["findings"][0]["evidence"]
        )


def test_the_cases_are_what_they_say(world: World, folder: Path) -> None:
    """The gap of the sound pair is bfloat16's; the faults in weights are several times as large, and grow with size."""
    gaps = {}
    for name in ("clean", "weights_not_updated_one_step", "weights_partly_updated", "stale_server"):
        for size in SIZES:
            made = folder / f"gaps-{name}-{size}"
            write_case(world, folder / "checkpoints", made, name, size)
            records, training = read_records(made / "rollouts.jsonl"), read_training(made / "training.jsonl")
            rows = zip(records, training, strict=True)
            gap = np.concatenate([_array(b.train_log_probs) - _array(a.rollout_log_probs) for a, b in rows])
            gaps[name, size] = float(np.abs(gap).mean())
    print(gaps)
    assert 0.002 < gaps.pop(("clean", "mild")) < 0.015
    assert 0.015 < gaps.pop(("clean", "strong")) < 0.1
    assert all(gaps[name, "mild"] > 0.015 and gaps[name, "strong"] > 2 * gaps[name, "mild"] for name, _ in gaps)


def test_the_dump_is_of_a_healthy_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.inspect.make_dump", str(tmp_path)]
    done = subprocess.run([*command, "--tokens", "60000", "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records, training = read_records(tmp_path / "rollouts.parquet"), read_training(tmp_path / "training.jsonl")
    tokens = sum(len(record.response_ids) for record in records)
    assert tokens >= 60000 and f"{len(records)} responses, {tokens} response tokens, " in done.stdout
    steps = set()
    for record, told in zip(records, training, strict=True):
        (span,) = record.weight_versions
        assert record.sample_id == told.sample_id and span.version == told.weight_version
        assert record.reward is not None and record.server
        assert _array(record.rollout_log_probs) == pytest.approx(_array(told.train_log_probs), abs=1e-4)
        steps.add(span.version)
    assert len(steps) > 1


def test_every_case_says_what_it_is() -> None:
    assert EXPECTED.keys() <= cases.CASES.keys() and all(case.__doc__ for case in cases.CASES.values())
