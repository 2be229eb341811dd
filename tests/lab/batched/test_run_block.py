"""A block of runs in the folders of its runs: what is there is what the run alone gives; a run that breaks is said."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from mismatch_plugin.lab.batched.model import FINAL_NORM, OUTPUT
from mismatch_plugin.lab.batched.trainer import train
from mismatch_plugin.lab.batched.warm import save_warm, warm_weights
from mismatch_plugin.lab.compare import Job, plan, tasks
from mismatch_plugin.lab.workers import _attempt
from mismatch_plugin.report.log import to_json
from tests.lab.batched.problem import SMALL


def _block(root: Path) -> tuple[Job, ...]:
    lab = {**SMALL, "warm_up_steps": 4}
    (task,) = tasks(plan(root, {"int3": ["0", "1"]}, [0, 1], {"int3": {"rollout_dtype": "int3"}}, lab, "batched"))
    return task


def _run(task: tuple[Job, ...]) -> None:
    locks: dict[str, Any] = {job.settings.warm_up_key: Lock() for job in task}
    assert _attempt(task, locks, {}) is None


def _without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def test_a_block_fills_the_folders_of_its_runs(tmp_path: Path) -> None:
    task = _block(tmp_path)
    _run(task)
    seen = set[str]()
    for job in task:
        config = json.loads((job.folder / "config.json").read_text())
        assert config["settings"] == job.settings.model_dump(mode="json")
        assert config["mismatch"] == job.config.model_dump(mode="json")
        seed = [job.settings.seed]
        blocks = train(job.settings, seed, [job.config], warm_weights(job.settings, seed, job.warm))
        alone = [json.loads(to_json(block[0][0])) for block in blocks]
        text = (job.folder / "metrics.jsonl").read_text()
        assert _without_seconds([*map(json.loads, text.splitlines())]) == _without_seconds(alone)
        outcome = json.loads((job.folder / "done.json").read_text())
        assert (outcome["status"], outcome["step"]) == ("finished", 4)
        assert outcome["held_out_exact"] == alone[-1]["held_out_exact"]
        assert job.done and job.last("held_out_exact") == alone[-1]["held_out_exact"]
        (job.folder / "done.json").unlink()
        assert job.steps_done == 4  # counted in the file: the first line is before any step
        seen.add(to_json(_without_seconds(alone)))
    assert len(seen) == 4


def test_a_run_that_breaks_is_said_to_have_diverged(tmp_path: Path) -> None:
    task = _block(tmp_path)
    one = next(job for job in task if job.settings.seed == 1)
    broken = {name: weight[0] for name, weight in warm_weights(one.settings, [1]).items()}
    broken[FINAL_NORM] = broken[FINAL_NORM] * 1e-30
    broken[OUTPUT] = broken[OUTPUT] * 1e30  # the same logits, and a gradient whose square is more than float32 holds
    save_warm(one.settings, one.warm, broken)
    _run(task)
    said = {job.settings.seed: json.loads((job.folder / "done.json").read_text())["status"] for job in task}
    assert said == {0: "finished", 1: "diverged"} and torch.isfinite(broken[OUTPUT]).all()
