"""Bounds that keep a wished share of these data, at every level, in place of constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import token_statistic
from mismatch_plugin.core.segments import segment_max, segment_sum
from mismatch_plugin.core.tokens import Tokens, select_tokens
from mismatch_plugin.core.units import UNITS
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.rollout.responses import Floats

SHARES = (0.99, 0.999)
LEVELS = ("token", "sequence", "geometric")
STATISTICS = (
    ("token", "tv"),
    ("token", "binary_kl"),
    ("token", "binary_kl_reverse"),
    ("sequence_mean", "k3"),
    ("sequence_max", "k2"),
)
"""(aggregate, statistic) of the criteria that have an upper bound alone."""
_SMALLEST = 1e-6
_FINENESS = 1e-3
_ROUNDING = 1e-12


def bounds_for(
    packed: PackedSequences, shares: Sequence[float] = SHARES
) -> dict[str, dict[str, tuple[float, float]]]:
    """Level or criterion → wished share kept ("99%", "99.9%") → (lower, upper).

    Of a level (token, sequence, geometric) the bounds are on its ratio ρ: at most ⌊n (1 − share) / 2⌋ of its n units
    lie beyond each, and ρ = 1 is always inside. Of a criterion ("sequence_mean_k3", "sequence_max_k2", "token_tv",
    "token_binary_kl", "token_binary_kl_reverse") lower is 0, and at most ⌊n (1 − share)⌋ units are above upper.
    Rounded outwards to a thousandth of |log ρ|, or of the upper bound. An upper bound above e^20 is inf, which mask
    mode takes for e^20; a lower one below e^−20 is 0, which is none.
    Raises ValueError for shares outside of (0, 1], and where a side is missing.
    """
    if any(not 0.0 < share <= 1.0 for share in shares):
        raise ValueError(f"shares {list(shares)} must be above 0 and at most 1: 0.99 keeps 99 %.")
    if packed.old_log_probs is None or packed.rollout_log_probs is None:
        raise ValueError("bounds need old_log_probs and rollout_log_probs: the packed batch lacks one of them.")
    tokens = select_tokens(packed.old_log_probs.detach(), packed)
    trained = packed.loss_mask
    sums = {"log_ratio": segment_sum(tokens.log_ratio, packed.offsets), "tokens": segment_sum(trained, packed.offsets)}
    has = sums["tokens"] > 0
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for level in LEVELS:
        units = UNITS[level]
        values = units.aggregate(tokens.log_ratio, sums)[trained if units.per_token else has].double().numpy()
        found[level] = {f"{share * 100:g}%": _two_sided(values, share) for share in shares}
    for aggregate, statistic in STATISTICS:
        values = _compared(aggregate, statistic, tokens, packed, sums)
        found[f"{aggregate}_{statistic}"] = {f"{share * 100:g}%": (0.0, _above(values, share)) for share in shares}
    return found


def _compared(
    aggregate: str, statistic: str, tokens: Tokens, packed: PackedSequences, sums: dict[str, torch.Tensor]
) -> Floats:
    """What a criterion compares, of every unit with a token."""
    values = token_statistic(statistic, tokens.log_ratio, tokens.train, tokens.rollout)
    if aggregate == "token":
        return values[packed.loss_mask].double().numpy()
    if aggregate == "sequence_max":
        values = segment_max(values, packed.offsets)
    else:
        values = segment_sum(values, packed.offsets) / sums["tokens"].clamp(min=1)
    return values[sums["tokens"] > 0].double().numpy()


def _beyond(units: int, share: float) -> int:
    """Units that may be lost; 1 − share is rounding away from a decimal number."""
    return int(units * (1.0 - share) + 1e-9)


def _two_sided(values: Floats, share: float) -> tuple[float, float]:
    if not len(values):
        return 1.0, 1.0
    lost = int(len(values) * (1.0 - share) / 2 + 1e-9)
    low, high = np.partition(values, (lost, len(values) - 1 - lost))[[lost, len(values) - 1 - lost]].tolist()
    return _outward(min(low, -_SMALLEST), -1), _outward(max(high, _SMALLEST), 1)


def _outward(log_ratio: float, sign: int) -> float:
    """e^l, moved away from 1 to a short decimal number, by at most a thousandth of |l|."""
    if abs(log_ratio) > SAFETY_BOUND:
        return math.inf if sign > 0 else 0.0
    ratio = math.exp(log_ratio + sign * _ROUNDING)
    digits = -math.floor(math.log10(_FINENESS * abs(log_ratio) * ratio))
    return round((math.ceil if sign > 0 else math.floor)(ratio * 10.0**digits) / 10.0**digits, max(digits, 0))


def _above(values: Floats, share: float) -> float:
    if not len(values):
        return _SMALLEST
    kept = len(values) - 1 - _beyond(len(values), share)
    value = max(float(np.partition(values, kept)[kept]), _SMALLEST**2) * (1.0 + _ROUNDING)
    digits = -math.floor(math.log10(_FINENESS * value))
    return round(math.ceil(value * 10.0**digits) / 10.0**digits, max(digits, 0))
