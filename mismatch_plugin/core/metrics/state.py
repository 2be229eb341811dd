"""Mergeable state of a step's diagnostics: sums, counts and maxima that any split of the step adds up to.

Means, deviations and quantiles are formed last, by `registry.py`, so every figure is the same however a step was cut.
A sum is named `quantity@measure`: the quantity is a mean over the response tokens of a sequence, and the measure weighs
the sequences: `tokens` by their response tokens, `sequences` by 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.health import check_gate
from mismatch_plugin.core.metrics.registry import compute_metrics
from mismatch_plugin.core.rejection import BUDGET_BINS, budget_threshold
from mismatch_plugin.core.units import batch_factor
from mismatch_plugin.core.validity import Locator, invalid_error, stopping_kinds

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums [S] and maxima [M], float64, on the device; their names, fixed by the configuration.
    `locators` find the place of an invalid log-prob; they run only when one was counted and the policy is `error`.
    own_means: batches in it whose loss was divided by a mean weight of their own, where the scope is the step.
    """

    sums: Tensor
    maxima: Tensor
    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    config: MismatchConfig
    locators: tuple[Locator, ...] = ()
    own_means: int = 0

    def __repr__(self) -> str:
        return f"Statistics({len(self.sums)} sums, {len(self.maxima)} maxima; figures: .metrics())"

    def merge(self, other: Statistics) -> Statistics:
        """The state of both together. Raises ValueError where configurations or the fields of the batches differ."""
        if self.config != other.config:
            theirs = other.config.model_dump(exclude={"report_dir"})
            for key, value in self.config.model_dump(exclude={"report_dir"}).items():
                if value != theirs[key]:
                    raise ValueError(
                        f"statistics cannot be merged: one has {key} = {value!r}, the other has {theirs[key]!r}. Give "
                        f"every batch of a step the same configuration."
                    )
        if (self.sum_names, self.maximum_names) != (other.sum_names, other.maximum_names):
            what = ", ".join(sorted({*self.fields} ^ {*other.fields})[:6]) or "another order of names"
            raise ValueError(
                f"statistics cannot be merged: one has {what}, the other not. All batches of a step need the same "
                f"fields (rollout_log_probs, ref_log_probs, weight_versions, advantages, entropy)."
            )
        return replace(
            self,
            sums=self.sums + other.sums,
            maxima=torch.maximum(self.maxima, other.maxima),
            locators=self.locators + other.locators,
            own_means=self.own_means + other.own_means,
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """What it is about: the names of its sums and maxima, each vector once."""
        return tuple(dict.fromkeys(name.split("[")[0] for name in (*self.sum_names, *self.maximum_names)))

    def with_vector(self, names: tuple[str, ...], values: Tensor) -> Statistics:
        """This state with further sums appended: a float64 vector of as many elements as there are names."""
        return replace(self, sums=torch.cat([self.sums, values]), sum_names=(*self.sum_names, *names))

    def sum_of(self, name: str) -> Tensor:
        """One sum as a 0-d tensor, without a host sync."""
        return self.sums[self.sum_names.index(name)]

    def batch_factor(self) -> Tensor:
        """Mean weight over everything merged so far (0-d, float64, no sync): pass it as `batch_factor` to `correct`
        or `policy_loss` when the step is cut into micro-batches."""
        if not self.config.normalizes:
            return self.sums.new_ones(())
        measure = self.config.unit.measure
        return batch_factor(self.sum_of(f"weight_unit@{measure}"), self.sum_of(f"units@{measure}"))

    def thresholds(self) -> dict[str, Tensor]:
        """Criterion with a budget → the upper bound that the next step is to judge by (0-d float64, no sync). Of the
        whole step: pass it to `policy_loss` in the next one, and save it with a checkpoint."""
        found = {}
        for criterion in self.config.budgets:
            start = self.sum_names.index(f"budget_{criterion.name}[0]")
            found[criterion.name] = budget_threshold(self.sums[start : start + BUDGET_BINS], criterion)
        return found

    def k3_kl(self) -> Tensor:
        """What the gate judges: mean k3 of the measured tokens (0-d, float64, no sync). 0 where the step has no token;
        NaN where none of its tokens was measured, or none is valid."""
        if "k3@tokens" not in self.sum_names:
            return self.sums.new_full((), torch.nan)
        measured = self.sum_of("one@tokens")
        trained = self.sum_of("trained_tokens") if "trained_tokens" in self.sum_names else measured
        mean = torch.where(trained > 0, self.sum_of("k3@tokens") / measured, 0.0)
        if "invalid_sound" in self.sum_names:  # under a policy that replaces or drops, all of them may be invalid
            mean = mean.masked_fill((self.sum_of("invalid_sound") == 0) & (trained > 0), torch.nan)
        return mean

    def metrics(self, averaged_only: bool = False) -> dict[str, float]:
        """Every metric that this configuration declares (averaged_only: whose mean over micro-batches means something).
        One transfer to the host.
        Raises InvalidLogProbError where an invalid log-prob that is used was counted and the policy is `error`;
        GateError where the mean k3 is above `gate_kl`; ValueError where each micro-batch had a mean weight of its own.
        """
        return compute_metrics(*self.on_host(), self.config, averaged_only)

    def on_host(self) -> tuple[dict[str, float], dict[str, float]]:
        """(sums, maxima) by name. One transfer to the host. Raises as `metrics`."""
        if self.own_means > 1:
            raise ValueError(
                f"{self.own_means} micro-batches were each divided by their own mean weight, not the step's: end the "
                f"step with mp.step_loss, or choose --tis-batch-normalize-scope micro_batch."
            )
        gated = [] if self.config.gate_kl is None else [self.k3_kl().reshape(1)]
        values = torch.cat([self.sums, self.maxima, *gated]).tolist()
        sums = dict(zip(self.sum_names, values, strict=False))
        if self.config.rollout_log_prob_policy == "error":
            self._raise_if_invalid(sums)
        if self.config.gate_kl is not None:
            check_gate(values.pop(), self.config.gate_kl)
        return sums, dict(zip(self.maximum_names, values[len(self.sum_names) :], strict=True))

    def _raise_if_invalid(self, sums: Mapping[str, float]) -> None:
        counted = {kind: sums.get(f"invalid_{kind}", 0.0) for kind in stopping_kinds(self.config)}
        if not any(counted.values()):
            return
        found = [item for locate in self.locators for item in locate()[0] if item.kind in counted]
        if found:
            raise invalid_error(found, int(sum(counted.values())))
        kinds = ", ".join(f"{int(count)} of kind {kind}" for kind, count in counted.items() if count)
        raise invalid_error([], summary=f"invalid log-probs on another rank: {kinds}")
