"""One optimizer step of slime or miles: statistics and mean weight, ended inside megatron's finalize_model_grads."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import Correction
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import InvalidLogProbError
from mismatch_plugin.hooks.megatron_core.extra_losses import extra_losses
from mismatch_plugin.hooks.slime.config import needs_steps
from mismatch_plugin.parallel.agreement import StepKind, settings_of
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.step import Step, deferred_with, end_step
from mismatch_plugin.report.log import report_step, validate_same_settings

logger = logging.getLogger("mismatch_plugin")


@dataclass(eq=False)
class StepRun:
    """The steps of one training process. Whether a rank takes part in a collective never depends on its data.

    host: its name. log: its tracker, `log(args, metrics)`, called on one rank.
    writes: whether this process writes the run's files, of those that are first in their groups.
    step: the one in progress, on the last pipeline stage.
    metrics: of the last step that ended, on the ranks of that stage.
    rollout_metrics: of the rollout whose steps these are, reported with each of them.
    """

    host: str
    log: Callable[[Namespace, dict[str, float]], None]
    writes: Callable[[Namespace], bool] = lambda args: True
    step: Step | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    _prepared: list[Step] = field(default_factory=list)
    _steps_per_rollout: int = 0  # 0 without the rollout's hook: then each step compares ranks
    _begun: tuple[Namespace, MismatchConfig, ParallelGroups, int] | None = None
    _seen: list[object] = field(default_factory=list)
    _told_scope: bool = False
    _asked: bool = False  # whether the report folder is this run's

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
        self._steps_per_rollout, self._prepared = len(rollout.micro_batches or ()), []
        for packed in data:
            self._prepared.append(Step(config, groups))
            self._prepared[-1].prepare([packed], reuse=False)  # the loss comes micro-batch by micro-batch

    def begin(
        self,
        args: Namespace,
        config: MismatchConfig,
        groups: ParallelGroups,
        rollout_id: int,
        step_id: int,
        model_config: Any,
        device: torch.device | str = "cpu",
        failure: str = "",
    ) -> None:
        """An optimizer step, before its first micro-batch, on every rank: megatron's model config gets its end.

        failure: why this rank cannot take part; raised on all of them.

        Where no rollout was compared before (`prepare`), configurations are compared here, and what the micro-batches
        hold at the step's end.
        Collectives: those of `ParallelGroups.agree` for that; one broadcast over a pipeline where batch normalisation
        meets other sources of gradient. Raises ValueError, the same on every rank, where configurations differ; before
        the first step, on the rank that writes, where the report folder is another run's.
        """
        if config.report_dir is not None and not self._asked and groups.is_last_stage and groups.is_first_of_stage:
            if self.writes(args):
                validate_same_settings(config.report_dir, config, holds=True)
            self._asked = True
        step = self._prepared[step_id] if self._prepared else Step(config, groups)
        step.agreed = self._steps_per_rollout > 0
        if not step.agreed:
            groups.agree(StepKind(settings_of(config), failure=failure))
        refusal = deferred_with(config.other_terms + extra_losses(model_config))
        if config.normalizes_step and refusal:
            # Whether the factor is known depends on the data, which the last stage has: all ranks raise, or none.
            groups.raise_with_last_stage(refusal if step.defers_factor else "", device)
        number = rollout_id * (self._steps_per_rollout or _steps_per_rollout(args)) + step_id
        self._begun, self._seen = (args, config, groups, number), []
        self.step = step if groups.is_last_stage else None
        finalize = model_config.finalize_model_grads_func
        if getattr(finalize, "func", None) != self.finalize:
            model_config.finalize_model_grads_func = partial(self.finalize, finalize)

    def factor(self, config: MismatchConfig) -> Tensor | float | None:
        """What to pass as `batch_factor`: the step's mean weight, or 1 where gradients are divided by it at the end.

        None, the mean of the micro-batch alone, where that is the widest there is: scope auto without a step's hooks.
        """
        if not config.normalizes_step:
            return None
        if self.step is None:
            module = f"mismatch_plugin.hooks.{self.host}"
            fix = (
                f"--custom-megatron-before-train-step-hook-path {module}.before_train_step and "
                f"--rollout-data-postprocess-path {module}.rollout_data_postprocess"
            )
            if config.tis.batch_normalize_scope == "step":
                raise ValueError(
                    f"batch normalisation over the step needs the hooks around it: set {fix}, or choose "
                    f"--tis-batch-normalize-scope micro_batch."
                )
            if not self._told_scope:
                self._told_scope = True
                logger.warning("batch normalisation runs over each micro-batch: for the whole step, set %s.", fix)
            return None
        return self.step.batch_factor

    def record(self, loss_T: Tensor, correction: Correction, config: MismatchConfig, micro_batch: object) -> Tensor:
        """Merge a micro-batch's statistics; once, though a host that recomputes its loss passes the same one twice.

        micro_batch: any object that belongs to this micro-batch alone. Returns the loss [T] as it came. Without a
        step, whose end would raise for invalid rollout log-probs, these turn it into NaN: never silent. A gate without
        a step is a ValueError.
        """
        if self.step is None:
            if config.gate_kl is not None:
                raise ValueError(needs_steps("--mismatch-gate-kl judges", self.host))
            defective = correction.tokens.stopping(config)
            if defective is None or config.rollout_log_prob_policy != "error":
                return loss_T
            return loss_T * torch.where(defective.any(), math.nan, 1.0).to(loss_T.dtype)
        if not any(micro_batch is seen for seen in self._seen):
            self._seen.append(micro_batch)
            self.step.record(correction.statistics)
        return loss_T

    def finalize(
        self, finalize: Callable[..., Any] | None, model: Sequence[Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """megatron's finalize_model_grads_func, then the end of the step: gradients are reduced, the optimizer comes.

        On every rank. Divides gradients by the mean weight where that was deferred; logs the step's metrics.
        Collectives, host syncs, errors: those of `end_step`.
        """
        outcome = None if finalize is None else finalize(model, *arguments, **keywords)
        begun, step = self._begun, self.step
        self._begun, self.step, self._seen = None, None, []
        if begun is None:
            return outcome
        args, config, groups, number = begun
        try:
            finished = end_step(step, config, groups, model, number)
        except InvalidLogProbError as error:
            if error.placed:  # Ray ends the run with one rank's error, which may be another rank's
                logger.error("step %d: %s", number, error)
            raise
        self.metrics = {} if finished is None else {**finished.metrics(), **self.rollout_metrics}
        if self.metrics and groups.is_first_of_stage:
            self.log(args, {**{f"train/{k}": v for k, v in self.metrics.items()}, "train/step": number})
            report_step(config, number, self.metrics, finished, self.writes(args))
        return outcome


def _steps_per_rollout(args: Namespace) -> int:
    """As the host counts them, where the rollout's data do not say."""
    steps = getattr(args, "num_steps_per_rollout", None)
    samples = (getattr(args, "rollout_batch_size", None) or 1) * (getattr(args, "n_samples_per_prompt", None) or 1)
    return int(steps or max(1, samples // (getattr(args, "global_batch_size", None) or samples)))
