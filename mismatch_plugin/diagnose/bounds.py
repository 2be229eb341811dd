"""Bounds that keep a wished share of these data, at every level, in place of constants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import token_statistic
from mismatch_plugin.core.segments import segment_max, segment_sum
from mismatch_plugin.core.tokens import select_tokens
from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.levels import GROWN, growing, growing_name, levels_of, units_in
from mismatch_plugin.diagnose.packing import pieces
from mismatch_plugin.limits import SAFETY_BOUND

SHARES = (0.99, 0.999)
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
_SLACK = 1e-9
"""1 − 0.99 is a little less than 0.01."""
_LARGEST = 1e300
"""What is above it cannot be rounded outwards, and stays without a bound."""
_NOTHING = np.zeros(0)

Bounds = Mapping[str, Mapping[str, tuple[float, float]]]
"""Level or criterion → wished share kept ("99%") → (lower, upper)."""


def bounds_for(packed: PackedSequences, shares: Sequence[float] = SHARES) -> dict[str, dict[str, tuple[float, float]]]:
    """Level or criterion → wished share kept ("99%", "99.9%") → (lower, upper).

    Of a level (token, turn where a response has several, sequence, geometric, prefix) the bounds are on its ratio ρ: at
    most ⌊n (1 − share) / 2⌋ of its n units lie beyond each, and ρ = 1 is always inside. Those of "turn_growing",
    "sequence_growing" and "prefix_growing" are for one token, and grow with √n (`tis.bound_growth` 0.5). Of a criterion
    ("sequence_mean_k3", "sequence_max_k2", "token_tv", "token_binary_kl", "token_binary_kl_reverse") lower is 0, and at
    most ⌊n (1 − share)⌋ units are above upper. Rounded outwards to a thousandth of |log ρ|, or of the upper bound. An
    upper bound above e^20 is inf, which mask mode takes for e^20; a lower one below e^−20 is 0, which is none.
    Raises ValueError for shares outside of (0, 1], and where a side is missing.
    """
    if any(not 0.0 < share <= 1.0 for share in shares):
        raise ValueError(f"shares {list(shares)} must be above 0 and at most 1: 0.99 keeps 99 %.")
    if packed.old_log_probs is None or packed.rollout_log_probs is None:
        raise ValueError("bounds need old_log_probs and rollout_log_probs: the packed batch lacks one of them.")
    found: dict[str, dict[str, tuple[float, float]]] = {}
    names = {share: f"{share * 100:g}%" for share in shares}
    tried = [(level, level, 0.0) for level in levels_of(packed)]
    tried += [(growing_name(level), level, GROWN) for level in growing(packed)]
    for name, level, growth in tried:
        values = np.concatenate([_NOTHING, *(_ratios(level, growth, piece) for _, piece in pieces(packed))])
        found[name] = {shown: _two_sided(values, share) for share, shown in names.items()}
    for criterion in STATISTICS:
        values = np.concatenate([_NOTHING, *(_compared(*criterion, piece) for _, piece in pieces(packed))])
        found["_".join(criterion)] = {name: (0.0, _above(values, share)) for share, name in names.items()}
    return found


def _ratios(level: str, growth: float, packed: PackedSequences) -> Floats:
    """log ρ of every unit with a token; divided by n^growth, n the tokens that it is the sum over."""
    of = units_in(level, packed)
    scaled = of.log_ratio_U / of.count_U.clamp(min=1).pow(growth) if growth else of.log_ratio_U
    return scaled[of.tokens_U > 0].numpy()


def _compared(aggregate: str, statistic: str, packed: PackedSequences) -> Floats:
    """What a criterion compares, of every unit with a token."""
    assert packed.old_log_probs is not None
    tokens, counts_N = (
        select_tokens(packed.old_log_probs.detach(), packed),
        segment_sum(packed.loss_mask, packed.offsets),
    )
    values = token_statistic(statistic, tokens.log_ratio, tokens.train, tokens.rollout)
    if aggregate == "token":
        return values[packed.loss_mask].double().numpy()
    if aggregate == "sequence_max":
        values = segment_max(values, packed.offsets)
    else:
        values = segment_sum(values, packed.offsets) / counts_N.clamp(min=1)
    return values[counts_N > 0].double().numpy()


def _two_sided(values: Floats, share: float) -> tuple[float, float]:
    if not len(values):
        return 1.0, 1.0
    lost = int(len(values) * (1.0 - share) / 2 + _SLACK)
    places = [lost, len(values) - 1 - lost]
    values.partition(places)
    low, high = values[places].tolist()
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
    kept = len(values) - 1 - int(len(values) * (1.0 - share) + _SLACK)
    values.partition(kept)
    value = max(float(values[kept]), _SMALLEST**2) * (1.0 + _ROUNDING)
    if not value < _LARGEST:
        return math.inf
    digits = -math.floor(math.log10(_FINENESS * value))
    return round(math.ceil(value * 10.0**digits) / 10.0**digits, max(digits, 0))
