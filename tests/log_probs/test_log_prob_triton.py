"""The Triton log-probs without a GPU: every kernel interpreted. What they compile to: `test_log_prob_compiled.py`.

Triton decides at its import whether it interprets, and other tests need it not to. So `CASES` run in a pytest of their
own that has TRITON_INTERPRET=1 from the start; here is one test for each of their test functions.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mismatch_plugin.log_probs import torch_arithmetic, vocab_parallel_log_probs
from mismatch_plugin.log_probs.backends import choose_arithmetic
from tests import peers

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "log_probs" / "triton_cases.py"


def version(module: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


NAMES = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


# 1 interpreted -------------------------------------------------------------------------------------------------------


# Its scalars are arrays of one element, which numpy 2.4 no longer takes for numbers; Triton 3.9 no longer asks it to.
INTERPRETER_WORKS = version(triton) >= (3, 9) or version(numpy) < (2, 4)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], str]:
    """(outcomes of each test function, what pytest printed)."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=ROOT, check=False)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    outcomes: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcomes.setdefault(case.attrib["name"].split("[")[0], []).append(outcome)
    return outcomes, done.stdout


@pytest.mark.skipif(not INTERPRETER_WORKS, reason="this Triton's interpreter needs numpy < 2.4")
@pytest.mark.parametrize("name", NAMES)
def test_interpreted(interpreted: tuple[dict[str, list[str]], str], name: str):
    outcomes, printed = interpreted
    found = set(outcomes.get(name, ["never ran"]))
    if found == {"skipped"} and peers.missing():
        pytest.skip(peers.ABSENT)
    assert found == {"passed"}, printed[-5000:]


# 2 chosen ------------------------------------------------------------------------------------------------------------


def cuda_logits(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    # Not torch.empty, whose device another test's stand-ins for CUDA may have made the CPU.
    return FakeTensor(FakeTensorMode(), torch.empty(2, 3, dtype=dtype, device="meta"), torch.device("cuda"))


def test_auto_is_triton_on_cuda_alone():
    from mismatch_plugin.log_probs import triton_arithmetic

    assert choose_arithmetic(cuda_logits(), "auto") is triton_arithmetic
    assert choose_arithmetic(cuda_logits(), "torch") is torch_arithmetic
    assert choose_arithmetic(cuda_logits(torch.float64), "auto") is torch_arithmetic
    assert choose_arithmetic(torch.zeros(2, 3), "auto") is torch_arithmetic


def test_without_triton_auto_is_torch(monkeypatch: pytest.MonkeyPatch):
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
