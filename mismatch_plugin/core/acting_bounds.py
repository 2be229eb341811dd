"""The bounds that act on ratios, which the fractions outside of them are reported for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

_LEVELS = {"token": "token", "sequence_sum": "sequence", "sequence_mean": "geometric"}


class ActingBounds(NamedTuple):
    """level: whose aggregated ratio is compared. lower may be 0 (no bound), upper inf."""

    level: str
    lower: float
    upper: float

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
    preset or a person gave, for the metrics alone; None where nothing bounds a ratio."""
    tis = config.tis
    if config.weighted:
        return ActingBounds(tis.level, tis.lower, tis.upper)
    for criterion in config.criteria:
        if criterion.in_log_space and criterion.aggregate in _LEVELS:
            upper = math.inf if criterion.upper_bound is None else criterion.upper_bound
            return ActingBounds(_LEVELS[criterion.aggregate], criterion.lower_bound or 0.0, upper)
    if tis.model_fields_set & {"upper_bound", "lower_bound"}:
        return ActingBounds("token" if tis.level == "none" else tis.level, tis.lower, tis.upper)
    return None
