"""Sums and maxima over sequences of a packed tensor, and the three levels at which ratios are aggregated.

Reference for the levels: rollout-correction guide, section 3.3; Liu & Li et al. 2025, "When Speed Kills Stability".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

_MAX_CENTERED = 100.0


def center(config: MismatchConfig) -> float:
    """What is subtracted from ratios clamped to [1/hi, hi] before they are summed: 1, which keeps the digits of their
    deviation where the engines nearly agree. 0 for hi above 100, where 1 + (c − 1) would lose those of a small c."""
    return 1.0 if config.tis.upper <= _MAX_CENTERED else 0.0


def segment_sum(values_T: Tensor, offsets: Tensor) -> Tensor:
    """Σ over each sequence: [T] → [N]. Two kernels, deterministic; an empty sequence gives 0.

    In float64 (a float32 sum over a long response loses three digits); bool is counted in float32, exact to 16 million.
    """
    wide = values_T.float() if values_T.dtype == torch.bool else values_T.double()
    return torch.segment_reduce(wide, "sum", offsets=offsets, unsafe=True)


def segment_max(values_T: Tensor, offsets: Tensor) -> Tensor:
    """Maximum over each sequence: [T] → [N]. One kernel; an empty sequence gives −inf."""
    return torch.segment_reduce(values_T, "max", offsets=offsets, unsafe=True)


def segment_sums(columns: Iterable[Tensor], offsets: Tensor, wide_T: Tensor) -> Tensor:
    """`segment_sum` of every [T] column: [K, N] float64. Each column is freed once it is summed.

    wide_T: [T] float64 in which columns are widened, one after the other: fresh memory is slow to touch. A column may
    be this tensor itself.
    """
    sums = []
    for column in columns:
        if column.dtype == torch.bool:
            column = wide_T.view(torch.float32)[: len(column)].copy_(column)
        elif column.dtype != torch.float64:
            column = wide_T.copy_(column)
        sums.append(torch.segment_reduce(column, "sum", offsets=offsets, unsafe=True))
    return torch.stack(sums)


def segment_maxima(columns: Iterable[Tensor], offsets: Tensor) -> Tensor | None:
    """`segment_max` of every [T] column: [K, N]; None where there is none."""
    values = [segment_max(column, offsets) for column in columns]
    if not values:
        return None
    return torch.stack(values) if len(values) > 1 else values[0].unsqueeze(0)


def spread(values_N: Tensor, sequence_index_T: Tensor) -> Tensor:
    """Each sequence's value at each of its tokens: [N] → [T]. One kernel."""
    return values_N.index_select(0, sequence_index_T)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(l, −20, 20)): the safety bound. Two kernels."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()


def aggregate_log_ratio(level: str, log_ratio_T: Tensor, sum_N: Tensor, count_N: Tensor) -> Tensor:
    """The aggregated log-ratio of a level, unclamped.

    token: l_t, [T] · sequence: Σ m l, [N] · geometric: Σ m l / Σ m, [N] (0 for a sequence without response tokens).
    """
    if level == "token":
        return log_ratio_T
    if level == "sequence":
        return sum_N
    if level == "geometric":
        return sum_N / count_N.clamp(min=1)
    raise ValueError(f"level {level!r} is unknown: choose token, sequence or geometric.")
