"""What happens once an optimizer step under Megatron-LM RL: errors on all ranks, the weight mean, the metrics."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.hooks.megatron_core import MegatronLoss
from mismatch_plugin.hooks.megatron_core.extra_losses import extra_losses
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.parallel.step import Step, deferred_with
from mismatch_plugin.report.log import report_step

logger = logging.getLogger("mismatch_plugin")


class StepEnd(MegatronLoss):
    """Wraps `finalize_model_grads_func` of the model's config, on every pipeline stage.

    groups: `data_groups()`. Under context parallelism Megatron-LM RL holds whole sequences on every rank of the group,
    so statistics are summed over DP alone. Raises ValueError as `MegatronLoss`, and where batch normalisation over the
    step meets another source of gradient: here its factor is known after the step in algorithm 2 as well.
    """

    def __init__(self, config: MismatchConfig, model_config: Any, groups: ParallelGroups, args: Any) -> None:
        super().__init__(config, model_config, groups)
        self.args = args
        others = config.other_terms + extra_losses(model_config)
        if config.normalizes_step and others:
            raise ValueError(deferred_with(others, " (--grpo-kl-beta 0)"))

    def add(self, statistics: Statistics) -> None:
        """Merge a micro-batch's statistics into the step's. No collective, no sync.

        Nothing calls `start` here: the loss has no collective of its own, and ranks are compared at the step's end.
        """
        if self.step is None:
            self.step = Step(self.config, self.groups)
        self.step.record(statistics)

    @property
    def batch_factor(self) -> float | None:
        """1 where the step's factor is applied at its end, None where there is none or each micro-batch has its own."""
        return 1.0 if self.config.normalizes_step else None

    @property
    def writes(self) -> bool:
        return self.groups.is_last_stage and _is_first(self.groups)

    def step_number(self) -> int:
        """Megatron's own count, as of `lm loss` and its log line: `curr_iteration` is what was done before."""
        return _step(self.args)

    def finalize_model_grads(self, model: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Megatron's own, then as in `MegatronLoss`; on the last stage the metrics are logged."""
        self.finished = None
        if self.step is None and self.groups.is_last_stage:  # the other ranks compare themselves with this one
            self.step = Step(self.config, self.groups)
        outcome = super().finalize_model_grads(model, *args, **kwargs)
        if self.finished is not None and self.config.metrics != "off":
            log_metrics(self.finished, self.config, self.args, first=self.writes)
        return outcome


def data_groups() -> ParallelGroups:
    """The groups of a running Megatron-LM, with the data-parallel group in place of DP × CP."""
    groups = ParallelGroups.from_megatron()
    return ParallelGroups(tp=groups.tp, dp=groups.dp, dp_cp=groups.dp, pp=groups.pp)


def log_metrics(statistics: Statistics, config: MismatchConfig, args: Any, first: bool) -> None:
    """Give a step's metrics to Megatron's TensorBoard and W&B writers where this rank has one.

    first: this rank logs the health check's warnings, and appends to the report folder where one is set.
    """
    metrics = statistics.metrics()
    training = import_module("megatron.training")
    step = _step(args)
    board, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
    if board is not None:
        for name, value in metrics.items():
            board.add_scalar(name, value, step)
    if wandb:
        wandb.log(metrics, step)
    if first:
        report_step(config, step, metrics, statistics)


def _step(args: Any) -> int:
    return int(getattr(args, "curr_iteration", 0)) + 1


def _is_first(groups: ParallelGroups) -> bool:
    """The rank of the last stage that is first in its DP and TP groups, and in its context-parallel group."""
    from megatron.core import parallel_state

    ranks = [group.rank() for group in (groups.dp, groups.tp) if group is not None]
    return not any(ranks) and parallel_state.get_context_parallel_rank() == 0
