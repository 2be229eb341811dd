"""The further diagnostics of `--mismatch-metrics full`: quantiles of the ratio, drift by bucket, acceptance by bucket.

All of it is sums over fixed buckets, so it merges like everything else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.segments import histogram
from mismatch_plugin.core.validity import bucket
from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.core.correction_state import CorrectionState

HISTOGRAM_BINS = 2048
HISTOGRAM_SCALE = 1e-4
HISTOGRAM_EDGE = math.asinh(SAFETY_BOUND / HISTOGRAM_SCALE)
"""Bins are equal in asinh(l / 1e-4): 1.3 % of |l| wide, down to 1e-6 at 0, over l in ±20."""

POSITION_EDGES = (64, 256, 1024, 4096, 16384)
PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99)
LENGTH_EDGES = (256, 1024, 4096, 16384)
VERSION_LAGS = 16
"""Weight versions that a token lags behind the trainer's are counted one by one below this, and above it together."""


def full_diagnostics(state: CorrectionState, counts_sequences: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """({name: sums [B]}, {name: maxima, 0-d}) of the local tokens, and of whole sequences where counted here.

    About 60 kernels; no host sync. Accumulated in float64.
    """
    tokens, packed = state.tokens, state.packed
    sums: dict[str, Tensor] = {}
    # Log-ratios beyond ±20 fall into the last bins.
    edge = HISTOGRAM_EDGE * (1 - 1e-6)
    place = tokens.log_ratio.mul(1.0 / HISTOGRAM_SCALE).asinh_().clamp_(-edge, edge)
    place.masked_fill_(tokens.padding, 2 * HISTOGRAM_EDGE)  # outside the range: not counted
    sums["histogram"] = histogram(place, HISTOGRAM_BINS, -HISTOGRAM_EDGE, HISTOGRAM_EDGE)
    del place
    maxima: dict[str, Tensor] = {}
    difference = tokens.train.exp().sub_(tokens.rollout.exp()).abs_()
    sums["probability_difference"] = difference.sum(dtype=torch.float64).reshape(1)
    maxima["probability_difference"] = difference.amax() if difference.numel() else difference.new_zeros(())
    del difference

    buffer = torch.empty_like(tokens.log_ratio, dtype=torch.float64)

    def add_drift(name: str, place: Tensor, size: int) -> None:
        sums[f"{name}_log_ratio"] = _by_bucket(place, size, buffer.copy_(tokens.log_ratio))
        if name != "version":
            sums[f"{name}_log_ratio_abs"] = _by_bucket(place, size, buffer.copy_(tokens.log_ratio).abs_())
        sums[f"{name}_tokens"] = _by_bucket(place, size, buffer.copy_(tokens.mask))

    if packed.weight_versions is not None and packed.trainer_version is not None:
        lag = (packed.trainer_version - packed.weight_versions).clamp_(0, VERSION_LAGS)
        add_drift("version", lag, VERSION_LAGS + 1)
    add_drift("probability", bucket(tokens.rollout.exp(), PROBABILITY_EDGES), len(PROBABILITY_EDGES) + 1)
    add_drift("position", bucket(packed.response_positions, POSITION_EDGES), len(POSITION_EDGES) + 1)
    if packed.advantages is not None:
        sign = packed.advantages.masked_fill(tokens.padding, 0.0).sign_().add_(1.0).int()
        sums["advantage_tokens"] = _by_bucket(sign, 3, buffer.copy_(tokens.mask))
        sums["advantage_kept"] = _by_bucket(sign, 3, buffer.copy_(state.keep_T))
    length = bucket(state.tokens_N, LENGTH_EDGES)
    counted = (state.tokens_N > 0).double() * float(counts_sequences)
    sums["length_sequences"] = _by_bucket(length, len(LENGTH_EDGES) + 1, counted)
    sums["length_kept"] = _by_bucket(length, len(LENGTH_EDGES) + 1, counted * (state.kept_N > 0))
    return sums, maxima


def quantile(histogram: list[float], share: float) -> float:
    """The log-ratio below which `share` of the counted tokens lie, interpolated inside its bin (host arithmetic)."""
    total = sum(histogram)
    width = 2 * HISTOGRAM_EDGE / HISTOGRAM_BINS
    below, target = 0.0, share * total
    for index, count in enumerate(histogram):
        if count and below + count >= target:
            place = -HISTOGRAM_EDGE + width * (index + (target - below) / count)
            return HISTOGRAM_SCALE * math.sinh(place)
        below += count
    return 0.0


def _by_bucket(bucket: Tensor, size: int, values: Tensor) -> Tensor:
    return values.new_zeros(size).index_add_(0, bucket, values)
