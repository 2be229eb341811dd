"""What a whole optimizer step shares across micro-batches and ranks: weight mean, denominators, statistics, errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.health import check_gate
from mismatch_plugin.core.loss import PolicyLoss, known_before_loss, sum_tokens, token_loss
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import stale_tokens
from mismatch_plugin.core.segments import segment_sum
from mismatch_plugin.core.units import batch_factor
from mismatch_plugin.core.validity import DEFECTS, invalid_error, stopping_kinds
from mismatch_plugin.parallel.agreement import NO_MICRO_BATCH, StepKind, settings_of, step_kind
from mismatch_plugin.parallel.groups import ParallelGroups

NOTHING_RAN = (1.0, 0.0, 0.0)
"""What `Step.finish` says of a step without tokens."""


def deferred_with(others: Sequence[str]) -> str:
    """Why a mean weight known only at the step's end cannot be had next to other sources of gradient; "" if none."""
    if not others:
        return ""
    return (
        f"batch normalisation over the step divides all gradients by the mean weight at its end, so the policy term "
        f"must be their only source, but there is also: {'; '.join(others)}. Choose --tis-batch-normalize-scope "
        f"micro_batch, or switch them off."
    )


@dataclass(frozen=True)
class StepTotals:
    """Sums over the whole step, known before it runs (0-d float64 tensors); None where it needs π_θ.

    tokens: response tokens. original, accepted: units of the chosen aggregation in the original mask and what rejection
    leaves. batch_factor: mean weight. fed: tokens fed to the model, as `prepare` was told.
    """

    tokens: Tensor
    original: Tensor
    accepted: Tensor | None
    batch_factor: Tensor | None
    fed: Tensor


