"""What the Triton kernels of the log-probs compile to, for GPUs that need not be there.

What is counted is what makes the speed: each logit loaded once and 16 bytes at a time, few instructions, few registers,
nothing spilled, no barrier in the loop over a row, and no other variant of a kernel for another number of rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

from mismatch_plugin.log_probs import triton_arithmetic as twin  # noqa: E402
from mismatch_plugin.log_probs import triton_kernels  # noqa: E402
from mismatch_plugin.log_probs.arguments import Call, RaggedSamplingMask, check_rows  # noqa: E402
from mismatch_plugin.log_probs.hidden_states import Head, LinearLogProbs  # noqa: E402
from mismatch_plugin.log_probs.logits import LogProbsFunction  # noqa: E402
from tests.log_probs.triton_compiled import BOOLEAN, FLOAT32, RAGGED, compiled, machine  # noqa: E402

NO_ENTROPY = {"ENTROPY": False, "SLOPE": False}
SETTINGS: dict[str, dict[str, Any]] = {"bf16": {}, "none": NO_ENTROPY, "fp32": FLOAT32, "mask": BOOLEAN}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew, and nothing left in the home folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


# 1 instructions ------------------------------------------------------------------------------------------------------


FORWARD = [
    ("bf16", 90, 300, 64), ("bf16", 100, 272, 64), ("none", 90, 216, 48), ("none", 100, 186, 56),
    ("fp32", 90, 288, 64), ("fp32", 100, 260, 80), ("mask", 90, 408, 80), ("mask", 100, 390, 80),
]  # fmt: skip


@pytest.mark.parametrize(("what", "capability", "instructions", "registers"), FORWARD)
def test_the_forward(what: str, capability: int, instructions: int, registers: int):
    """At most so many instructions for 32 logits of a thread; 2 bytes a logit, the row's rest beyond the last whole
    tile included: it ends where the vocabulary does, at an odd column, and is read up to the row's padding."""
    found = machine("statistics_kernel", SETTINGS[what], capability)
    wide, loop = (16 if what == "fp32" else 8), found.loop()
    assert len(loop) <= instructions and found.registers <= registers
    assert found.stack == 0 == found.count("LDL", "STL")
    assert not any(name in line for line in loop for name in ("BAR.", "SHFL"))
    assert found.count("LDG.E.128") == wide
    # The target and its logit; of the mask, 8 bytes at a time, and whether it has the target.
    assert found.count("LDG") == wide + 2 + (9 if what == "mask" else 0)


BACKWARD = [
    ("bf16", 90, 190, 40), ("bf16", 100, 166, 40), ("none", 90, 155, 40), ("none", 100, 148, 40),
    ("fp32", 90, 180, 48), ("fp32", 100, 170, 48), ("mask", 90, 268, 48), ("mask", 100, 248, 56),
]  # fmt: skip


@pytest.mark.parametrize(("what", "capability", "instructions", "registers"), BACKWARD)
def test_the_backward(what: str, capability: int, instructions: int, registers: int):
    """At most so many instructions from the start of a thread to its end, for 16 logits of a tile without the target;
    4 bytes a logit (and as many stores of zeros, where nothing is read)."""
    found = machine("gradient_kernel", SETTINGS[what], capability)
    wide = 4 if what == "fp32" else 2
    assert found.path(16) <= instructions and found.registers <= registers
    assert found.stack == 0 == found.count("LDL", "STL")
    assert found.count("LDG.E.128") == wide + (what == "mask")
    assert found.count("STG.E.128") == 2 * wide == found.count("STG")


@pytest.mark.parametrize("kernel", ["statistics_kernel", "gradient_kernel"])
def test_an_older_gpu(kernel: str):
    found = machine(kernel, {}, 80)
    assert found.count("LDG.E.128") == (8 if kernel == "statistics_kernel" else 2) and found.stack == 0


