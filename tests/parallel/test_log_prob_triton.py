"""The Triton log-probs without a GPU: every kernel interpreted, and compiled for real devices.

Triton decides at its import whether it interprets, and other tests need it not to. So `log_prob_triton_cases.py` runs
in a pytest of its own that has TRITON_INTERPRET=1 from the start; here is one test for each test function there.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mismatch_plugin.parallel.log_prob_torch import VocabParallelLogProbs
from mismatch_plugin.parallel.log_probs import choose_function, vocab_parallel_log_probs

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "log_prob_triton_cases.py"


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
    assert set(outcomes.get(name, ["never ran"])) == {"passed"}, printed[-5000:]


# 2 compiled ----------------------------------------------------------------------------------------------------------
#
# For a GPU that need not be there. What is counted is what makes the speed: each logit loaded once, 16 bytes at a time,
# nothing spilled to memory, and no barrier in the loop over a row.

ARGUMENTS: dict[str, Any] = {
    "logits": "*bf16", "stride_t": "i32", "stride_v": 1, "gradient": "*bf16", "gradient_stride_t": "i32",
    "gradient_stride_v": 1, "rows": None, "target_of_row": None, "targets": "*i64", "unit": "fp32", "units": None,
    "mask": None, "mask_stride_r": 0, "mask_stride_v": 0, "kept": None, "offsets": None, "statistics": "*fp32",
    "coefficients": "*fp32", "values": "*bf16", "target_values": "*bf16", "log_probs": "*fp32", "entropy": "*fp32",
    "shift": "*fp32", "sums": "*fp32", "g": "*fp32", "g_stride": "i32", "h": "*fp32", "h_stride": "i32",
    "targets_count": "i32", "vocab_start": "i32", "columns": "i32", "width": "i32", "blocks": "i32", "FILTER": 0,
    "ENTROPY": True, "SLOPE": True, "CONTIGUOUS": True, "LINES": 1024, "LINE": 8, "BLOCK": 4096, "RANKS": 8,
}  # fmt: skip
BOOLEAN = {"mask": "*u8", "mask_stride_r": "i32", "mask_stride_v": 1, "FILTER": 1}
RAGGED = {"kept": "*i32", "offsets": "*i64", "FILTER": 2}
FLOAT32 = {"logits": "*fp32", "LINE": 4, "LINES": 2048}
UNALIGNED = ("vocab_start", "targets_count", "columns", "blocks")


def ptx(kernel: str, changes: dict[str, Any], capability: int = 90) -> str:
    """What the kernel of 8 warps becomes: its `ARGUMENTS` are types, and values of what is constant."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mismatch_plugin.parallel import log_prob_kernels

    function = getattr(log_prob_kernels, kernel)
    arguments = {name: (ARGUMENTS | changes)[name] for name in function.arg_names}
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in arguments.items()}
    constants = {(i,): arguments[name] for i, name in enumerate(arguments) if types[name] == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(arguments)
        if types[name] not in ("constexpr", "fp32") and name not in UNALIGNED
    }
    source = ASTSource(function, types, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    return compiled.asm["ptx"]


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew, and nothing left in the home folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("changes", [{}, {"ENTROPY": False}, FLOAT32, BOOLEAN], ids=["bf16", "none", "fp32", "mask"])
def test_the_forward_reads_each_logit_once(changes: dict[str, Any], capability: int):
    """2 bytes a logit: a tile of 8192 columns is 4 loads a thread in the loop. The rest is read column by column here,
    as the vocabulary's size is odd."""
    text, wide, rest = ptx("statistics_kernel", changes, capability), 8 if changes == FLOAT32 else 4, 32
    assert count(r"ld\.global\.v4\.b32", text) == wide
    if changes != BOOLEAN:  # which reads a mask besides
        assert count(r"ld\.global", text) == wide + rest + 2  # the target and its logit
    assert ".local" not in text
    loop = text[text.index("ld.global.v4.b32") :]
    loop = loop[: loop.index("ld.global.b32" if changes == FLOAT32 else "ld.global.b16")]
    assert loop.count("ex2.approx") >= 32 and "bar.sync" not in loop and "shfl" not in loop


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("changes", [{}, {"SLOPE": False}, BOOLEAN], ids=["entropy", "none", "mask"])
def test_the_backward_reads_and_writes_each_logit_once(changes: dict[str, Any], capability: int):
    """4 bytes a logit: 16 columns a thread are 2 loads and 2 stores (and 2 of zeros, where nothing is read)."""
    text = ptx("gradient_kernel", changes, capability)
    assert count(r"ld\.global\.v4\.b32", text) == (3 if changes == BOOLEAN else 2)
    assert count(r"st\.global\.v4\.b32", text) == 4 == count(r"st\.global", text)
    assert ".local" not in text


STRIDED = {"stride_v": "i32", "gradient_stride_v": "i32", "CONTIGUOUS": False}
KEPT = RAGGED | {"targets": "*i32", "rows": "*i64", "BLOCK": 512}
FEW = {"BLOCK": 256}


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        ("statistics_kernel", RAGGED | STRIDED | {"units": "*fp32", "rows": "*i64"}),
        ("gradient_kernel", RAGGED | STRIDED | {"target_of_row": "*i64"}),
        ("kept_gradient_kernel", KEPT),
        ("kept_write_kernel", KEPT),
        ("finish_kernel", FEW),
        ("coefficients_kernel", FEW),
        ("coefficients_kernel", FEW | {"g": None, "units": "*fp32"}),
        ("coefficients_kernel", FEW | {"h": None, "entropy": None}),
    ],
)
def test_filters_and_strides_compile(kernel: str, changes: dict[str, Any]):
    """What a row's ragged ids, picked rows, a temperature per target and other strides add."""
    text = ptx(kernel, changes)
    assert "fma" in text or kernel != "finish_kernel"


