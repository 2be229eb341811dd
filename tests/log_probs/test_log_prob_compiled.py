"""What the Triton kernels of the log-probs compile to, for GPUs that need not be there, by the tools in Triton's wheel.

What is counted is what makes the speed: each logit loaded once and 16 bytes at a time, few registers, nothing spilled,
no barrier in the loop over a row, and no other variant of a kernel for another number of rows.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mismatch_plugin.log_probs import triton_arithmetic as twin  # noqa: E402
from mismatch_plugin.log_probs import triton_kernels  # noqa: E402
from mismatch_plugin.log_probs.arguments import Call, RaggedSamplingMask  # noqa: E402
from mismatch_plugin.log_probs.logits import LogProbsFunction  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Types, and values of what is constant: a large vocabulary, whose size within the padding is odd.
ARGUMENTS: dict[str, Any] = {
    "logits": "*bf16", "stride_t": "i32", "stride_v": "i32", "gradient": "*bf16", "gradient_stride_t": "i32",
    "gradient_stride_v": "i32", "rows": None, "target_of_row": None, "targets": "*i64", "unit": "fp32", "units": None,
    "mask": None, "mask_stride_r": 0, "mask_stride_v": "i32", "kept": None, "offsets": None, "statistics": "*fp32",
    "coefficients": "*fp32", "values": "*bf16", "target_values": "*bf16", "log_probs": "*fp32", "entropy": "*fp32",
    "shift": "*fp32", "sums": "*fp32", "g": "*fp32", "g_stride": "i32", "h": "*fp32", "h_stride": "i32",
    "targets_count": "i32", "vocab_start": "i32", "columns": "i32", "width": "i32", "BLOCKS": 32, "FILTER": 0,
    "ENTROPY": True, "SLOPE": True, "CONTIGUOUS": True, "LINES": 1024, "LINE": 8, "BLOCK": 4096, "RANKS": 8,
}  # fmt: skip
BOOLEAN = {"mask": "*u8", "mask_stride_r": "i32", "FILTER": 1}
RAGGED = {"kept": "*i32", "offsets": "*i64", "FILTER": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "none": {"ENTROPY": False, "SLOPE": False},
    "fp32": {"logits": "*fp32", "gradient": "*fp32", "LINE": 4, "LINES": 2048},
    "mask": BOOLEAN,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew, and nothing left in the home folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


# Instructions ---------------------------------------------------------------------------------------------------------


def compiled(kernel: str, changes: dict[str, Any], capability: int = 90, aligned: bool = True) -> Any:
    """The kernel of 8 warps with the alignment that Triton finds at a launch, but `aligned`: of rows and widths."""
    function = getattr(triton_kernels, kernel)
    parameters = {parameter.name: parameter for parameter in function.params}
    arguments = {name: (ARGUMENTS | changes)[name] for name in function.arg_names}
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in arguments.items()}
    constants = {(i,): arguments[name] for i, name in enumerate(arguments) if types[name] == "constexpr"}
    odd = {"columns"} if aligned else {"columns", "width", "stride_t", "gradient_stride_t", "mask_stride_r"}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(arguments)
        if types[name] not in ("constexpr", "fp32") and name not in odd and not parameters[name].do_not_specialize
        and not parameters[name].do_not_specialize_on_alignment
    }  # fmt: skip
    options = {"num_warps": 8, "enable_fp_fusion": twin.FUSION}
    source = ASTSource(function, types, constants, divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def machine(*kernel: Any) -> tuple[list[str], int, int]:
    """(the machine's instructions and labels, registers of a thread, bytes of its stack)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(*kernel).asm["cubin"])
        file.flush()
        text, resources = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    usage = re.search(r"REG:(\d+) STACK:(\d+)", resources)
    assert usage, "cuobjdump tells no registers"
    lines = re.findall(r"^(?:(\.L_x_\d+):|\s+/\*[0-9a-f]{4,}\*/\s+([^;]+?)\s*;)", text, re.MULTILINE)
    return [label or instruction for label, instruction in lines], int(usage[1]), int(usage[2])


def count(lines: list[str], *names: str) -> int:
    """Instructions whose name begins so."""
    return sum(re.sub(r"^@!?\w+\s+", "", line).startswith(names) for line in lines)


def loop(lines: list[str]) -> list[str]:
    """The one loop that computes exponentials."""
    for i, line in enumerate(lines):
        goal = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        begin = lines.index(goal[1]) if goal else i
        if begin < i and any("MUFU.EX2" in each for each in lines[begin:i]):
            return lines[begin : i + 1]
    raise AssertionError("no loop over a row")


@pytest.mark.parametrize(
    ("what", "capability", "instructions", "registers"),
    [
        ("bf16", 90, 300, 64),
        ("bf16", 100, 272, 64),
        ("none", 90, 216, 48),
        ("fp32", 90, 288, 64),
        ("mask", 90, 408, 80),
    ],
)
def test_the_forward(what: str, capability: int, instructions: int, registers: int):
    """At most so many instructions for 32 logits of a thread; 2 bytes a logit, the row's rest beyond the last whole
    tile included: it ends where the vocabulary does, at an odd column, and is read up to the row's padding."""
    lines, used, stack = machine("statistics_kernel", SETTINGS[what], capability)
    wide, body = (16 if what == "fp32" else 8), loop(lines)
    assert len(body) <= instructions and used <= registers and stack == 0 == count(lines, "LDL", "STL")
    assert not any(name in line for line in body for name in ("BAR.", "SHFL"))
    assert count(lines, "LDG.E.128") == wide
    # The target and its logit; of the mask, 8 bytes at a time, and whether it has the target.
    assert count(lines, "LDG") == wide + 2 + (9 if what == "mask" else 0)


@pytest.mark.parametrize(
    ("what", "capability", "registers"),
    [("bf16", 90, 40), ("bf16", 100, 40), ("none", 90, 40), ("fp32", 90, 48), ("mask", 90, 48)],
)
def test_the_backward(what: str, capability: int, registers: int):
    """4 bytes a logit (and as many stores of zeros, where nothing is read)."""
    lines, used, stack = machine("gradient_kernel", SETTINGS[what], capability)
    wide = 4 if what == "fp32" else 2
    assert used <= registers and stack == 0 == count(lines, "LDL", "STL")
    assert count(lines, "LDG.E.128") == wide + (what == "mask")
    assert count(lines, "STG.E.128") == 2 * wide == count(lines, "STG")


# Variants -------------------------------------------------------------------------------------------------------------


class Device:
    """A GPU as Triton's launcher asks for it."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "a GPU that is not there"

    def get_current_stream(self, device: str) -> int:
        return 0


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The keys by which launched kernels would be compiled, by kernel: nothing is, and nothing runs."""
    found: dict[str, set[str]] = {}

    def asked(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.setdefault(fn.name, set()).add(key)
        assert compile["enable_fp_fusion"] is twin.FUSION
        return True

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", asked)
    monkeypatch.setattr(triton.runtime.driver, "_active", Device())
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # the default of Triton 3.10
    return found


def launch(rows: int, what: str, dtype: torch.dtype) -> None:
    """Forward and backward of so many rows; the results are whatever was in memory."""
    logits, targets = torch.zeros(rows + 1, 64, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    temperature: Any = 1.0
    mask, picked = None, torch.arange(rows)
    if what == "mask":
        mask = torch.ones(rows, 64, dtype=torch.bool)
    if what == "ragged":
        mask, temperature = (
            RaggedSamplingMask(torch.zeros(rows, dtype=torch.int64), torch.arange(rows + 1)),
            torch.ones(rows),
        )
    call = Call(targets, 61, 0, picked, temperature, mask, entropy="grad", inplace_gradient=what == "mask")
    outputs = LogProbsFunction.apply(logits.requires_grad_(), call, twin)
    torch.autograd.grad(outputs, logits, [torch.ones(rows), torch.ones(2, rows).t()[:, 0]])


@pytest.mark.parametrize("what", ["plain", "mask", "ragged"])
def test_another_number_of_rows_compiles_nothing(variants: dict[str, set[str]], what: str):
    """Neither 1, nor a multiple of 16, nor where tensors of so many rows happen to lie."""
    for rows in (*range(1, 10), 16, 32):
        launch(rows, what, torch.bfloat16)
    ragged = 2 if what == "ragged" else 0
    assert {name: len(keys) for name, keys in variants.items()} == dict.fromkeys(variants, 1)
    assert len(variants) == 4 + ragged
    launch(3, what, torch.float32)
    assert len(variants["gradient_kernel"]) == 2, "another dtype is another variant, or nothing was counted"
