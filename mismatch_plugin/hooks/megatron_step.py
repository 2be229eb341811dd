"""One optimizer step of a host that trains with megatron's schedules, ended inside megatron's finalize_model_grads.

slime, miles and Megatron-LM RL compute losses micro-batch by micro-batch. What needs the whole step is here:
statistics, the mean weight, errors and the gate on all ranks together, the host's tracker, the report folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import Correction
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import InvalidLogProbError
from mismatch_plugin.hooks.base import whole_step_needs, wrap_once
from mismatch_plugin.hooks.megatron_core.model import extra_losses
from mismatch_plugin.parallel.agreement import StepKind, settings_of
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.step import Step, deferred_with, end_step
from mismatch_plugin.report.log import report_step, validate_same_settings

logger = logging.getLogger("mismatch_plugin")


@dataclass(eq=False)
class MegatronStep:
    """The steps of one training process. Whether a rank takes part in a collective never depends on its data.

    log: log(args, metrics, number, first) hands a step's metrics to the host's tracker, on every rank of the last
    pipeline stage; first: whether this rank is the one that speaks for all and writes the run's files, as `is_first`
    says.
    config, step: of the one in progress; step on the last pipeline stage alone.
    metrics: of the last step that ended, on the ranks of that stage.
    rollout_metrics: of the rollout whose steps these are, reported with each of them.
    steps_per_rollout: as the rollout's data say; 0 where nobody has read them.
    thresholds: what to pass as `thresholds`: of the last step that ended, for budgets; None before the first.
    """

    log: Callable[[Any, dict[str, float], int, bool], None]
    is_first: Callable[[ParallelGroups], bool] = lambda groups: groups.is_first_of_stage
    config: MismatchConfig | None = None
    step: Step | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    steps_per_rollout: int = 0
    thresholds: Mapping[str, Tensor] | None = None
    _prepared: list[Step] = field(default_factory=list)
    _begun: tuple[Any, ParallelGroups, int] | None = None
    _seen: list[object] = field(default_factory=list)

    def prepare(
        self, config: MismatchConfig, groups: ParallelGroups, rollout: StepKind, data: Sequence[PackedSequences]
    ) -> None:
        """A rollout's steps, before the first, on every rank.

        rollout: what this rank holds of all steps; they are compared here, and no more in the steps themselves.
        data: a packed batch for each step where its mean weight is wanted now.
        Collectives: those of `ParallelGroups.agree` for `rollout`; for each of `data` one CP SUM (and a MAX for some
        criteria), one SUM over DP × CP. Raises ValueError, the same on every rank, where ranks differ.
        """
        groups.agree(rollout)
        self.steps_per_rollout, self._prepared = len(rollout.micro_batches or ()), []
        for packed in data:
            self._prepared.append(Step(config, groups))
            self._prepared[-1].prepare([packed], reuse=False)  # the loss comes micro-batch by micro-batch

    @property
    def begun(self) -> bool:
        """Whether a step is in progress."""
        return self._begun is not None

    def begin(
        self,
        args: Any,
        config: MismatchConfig,
        groups: ParallelGroups,
        model_config: Any,
        number: int,
        *,
        step_id: int = 0,
        failure: str = "",
        compare: bool = True,
    ) -> None:
        """An optimizer step, before its first micro-batch, on every rank: megatron's model config gets its end.

        number, step_id: the step's, and its place in the rollout. failure: why this rank cannot take part; raised on
        all of them. compare: whether ranks may meet here; False inside a schedule, whose stages do not come at once.
        Where no rollout was compared before (`prepare`), configurations are compared here, and what the micro-batches
        hold at the step's end.
        Collectives, if `compare`: those of `ParallelGroups.agree` for that; one object over a pipeline where batch
        normalisation meets other sources of gradient. Raises ValueError, then the same on every rank, where
        configurations differ; on the rank that writes, where the report folder is another run's.
        """
        if config.report_dir is not None and groups.is_last_stage and self.is_first(groups):
            validate_same_settings(config.report_dir, config, holds=True)
        step = self._prepared[step_id] if self._prepared else Step(config, groups)
        step.agreed = self.steps_per_rollout > 0
        if not step.agreed and compare:
            groups.agree(StepKind(settings_of(config), failure=failure))
        refusal = deferred_with(config.other_terms + extra_losses(model_config))
        if config.normalizes_step and refusal:
            # Whether the factor is known depends on the data, which the last stage has: all ranks raise, or none.
            if compare:
                groups.raise_with_last_stage(refusal if step.defers_factor else "")
            else:
                raise ValueError(refusal)
        self._begun, self._seen, self.config = (args, groups, number), [], config
        self.step = step if groups.is_last_stage else None
        wrap_once(model_config, "finalize_model_grads_func", self.finalize)

    def factor(self, config: MismatchConfig) -> Tensor | float | None:
        """What to pass as `batch_factor`: the step's mean weight, or 1 where gradients are divided by it at the end;
        None, the mean of the micro-batch alone, where no step is begun."""
        return self.step.batch_factor if self.step is not None and config.normalizes_step else None

    def add(self, statistics: Statistics, micro_batch: object = None) -> None:
        """Merge a micro-batch's statistics; once, though a host that recomputes its loss passes the same one twice.
        micro_batch: any object that belongs to this micro-batch alone. No collective, no sync."""
        if self.step is not None and (micro_batch is None or not any(micro_batch is seen for seen in self._seen)):
            self._seen.append(micro_batch)
            self.step.record(statistics)

    def record(self, loss_T: Tensor, correction: Correction, config: MismatchConfig, micro_batch: object) -> Tensor:
        """`add` of the correction's statistics. Returns the loss [T] as it came.

        Without a step, whose end would raise for invalid rollout log-probs, these turn the loss into NaN: never silent.
        What needs a whole step is then a ValueError.
        """
        if self.step is not None:
            self.add(correction.statistics, micro_batch)
            return loss_T
        if needs := whole_step_needs(config):
            raise ValueError(
                f"{', '.join(needs)} needs the whole step, and the hooks around it were not called: start through "
                f"`python -m mismatch_plugin.launch`, or leave it out."
            )
        defective = correction.tokens.stopping(config)
        if defective is None or config.rollout_log_prob_policy != "error":
            return loss_T
        return loss_T * torch.where(defective.any(), math.nan, 1.0).to(loss_T.dtype)

    def finalize(self, own: Callable[..., Any] | None, model: Sequence[Any], *arguments: Any, **keywords: Any) -> Any:
        """megatron's finalize_model_grads_func, then the end of the step: gradients are reduced, the optimizer comes.

        On every rank. Divides gradients by the mean weight where that was deferred; logs the step's metrics.
        Collectives, host syncs, errors: those of `end_step`.
        """
        outcome = None if own is None else own(model, *arguments, **keywords)
        begun, step, config = self._begun, self.step, self.config
        self._begun, self.step, self._seen, self.metrics = None, None, [], {}
        if begun is None or config is None:
            return outcome
        args, groups, number = begun
        try:
            finished = end_step(step, config, groups, model, number)
        except InvalidLogProbError as error:
            if error.placed:  # Ray ends the run with one rank's error, which may be another rank's
                logger.error("step %d: %s", number, error)
            raise
        self.thresholds = None if finished is None else finished.thresholds()
        if finished is not None and config.metrics != "off":
            self.metrics, first = {**finished.metrics(), **self.rollout_metrics}, self.is_first(groups)
            self.log(args, self.metrics, number, first)
            if first:
                report_step(config, number, self.metrics)
        return outcome
