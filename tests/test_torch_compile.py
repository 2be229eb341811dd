"""A user's own torch.compile around the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from tests.ragged import equal

CONFIGS: list[dict[str, Any]] = [
    {"use_tis": True, "tis": {"level": "sequence"}, "rs": {"veto_threshold": 1e-4}},
    {"use_rollout_log_probs": True, "ppo": {"dual_clip": 3.0}, "metrics": "full"},
]


def batch() -> mp.PackedSequences:
    generator = torch.Generator().manual_seed(0)
    rollout = [-3 * torch.rand(length, generator=generator) - 0.01 for length in (7, 1, 30)]
    return mp.PackedSequences.from_lists(
        rollout_log_probs=rollout,
        old_log_probs=[row + 0.1 * torch.randn(len(row), generator=generator) for row in rollout],
        loss_masks=[torch.ones(len(row)) for row in rollout],
        advantages=[1.0, -0.5, 0.3],
    )


def with_gradient(packed: mp.PackedSequences) -> torch.Tensor:
    assert packed.old_log_probs is not None
    return (packed.old_log_probs + 0.05).requires_grad_()


@pytest.mark.parametrize("fields", CONFIGS)
def test_a_users_own_torch_compile_gives_the_same_loss_and_gradient(fields: dict[str, Any]) -> None:
    packed, config = batch(), mp.MismatchConfig(**fields)

    def step(log_probs: torch.Tensor) -> torch.Tensor:
        return mp.policy_loss(log_probs * 1.5, packed, config).loss * 2.0

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):  # graph breaks are allowed
        log_probs = with_gradient(packed)
        loss = function(log_probs)
        loss.backward()
        results.append([loss.detach(), log_probs.grad])
    equal(results[1], results[0], 1e-6)
