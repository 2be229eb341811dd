"""GSPO and CISPO against verl's own losses: loss, gradient and metrics.

Differences. verl clamps log s to at most 10, here log r is clamped to ±20. Its GSPO has no dual clip, here it may. Its
mean over a sequence runs over the mask that it is given, which in decoupled mode the driver has taken rejected tokens
out of; so it does here, in verl, and over all trained tokens elsewhere (`test_rejected_tokens_…`).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import actor, batch, loss_and_gradient
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn

import mismatch_plugin as mp
from mismatch_plugin.hooks.verl.loss import verl_token_loss

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

TOLERANCE = 1e-6
CLIPS = {"gspo": (0.04, 0.06), "cispo": (0.15, 0.2)}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def settings(**fields: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig.model_validate(fields)


def ours(config: mp.MismatchConfig, aggregation: str) -> Any:
    """Called as verl calls a policy loss."""

    def loss(rollout_is_weights: torch.Tensor | None = None, **arguments: Any) -> Any:
        losses, mask, metrics = verl_token_loss(config=config, rollout_is_weights=rollout_is_weights, **arguments)
        return agg_loss(losses, mask, aggregation), metrics

    return loss


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("way", ["algorithm 0", "bypass", "weights"])
def test_equals_verl(name: str, aggregation: str, way: str) -> None:
    low, high = CLIPS[name]
    theirs = actor(clip_ratio_low=low, clip_ratio_high=high)
    config = settings(
        objective=name,
        use_rollout_log_probs=way == "bypass",
        use_tis=way == "weights",
        ppo={"eps_clip_low": low, "eps_clip_high": high},
    )
    clipped = 0.0
    for seed in range(6):
        data = batch(seed)
        anchor = data["rollout_log_probs"] if way == "bypass" else data["old_log_probs"]
        weights = (data["old_log_probs"] - data["rollout_log_probs"]).exp().clamp(max=1.3)
        given = {"old_log_prob": anchor, "rollout_is_weights": weights if way == "weights" else None}
        expected = loss_and_gradient(get_policy_loss_fn(name), data, loss_agg_mode=aggregation, config=theirs, **given)
        found = loss_and_gradient(ours(config, aggregation), data, **given)
        assert found[0] == pytest.approx(expected[0], rel=TOLERANCE, abs=TOLERANCE)
        torch.testing.assert_close(found[1], expected[1], rtol=TOLERANCE, atol=TOLERANCE)
        for metric, value in expected[2].items():
            assert found[2][metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
        clipped += found[2]["actor/pg_clipfrac"]
    assert 0.1 < clipped < 5.9


@pytest.mark.parametrize("rejects", [False, True])
def test_bypass_adds_the_distance_to_the_sampler(rejects: bool) -> None:
    """prime-rl's l², as 2 · k2: over all tokens, also rejected ones, and divided by all."""
    rs = {"criteria": ["token:k2:0.05"]} if rejects else {}
    plain = settings(use_rollout_log_probs=True, rs=rs, denominator="original")
    config = plain.replace(terms={"rollout_kl_coef": 2e-2})
    data = batch(0)
    gap = (data["log_prob"] - data["rollout_log_probs"]) * data["response_mask"]
    given = {"old_log_prob": data["rollout_log_probs"]}
    bare, found = (loss_and_gradient(ours(c, "token-mean"), data, **given) for c in (plain, config))
    count = data["response_mask"].sum()
    assert found[0] - bare[0] == pytest.approx(float(1e-2 * gap.square().sum() / count), rel=1e-6)
    torch.testing.assert_close(found[1] - bare[1], 2e-2 * gap / count)
    assert (found[2].get("rollout_corr/rollout_is_masked_fraction", 0.0) > 0) == rejects
    assert found[2]["rollout_corr/rollout_kl"] == pytest.approx(float(gap.square().sum() / 2 / count), rel=1e-6)


def test_rejected_tokens_leave_the_mean_in_decoupled_verl() -> None:
    """A difference: verl's driver takes a rejected token out of the mask, so that s is of the others alone."""
    log_prob, old = torch.tensor([[-0.5, -0.7, -0.9]]), torch.tensor([[-0.6, -0.7, -0.7]])
    config = settings(objective="gspo", ppo={"eps_clip_low": 0.5, "eps_clip_high": 0.5})
    ones, left = torch.ones(1, 3), torch.tensor([[1.0, 1.0, 0.0]])
    for mask, mean in ((ones, -0.1 / 3), (left, 0.05)):
        losses, _, _ = verl_token_loss(old, log_prob, ones, mask, config)
        assert losses[0, 0].item() == pytest.approx(-torch.tensor(mean).exp().item(), rel=1e-6)
