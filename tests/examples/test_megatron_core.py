"""The example that users copy runs under torchrun, and gives the same numbers split over tensors and over data."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")


def printed(*flags: str) -> str:
    """What the example prints, on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "megatron_core" / "train.py"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(*flags: str) -> list[tuple[float, float]]:
    """(loss, KL) of each step that the example prints."""
    found = re.findall(r"loss (-?[\d.]+), KL\(rollout \|\| train\) (-?[\d.]+)", printed(*flags))
    return [(float(loss), float(kl)) for loss, kl in found]


def test_the_example_trains_the_same_under_tensor_and_data_parallelism() -> None:
    flags = ("--use-rollout-log-probs", "--use-tis", "--tis-level", "sequence")
    tensor, data = losses("--tp", "2", *flags), losses(*flags)
    assert len(tensor) == 20
    assert tensor[-1][1] > tensor[0][1] + 0.2  # it learned: it left the uniform policy that wrote the data
    assert tensor[0] == pytest.approx(data[0], abs=2e-5)
    assert tensor[5] == pytest.approx(data[5], abs=1e-3)


def test_the_example_explains_once() -> None:
    page = printed("--use-tis", "--mismatch-explain-only")
    assert page.count("algorithm 2: decoupled PPO") == 1
    assert "step 0" not in page