class Step:
    """One optimizer step of the correction: `start`, `prepare` where needed, `loss` per micro-batch, `finish` once.

    `start` runs on every pipeline stage, the rest on the last. No collective depends on what a rank holds. Without
    `start` (a host that knows no data before its loss) `finish` compares ranks.
    thresholds: `Statistics.thresholds` of the step before, for budgets.
    """

    def __init__(
        self, config: MismatchConfig, groups: ParallelGroups, thresholds: Mapping[str, Tensor] | None = None
    ) -> None:
        if config.normalizes and config.tis.batch_normalize_scope == "rollout_batch":
            raise ValueError("--tis-batch-normalize-scope rollout_batch needs a host that weighs rollouts: use step.")
        self.config, self.groups, self.thresholds = config, groups, thresholds
        self.totals: StepTotals | None = None
        self.statistics: Statistics | None = None
        self.failure = ""
        self._corrections: dict[tuple[object, ...], tuple[PackedSequences, Correction]] = {}
        self.agreed = False
        """True where the ranks were compared before the step, so that `finish` need not."""

    def start(self, micro_batches: Sequence[PackedSequences], **loop: object) -> None:
        """Compare what the ranks bring to the step: on every rank of every pipeline stage, before all else.

        micro_batches: all of this rank's, not yet run; off the last stage only their number counts. loop: as in
        `step_kind`. Collectives, host syncs: those of `ParallelGroups.agree`. Raises the same ValueError on every rank
        where a `StepKind` differs that must not, a rank has no micro-batch or lacks what the configuration needs.
        """
        self.groups.agree(step_kind(self.config, micro_batches, self.groups.is_last_stage, **loop))
        self.agreed = True

    def prepare(self, micro_batches: Iterable[PackedSequences], fed_tokens: int = 0, reuse: bool = True) -> StepTotals:
        """Totals of the step from its data, before any forward pass. What is kept and weights need π_old for it, which
        all micro-batches of all ranks have or none (as `start` sees to).

        fed_tokens: that this rank feeds to the model in all of them, prompts and padding included.
        reuse: corrections that are computed here, and need no more, are those of `loss`, where the same batches come
            (the same tensors, not written since: on all ranks of a context-parallel group, or on none).

        Collectives: the CP reductions of `correct` per micro-batch where π_old is there and weights are normalised over
        the step or something may be rejected, one CP SUM of the masks otherwise; one SUM of six floats over DP × CP.
        """
        known, parts = not self.config.use_rollout_log_probs, list[Tensor]()
        for packed in micro_batches:
            known = known and packed.old_log_probs is not None
            parts.append(self._sums(packed, known, reuse))
        if not parts:
            raise ValueError(NO_MICRO_BATCH)
        sums = torch.cat([torch.stack(parts).sum(0), parts[0].new_tensor([float(fed_tokens)])])
        tokens, original, accepted, weight, units, fed = self.groups.sum_over_data(sums).unbind(0)
        factor = batch_factor(weight, units)
        accepted_known = known and self.config.keep_known_before_step
        accepted_known = accepted_known or not self.config.rejects_by_log_probs or self.config.dry_run
        self.totals = StepTotals(tokens, original, accepted if accepted_known else None, factor if known else None, fed)
        return self.totals

    def _sums(self, packed: PackedSequences, known: bool, reuse: bool) -> Tensor:
        """[5] float64 of this rank: tokens, original and accepted units, sum and number of the weights to average."""
        by_token = self.config.aggregation == "token-mean"
        weighed = self.config.normalizes_step or (self.config.rejects_by_log_probs and not self.config.dry_run)
        if not known or not weighed:  # no weight is asked for, all but what is stale is accepted
            stale_T = None if self.config.dry_run else stale_tokens(self.config, packed)
            masks = [packed.loss_mask]
            masks += [] if stale_T is None else [packed.loss_mask.logical_and(stale_T.logical_not())]
            counts = self.groups.sum(torch.cat([segment_sum(mask.double(), packed.offsets) for mask in masks]))
            each = counts.view(len(masks), -1)
            tokens, units = each[0].sum(), each.sum(1) if by_token else (each > 0).sum(1)
            sums = torch.stack([tokens, units[0], units[-1], 0 * tokens, 0 * tokens]).double()
            return sums * float(self.groups.counts_sequences)
        # What data preparation found on one rank is raised at the step's end on all of them. What π_θ judges is not
        # known yet, and changes no weight: π_old stands in for it.
        reuse = reuse and known_before_loss(self.config)
        config = self.config if reuse else self.config.model_copy(update={"metrics": "off"})
        factor = 1.0 if config.normalizes_step else None
        arguments = (packed.replace(invalid=()), config, self.groups, factor)
        correction = correct(*arguments, log_probs=packed.old_log_probs, thresholds=self.thresholds)
        if reuse:
            self._corrections[_key(packed)] = packed, correction
        statistics = correction.statistics
        names = ["one@tokens", "one@tokens", "kept@tokens"]
        if not by_token:
            names[1:] = ["one@sequences", "kept_any@sequences"]
        if self.config.normalizes_step:
            measure = self.config.unit.measure
            names += [f"weight_unit@{measure}", f"units@{measure}"]
        values = [statistics.sum_of(name) for name in names]
        return torch.stack(values + [torch.zeros_like(values[0])] * (5 - len(values)))

    @property
    def defers_factor(self) -> bool:
        """True where the step's weight mean is known only after it, so that gradients are divided by it at the end."""
        return self.config.normalizes_step and (self.totals is None or self.totals.batch_factor is None)

    @property
    def batch_factor(self) -> Tensor | float | None:
        """What micro-batches divide weights by: the step's mean, 1 where that is deferred, None: each by its own."""
        if not self.config.normalizes_step:
            return None
        known = None if self.totals is None else self.totals.batch_factor
        return 1.0 if known is None else known

    def loss(self, log_probs: Tensor, packed: PackedSequences) -> PolicyLoss:
        """`policy_loss` of one micro-batch, its statistics merged into the step's. A correction that `prepare` keeps is
        not computed or reduced again."""
        _, correction = self._corrections.pop(_key(packed), (None, None))
        arguments = (packed.replace(invalid=()), self.config, self.groups, self.batch_factor)
        token = token_loss(log_probs, *arguments, correction=correction, thresholds=self.thresholds)
        result = sum_tokens(token, self.groups)
        self.record(result.statistics)
        return result

    def record(self, statistics: Statistics) -> None:
        """Merge a micro-batch's statistics into the step's. What does not merge is raised by `finish`, on all ranks;
        after `start`, to which it was then not given, at once."""
        try:
            self.statistics = statistics if self.statistics is None else self.statistics.merge(statistics)
        except ValueError as error:
            if self.agreed:
                raise
            self.failure = self.failure or str(error)

    def finish(self) -> tuple[Statistics | None, Tensor]:
        """(statistics over the whole step; [3] float64: weight mean to divide gradients by, invalid log-probs counted,
        mean k3 for the gate).

        Collectives: those of `ParallelGroups.reduce_step`. Without `start` before them those of `agree` over DP × CP,
        with one host sync, and then raises ValueError, on every rank, where micro-batches or ranks hold different
        statistics.
        """
        if not self.agreed:
            held = () if self.statistics is None else self.statistics.fields
            kind = StepKind(settings_of(self.config), held, failure=self.failure)
            self.groups.agree(kind, stages=False)
        if self.statistics is None:
            return None, torch.tensor(NOTHING_RAN, dtype=torch.float64)
        reduced = self.groups.reduce_step(self.statistics)
        factor = reduced.batch_factor() if self.defers_factor else reduced.sums.new_ones(())
        kinds = stopping_kinds(self.config) if self.config.rollout_log_prob_policy == "error" else DEFECTS
        counted = [reduced.sum_of(f"invalid_{kind}") for kind in kinds if f"invalid_{kind}" in reduced.sum_names]
        invalid = torch.stack(counted).sum() if counted else reduced.sums.new_zeros(())
        return reduced, torch.stack([factor, invalid, reduced.k3_kl()])


