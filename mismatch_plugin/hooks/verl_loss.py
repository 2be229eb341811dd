"""The loss of each token as verl's `agg_loss` wants it, from padded tensors; no verl in here."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.objectives import ppo_clip_loss, reinforce_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import train_is_valid

_NOT_AVERAGED = ("_max", "_min", "_std", "_deviation", "_eff_sample_size", "ppl_ratio", "/tokens", "/sequences")
"""Endings of metrics of which the mean over micro-batches, all that verl takes of a loss's metrics, means nothing."""


def token_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: MismatchConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(losses [B, S] with gradient, 0 outside the mask; the mask to aggregate over, [B, S] float; metrics).

    All inputs [B, S]. Bypass (algorithms 1, 3): old_log_prob is log π_rollout; weights and rejection are made here, and
    the mask is what is left, or the response mask where the denominator is `original`. Otherwise (0, 2): old_log_prob
    is log π_old, and rollout_is_weights and response_mask are what the driver made.
    Raises: ValueError where weights are needed and missing; InvalidLogProbError.
    """
    mask = response_mask.bool()
    log_prob = log_prob.float() if log_prob.dtype in (torch.bfloat16, torch.float16) else log_prob
    advantages = torch.where(mask, advantages.detach(), 0.0)
    if not config.use_rollout_log_probs:
        if config.weighted and rollout_is_weights is None:
            raise ValueError(
                "rollout_is_weights is missing: verl's driver found no rollout_log_probs in the batch, so set "
                "actor_rollout_ref.rollout.calculate_log_probs=true."
            )
        weights = torch.ones_like(log_prob) if rollout_is_weights is None else rollout_is_weights.to(log_prob.dtype)
        anchor, aggregated, measured = old_log_prob.detach(), mask.to(log_prob.dtype), {}
        weights = torch.where(mask, weights, 0.0)
        selected = mask
    else:
        packed = PackedSequences(
            loss_mask=mask.flatten(),
            lengths=(mask.shape[1],) * mask.shape[0],
            rollout_log_probs=old_log_prob.detach().flatten(),
            old_log_probs=log_prob.detach().flatten(),
        )
        correction = correct(packed, config)
        measured = correction.statistics.metrics()  # raises where a log-prob is invalid
        keep = correction.keep.view_as(log_prob)
        weights = (correction.weights * correction.keep).view_as(log_prob)
        # Selected: π_θ itself where a rollout log-prob is invalid, so that its ratio is 1.
        anchor = correction.tokens.rollout.view_as(log_prob)
        aggregated = mask.to(log_prob.dtype) if config.denominator == "original" else keep
        assert correction.tokens.code is not None  # rollout log-probs are there
        selected = mask & train_is_valid(correction.tokens.code).view_as(mask)
    log_prob, anchor = torch.where(selected, log_prob, 0.0), torch.where(selected, anchor, 0.0)
    if config.algorithm == 3:
        losses = reinforce_loss(log_prob, advantages)
        clip_metrics = {}
    else:
        clip = config.ppo
        losses, log_r = ppo_clip_loss(
            log_prob, anchor, advantages, clip.eps_clip_low, clip.eps_clip_high, clip.dual_clip
        )
        clip_metrics = _clip_fractions(log_r.detach(), advantages, aggregated, config)
    kl = ((anchor - log_prob.detach()).clamp(-20.0, 20.0) * aggregated).sum() / aggregated.sum().clamp(min=1)
    names, values = zip(*{**clip_metrics, "actor/ppo_kl": kl}.items(), strict=True)
    metrics = dict(zip(names, torch.stack(values).tolist(), strict=True))
    metrics |= {name: value for name, value in measured.items() if not name.endswith(_NOT_AVERAGED)}
    return losses * weights, aggregated, metrics


def _clip_fractions(log_r: Tensor, advantages: Tensor, mask: Tensor, config: MismatchConfig) -> dict[str, Tensor]:
    """verl's two clip metrics: share of tokens where either clip bound is active, and where the dual clip is."""
    r = log_r.clamp(-20.0, 20.0).exp()
    plain = -advantages * r
    clipped = -advantages * r.clamp(1.0 - config.ppo.eps_clip_low, 1.0 + config.ppo.eps_clip_high)
    tokens = mask.sum().clamp(min=1)
    dual = torch.zeros_like(tokens)
    if config.ppo.dual_clip is not None:
        above = torch.maximum(plain, clipped) > -advantages * config.ppo.dual_clip
        dual = (above.logical_and(advantages < 0) * mask).sum()
    return {"actor/pg_clipfrac": ((clipped > plain) * mask).sum() / tokens, "actor/pg_clipfrac_lower": dual / tokens}
