"""The plain torch loop that users copy: the same losses alone, on two processes, and in one micro-batch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "examples" / "torch_loop.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")


def run(script: Path, logs: Path, *launcher: str) -> list[list[float]]:
    """Loss, KL, accepted share and norm of the weights after each step, as printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(script), str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(logs.iterdir()), "TensorBoard's file"
    return [
        [float(value) for value in re.findall(r"-?[\d.]+", line)[1:]]
        for line in done.stdout.splitlines()
        if "loss" in line
    ]


def test_the_loop_gives_the_same_numbers_however_it_is_split(tmp_path: Path) -> None:
    """Catches a mean of micro-batch means, and DDP's mean over ranks that was not undone."""
    alone = run(LOOP, tmp_path / "alone")
    assert len(alone) == 3 and all(len(step) == 4 for step in alone)
    assert all(0.5 < accepted < 1.0 for _, _, accepted, _ in alone), "the criterion rejects something, not all"
    assert len({norm for *_, norm in alone}) == 3, "the weights move"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    whole = tmp_path / "whole.py"
    whole.write_text(LOOP.read_text().replace("STEPS = 16, 16, 12, 4, 3", "STEPS = 16, 16, 12, 16, 3"))
    assert whole.read_text() != LOOP.read_text()
    for other in (run(LOOP, tmp_path / "two", *torchrun), run(whole, tmp_path / "whole")):
        for mine, theirs in zip(other, alone, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)


def test_rejected_responses_are_in_no_baseline(tmp_path: Path) -> None:
    """Catches advantages over all responses: other numbers than the loop's, which rejects whole ones in every step."""
    everyone = tmp_path / "everyone.py"
    everyone.write_text(LOOP.read_text().replace("prompts, accepted)", "prompts)"))
    assert everyone.read_text() != LOOP.read_text()
    alone, biased = run(LOOP, tmp_path / "alone"), run(everyone, tmp_path / "biased")
    assert abs(alone[0][0] - biased[0][0]) > 1e-3
    assert alone[0][2] == biased[0][2], "the same tokens are accepted"