@pytest.mark.parametrize("changes", [{}, BOOLEAN, RAGGED], ids=["none", "mask", "ragged"])
def test_sizes_of_one_compile(changes: dict[str, Any]):
    """Triton makes a constant of every size and stride that is 1, and then other code."""
    ones = {"stride_t": 1, "gradient_stride_t": 1, "columns": 1, "width": 1, "blocks": 1, "LINES": 32}
    for kernel in ("statistics_kernel", "gradient_kernel"):
        assert ptx(kernel, changes | ones)


# 3 chosen ------------------------------------------------------------------------------------------------------------


def cuda_logits(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(2, 3, dtype=dtype, device="cuda")


def test_auto_is_triton_on_cuda_alone():
    from mismatch_plugin.parallel.log_prob_triton import TritonLogProbs

    assert choose_function(cuda_logits(), "auto") is TritonLogProbs
    assert choose_function(cuda_logits(), "torch") is VocabParallelLogProbs
    assert choose_function(cuda_logits(torch.float64), "auto") is VocabParallelLogProbs
    assert choose_function(torch.zeros(2, 3), "auto") is VocabParallelLogProbs


def test_without_triton_auto_is_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mismatch_plugin.parallel.log_prob_triton", None)
    assert choose_function(cuda_logits(), "auto") is VocabParallelLogProbs
    with pytest.raises(RuntimeError, match=r"backend='triton' needs Triton .*: install it or use backend='torch'"):
        choose_function(cuda_logits(), "triton")


def test_triton_is_refused_where_it_cannot_run():
    targets = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="needs logits on CUDA, not on cpu: use backend='torch', or set TRITON"):
        vocab_parallel_log_probs(torch.zeros(2, 3), targets, backend="triton")
    with pytest.raises(ValueError, match=r"backend='triton' cannot do torch\.float64 logits: use backend='torch'"):
        vocab_parallel_log_probs(torch.zeros(2, 3, dtype=torch.float64), targets, backend="triton")


def test_importing_the_package_does_not_import_triton():
    code = "import sys, mismatch_plugin.parallel.log_probs; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_the_cuda_check_claims_nothing_without_cuda():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "examples.benchmarks.log_probs_cuda_check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "nothing was checked and nothing was measured" in done.stderr
