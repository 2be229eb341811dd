"""Log-probs from hidden states equal those from whole logits, in one process: values, gradients, costs, refusals.

Every option, tensor and sequence parallelism, in float64: `test_log_probs_tp.py`. Through a model, in every layout:
`hooks/megatron_core/test_layouts.py`; what the hook refuses: `test_adapter.py` there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mismatch_plugin.log_probs import RaggedSamplingMask, vocab_parallel_linear_log_probs, vocab_parallel_log_probs
from tests.log_probs.test_log_probs import Recorder

F64 = torch.float64
T, H, V = 11, 6, 50


def make(dtype: torch.dtype = F64, tokens: int = T, width: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [T, H], weight [V, H], targets [T])."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(tokens, H, generator=generator, dtype=F64) * 2).to(dtype).requires_grad_()
    weight = torch.randn(width, H, generator=generator, dtype=F64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, width, (tokens,), generator=generator)


class Megatron(torch.nn.Parameter):
    """A parameter as Megatron's DDP leaves it."""

    main_grad: Tensor
    grad_added_to_main_grad: bool
    zero_out_wgrad: bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_the_gradient_in_megatron_s_main_grad(dtype: torch.dtype):
    """In float32, summed over micro-batches; what autograd gets is not added to it again."""
    hidden, weight, targets = make(dtype, tokens=64)
    parameter = Megatron(weight.detach())
    parameter.main_grad = torch.full_like(weight, 2.0, dtype=torch.float32)
    parameter.grad_added_to_main_grad = False
    parameter.zero_out_wgrad = True
    result = vocab_parallel_linear_log_probs(hidden, parameter, targets, chunk_rows=8)
    result.log_probs.sum().backward()
    assert parameter.grad_added_to_main_grad
    assert parameter.grad is not None and parameter.grad.eq(0).all()  # a tied embedding adds to zeros
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = vocab_parallel_log_probs(wide[0] @ wide[1].t(), targets).log_probs
    gradients = torch.autograd.grad(expected.sum(), wide)
    assert hidden.grad is not None
    found = [result.log_probs.detach(), hidden.grad, parameter.main_grad - 2.0]
    for one, other in zip(found, [expected.detach(), *gradients], strict=True):
        error = float((one.double() - other).norm() / other.norm())
        assert error < (1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("what", ["plain", "padded", "ragged"])
@pytest.mark.parametrize("tokens", [40, 160])
def test_no_logits_but_of_one_chunk(what: str, tokens: int):
    """Whatever T is, one buffer of chunk × V in forward and one in backward; no host sync; nothing of [T, V] kept."""
    width, chunk = 64, 8
    hidden, weight, targets = make(torch.float32, tokens, width)
    offsets = torch.arange(0, 3 * tokens + 1, 3)
    arguments: dict[str, Any] = {
        "plain": {},
        "padded": {"vocab_size": 60},
        "ragged": {"sampling_mask": RaggedSamplingMask(torch.randint(0, width, (3 * tokens,)), offsets)},
    }[what]
    targets = targets % 60
    saved: list[Tensor] = []
    with Recorder() as recorder, saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        log_probs, entropy = vocab_parallel_linear_log_probs(
            hidden, weight, targets, entropy="grad", chunk_rows=chunk, **arguments
        )
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert recorder.syncs == []
    inputs = {tokens * H, width * H, 3 * tokens, 4 * tokens, tokens + 1}
    large = [(name, size) for name, size in recorder.made if size > chunk * (width + 1) and size not in inputs]
    assert large == []
    buffers = sum(size == chunk * width and name == "new_empty" for name, size in recorder.made)
    assert buffers == 2 if what == "padded" else buffers >= 2  # else the blocks of the arithmetic have that size, too
    own = [x for x in saved if x.ndim == 1 and x.dtype == torch.float32 and x.numel() == tokens]
    assert all(x.numel() <= max(tokens * H, width * H, 3 * tokens) for x in saved)
    assert len({x.data_ptr() for x in own}) == 3


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(2, 3, 4)}, r"hidden has shape \[2, 3, 4\]"),
    ({"weight": torch.zeros(V, H + 1)}, r"weight is torch.float32 \[50, 7\] for torch.float32 \[11, 6\] hidden states"),
    ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets has 3 ids for 11 rows of hidden"),
    ({"sequence_parallel": True}, "sequence_parallel=True has no group"),
    ({"rows": torch.tensor([0, T, *range(9)])}, rf"rows\[1\]={T}: rows must lie in \[0, T\) \(T=11\)"),
    ({"backend": "megatron"}, "backend='megatron' needs whole logits"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_what_does_not_fit_is_refused_in_one_sentence(arguments: dict[str, Any], message: str):
    hidden, weight, targets = make(torch.float32)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_linear_log_probs(**{"hidden": hidden, "weight": weight, "targets": targets, **arguments})
