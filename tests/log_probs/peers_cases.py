"""The real Triton cross entropies of transformer-engine and liger-kernel in Triton's interpreter, next to ours.

Random upstream gradients that begin with 0: kernels that read the first one for all rows have been released more than
once (transformer-engine's #2139 and #2402, liger's #1298).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from mismatch_plugin.log_probs import vocab_parallel_log_probs
from tests import peers
from tests.distributed.launch import launch

pytestmark = [
    pytest.mark.skipif(peers.missing(), reason=peers.ABSENT),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, where −inf meets −inf
]

T, V = 6, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, V], targets with two that are ignored, upstream)."""
    torch.manual_seed(0)
    logits, targets, upstream = (torch.randn(T, V) * 3).to(DTYPES[dtype]), torch.randint(0, V, (T,)), torch.randn(T)
    targets[[1, 4]], upstream[0] = torch.tensor([-100, -1]), 0.0
    return logits, targets, upstream


def forward_backward(name: str, logits: Tensor, targets: Tensor, upstream: Tensor, **options: Any) -> list[Tensor]:
    """[log-probs, gradient] by ours (Triton), by the backend that calls transformer-engine, or by liger's function."""
    logits = logits.clone().requires_grad_()
    if name == "liger":
        function = peers.liger().LigerVocabParallelCEFunction
        x = logits / options.get("temperature", 1.0)
        known = torch.where(targets < 0, -100, targets)[:, None]
        log_probs = -function.apply(x[:, None], known, options.get("tp_group"), -100, 0.0, "pytorch", "global")[:, 0]
    else:
        if name == "transformer-engine":
            peers.transformer_engine()
        backend: Any = name
        log_probs = vocab_parallel_log_probs(logits, targets, backend=backend, **options).log_probs
    return [log_probs.detach(), torch.autograd.grad(log_probs, logits, upstream)[0]]


def assert_same(ours: list[Tensor], theirs: list[Tensor], dtype: str) -> None:
    """Values to 1e-6 and 1e-5 (theirs take natural exponentials), gradients to the rounding of the logits' dtype."""
    rounding = 1e-6 if dtype == "fp32" else 2**-6
    assert_close(theirs[0], ours[0], rtol=1e-5, atol=1e-5)
    assert theirs[1].dtype == ours[1].dtype
    assert_close(theirs[1], ours[1], rtol=rounding, atol=rounding if dtype == "bf16" else 2e-6)
    assert not theirs[1][[0, 1, 4]].any() and theirs[1][[2, 3, 5]].any()  # upstream 0, and ignored


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["transformer-engine", "liger"])
def test_their_kernels_agree_with_ours(name: str, dtype: str, temperature: float):
    logits, targets, upstream = make(dtype)
    if dtype == "bf16":  # liger's is given what our backend gives to transformer-engine: divided in float32
        logits = logits if name != "liger" or temperature == 1.0 else logits.float()
    before = logits.clone()
    found = [forward_backward(each, logits, targets, upstream, temperature=temperature) for each in ("triton", name)]
    assert_same(found[0], found[1], dtype)
    assert torch.equal(logits, before), "the caller's logits were overwritten"


def run_shard(case: tuple[str, str]) -> list[Tensor]:
    """Of this rank's half of the vocabulary."""
    name, dtype = case
    logits, targets, upstream = make(dtype)
    half = logits.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
    return forward_backward(name, half, targets, upstream, tp_group=dist.group.WORLD)


def test_their_kernels_agree_with_ours_over_two_shards():
    cases = [(name, dtype) for name in ("transformer-engine", "liger") for dtype in DTYPES]
    for (_, dtype), ranks in zip(cases, launch(run_shard, cases, 2), strict=True):
        ours = forward_backward("triton", *make(dtype))
        assert torch.equal(ranks[0][0], ranks[1][0])
        assert_same(ours, [ranks[0][0], torch.cat([gradient for _, gradient in ranks], 1)], dtype)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_summed_loss_has_one_upstream_gradient(dtype: str):
    """Of stride 0, which a kernel may read as if each row had its own."""
    logits, targets, _ = make(dtype)
    for name in ("transformer-engine", "liger"):
        upstream = torch.tensor(-0.7).expand(T)
        ours, theirs = (forward_backward(each, logits, targets, upstream)[1] for each in ("triton", name))
        assert_close(theirs, ours, rtol=2**-6 if dtype == "bf16" else 1e-6, atol=2**-6 if dtype == "bf16" else 2e-6)
