"""The units of every level in a packed batch, as the core forms them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_plugin.config.sections import GROWING
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import segment_sum
from mismatch_plugin.core.tokens import select_tokens
from mismatch_plugin.core.units import UNITS, Units

LEVELS = tuple(UNITS)
GROWN = 0.5
"""`tis.bound_growth` of the bounds that are tried: the share outside hardly depends on the length."""


def levels_of(packed: PackedSequences) -> tuple[str, ...]:
    """The levels, without those that are another one here: a turn is the whole response where each has one."""
    several = any(count > 1 for count in packed.turn_numbers()[1])
    return tuple(level for level in LEVELS if several or UNITS[level].measure != "turns")


def growing(packed: PackedSequences) -> tuple[str, ...]:
    """Those whose bounds may grow with the length."""
    return tuple(level for level in levels_of(packed) if level in GROWING)


def growing_name(level: str) -> str:
    """What bounds that grow are called among `bounds_for`."""
    return f"{level}_growing"


@dataclass(frozen=True)
class LevelUnits:
    """log_ratio_U, float64: of every unit, unclamped. count_U: tokens that it is the sum over. tokens_U: tokens that
    have it for their ratio. index_T: the unit of each token; None where every token is one."""

    units: type[Units]
    log_ratio_U: Tensor
    count_U: Tensor
    tokens_U: Tensor
    index_T: Tensor | None

    def total(self, values_T: Tensor) -> Tensor:
        """Σ over the tokens of each unit."""
        if self.index_T is None:
            return values_T
        return torch.zeros(len(self.tokens_U), dtype=values_T.dtype).index_add_(0, self.index_T, values_T)

    def at_tokens(self, values_U: Tensor) -> Tensor:
        """Each unit's value at each of its tokens."""
        return values_U if self.index_T is None else values_U.index_select(0, self.index_T)


def units_in(level: str, packed: PackedSequences, train_T: Tensor | None = None) -> LevelUnits:
    """train_T: log π_train, [T]; None: `packed.old_log_probs`. Units without response tokens have log-ratio 0."""
    train_T = packed.old_log_probs if train_T is None else train_T
    assert train_T is not None
    units, log_ratio = UNITS[level], select_tokens(train_T.detach(), packed).log_ratio.double()
    parts, mask = units.parts(packed), packed.loss_mask.double()
    offsets = packed.offsets if parts is None else parts.offsets
    sums = {"log_ratio": segment_sum(log_ratio, offsets), "tokens": segment_sum(mask, offsets)}
    count = mask if units.per_token else units.count(mask, sums, parts)
    aggregated = units.aggregate(log_ratio, sums, parts)
    if units.on_tokens:
        return LevelUnits(units, aggregated, count, mask, None)
    index = packed.sequence_index if parts is None else parts.index
    return LevelUnits(units, aggregated, count, sums["tokens"], index)
