"""What one `correct` call has worked out so far, which its later stages read."""

from __future__ import annotations

from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.acting_bounds import acting_bounds
from mismatch_plugin.core.levels import aggregate_log_ratio, bounded_exp, center
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.tokens import Tokens
from mismatch_plugin.core.validity import Locator, find_invalid
from mismatch_plugin.core.weights import batch_factor

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


def any_of(verdicts: list[Tensor | None]) -> Tensor | None:
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
    """The intermediate results of one `correct` call, filled in as it proceeds. [T] local tokens, [N] whole sequences.

    `outside` marks what a criterion or mask mode rejects; `masked` is any of these, `rejected` also a dropped defect.
    """

    def __init__(self, config: MismatchConfig, packed: PackedSequences, tokens: Tokens, train_T: Tensor) -> None:
        self.config, self.packed, self.tokens = config, packed, tokens
        self.level = config.tis.level if config.tis.level != "none" else "token"
        self.bounds = acting_bounds(config)
        self.center = center(config)
        self.measured = config.metrics != "off" and tokens.code is not None
        self.weights_T: Tensor | None = None
        self.weights_N: Tensor | None = None
        self.outside_mode_T: Tensor | None = None
        self.outside_mode_N: Tensor | None = None
        self.outside_criteria_T: dict[str, Tensor] = {}
        self.outside_N: dict[str, Tensor] = {}
        self.values_N: dict[str, Tensor] = {}  # what a sequence criterion compares, by name
        self.token_extremes: dict[str, Tensor] = {}  # maxima of a token criterion's statistic, "-name" for minima
        self.sums_N: dict[str, Tensor] = {}
        self.means_N: dict[str, Tensor] = {}
        self.maxima_N: dict[str, Tensor] = {}
        self.tokens_N: Tensor
        self.kept_N: Tensor
        self.keep_T: Tensor
        self.factor: Tensor | float | None = None  # what batch normalisation divides the weights by
        self.locators = locators(config, packed, train_T)

    @cached_property
    def wide_T(self) -> Tensor:
        """[T] float64, for one column after the other."""
        return torch.empty_like(self.tokens.log_ratio, dtype=torch.float64)

    @cached_property
    def unit_ratio(self) -> Tensor:
        """[N] float64 (so that ρ − 1 keeps its digits): ρ of each sequence, within e^±20. Not at token level."""
        return bounded_exp(self.aggregated())

    @property
    def masks_tokens(self) -> bool:
        """True where criteria or mask mode reject single tokens."""
        return bool(self.outside_criteria_T) or self.outside_mode_T is not None

    def read(self, names: tuple[str, ...], partials_KN: Tensor) -> None:
        """Take the reduced sums per sequence, and form the means over response tokens (0 where there is none)."""
        self.sums_N = dict(zip(names, partials_KN.unbind(0), strict=True))
        self.tokens_N = self.sums_N["tokens"]
        self.divisor_N = self.tokens_N.clamp(min=1)
        self.means_N = dict(zip(names, (partials_KN / self.divisor_N).unbind(0), strict=True))

    def aggregated(self, level: str | None = None) -> Tensor:
        """The aggregated log-ratio of a level (the diagnostics' one), unclamped: [T] at token level, else [N]."""
        level = self.level if level is None else level
        return aggregate_log_ratio(level, self.tokens.log_ratio, self.sums_N["log_ratio"], self.tokens_N)

    def batch_factor(self) -> Tensor:
        """Mean weight of this batch (0-d, float64), the same on every rank of a context-parallel group."""
        rows = self.unit_rows()
        measure = self.tokens_N if self.level == "token" else (self.tokens_N > 0).double()
        return batch_factor(rows["weight_unit"].dot(measure), rows["units"].dot(measure))

    def unit_rows(self) -> dict[str, Tensor]:
        """Rows whose sums batch normalisation divides: weights before it, and the units they are averaged over."""
        ones = torch.ones_like(self.tokens_N)
        if self.weights_N is not None:
            units = ones if self.outside_mode_N is None else ones.masked_fill_(self.outside_mode_N, 0.0)
            return {"weight_unit": self.weights_N, "units": units}
        units = ones if self.outside_mode_T is None else ones - self.means_N["outside_mode"]
        return {"weight_unit": self.means_N["weight_unit"], "units": units}
