"""The minimal loop that users copy: the same gradients on one process, with accumulation and on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "examples" / "torch_loop.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SAVES = """    torch.save([weight.grad for weight in policy.parameters()], f"{sys.argv[2]}/{_}.{rank}.pt")
    optimizer.step()
"""


def gradients(folder: Path, script: str, micro_batches: int, *launcher: str) -> list[torch.Tensor]:
    """Of each of three steps, all weights'; every rank must have the same."""
    folder.mkdir()
    (folder / "loop.py").write_text(script.replace("    optimizer.step()\n", SAVES))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(folder / "loop.py"), str(micro_batches), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [
        torch.cat([each.flatten() for step in range(3) for each in torch.load(folder / f"{step}.{rank}.pt")])
        for rank in range(2 if launcher else 1)
    ]
    assert all(torch.equal(each, ranks[0]) for each in ranks)
    return list(ranks[0].chunk(3))


def test_the_loop_is_short_and_its_gradients_are_the_same_however_it_is_split(tmp_path: Path) -> None:
    """Catches a mean of micro-batch means, a micro-batch's own normalisation, and DDP's mean that is not undone."""
    script = LOOP.read_text()
    assert len(script.splitlines()) <= 40
    alone = gradients(tmp_path / "alone", script, 1)
    assert all(float(step.norm()) > 0.01 for step in alone)
    splits = {
        "accumulated": gradients(tmp_path / "accumulated", script, 3),
        "two ranks, accumulated": gradients(tmp_path / "two", script, 2, *TORCHRUN),
    }
    for name, steps in splits.items():
        for mine, theirs in zip(steps, alone, strict=True):
            assert float((mine - theirs).abs().max()) < 1e-6 * float(theirs.abs().max()), name
