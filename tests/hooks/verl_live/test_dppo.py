"""Presets dppo_tv and dppo_kl against verl's own functions, which are called with π_rollout as the old policy."""

# pyright: reportMissingImports=false
from __future__ import annotations

import warnings

import pytest
import torch
from batches import actor, batch, loss_and_gradient
from verl.trainer.ppo.core_algos import get_policy_loss_fn

import mismatch_plugin as mp


@pytest.mark.parametrize(("name", "threshold"), [("dppo_tv", 0.15), ("dppo_tv", 0.05), ("dppo_kl", 0.05)])
@pytest.mark.parametrize("bound", [20.0, 1.2])
def test_dppo_equals_verl(name: str, threshold: float, bound: float) -> None:
    """`bound` is verl's clip_ratio_c, for which its configuration has 3 and its function 20."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        config = mp.preset(name, threshold=threshold, is_threshold=bound)
    own = actor(clip_ratio=threshold, clip_ratio_low=threshold, clip_ratio_high=threshold, clip_ratio_c=bound)
    rejected = 0.0
    for seed in range(6):
        data = batch(seed)
        packed = mp.PackedSequences.from_padded(
            loss_masks=data["response_mask"], rollout_log_probs=data["rollout_log_probs"], advantages=data["advantages"]
        )
        log_probs = data["log_prob"].clone().requires_grad_()
        mine = mp.policy_loss(log_probs, packed, config)
        loss, gradient, metrics = loss_and_gradient(
            get_policy_loss_fn(name), data, old_log_prob=data["rollout_log_probs"], config=own, rollout_is_weights=None
        )
        assert float(mine.loss.detach()) == pytest.approx(loss, rel=1e-6, abs=1e-9)
        torch.testing.assert_close(torch.autograd.grad(mine.loss, log_probs)[0], gradient, rtol=1e-6, atol=1e-9)
        share = mine.statistics.metrics()["rollout_corr/rollout_rs_masked_fraction"]
        assert share == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
        rejected += share
    assert rejected > 0
