"""The minimal loop that users copy: the same gradients on one process, with accumulation and on two ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.launch import launch

SCRIPT = (Path(__file__).parents[2] / "examples" / "torch_loop.py").read_text()
STEP, START = "    optimizer.step()\n", '    dist.init_process_group("gloo")\n'


def gradients(micro_batches: int) -> Tensor:
    """[3 steps, weights] of this rank; the loop, but for the start of the processes, which have been started."""
    names: dict[str, Any] = {"__name__": "loop", "seen": []}
    code = SCRIPT.replace(STEP, "    seen.append([weight.grad.flatten() for weight in policy.parameters()])\n" + STEP)
    variables = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, variables), mock.patch.object(sys, "argv", ["loop.py", str(micro_batches)]):
        exec(compile(code.replace(START, "    pass\n"), "loop.py", "exec"), names)
    return torch.stack([torch.cat(step) for step in names["seen"]])


def test_the_loop_is_short_and_its_gradients_are_the_same_however_it_is_split() -> None:
    """Catches a mean of micro-batch means, a micro-batch's own normalisation, and DDP's mean that is not undone."""
    assert len(SCRIPT.splitlines()) <= 40 and SCRIPT.count(STEP) == SCRIPT.count(START) == 1
    (alone,), (accumulated,) = launch(gradients, [1, 3], 1)
    ((first, second),) = launch(gradients, [2], 2)
    assert float(alone.norm(dim=1).min()) > 0.01 and torch.equal(first, second)
    for split in (accumulated, first):
        assert float((split - alone).abs().max()) < 1e-6 * float(alone.abs().max())
