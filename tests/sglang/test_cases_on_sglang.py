"""What inspect is tried on: faults planted on real servers are of the size that they say, and a dump is sound."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mismatch_plugin.check.training import read_training
from mismatch_plugin.rollout.files import read_records
from tests.sglang.cases import write_case
from tests.sglang.world import SIZES, Size, World


def _array(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


def test_the_cases_are_what_they_say(world: World, folder: Path) -> None:
    """The gap of the sound pair is bfloat16's; the faults in weights are several times as large, and grow with size."""
    gaps: dict[tuple[str, Size], float] = {}
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
    done = subprocess.run([*command, "--tokens", "40000", "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records, training = read_records(tmp_path / "rollouts.parquet"), read_training(tmp_path / "training.jsonl")
    tokens = sum(len(record.response_ids) for record in records)
    assert tokens >= 40000 and f"{len(records)} responses, {tokens} response tokens, " in done.stdout
    steps = set()
    for record, told in zip(records, training, strict=True):
        (span,) = record.weight_versions
        assert record.sample_id == told.sample_id and span.version == told.weight_version
        assert record.reward is not None and record.server
        assert _array(record.rollout_log_probs) == pytest.approx(_array(told.train_log_probs), abs=1e-4)
        steps.add(span.version)
    assert len(steps) > 1