def test_the_counter_of_instructions_sees_what_it_must():
    """Rows that are not aligned are read one by one, in more instructions."""
    aligned, odd = (machine("gradient_kernel", {}, 90, aligned) for aligned in (True, False))
    assert odd.count("LDG.E.128") == 0 and odd.count("LDG.E.U16") >= 16
    assert odd.path(16) > aligned.path(16) + 14 and 0 < len(aligned.instructions) - aligned.path(16) < 200


STRIDED = {"CONTIGUOUS": False}
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
    text = compiled(kernel, changes).asm["ptx"]
    assert "fma" in text or kernel != "finish_kernel"


@pytest.mark.parametrize("changes", [{}, BOOLEAN, RAGGED], ids=["none", "mask", "ragged"])
def test_sizes_of_one_compile(changes: dict[str, Any]):
    """Triton makes a constant of a size or stride that is 1, and then other code."""
    ones = {"stride_t": 1, "gradient_stride_t": 1, "columns": 1, "width": 1, "BLOCKS": 1, "LINES": 32}
    for kernel in ("statistics_kernel", "gradient_kernel"):
        assert compiled(kernel, changes | ones).asm["ptx"]


# 2 variants ----------------------------------------------------------------------------------------------------------


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


def test_chunks_of_the_linear_path_compile_nothing_more(variants: dict[str, set[str]]):
    """Whose rows begin anywhere in the tensors that have a few floats a row."""
    for rows in range(1, 10):
        hidden, weight = torch.zeros(rows, 8, requires_grad=True), torch.zeros(64, 8, requires_grad=True)
        targets, temperatures = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        call = Call(targets, 61, temperature=temperatures, entropy="grad", inplace_gradient=True)
        outputs: tuple[Tensor, ...] = LinearLogProbs.apply(hidden, weight, call, Head(twin, 3, False))
        torch.autograd.grad(outputs, [hidden, weight], [torch.ones(rows), torch.ones(rows)])
    assert {name: len(keys) for name, keys in variants.items()} == dict.fromkeys(variants, 1) and len(variants) == 4


# 3 captured ----------------------------------------------------------------------------------------------------------


class NoLaunches:
    """The kernels, which do nothing: tensors without contents have nothing to compute."""

    def __getattr__(self, name: str) -> Any:
        launched = defaultdict(lambda: lambda *_, **__: None)
        return launched if name.endswith("_kernel") else getattr(triton_kernels, name)


class Crossings(TorchDispatchMode):
    """Operations that have to do with two devices, with whether they wait. A meta tensor refuses those that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, self.operations = kwargs or {}, self.operations + 1
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        if isinstance(target := kwargs.get("device"), torch.device):
            devices.add(target.type)
        if len(devices) > 1:
            self.found.append((str(func), not kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("what", ["plain", "temperature", "mask", "rows", "ragged"])
def test_a_cuda_graph_can_capture_it(monkeypatch: pytest.MonkeyPatch, what: str, inplace: bool):
    """Nothing waits for the device or copies from pageable memory; ragged ids copy their offsets, which are to be
    pinned, and whose values a replay would take from the host again. A captured step: `make gpu`."""
    monkeypatch.setattr(twin, "kernels", NoLaunches())
    offsets = torch.zeros(5, dtype=torch.int64)
    with torch.device("meta"):
        logits, targets, upstream = torch.zeros(9, 64), torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4)
        rows = torch.zeros(4, dtype=torch.int64) if what == "rows" else None
        temperature = torch.zeros(4) if what == "temperature" else 0.7
        masks = {"mask": torch.zeros(4, 64, dtype=torch.bool), "ragged": RaggedSamplingMask(targets, offsets)}
    with Crossings() as crossings:
        check_rows(rows, len(logits))
        call = Call(targets, 61, 0, rows, temperature, masks.get(what), entropy="grad", inplace_gradient=inplace)
        inputs = twin.prepare(logits, call)
        log_probs, entropy, shift, total = twin.finish(twin.local_statistics(inputs)[None], call)
        gradient = twin.gradient(inputs, shift, total, entropy, *upstream)
    assert log_probs.is_meta and gradient.shape == logits.shape and crossings.operations > 5
    assert crossings.found == ([("aten._to_copy.default", False)] if what == "ragged" else [])
