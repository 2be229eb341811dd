"""How often the Triton kernels of the log-probs are compiled: once, whatever the number of rows. What they compile to,
and how fast that is: `make gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

from mismatch_plugin.log_probs import triton_arithmetic as twin  # noqa: E402
from mismatch_plugin.log_probs.arguments import Call, RaggedSamplingMask  # noqa: E402
from mismatch_plugin.log_probs.logits import LogProbsFunction  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew, and nothing left in the home folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


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
    mask = (
        RaggedSamplingMask(torch.zeros(rows, dtype=torch.int64), torch.arange(rows + 1)) if what == "ragged" else None
    )
    call = Call(targets, 61, 0, torch.arange(rows), 0.7, mask, entropy="grad", inplace_gradient=what == "in place")
    outputs = LogProbsFunction.apply(logits.requires_grad_(), call, twin)
    torch.autograd.grad(outputs, logits, [torch.ones(rows), torch.ones(2, rows).t()[:, 0]])


@pytest.mark.parametrize("what", ["plain", "in place", "ragged"])
def test_another_number_of_rows_compiles_nothing(variants: dict[str, set[str]], what: str):
    """Neither 1, nor a multiple of 16, nor where tensors of so many rows happen to lie."""
    for rows in (*range(1, 10), 16, 32):
        launch(rows, what, torch.bfloat16)
    ragged = 2 if what == "ragged" else 0
    assert {name: len(keys) for name, keys in variants.items()} == dict.fromkeys(variants, 1)
    assert len(variants) == 4 + ragged
    launch(3, what, torch.float32)
    assert len(variants["gradient_kernel"]) == 2, "another dtype is another variant, or nothing was counted"
