"""What one `correct` call has worked out so far, which its later stages read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import RejectionInputs
from mismatch_plugin.core.segments import Column, bounded_exp, named_rows, spread, verdict_columns
from mismatch_plugin.core.units import (
    LARGEST,
    acting_bounds,
    batch_factor,
    bound_weight,
    gamma_weight,
    unit_log_ratio,
    unit_tokens,
)
from mismatch_plugin.core.validity import Locator, Tokens, find_invalid

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


def any_of(verdicts: Iterable[Tensor | None]) -> Tensor | None:
    """OR of the verdicts that exist; None where there is none."""
    given = [verdict for verdict in verdicts if verdict is not None]
    return reduce(torch.logical_or, given) if given else None


class CorrectionState:
    """The intermediate results of one `correct` call, filled in as it proceeds. [T] local tokens, [N] whole sequences,
    [U] units of the level, which are tokens, sequences or, with `parts`, parts of sequences.
    judged: what criteria and veto judge. outside_T, outside_N: what a criterion rejects, by its name, and what
        `staleness`, `veto` and `invalid` do. outside_U: what `mode` (mask) does, in outside_T where units are tokens.
    weights_U: bounded, before batch normalisation; None without weights. factor: what that divides them by.
    values_N: what a sequence criterion compares, by name. token_extremes: maxima of a token criterion's statistic,
        "-name" for minima. sums_U: sums of each part.
    """

    def __init__(
        self, config: MismatchConfig, packed: PackedSequences, tokens: Tokens, judged: RejectionInputs, train_T: Tensor
    ) -> None:
        self.config, self.packed, self.tokens, self.judged = config, packed, tokens, judged
        self.unit, self.bounds = config.unit, acting_bounds(config)
        self.parts = packed.parts(self.unit)
        self.measured = config.metrics != "off" and tokens.code is not None
        self.weights_U: Tensor | None = None
        self.outside_T: dict[str, Tensor] = {}
        self.outside_N: dict[str, Tensor] = {}
        self.outside_U: dict[str, Tensor] = {}
        self.values_N: dict[str, Tensor] = {}
        self.token_extremes: dict[str, Tensor] = {}
        self.sums_N: dict[str, Tensor] = {}
        self.sums_U: dict[str, Tensor] = {}
        self.means_N: dict[str, Tensor] = {}
        self.factor: Tensor | float | None = None
        self.locators: tuple[Locator, ...] = ()
        if config.rollout_log_prob_policy == "error" and packed.rollout_log_probs is not None:
            where = (packed.loss_mask, packed.lengths, packed.sequence_ids, packed.positions)
            self.locators = (partial(find_invalid, train_T, packed.rollout_log_probs, *where),)

    def rejected_tokens(self) -> tuple[Tensor | None, Tensor | None]:
        """(what criteria and mask mode reject so far, the same with tokens that are dropped), [T] bool; None: none."""
        masked_T = any_of(self.outside_T.values())
        dropped_T = self.tokens.defective if self.config.rollout_log_prob_policy == "drop-token" else None
        return masked_T, any_of([masked_T, dropped_T])

    def part_columns(self, masked_T: Tensor | None, rejected_T: Tensor | None) -> Iterator[Column]:
        """What is summed over the parts of sequences, too; nothing where there are none."""
        if not self.parts.splits:
            return
        log_ratio = self.tokens.log_ratio
        # Chunks before a rank's own count as its running sum would count them.
        yield Column("log_ratio", log_ratio.clamp(-LARGEST, LARGEST) if self.unit.one_ratio_per_token else log_ratio)
        yield Column("tokens", self.tokens.mask)
        if self.unit.one_ratio_per_token:
            return
        if self.config.weighs_by_sign and self.judged.advantages is not None:
            yield Column("advantage", self.judged.advantages)
        yield from verdict_columns({"rejected": rejected_T, "masked": masked_T})

    def read(self, names: Sequence[str], partials_KN: Tensor) -> None:
        """Take reduced sums per sequence, and form the means over response tokens (0 where there is none)."""
        sums_N = named_rows(names, partials_KN)
        if not self.sums_N:
            self.tokens_N = sums_N["tokens"]
            self.divisor_N = self.tokens_N.clamp(min=1)
        self.sums_N |= sums_N
        self.means_N |= named_rows(names, partials_KN / self.divisor_N)

    @cached_property
    def log_ratio_U(self) -> Tensor:
        """The aggregated log-ratio of every unit, unclamped; 0 at padding."""
        log_ratio = unit_log_ratio(self.unit, self.tokens.log_ratio, self.sums_U, self.parts)
        return log_ratio.masked_fill_(self.tokens.padding, 0.0) if self.unit.needs_second_reduction else log_ratio

    @cached_property
    def ratio_U(self) -> Tensor:
        """ρ of each unit, within e^±20; float64 where it is a product, so that ρ − 1 keeps its digits."""
        return bounded_exp(self.log_ratio_U)

    @cached_property
    def scale_U(self) -> Tensor | None:
        """n^g, what the logs of the bounds are multiplied by; None where they do not grow."""
        growth = self.config.tis.growth
        return unit_tokens(self.unit, self.tokens.mask, self.sums_U, self.parts).pow(growth) if growth else None

    @cached_property
    def counts_U(self) -> Tensor:
        """What each unit counts in a mean over units, 0 without response tokens: [N] for units that are tokens, the
        tokens of each sequence, whose rows are means over them."""
        if self.unit.one_ratio_per_token:
            return self.tokens_N
        return (self.sums_U["tokens"] > 0).double()

    @property
    def positive_U(self) -> Tensor:
        """Units of A ≥ 0, of several tokens by their sum, [U] bool; any where padded."""
        if not self.unit.one_ratio_per_token:
            return self.sums_U["advantage"] >= 0
        assert self.judged.advantages is not None  # validate_fields
        return self.judged.advantages >= 0

    def weigh(self) -> None:
        """Bound the units' ratios to weights, where there are weights, and note what mask mode rejects."""
        if not self.config.weighted:
            return
        tis, unit = self.config.tis, self.unit
        padding = self.tokens.padding if unit.one_ratio_per_token else None
        ratio, scale = (None, None) if unit.per_token else (self.ratio_U, self.scale_U)

        def bounded(lower: float, upper: float) -> tuple[Tensor, Tensor | None]:
            return bound_weight(self.log_ratio_U, tis.mode, lower, upper, padding, ratio, scale)

        if tis.mode == "gamma":
            weights, rejected = gamma_weight(self.log_ratio_U, self.ratio_U, self.positive_U), None
        else:
            weights, rejected = bounded(tis.lower, tis.upper)
        if tis.differs_by_sign:
            of_positive, rejected_positive = bounded(*tis.positive)
            weights = torch.where(self.positive_U, of_positive, weights)
            if rejected is not None and rejected_positive is not None:
                rejected = torch.where(self.positive_U, rejected_positive, rejected)
        self.weights_U = weights.mul_(self.tokens.mask) if unit.one_ratio_per_token else weights
        if rejected is not None:
            (self.outside_T if unit.one_ratio_per_token else self.outside_U)["mode"] = rejected

    def settle(self, rejected_T: Tensor | None) -> None:
        """Which tokens stay, and how many of each sequence and unit, once everything is judged."""
        rejected_U, mask = any_of(self.outside_N.values()), self.tokens.mask
        self.keep_T = mask if rejected_T is None else mask.masked_fill(rejected_T, 0.0)
        by_token = self.unit.one_ratio_per_token
        parts, sums = (self.packed.whole, self.sums_N) if by_token else (self.parts, self.sums_U)
        if rejected_U is not None and parts.splits:
            rejected_U = spread(rejected_U, parts.sequence)
        rejected_U = any_of([rejected_U, *self.outside_U.values()])
        kept = sums["tokens"] if rejected_T is None else sums["tokens"] - sums["rejected"]
        if rejected_U is not None:
            kept = kept.masked_fill(rejected_U, 0.0)
            self.keep_T = self.keep_T.masked_fill(spread(rejected_U, parts.index), 0.0)
        self.kept_U, self.kept_N = kept, parts.to_sequences(kept.unsqueeze(0)).squeeze(0)

    def batch_factor(self) -> Tensor:
        """Mean weight of this batch (0-d, float64), the same on every rank of a context-parallel group."""
        rows = self.unit_rows()
        return batch_factor(rows["weight_unit"].dot(self.counts_U), rows["units"].dot(self.counts_U))

    def unit_rows(self) -> dict[str, Tensor]:
        """Rows whose sums batch normalisation divides: weights before it, and the units they are averaged over."""
        units = torch.ones_like(self.counts_U)
        if self.unit.one_ratio_per_token:
            if "out_mode" in self.means_N:
                units = units - self.means_N["out_mode"]
            return {"weight_unit": self.means_N["weight_unit"], "units": units}
        assert self.weights_U is not None  # asked for with weights only
        if "mode" in self.outside_U:
            units = units.masked_fill_(self.outside_U["mode"], 0.0)
        return {"weight_unit": self.weights_U, "units": units}

    def of_sequences(self, rows_U: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rows of units that are (parts of) sequences as means over the response tokens of each sequence."""
        if not self.parts.splits or not rows_U:
            return rows_U
        values = torch.stack([row.double() for row in rows_U.values()]).mul_(self.sums_U["tokens"])
        return dict(zip(rows_U, (self.parts.to_sequences(values) / self.divisor_N).unbind(0), strict=True))
