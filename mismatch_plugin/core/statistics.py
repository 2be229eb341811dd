"""Mergeable state of a step's diagnostics: sums, counts and maxima that any split of the step adds up to.

Nothing here is a mean, a deviation or a quantile: those are formed last, by `metrics.py`, from the merged state. So
every figure is the same however the step was cut into micro-batches and ranks (DESIGN 3.8).

A sum is named `quantity@measure`: the quantity is a mean over the response tokens of a sequence, and the measure weighs
the sequences: `tokens` by their response tokens, `sequences` by 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.validity import DEFECTS, InvalidLogProb, invalid_error
from mismatch_plugin.core.weights import batch_factor

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

Locator = Callable[[], tuple[InvalidLogProb, ...]]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums [S] and maxima [M], float64, on the device; their names, fixed by the configuration.

    `locators` find the place of an invalid log-prob; they run only when one was counted and the policy is `error`.
    """

    sums: Tensor
    maxima: Tensor
    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    config: MismatchConfig
    locators: tuple[Locator, ...] = field(default=(), repr=False)

    def merge(self, other: Statistics) -> Statistics:
        """The state of both together. Raises ValueError where they come from different configurations."""
        same_names = self.sum_names == other.sum_names and self.maximum_names == other.maximum_names
        if not same_names or self.config != other.config:
            mine, theirs = set(self.sum_names), set(other.sum_names)
            differing = ", ".join(sorted({name.split("[")[0] for name in mine ^ theirs})[:6])
            reason = f"one has {differing} and the other not" if differing else "their configurations differ"
            raise ValueError(
                f"these statistics cannot be merged ({reason}): merge those of one step, whose batches all have the "
                f"same fields."
            )
        return Statistics(
            self.sums + other.sums,
            torch.maximum(self.maxima, other.maxima),
            self.sum_names,
            self.maximum_names,
            self.config,
            self.locators + other.locators,
        )

    def replace(self, sums: Tensor, maxima: Tensor) -> Statistics:
        """This state with reduced tensors (what an all-reduce returned) in place of the local ones."""
        return Statistics(sums, maxima, self.sum_names, self.maximum_names, self.config, self.locators)

    def with_sums(self, extra: Mapping[str, Tensor]) -> Statistics:
        """This state with further 0-d sums appended."""
        return self.with_vectors(tuple(extra), [torch.stack([value.detach().double() for value in extra.values()])])

    def with_vectors(self, names: tuple[str, ...], values: Sequence[Tensor]) -> Statistics:
        """This state with further sums appended: float64 vectors of as many elements together as there are names."""
        sums, names = torch.cat([self.sums, *values]), (*self.sum_names, *names)
        return Statistics(sums, self.maxima, names, self.maximum_names, self.config, self.locators)

    def sum_of(self, name: str) -> Tensor:
        """One sum as a 0-d tensor, without a host sync."""
        return self.sums[self.sum_names.index(name)]

    def batch_factor(self) -> Tensor:
        """Mean weight over everything merged so far: what batch normalisation divides by (0-d, float64, no sync).

        Pass it to `correct` or `policy_loss` as `batch_factor` when the step is cut into micro-batches.
        """
        if not (self.config.weighted and self.config.tis.batch_normalize):
            return self.sums.new_ones(())
        measure = "tokens" if self.config.tis.level == "token" else "sequences"
        return batch_factor(self.sum_of(f"weight_unit@{measure}"), self.sum_of(f"units@{measure}"))

    def metrics(self) -> dict[str, float]:
        """Every metric of DESIGN 3.8 that this configuration declares. One transfer to the host.

        Raises InvalidLogProbError where an invalid rollout log-prob was counted and the policy is `error`.
        """
        from mismatch_plugin.core.metrics import compute_metrics

        sums = dict(zip(self.sum_names, self.sums.tolist(), strict=True))
        self._raise_if_invalid(sums)
        maxima = dict(zip(self.maximum_names, self.maxima.tolist(), strict=True))
        return compute_metrics(sums, maxima, self.config)

    def _raise_if_invalid(self, sums: Mapping[str, float]) -> None:
        if self.config.rollout_log_prob_policy != "error":
            return
        counted = {kind: sums.get(f"invalid_{kind}", 0.0) for kind in DEFECTS}
        if not any(counted.values()):
            return
        found = [item for locate in self.locators for item in locate()]
        if found:
            raise invalid_error(found)
        kinds = ", ".join(f"{int(count)} of kind {kind}" for kind, count in counted.items() if count)
        raise invalid_error([], f"rollout log-probs on another rank are no log-probs: {kinds}")