def _key(packed: PackedSequences) -> tuple[object, ...]:
    """What a correction of π_old depends on; copies with other fields share it. What was written since is another."""
    tensors = (
        packed.loss_mask, packed.rollout_log_probs, packed.old_log_probs, packed.advantages, packed.weight_versions,
        packed.unit_ids, packed.positions,
    )  # fmt: skip
    seen = [(id(value), None if value is None or value.is_inference() else value._version) for value in tensors]
    return *seen, packed.lengths, packed.trainer_version, packed.unit_counts, packed.chunk_lengths


def end_step(
    step: Step | None, config: MismatchConfig, groups: ParallelGroups, model: Sequence[Any], number: int | None = None
) -> Statistics | None:
    """The end of an optimizer step, on every rank, after gradients were reduced and before the optimizer steps.

    Divides all gradients by the mean weight where that was known only now. step: None where no loss ran. model:
    megatron's chunks. number: the step's, for errors, where the host knows it. Returns the step's statistics on the
    last pipeline stage, None elsewhere.

    Collectives: those of `Step.finish` on the last stage; with a pipeline one broadcast of three floats. One host sync,
    in addition to that of `Step.finish`.
    Raises, on every rank: InvalidLogProbError, with sample and position where a rank holds them; GateError where
    `gate_kl` is set and the step's mean k3 is above it; ValueError where ranks cannot merge their statistics.
    """
    finished, unmerged = None, ""
    verdict = torch.tensor(NOTHING_RAN, dtype=torch.float64, device=next(model[0].parameters()).device)
    if step is not None and groups.is_last_stage:
        try:
            finished, outcome = step.finish()
            verdict = outcome.to(verdict.device)
        except ValueError as error:  # the other stages wait for this one
            unmerged = str(error)
            verdict.fill_(torch.nan)
    factor, invalid, k3_kl = groups.from_last_stage(verdict).tolist()
    if math.isnan(factor) and math.isnan(invalid):
        groups.raise_with_last_stage(unmerged)
    if invalid and config.rollout_log_prob_policy == "error":
        if finished is not None:
            finished.metrics()  # raises, with the place where this rank holds it
        raise invalid_error([], summary=f"this step has {int(invalid)} invalid log-probs")
    if config.gate_kl is not None:
        check_gate(k3_kl, config.gate_kl, number)
    if factor != 1.0:
        for chunk in model:
            chunk.scale_gradients(1.0 / factor)
    return finished


