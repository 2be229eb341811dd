"""The units at which ratios are aggregated: one class a level. Nothing outside of this file asks which level it is.

Reference: rollout-correction guide, section 3.3; Liu & Li et al. 2025, "When Speed Kills Stability".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from mismatch_plugin.core.segments import spread

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


class Units:
    """How a level cuts sequences into units, and what a unit's log-ratio is: each unit has one weight.

    name: as in the settings.
    per_token: a unit is one token, whose log-ratio needs no other one: it is bounded before the reduction over
        context-parallel ranks, and its sums ride on that. Else a unit is formed from the reduced sums.
    measure: what the merged sums count a unit by, `tokens` or `sequences`.
    multiplies: the ratio is a product over the unit, so that its spread grows with the length.
    """

    name: ClassVar[str]
    per_token: ClassVar[bool] = False
    measure: ClassVar[str] = "sequences"
    multiplies: ClassVar[bool] = False

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums_N: Mapping[str, Tensor]) -> Tensor:
        """The unit's log-ratio, [U], unclamped; 0 for a unit without response tokens.

        log_ratio_T: l, 0 at padding. sums_N: Σ m l (`log_ratio`) and Σ m (`tokens`) of each whole sequence, reduced;
            not looked at where `per_token`.
        """
        raise NotImplementedError

    @staticmethod
    def to_tokens(values_U: Tensor, sequence_index_T: Tensor) -> Tensor:
        """Each unit's value at each of its tokens: [U] → [T]."""
        return spread(values_U, sequence_index_T)


class TokenUnits(Units):
    """Each response token: l_t."""

    name, per_token, measure = "token", True, "tokens"

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums_N: Mapping[str, Tensor]) -> Tensor:
        """l_t, [T]."""
        return log_ratio_T

    @staticmethod
    def to_tokens(values_U: Tensor, sequence_index_T: Tensor) -> Tensor:
        """As they are."""
        return values_U


class SequenceUnits(Units):
    """The whole response: Σ m l, the log of the product."""

    name, multiplies = "sequence", True

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums_N: Mapping[str, Tensor]) -> Tensor:
        """Σ m l, [N]."""
        return sums_N["log_ratio"]


class GeometricUnits(Units):
    """The whole response: Σ m l / Σ m, the log of the geometric mean."""

    name = "geometric"

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums_N: Mapping[str, Tensor]) -> Tensor:
        """Σ m l / Σ m, [N]."""
        return sums_N["log_ratio"] / sums_N["tokens"].clamp(min=1)


UNITS: dict[str, type[Units]] = {units.name: units for units in (TokenUnits, SequenceUnits, GeometricUnits)}
_MAX_CENTERED = 100.0
_OF_CRITERION = {"token": TokenUnits, "sequence_sum": SequenceUnits, "sequence_mean": GeometricUnits}


def units_of(config: MismatchConfig) -> type[Units]:
    """The units of the weights; tokens where there are none (`tis.level` none), for the metrics."""
    return UNITS.get(config.tis.level, TokenUnits)


class ActingBounds(NamedTuple):
    """The bounds that act on ratios, which the fractions outside of them are reported for.

    level: whose aggregated ratio is compared. lower may be 0 (no bound), upper inf.
    """

    level: str
    lower: float
    upper: float

    @property
    def units(self) -> type[Units]:
        """Those of the level."""
        return UNITS[self.level]

    @property
    def log_lower(self) -> float:
        """−inf where there is no lower bound."""
        return math.log(self.lower) if self.lower > 0 else -math.inf

    @property
    def log_upper(self) -> float:
        """inf where there is no upper bound."""
        return math.log(self.upper)


def acting_bounds(config: MismatchConfig) -> ActingBounds | None:
    """The weights' bounds; without weights those of the first ratio criterion, at its level; else a TIS bound that a
    preset or a person gave, for the metrics alone; None where nothing bounds a ratio.

    A criterion counts that bounds π_train's ratio in every unit: not under a condition, nor where π_θ is judged apart.
    """
    tis = config.tis
    if config.weighted:
        return ActingBounds(units_of(config).name, tis.lower, tis.upper)
    for criterion in () if config.judges_current else config.criteria:
        if criterion.in_log_space and not criterion.conditional and criterion.aggregate in _OF_CRITERION:
            upper = math.inf if criterion.upper_bound is None else criterion.upper_bound
            return ActingBounds(_OF_CRITERION[criterion.aggregate].name, criterion.lower_bound or 0.0, upper)
    if tis.model_fields_set & {"upper_bound", "lower_bound"}:
        return ActingBounds(units_of(config).name, tis.lower, tis.upper)
    return None


def center(config: MismatchConfig) -> float:
    """What is subtracted from ratios clamped to [1/hi, hi] before they are summed: 1, which keeps the digits of their
    deviation where the engines nearly agree. 0 for hi above 100, where 1 + (c − 1) would lose those of a small c."""
    return 1.0 if config.tis.upper <= _MAX_CENTERED else 0.0
