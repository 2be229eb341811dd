"""The units at which ratios are aggregated: one class a level. Nothing outside of this file asks which level it is.

References: rollout-correction guide, section 3.3; Liu & Li et al. 2025, "When Speed Kills Stability"; Precup, Sutton &
Singh 2000 (prefix: per-decision importance sampling).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.sequence_parts import SequenceParts

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


class Units:
    """How a level cuts sequences into units, and what a unit's log-ratio is: each unit has one weight.

    name: as in the settings.
    per_token: a unit's log-ratio needs one token only: it is bounded before the reduction over context-parallel ranks,
        and its sums ride on that. Else it is formed from the reduced sums.
    one_ratio_per_token: every token has a ratio of its own, [U] is [T]. Else [U] is the sequences, or their `parts`.
    needs_second_reduction: a token's ratio is known only after that reduction, so what becomes of tokens takes another.
    measure: what the merged sums count a unit by, `tokens`, `turns` or `sequences`.
    multiplies: the ratio is a product over many tokens, so that its spread grows with their number.
    spans: the ratio reaches over the whole response.
    ess: what the metric of a unit's effective sample size is called by, before `eff_sample_size`.
    needs: fields of the batch without which context parallelism cannot find the units.
    """

    name: ClassVar[str]
    per_token: ClassVar[bool] = False
    one_ratio_per_token: ClassVar[bool] = False
    needs_second_reduction: ClassVar[bool] = False
    measure: ClassVar[str] = "sequences"
    multiplies: ClassVar[bool] = False
    spans: ClassVar[bool] = True
    ess: ClassVar[str] = "seq_"
    needs: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def parts(packed: PackedSequences) -> SequenceParts | None:
        """Parts of sequences over which log-ratios and tokens are summed, too; None where the sequences' sums do."""
        return None

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """The unit's log-ratio, [U], unclamped; 0 for a unit without response tokens.

        log_ratio_T: l, 0 at padding. sums: Σ m l (`log_ratio`) and Σ m (`tokens`) of each whole part, or of each
            sequence without parts, reduced; not looked at where `per_token`.
        """
        raise NotImplementedError

    @staticmethod
    def count(mask_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """Response tokens that a unit's log-ratio is the sum of, [U]."""
        return sums["tokens"]


class TokenUnits(Units):
    """Each response token: l_t."""

    name, per_token, one_ratio_per_token, measure, spans, ess = "token", True, True, "tokens", False, ""

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """l_t, [T]."""
        return log_ratio_T


class SequenceUnits(Units):
    """The whole response: Σ m l, the log of the product."""

    name, multiplies = "sequence", True

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """Σ m l, [N]."""
        return sums["log_ratio"]


class GeometricUnits(Units):
    """The whole response: Σ m l / Σ m, the log of the geometric mean."""

    name = "geometric"

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """Σ m l / Σ m, [N]."""
        return sums["log_ratio"] / sums["tokens"].clamp(min=1)


class TurnUnits(Units):
    """Each turn of a response, a run of trained tokens: Σ m l over it, the log of the product."""

    name, measure, multiplies, spans, ess = "turn", "turns", True, False, "turn_"
    needs = ("turn_ids", "turn_counts")

    @staticmethod
    def parts(packed: PackedSequences) -> SequenceParts | None:
        """The turns."""
        return packed.turns

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """Σ m l, [C]."""
        return sums["log_ratio"]


class PrefixUnits(Units):
    """Each response token, with all of its response before it: Σ_{k≤t} m_k l_k, the log of the product so far.

    A rank sums its own chunk up to each token, and adds what the reduced sums say of the chunks before.
    """

    name, measure, multiplies, ess = "prefix", "tokens", True, ""
    one_ratio_per_token = needs_second_reduction = True
    needs = ("chunk_lengths",)

    @staticmethod
    def parts(packed: PackedSequences) -> SequenceParts | None:
        """The chunks of context parallelism."""
        return packed.chunks

    @staticmethod
    def aggregate(log_ratio_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """Σ_{k≤t} m_k l_k, [T] float64."""
        return _so_far(log_ratio_T, sums["log_ratio"], parts)

    @staticmethod
    def count(mask_T: Tensor, sums: Mapping[str, Tensor], parts: SequenceParts | None = None) -> Tensor:
        """Σ_{k≤t} m_k, [T]."""
        return _so_far(mask_T, sums["tokens"], parts, whole=True)


def _so_far(values_T: Tensor, sums_C: Tensor, parts: SequenceParts | None, whole: bool = False) -> Tensor:
    assert parts is not None
    running = parts.running(values_T, whole)
    return running.add_(parts.earlier(sums_C).index_select(0, parts.index)) if parts.splits else running


LEVELS = (TokenUnits, TurnUnits, SequenceUnits, GeometricUnits, PrefixUnits)
UNITS: dict[str, type[Units]] = {units.name: units for units in LEVELS}
_MAX_CENTERED = 100.0
_OF_CRITERION = {"token": TokenUnits, "sequence_sum": SequenceUnits, "sequence_mean": GeometricUnits}


def units_of(config: MismatchConfig) -> type[Units]:
    """The units of the weights; tokens where there are none (`tis.level` none), for the metrics."""
    return UNITS.get(config.tis.level, TokenUnits)


def growth_of(config: MismatchConfig) -> float:
    """g: log lo and log hi are those of one token, and grow as n^g with the n tokens of a product; 0 elsewhere."""
    return config.tis.bound_growth if units_of(config).multiplies else 0.0


class ActingBounds(NamedTuple):
    """The bounds that act on ratios, which the fractions outside of them are reported for.

    level: whose aggregated ratio is compared. lower may be 0 (no bound), upper inf. growth: `growth_of`.
    """

    level: str
    lower: float
    upper: float
    growth: float = 0.0

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

    A criterion counts that bounds π_train's ratio in every unit: not under a condition, nor where π_θ is judged.
    """
    tis = config.tis
    if config.weighted:
        return ActingBounds(units_of(config).name, tis.lower, tis.upper, growth_of(config))
    for criterion in () if config.rejects_on_current_policy else config.criteria:
        if criterion.in_log_space and not criterion.conditional and criterion.aggregate in _OF_CRITERION:
            upper = math.inf if criterion.upper_bound is None else criterion.upper_bound
            return ActingBounds(_OF_CRITERION[criterion.aggregate].name, criterion.lower_bound or 0.0, upper)
    if tis.model_fields_set & {"upper_bound", "lower_bound"}:
        return ActingBounds(units_of(config).name, tis.lower, tis.upper, growth_of(config))
    return None


def center(config: MismatchConfig) -> float:
    """What is subtracted from ratios clamped to [1/hi, hi] before they are summed: 1, which keeps the digits of their
    deviation where the engines nearly agree. 0 for hi above 100, where 1 + (c − 1) would lose those of a small c."""
    return 1.0 if config.tis.upper <= _MAX_CENTERED else 0.0
