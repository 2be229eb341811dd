"""What inspect is tried on: faults planted on real servers are of the size that they say, and a dump is sound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mismatch_plugin.data.read import read
from tests.sglang.cases import write_case
from tests.sglang.world import SIZES, Size, World


def test_the_cases_are_what_they_say(world: World, folder: Path) -> None:
    """The gap of the sound pair is bfloat16's; the faults in weights are several times as large, and grow with size."""
    gaps: dict[tuple[str, Size], float] = {}
    for name in ("clean", "weights_not_updated_one_step", "weights_partly_updated", "stale_server"):
        for size in SIZES:
            made = folder / f"gaps-{name}-{size}"
            write_case(world, folder / "checkpoints", made, name, size)
            samples = read(made / "rollouts.jsonl", made / "training.jsonl").samples
            gap = np.concatenate([sample.train_log_probs - sample.rollout_log_probs for sample in samples])
            gaps[name, size] = float(np.abs(gap).mean())
    print(gaps)
    assert 0.002 < gaps.pop(("clean", "mild")) < 0.015
    assert 0.015 < gaps.pop(("clean", "strong")) < 0.1
    assert all(gaps[name, "mild"] > 0.015 and gaps[name, "strong"] > 2 * gaps[name, "mild"] for name, _ in gaps)


def test_the_dump_is_of_a_healthy_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.inspect.make_dump", str(tmp_path / "dump.parquet")]
    done = subprocess.run([*command, "--tokens", "40000", "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = read(tmp_path / "dump.parquet").samples
    tokens = sum(map(len, samples))
    assert tokens >= 40000 and f"{len(samples)} responses, {tokens} response tokens, " in done.stdout
    steps = set()
    for sample in samples:
        (span,) = sample.weight_versions
        assert span.version == sample.trainer_version
        assert sample.reward is not None and sample.server
        assert sample.rollout_log_probs == pytest.approx(sample.train_log_probs, abs=1e-4)
        steps.add(span.version)
    assert len(steps) > 1
