"""A unit is the tokens that share one aggregated log-ratio, of weights and criteria: a cut of the responses, and what a
part's values become. Settings spell them by the words of `UNITS`, and nothing else asks for a word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Level = Literal["token", "turn", "sequence", "geometric", "prefix", "none"]
"""Of weights."""
Aggregate = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
"""Of criteria."""


@dataclass(frozen=True)
class Unit:
    """cut: single tokens, what `PackedSequences.unit_ids` numbers (without them: the runs of the mask), or sequences.
    aggregate: over a part of that; `running` is the sum up to each token. ratio: what it is, in words."""

    cut: Literal["token", "ids", "sequence"]
    aggregate: Literal["one", "sum", "mean", "max", "running"]
    ratio: str = field(default="", compare=False)

    @property
    def level(self) -> str:
        """The word that settings have for it."""
        return next(word for word, unit in UNITS.items() if unit == self)

    @property
    def per_token(self) -> bool:
        """The log-ratio needs one token only, so it is bounded before the reduction over context-parallel ranks."""
        return self.cut == "token"

    @property
    def one_ratio_per_token(self) -> bool:
        """Every token has a ratio of its own: [U] is [T]; else the sequences, or their parts."""
        return self.per_token or self.needs_second_reduction

    @property
    def needs_second_reduction(self) -> bool:
        """A token's ratio is known only after that reduction, so what becomes of tokens takes another."""
        return self.aggregate == "running"

    @property
    def multiplies(self) -> bool:
        """The ratio is a product over many tokens, so its spread grows with their number."""
        return self.aggregate in ("sum", "running")

    @property
    def measure(self) -> str:
        """What the merged sums count it by."""
        return "tokens" if self.one_ratio_per_token else "units" if self.cut == "ids" else "sequences"

    @property
    def ess(self) -> str:
        """What the metric of its effective sample size is called by, before `eff_sample_size`."""
        return {"tokens": "", "units": "unit_", "sequences": "seq_"}[self.measure]

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of the batch without which context parallelism cannot find it."""
        return ("unit_ids", "unit_counts") * (self.cut == "ids") + ("chunk_lengths",) * self.needs_second_reduction


UNITS: dict[str, Unit] = {
    "token": Unit("token", "one", "the token's own ρ"),
    "turn": Unit("ids", "sum", "the product of the ρ of the token's turn"),
    "sequence": Unit("sequence", "sum", "the product of the sequence's ρ"),
    "geometric": Unit("sequence", "mean", "the geometric mean of the sequence's ρ"),
    "prefix": Unit("sequence", "running", "the product of the sequence's ρ up to and with the token"),
    "sequence_sum": Unit("sequence", "sum"),
    "sequence_mean": Unit("sequence", "mean"),
    "sequence_max": Unit("sequence", "max"),
}
LEVELS = tuple(level for level in get_args(Level) if level in UNITS)
PRODUCTS = tuple(level for level in LEVELS if UNITS[level].multiplies)
RS_LEVELS = tuple(level for level in LEVELS if UNITS[level] in [UNITS[each] for each in get_args(Aggregate)])
"""Levels that are aggregates of criteria, too."""


def aggregate_name(word: Any) -> Any:
    """A criterion's aggregate by its own word, for one that is a level's: geometric is sequence_mean."""
    unit = UNITS.get(word) if isinstance(word, str) else None
    return next((name for name in get_args(Aggregate) if UNITS[name] == unit), word)
