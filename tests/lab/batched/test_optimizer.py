"""AdamW over many runs: each as if it were alone, and one that breaks stops alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mismatch_plugin.lab.batched.optimizer import BatchedAdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SIZES = ((3, 4), (5,), (2, 6))


def _weights(runs: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {str(i): torch.randn((runs, *size), generator=generator) for i, size in enumerate(SIZES)}


def _gradients(step: int, runs: int = 3) -> list[Tensor]:
    """Of norms far above, about and far below the clip's, run by run."""
    generator = torch.Generator().manual_seed(step + 1)
    scale = torch.tensor([10.0, 0.2, 1e-3])[:runs]
    return [torch.randn((runs, *size), generator=generator) * scale.view(-1, *[1] * len(size)) for size in SIZES]


def test_every_run_is_torchs_adamw_after_clipping() -> None:
    weights = _weights()
    alone = [[torch.nn.Parameter(weight[n].clone()) for weight in weights.values()] for n in range(3)]
    optimizers = [torch.optim.AdamW(parameters, **SETTINGS) for parameters in alone]
    batched = BatchedAdamW(weights, clip_grad=0.5, **SETTINGS)
    for step in range(6):
        gradients = _gradients(step)
        norms = batched.step(gradients).tolist()
        assert norms[0] > 0.5 > norms[2]
        for n, (parameters, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient[n].clone()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            assert norms[n] == pytest.approx(norm.item(), rel=1e-5)
            optimizer.step()
            for parameter, weight in zip(parameters, weights.values(), strict=True):
                torch.testing.assert_close(weight[n], parameter.detach(), atol=1e-6, rtol=1e-5)
    assert batched.live.all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_run_whose_gradient_is_not_finite_stops_for_good(bad: float) -> None:
    weights, others = _weights(), _weights()
    batched, sound = BatchedAdamW(weights, **SETTINGS), BatchedAdamW(others, **SETTINGS)
    before: dict[str, Tensor] = {}
    for step in range(4):
        gradients = _gradients(step)
        sound.step(_gradients(step))
        if step == 2:
            gradients[1][1, 0] = bad
            before = {name: weight[1].clone() for name, weight in weights.items()}
        norms = batched.step(gradients)
        assert norms.isfinite().tolist() == [True, step != 2, True]
    assert batched.live.tolist() == [True, False, True]
    for name, weight in weights.items():
        assert torch.equal(weight[1], before[name])
        assert torch.equal(weight[[0, 2]], others[name][[0, 2]]) and not torch.equal(weight[1], others[name][1])


def test_a_run_that_is_not_live_keeps_its_weights() -> None:
    weights, before = _weights(), _weights()
    batched = BatchedAdamW(weights, **SETTINGS)
    batched.live[0] = False
    batched.step(_gradients(0))
    assert [torch.equal(weights["0"][n], before["0"][n]) for n in range(3)] == [True, False, False]
