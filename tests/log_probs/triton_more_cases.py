"""More of the Triton log-probs in Triton's interpreter, as `triton_cases.py`: the path from hidden states, and
which addresses are read and written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime.interpreter import interpreter_builder

from mismatch_plugin.log_probs import (
    RaggedSamplingMask,
    vocab_parallel_linear_log_probs,
    vocab_parallel_log_probs,
)

T, H, V = 11, 6, 50


def linear_inputs(what: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(T, H) * 2).to(dtype), torch.randn(V, H).to(dtype)
    targets = torch.randint(0, 41, (T,))
    targets[2] = -100
    offsets = torch.tensor([0, 3, 3, 4, 9, 9, 9, 12, 20, 20, 21, 21])
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "strided targets": {},
        "temperatures padded": {"temperature": torch.linspace(0.3, 2.0, T), "vocab_size": 41},
        "mask": {"sampling_mask": torch.rand(T, V) < 0.2},
        "ragged": {"sampling_mask": RaggedSamplingMask(torch.randint(0, V, (21,)), offsets), "temperature": 0.7},
        "rows twice": {"rows": torch.tensor([9, 2, 4, 3, 3, 0, 10, 10, 1, 5, 6])},
    }
    if what == "strided targets":
        targets = torch.stack([targets, torch.full_like(targets, -100)], 1)[:, 0]
    return hidden.requires_grad_(), weight.requires_grad_(), targets, options[what]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["plain", "strided targets", "temperatures padded", "mask", "ragged", "rows twice"])
def test_from_hidden_states(what: str, dtype: torch.dtype):
    """Chunks of four rows, the last of three, against the torch arithmetic and float64: values and both gradients."""
    hidden, weight, targets, options = linear_inputs(what, dtype)
    upstream = torch.randn(2, T)
    upstream[:, 0] = 0.0

    def run(backend: Any, to: torch.dtype) -> list[Tensor]:
        inputs = [value.detach().to(to).requires_grad_() for value in (hidden, weight)]
        result = vocab_parallel_linear_log_probs(
            inputs[0], inputs[1], targets, entropy="grad", chunk_rows=4, backend=backend, **options
        )
        assert result.entropy is not None
        outputs = [result.log_probs, result.entropy]
        found = torch.autograd.grad(outputs, inputs, list(upstream.to(result.log_probs.dtype)))
        return [value.detach().double() for value in (*outputs, *found)]

    ours = run("triton", dtype)
    for value, other in zip(ours[:2], run("torch", dtype)[:2], strict=True):  # of logits rounded to the same dtype
        assert_close(value, other, rtol=1e-6, atol=1e-6)
    rounding = 1e-5 if dtype == torch.float32 else 3e-2
    for expected in (run("torch", dtype), run("torch", torch.float64)):
        for value, other in zip(ours, expected, strict=True):
            assert_close(value, other, rtol=rounding, atol=rounding * float(other.abs().max()))


@pytest.mark.parametrize("what", ["plain", "mask", "ragged", "rows"])
@pytest.mark.parametrize("columns", [61, 8208])
def test_nothing_beyond_a_row_is_read_or_written(monkeypatch: pytest.MonkeyPatch, columns: int, what: str):
    """Rows lie within a larger storage; what the vocabulary's padding has is read with its neighbours, no more."""
    torch.manual_seed(0)
    touched: list[Tensor] = []

    def following(name: str, mask_at: int) -> None:
        original = getattr(interpreter_builder, name)

        def access(pointers: Any, *others: Any) -> Any:
            touched.append(torch.from_numpy(pointers.data.astype("int64").ravel()[others[mask_at].data.ravel()]))
            return original(pointers, *others)

        monkeypatch.setattr(interpreter_builder, name, access)

    following("create_masked_load", 0)
    following("create_masked_store", 1)
    guarded = {
        "logits": torch.randn(8, columns + 24), "mask": torch.rand(8, columns + 24) < 0.5,
    }  # fmt: skip
    inner = {name: tensor[1:-1, 8:-16] for name, tensor in guarded.items()}
    options: dict[str, Any] = {
        "plain": {}, "mask": {"sampling_mask": inner["mask"]}, "rows": {"rows": torch.tensor([5, 3, 2, 0, 4, 1])},
        "ragged": {"sampling_mask": RaggedSamplingMask(torch.randint(0, columns, (30,)), torch.arange(0, 31, 5))},
    }[what]  # fmt: skip
    logits, before = inner["logits"], guarded["logits"].clone()
    result = vocab_parallel_log_probs(
        logits.requires_grad_(), torch.randint(0, columns - 5, (6,)), entropy="grad", vocab_size=columns - 5,
        inplace_gradient=True, backend="triton", **options,
    )  # fmt: skip
    torch.autograd.grad([value for value in result if value is not None], logits, [torch.ones(6)] * 2)
    addresses = torch.cat(touched)
    for name, tensor in guarded.items():
        size, row = tensor.element_size(), tensor.stride(0)
        at = addresses - tensor.data_ptr()
        at = at[(at >= 0) & (at < tensor.numel() * size)] // size
        assert len(at) > 0 or (name == "mask" and what != "mask")
        outside = (at // row < 1) | (at // row > 6) | (at % row < 8) | (at % row >= 8 + columns)
        assert not outside.any(), name
    guarded["logits"][1:-1, 8:-16] = before[1:-1, 8:-16]
    assert torch.equal(guarded["logits"], before) and result.log_probs.isfinite().all()
