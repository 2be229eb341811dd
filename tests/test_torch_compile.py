"""A user's own torch.compile around the loss."""

from __future__ import annotations

from typing import Any

import torch

import mismatch_plugin as mp

TRUNCATED: Any = {"use_tis": True, "tis": {"level": "sequence"}, "rs": {"veto_threshold": 1e-4}, "metrics": "full"}


def test_a_users_own_torch_compile_gives_the_same_loss_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = [-3 * torch.rand(length, generator=generator) - 0.01 for length in (7, 1, 30)]
    old = [row + 0.1 * torch.randn(len(row), generator=generator) for row in rollout]
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=rollout,
        old_log_probs=old,
        loss_masks=[[1] * len(row) for row in rollout],
        advantages=[1, -1, 0.3],
    )

    def step(log_probs: torch.Tensor) -> torch.Tensor:
        return mp.policy_loss(log_probs * 1.5, packed, mp.MismatchConfig(**TRUNCATED)).loss * 2.0

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):  # graph breaks are allowed
        log_probs = (torch.cat(old) + 0.05).requires_grad_()
        loss = function(log_probs)
        loss.backward()
        results.append((loss.detach(), log_probs.grad))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-6)
    transformed = torch.func.grad(step)(torch.cat(old) + 0.05)
    torch.testing.assert_close(transformed, results[0][1], atol=1e-6, rtol=1e-6)
