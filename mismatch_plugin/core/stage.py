"""What one `correct` call has worked out so far, which its later stages read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import Judged
from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.core.tokens import Tokens
from mismatch_plugin.core.units import acting_bounds, units_of
from mismatch_plugin.core.validity import Locator, find_invalid
from mismatch_plugin.core.weights import batch_factor, bound_weight

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


def any_of(verdicts: Iterable[Tensor | None]) -> Tensor | None:
    """OR of the verdicts that exist; None where there is none."""
    given = [verdict for verdict in verdicts if verdict is not None]
    return reduce(torch.logical_or, given) if given else None


def locators(config: MismatchConfig, packed: PackedSequences, train_T: Tensor) -> tuple[Locator, ...]:
    """What names the invalid log-probs of a batch, should any be counted under the policy `error`."""
    rollout = packed.rollout_log_probs
    if config.rollout_log_prob_policy != "error" or rollout is None:
        return ()
    where = (packed.lengths, packed.sequence_ids, packed.positions)
    return (partial(find_invalid, train_T, rollout, packed.loss_mask, *where),)


class Stage:
    """The intermediate results of one `correct` call, filled in as it proceeds. [T] local tokens, [N] whole sequences,
    [U] units of the level.

    judged: what criteria and veto judge.
    outside_T, outside_N: what a criterion rejects, by its name, and under `mode` what mask mode does; outside_T also
        `staleness`, outside_N `veto` and `invalid`. weights_U: bounded, before batch normalisation; None without
        weights.
    values_N: what a sequence criterion compares, by name. token_extremes: maxima of a token criterion's statistic,
        "-name" for minima. factor: what batch normalisation divides the weights by.
    """

    tokens_N: Tensor
    divisor_N: Tensor
    kept_N: Tensor
    keep_T: Tensor

    def __init__(
        self, config: MismatchConfig, packed: PackedSequences, tokens: Tokens, judged: Judged, train_T: Tensor
    ) -> None:
        self.config, self.packed, self.tokens, self.judged = config, packed, tokens, judged
        self.units, self.bounds = units_of(config), acting_bounds(config)
        self.measured = config.metrics != "off" and tokens.code is not None
        self.weights_U: Tensor | None = None
        self.outside_T: dict[str, Tensor] = {}
        self.outside_N: dict[str, Tensor] = {}
        self.values_N: dict[str, Tensor] = {}
        self.token_extremes: dict[str, Tensor] = {}
        self.sums_N: dict[str, Tensor] = {}
        self.means_N: dict[str, Tensor] = {}
        self.factor: Tensor | float | None = None
        self.locators = locators(config, packed, train_T)

    def read(self, names: Sequence[str], partials_KN: Tensor) -> None:
        """Take the reduced sums per sequence, and form the means over response tokens (0 where there is none)."""
        self.sums_N = dict(zip(names, partials_KN.unbind(0), strict=True))
        self.tokens_N = self.sums_N["tokens"]
        self.divisor_N = self.tokens_N.clamp(min=1)
        self.means_N = dict(zip(names, (partials_KN / self.divisor_N).unbind(0), strict=True))

    @cached_property
    def log_ratio_U(self) -> Tensor:
        """The aggregated log-ratio of every unit, unclamped."""
        return self.units.aggregate(self.tokens.log_ratio, self.sums_N)

    @cached_property
    def ratio_U(self) -> Tensor:
        """ρ of each unit, within e^±20; float64 where a unit is a sequence, so that ρ − 1 keeps its digits."""
        return bounded_exp(self.log_ratio_U)

    def weigh(self, padding_T: Tensor | None, outside: dict[str, Tensor]) -> None:
        """Bound the units' ratios to weights, where there are weights; what mask mode rejects goes to `outside`."""
        if not self.config.weighted:
            return
        tis = self.config.tis
        ratio = None if self.units.per_token else self.ratio_U
        weights, rejected = bound_weight(self.log_ratio_U, tis.mode, tis.lower, tis.upper, padding_T, ratio)
        self.weights_U = weights.mul_(self.tokens.mask) if self.units.per_token else weights
        if rejected is not None:
            outside["mode"] = rejected

    def batch_factor(self) -> Tensor:
        """Mean weight of this batch (0-d, float64), the same on every rank of a context-parallel group."""
        rows = self.unit_rows()
        measure = self.tokens_N if self.units.measure == "tokens" else (self.tokens_N > 0).double()
        return batch_factor(rows["weight_unit"].dot(measure), rows["units"].dot(measure))

    def unit_rows(self) -> dict[str, Tensor]:
        """Rows whose sums batch normalisation divides: weights before it, and the units they are averaged over."""
        units = torch.ones_like(self.tokens_N)
        if self.units.per_token:
            if "outside_mode" in self.means_N:
                units = units - self.means_N["outside_mode"]
            return {"weight_unit": self.means_N["weight_unit"], "units": units}
        assert self.weights_U is not None  # asked for with weights only
        if "mode" in self.outside_N:
            units = units.masked_fill_(self.outside_N["mode"], 0.0)
        return {"weight_unit": self.weights_U, "units": units}
