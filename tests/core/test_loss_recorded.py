"""What a CUDA graph asks of the correction: for given sizes the same kernels, and no value of the data in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from tests.ragged import equal

CONFIG = mp.MismatchConfig.build(
    {
        "use_tis": True,
        "tis": {"level": "sequence"},
        "rs": {"criteria": ["sequence_mean:ratio:0.99:1.01"], "veto_threshold": 1e-4},
    }
)
NAMES = ("loss_mask", "rollout_log_probs", "old_log_probs", "advantages")


def batch() -> mp.PackedSequences:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 31, (6,), generator=generator).tolist()
    rollout = -3 * torch.rand(sum(lengths), generator=generator) - 0.01
    return mp.PackedSequences(
        loss_mask=torch.rand(sum(lengths), generator=generator) < 0.8,
        lengths=tuple(lengths),
        rollout_log_probs=rollout,
        old_log_probs=rollout + 0.1 * torch.randn(sum(lengths), generator=generator),
        advantages=torch.randn(sum(lengths), generator=generator),
    )


def test_a_recorded_step_replays_on_other_data() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    first, second = batch().prepared(), batch()

    def step(*tensors: Tensor) -> list[Tensor]:
        packed = first.replace(**dict(zip(NAMES, tensors, strict=True)))
        result = mp.policy_loss(tensors[2].detach(), packed, CONFIG)
        return [result.loss_sum, result.correction.weights, result.correction.keep, result.statistics.sums]

    def tensors(packed: mp.PackedSequences) -> list[Tensor]:
        return [getattr(packed, name) for name in NAMES]

    others = {name: getattr(second, name).flip(0) for name in NAMES if name != "loss_mask"}
    second = second.replace(loss_mask=~second.loss_mask, **others)
    recorded = make_fx(step)(*tensors(first))
    equal(recorded(*tensors(second)), step(*tensors(second)), 1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_inside_a_cuda_graph() -> None:
    packed, other = (batch().to("cuda").prepared() for _ in range(2))
    mp.correct(packed, CONFIG)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = mp.correct(packed, CONFIG)
    assert packed.rollout_log_probs is not None and other.rollout_log_probs is not None
    packed.rollout_log_probs.copy_(other.rollout_log_probs.flip(0))
    graph.replay()
    expected = mp.correct(packed, CONFIG)
    equal([result.weights, result.statistics.sums], [expected.weights, expected.statistics.sums], 1e-6)
