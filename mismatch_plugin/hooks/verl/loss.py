"""The loss of each token as verl's `agg_loss` wants it, from padded tensors; no verl in here."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.limits import SAFETY_BOUND


def verl_token_loss(
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
    The penalty on the distance to the sampler is in the losses (verl adds entropy and KL itself).
    Raises: ValueError where weights are needed and missing; InvalidLogProbError.
    """
    mask = response_mask.bool()
    bypass, shape = config.use_rollout_log_probs, mask.shape
    if not bypass and config.weighted and rollout_is_weights is None:
        raise ValueError(
            "rollout_is_weights is missing: verl's driver found no rollout_log_probs in the batch, so set "
            "actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    packed = PackedSequences(
        loss_mask=mask.flatten(),
        lengths=(shape[1],) * shape[0],
        rollout_log_probs=old_log_prob.detach().flatten() if bypass else None,
        old_log_probs=None if bypass else old_log_prob.detach().flatten(),
        advantages=advantages.detach().flatten(),
    )
    weights = None
    if not bypass:  # the driver has weighed and rejected
        weights = torch.ones_like(log_prob) if rollout_is_weights is None else rollout_is_weights
        weights = weights.flatten()
    token = token_loss(log_prob.flatten(), packed, config, weights=weights)
    keep = token.correction.keep.view(shape)
    stays = not bypass or config.denominator == "original"
    aggregated = mask.to(keep.dtype) if stays else keep
    # Raises where a log-prob is invalid.
    measured = token.correction.statistics.metrics(averaged_only=True) if bypass else {}
    columns = {name: column.view(shape) for name, column in token.clip_columns()}
    report = {
        "actor/ppo_kl": columns.get(
            "ppo_kl", -token.correction.tokens.log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).view(shape)
        )
    }
    if columns:
        report["actor/pg_clipfrac"] = columns["clip_high"] | columns["clip_low"]
        report["actor/pg_clipfrac_lower"] = columns.get("clip_dual", torch.zeros_like(mask))
    distance = token.rollout_kl()
    if distance is not None:
        report[f"{PREFIX}rollout_kl"] = distance.detach().view(shape)
    means = torch.stack([(column * aggregated).sum() for column in report.values()]) / aggregated.sum().clamp(min=1)
    metrics = dict(zip(report, means.tolist(), strict=True))
    return token.total().view(shape), aggregated, metrics | measured
