"""slime: the functions that its argument paths name. Nothing of slime is imported before one of them runs.

| path argument | function | needed for |
| --- | --- | --- |
| `--custom-tis-function-path` | `tis_function` | algorithms 0 and 2, inside slime's own policy loss |
| `--loss-type custom_loss --custom-loss-function-path` | `policy_loss` | all four; 1 with rejection or metrics, and 3 |
| `--rollout-data-postprocess-path` | `rollout_data_postprocess` | algorithm 2's mean weight before each step |
| `--custom-megatron-before-train-step-hook-path` | `before_train_step` | step metrics, errors on all ranks together |
| `--custom-megatron-init-path` | `init` | refusing wrong arguments before training starts |

slime divides the loss by the tokens of the original masks (of a rollout, or of the step with
`--calculate-per-token-loss`), whatever is rejected. Written for slime at commit 624b824.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.hooks.slime.adapter import Host, RayAdapter, Reduce
from mismatch_plugin.hooks.slime.config import check_arguments, describe_settings, read_settings
from mismatch_plugin.parallel.groups import ParallelGroups


def settings(args: Namespace) -> MismatchConfig:
    """The configuration that slime's arguments and ours give together. Raises ValueError where they contradict."""
    return read_settings(args, "slime")


def check(args: Namespace) -> MismatchConfig | None:
    """`settings`, and whether the loss type and the paths can mean them; None where neither of our losses runs.

    Raises ValueError with one sentence that says what to change.
    """
    return check_arguments(args, "slime")


def describe(config: MismatchConfig, host_args: Namespace) -> list[str]:
    """Lines of the start-up block."""
    return describe_settings(config, host_args, "slime")


def tis_function(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor] | None,
    rollout_log_probs: Sequence[Tensor] | None,
    loss_masks: list[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Importance weights and rejection on slime's own policy loss: algorithms 0 (rejection, metrics) and 2.

    pg_loss: [T] of this rank's response tokens. Lists: one tensor a sample; log-probs of this rank's tokens, loss masks
    of the whole response. Returns the weighted loss (0 where rejected), the masks (without what is rejected where
    --custom-pg-loss-reducer-function-path names a reducer, else as they came), metrics [T].
    """
    return ADAPTER.weigh(
        args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
    )


def policy_loss(
    args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The corrected policy loss, all four algorithms, with entropy and KL terms: (0-d loss, 0-d metrics).

    logits: [1, T, V/tp] float32. sum_of_sample_mean: slime's reduction of this rank's tokens.
    """
    return ADAPTER.policy_loss(args, batch, logits, sum_of_sample_mean)


def rollout_data_postprocess(args: Namespace, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """Before a rollout's steps: checks the data, and knows each step's mean weight where algorithm 2 normalises."""
    ADAPTER.prepare_rollout(args, rollout_data)


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Begin an optimizer step; it ends inside megatron's finalize_model_grads, before the optimizer steps."""
    ADAPTER.begin_step(args, rollout_id, step_id, model)


def init(args: Namespace) -> None:
    """When a training process starts: refuse arguments that cannot run, and say on rank 0 what will."""
    ADAPTER.start(args)


def _groups() -> ParallelGroups:
    from megatron.core import parallel_state

    return ParallelGroups.from_megatron() if parallel_state.model_parallel_is_initialized() else ParallelGroups()


def _log_probs(args: Namespace, batch: Mapping[str, Any], logits: Tensor) -> tuple[list[Tensor], list[Tensor] | None]:
    from slime.backends.megatron_utils.loss import (  # pyright: ignore[reportMissingImports]
        get_log_probs_and_entropy,
        get_rollout_top_p_logprob_kwargs,
    )

    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )
    return found["log_probs"], found["entropy"]


def _log(args: Namespace, metrics: dict[str, float]) -> None:
    from slime.observability import logging_utils  # pyright: ignore[reportMissingImports]

    logging_utils.log(args, metrics, step_key="train/step")


ADAPTER = RayAdapter(Host("slime", _groups, _log_probs, lambda args, batch: None, _log))