@dataclass(frozen=True, eq=False)
class StepLoss:
    """What `step_loss` returns.

    loss: 0-d, with gradient: this rank's part times the number of ranks: their mean is the step's loss. statistics: of
    the whole step. gradient_scale: 0-d float64, what gradients of `PolicyLoss.undivided` are to be multiplied by.
    """

    loss: Tensor
    statistics: Statistics
    gradient_scale: Tensor

    def metrics(self) -> dict[str, float]:
        """Those of what was trained, the same on every rank. Call it before `optimizer.step()`: it raises, on every
        rank, where an invalid log-prob was used or the gate fails. One host sync."""
        return self.statistics.metrics()

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients of accumulated `PolicyLoss.undivided`: once a step, before clipping. No host sync."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.gradient_scale.to(parameter.grad.device))


def step_loss(results: Iterable[PolicyLoss] | PolicyLoss, group: dist.ProcessGroup | None = None) -> StepLoss:
    """What ends the arithmetic of one optimizer step: Σ over micro-batches and ranks, then one division.

    loss = R · (Σ loss_sum · f / F / Σ denominator + Σ terms / Σ terms_denominator): the Σ in the numerators over this
    rank's results, in the denominators over all ranks; f the mean weight that a result was divided by, F the step's
    (both 1 without batch normalisation of scope auto or step); R the number of ranks, for DDP and FSDP take the mean of
    gradients over ranks (a loop that adds them up divides by R). 0, with a graph, where no token is accepted.

    results: those of `policy_loss` of all micro-batches. Call `.loss.backward()` once; or, with gradient accumulation,
        `result.undivided.backward()` at each micro-batch, and `scale_gradients` here in place of `backward`.
    group: ranks whose gradients are averaged (`torch.distributed.group.WORLD` is None in one process); all call it.
    Collectives with several ranks: those of `Step.finish`, and one SUM of two floats. Host syncs: one of `agree`.
    Raises ValueError, on every rank, where micro-batches or ranks differ in settings or fields or a rank has no result;
    and for the scope rollout_batch.
    """
    groups = ParallelGroups(dp=group, dp_cp=group)
    results = [results] if isinstance(results, PolicyLoss) else [*(results or ())]
    if wrong := [type(result).__name__ for result in results if not isinstance(result, PolicyLoss)]:
        raise TypeError(f"results holds a {wrong[0]}: pass what policy_loss returned, not its .loss.")
    if not results:
        groups.agree(StepKind(failure=NO_MICRO_BATCH), stages=False)  # raises, on the other ranks as well
    config = results[0].statistics.config
    step = Step(config, groups)
    for result in results:
        step.record(replace(result.statistics, own_means=0))
    statistics, _ = step.finish()
    assert statistics is not None
    counts = torch.stack([torch.stack([result.denominator, result.terms_denominator]) for result in results])
    divisors = groups.sum_over_data(counts.sum(0).double()).clamp(min=1)
    factor = statistics.batch_factor() if config.normalizes_step else statistics.sums.new_ones(())
    policy_scale, terms_scale = groups.dp_size / (divisors[0] * factor), groups.dp_size / divisors[1]
    parts: list[Tensor] = []
    for result in results:
        parts.append(result.loss_sum * (result.own_factor * policy_scale).to(result.loss_sum.dtype))
        for name, term in result.terms.items():
            weighted = name == "kl" and config.terms.kl_importance_weighted
            scale = terms_scale * result.own_factor / factor if weighted else terms_scale
            parts.append(term * scale.to(term.dtype))
    return StepLoss(torch.stack(parts).sum(), statistics, policy_scale)
