"""From an aggregated log-ratio to a bounded importance weight, and its normalisation over the batch.

References: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncate);
Liu & Li et al. 2025, "When Speed Kills Stability" (mask); arXiv 2510.18855 (mask with denominator `original`, IcePop);
rollout-correction guide 3.6 (batch normalisation).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_plugin.core.segments import bounded_exp


def outside_bounds(
    log_ratio: Tensor, log_lower: float | None, log_upper: float | None, padding: Tensor | None = None
) -> Tensor:
    """l < log lo or l > log hi, as bool. Padding (where l is 0) is never outside."""
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
) -> tuple[Tensor, Tensor | None]:
    """The weight of a mode, and for `mask` which units are outside (None for the other modes).

    truncate: min(ρ, hi)
    clip: min(max(ρ, lo), hi)
    mask: ρ where lo ≤ ρ ≤ hi, else 0
    log_ratio: any shape, unclamped, zero where padded (there nothing is outside). ratio: `bounded_exp` of it, where the
    caller has it. Host syncs: none. Gradient: none (call it without one).
    """
    ratio = bounded_exp(log_ratio) if ratio is None else ratio
    if mode == "truncate":
        return ratio.clamp(max=upper), None
    if mode == "clip":
        return ratio.clamp(min=lower, max=upper), None
    if mode == "mask":
        log_lower = math.log(lower) if lower > 0 else None
        outside = outside_bounds(log_ratio, log_lower, math.log(upper), padding)
        # The clamp only trims rounding at the bounds themselves: what is outside becomes 0.
        return ratio.clamp(min=lower, max=upper).masked_fill_(outside, 0.0), outside
    raise ValueError(f"mode {mode!r} is unknown: choose truncate, clip or mask.")


def batch_factor(weight_sum: Tensor, units: Tensor) -> Tensor:
    """Mean weight that batch normalisation divides by; 1 where it is 0 or there is nothing to average.

    weight_sum, units: 0-d sums over tokens (token level) or sequences (sequence, geometric): all of them for truncate
    and clip, those inside the bounds for mask. Host syncs: none.
    """
    mean = weight_sum / units.clamp(min=1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))
