"""The policy losses of the four algorithms, per token, and the terms that are added to them.

References: Williams 1992 (REINFORCE); Schulman et al. 2017 (PPO-clip); Ye et al. 2020 (dual clip); Hilton et al. 2021,
"Batch size-invariance for policy optimization" (decoupled PPO); Schulman 2020 (k1, k2, k3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_plugin.limits import SAFETY_BOUND

LOW_VARIANCE_BOUND = 10.0


def ppo_clip_loss(
    log_probs_T: Tensor,
    anchor_T: Tensor,
    advantages_T: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(clamp(log π_θ − log π_anchor, ±20)), and log r unclamped.

    With a dual-clip constant c, where A < 0 the loss is at most −c A. All [T]; only log_probs_T carries gradient
    (zero where the clamp or the clip is active). Masking is the caller's.
    """
    log_r = log_probs_T - anchor_T
    r = log_r.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    loss = torch.maximum(-advantages_T * r, -advantages_T * r.clamp(1.0 - eps_low, 1.0 + eps_high))
    if dual_clip is not None:
        loss = torch.where(advantages_T < 0, torch.minimum(loss, -advantages_T * dual_clip), loss)
    return loss, log_r


def reinforce_loss(log_probs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """−A log π_θ, [T]. The importance weight multiplies it outside, without gradient."""
    return -advantages_T * log_probs_T


def kl_to_reference(log_probs_T: Tensor, ref_T: Tensor, kind: str) -> Tensor:
    """Estimator of KL(π_θ ‖ π_ref) at each token, [T], with gradient through log_probs_T.

    With d = log π_θ − log π_ref, clamped to ±20:
    k1: d
    k2: d²/2
    k3: e^−d − 1 + d
    low_var_kl: k3 bounded to ±10
    """
    difference = (log_probs_T - ref_T).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    value = torch.expm1(-difference) + difference
    if kind == "k3":
        return value
    if kind == "low_var_kl":
        return value.clamp(-LOW_VARIANCE_BOUND, LOW_VARIANCE_BOUND)
    raise ValueError(f"kl_type {kind!r} is unknown: choose k1, k2, k3 or low_var_kl.")
