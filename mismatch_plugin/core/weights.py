"""From an aggregated log-ratio to a bounded importance weight, and its normalisation over the batch.

References: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncate);
Liu & Li et al. 2025, "When Speed Kills Stability" (mask); arXiv 2510.18855 (mask with denominator `original`, IcePop);
rollout-correction guide 3.6 (batch normalisation); arXiv 2605.07331 (bounds that grow with the length);
arXiv 2602.10693 (VESPO, gamma).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.limits import GAMMA_NEGATIVE, GAMMA_POSITIVE, SAFETY_BOUND


def grown(log_bound: float, scale_U: Tensor | None) -> Tensor | float:
    """log bound · n^g, within ±20, [U]; as it is where nothing grows or nothing is bounded. scale_U: n^g."""
    if scale_U is None or math.isinf(log_bound):
        return log_bound
    return (scale_U * log_bound).clamp_(-SAFETY_BOUND, SAFETY_BOUND)


def outside_bounds(
    log_ratio: Tensor, log_lower: Tensor | float | None, log_upper: Tensor | float | None, padding: Tensor | None = None
) -> Tensor:
    """l < log lo or l > log hi, as bool. Padding (where l is 0) is never outside; with it bounds are numbers."""
    outside = torch.zeros_like(log_ratio, dtype=torch.bool) if log_upper is None else log_ratio > log_upper
    if log_lower is not None:
        outside = outside.logical_or_(log_ratio < log_lower)
    if padding is not None and not (log_lower or 0.0) <= 0.0 <= (log_upper or 0.0):
        outside = outside.masked_fill_(padding, False)
    return outside


def bound_weight(
    log_ratio: Tensor,
    mode: str,
    lower: float,
    upper: float,
    padding: Tensor | None = None,
    ratio: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The weight of a mode, and for `mask` which units are outside (None for the other modes).

    truncate: min(ρ, hi)
    clip: min(max(ρ, lo), hi)
    mask: ρ where lo ≤ ρ ≤ hi, else 0
    log_ratio: any shape, unclamped, zero where padded (there nothing is outside). ratio: `bounded_exp` of it, where the
    caller has it. scale: what log lo ≤ 0 and log hi ≥ 0 are multiplied by (`grown`), of the same shape.
    Host syncs: none. Gradient: none (call it without one).
    """
    ratio = bounded_exp(log_ratio) if ratio is None else ratio
    log_lower, log_upper = grown(math.log(lower), scale) if lower > 0 else None, grown(math.log(upper), scale)

    def bounded(low: float | None) -> Tensor:
        if not isinstance(log_upper, Tensor):
            return ratio.clamp(min=low, max=upper)
        below = torch.minimum(ratio, log_upper.exp())
        return below if low is None or not isinstance(log_lower, Tensor) else below.maximum(log_lower.exp())

    if mode == "truncate":
        return bounded(None), None
    if mode == "clip":
        return bounded(lower), None
    outside = outside_bounds(log_ratio, log_lower, log_upper, padding if scale is None else None)
    # The clamp only trims rounding at the bounds themselves: what is outside becomes 0.
    return bounded(lower).masked_fill_(outside, 0.0), outside


def gamma_weight(log_ratio_U: Tensor, ratio_U: Tensor, positive_U: Tensor) -> Tensor:
    """e^λ ρ^k e^(−λρ), [U]: 1 at ρ = 1, largest at ρ = k/λ (1.21 where A ≥ 0, else 1.24), 0 far away on either side.

    ratio_U: `bounded_exp` of the log-ratio. positive_U: bool, A ≥ 0. Host syncs: none. Gradient: none.
    """
    log_ratio_U = log_ratio_U.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    exponents = [k * log_ratio_U + scale * (1.0 - ratio_U) for k, scale in (GAMMA_POSITIVE, GAMMA_NEGATIVE)]
    return torch.where(positive_U, *exponents).exp_()


def batch_factor(weight_sum: Tensor, units: Tensor) -> Tensor:
    """Mean weight that batch normalisation divides by; 1 where it is 0 or there is nothing to average.

    weight_sum, units: 0-d sums over tokens (token, prefix), turns or sequences (sequence, geometric): all of them for
    truncate and clip, those inside the bounds for mask. Host syncs: none.
    """
    mean = weight_sum / units.clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))
