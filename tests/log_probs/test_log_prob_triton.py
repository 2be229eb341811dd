"""The Triton log-probs without a GPU: every kernel interpreted. What they compile to: `test_log_prob_compiled.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mismatch_plugin.log_probs import torch_arithmetic, vocab_parallel_log_probs
from mismatch_plugin.log_probs.backends import choose_arithmetic

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

ROOT = Path(__file__).parents[2]


def version(module: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


# Its scalars are arrays of one element, which numpy 2.4 no longer takes for numbers; Triton 3.9 no longer asks it to.
INTERPRETER_WORKS = version(triton) >= (3, 9) or version(numpy) < (2, 4)


@pytest.mark.skipif(not INTERPRETER_WORKS, reason="this Triton's interpreter needs numpy < 2.4")
def test_interpreted():
    """Triton decides at its import whether it interprets, and other tests need it not to: a pytest of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/log_probs/triton_cases.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-5000:] + done.stderr[-3000:]


def cuda_logits(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    # Not torch.empty, whose device another test's stand-ins for CUDA may have made the CPU.
    return FakeTensor(FakeTensorMode(), torch.empty(2, 3, dtype=dtype, device="meta"), torch.device("cuda"))


def test_auto_is_triton_on_cuda_alone(monkeypatch: pytest.MonkeyPatch):
    from mismatch_plugin.log_probs import triton_arithmetic

    assert choose_arithmetic(cuda_logits(), "auto") is triton_arithmetic
    assert choose_arithmetic(cuda_logits(), "torch") is torch_arithmetic
    assert choose_arithmetic(cuda_logits(torch.float64), "auto") is torch_arithmetic
    assert choose_arithmetic(torch.zeros(2, 3), "auto") is torch_arithmetic
    monkeypatch.setitem(sys.modules, "mismatch_plugin.log_probs.triton_arithmetic", None)
    assert choose_arithmetic(cuda_logits(), "auto") is torch_arithmetic
    with pytest.raises(RuntimeError, match=r"backend='triton' needs Triton .*: install it or use backend='torch'"):
        choose_arithmetic(cuda_logits(), "triton")


def test_triton_is_refused_where_it_cannot_run():
    targets = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="needs logits on CUDA, not on cpu: use backend='torch', or set TRITON"):
        vocab_parallel_log_probs(torch.zeros(2, 3), targets, backend="triton")
    with pytest.raises(ValueError, match=r"backend='triton' cannot do torch\.float64 logits: use backend='torch'"):
        vocab_parallel_log_probs(torch.zeros(2, 3, dtype=torch.float64), targets, backend="triton")
