"""miles: the functions that its argument paths name, under its own signatures. See `slime` for what each is for.

Against slime: log-probs come as a dict and may be of padded batches (`--qkv-format bshd`); the process groups are
miles's own; the rollout hook sees the arguments alone, so algorithm 2's batch normalisation over the step divides
gradients at its end, as algorithm 3's does everywhere. Written for miles at commit 31f1ca9.
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
    """The configuration that miles's arguments and ours give together. Raises ValueError where they contradict."""
    return read_settings(args, "miles")


def check(args: Namespace) -> MismatchConfig | None:
    """`settings`, and whether the loss type and the paths can mean them; None where neither of our losses runs.

    Raises ValueError with one sentence that says what to change.
    """
    return check_arguments(args, "miles")


def describe(config: MismatchConfig, host_args: Namespace) -> list[str]:
    """Lines of the start-up block."""
    return describe_settings(config, host_args, "miles")


def tis_function(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor] | None,
    rollout_log_probs: Sequence[Tensor] | None,
    loss_masks: list[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    parallel_state: Any = None,
    max_seq_lens: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Importance weights and rejection on miles's own policy loss: algorithms 0 (rejection, metrics) and 2.

    As slime's; max_seq_lens: padded length of each sample in a padded batch.
    """
    return ADAPTER.weigh(
        args,
        pg_loss,
        train_log_probs,
        rollout_log_probs,
        loss_masks,
        total_lengths,
        response_lengths,
        max_seq_lens=max_seq_lens,
    )


def policy_loss(
    args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The corrected policy loss, all four algorithms, with entropy and KL terms: (0-d loss, 0-d metrics)."""
    return ADAPTER.policy_loss(args, batch, logits, sum_of_sample_mean)


def rollout_data_postprocess(args: Namespace) -> None:
    """Before a rollout's steps. miles hands no data over: the arguments are checked, the data in the loss."""
    check_arguments(args, "miles")


def before_train_step(
    args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Begin an optimizer step; it ends inside megatron's finalize_model_grads, before the optimizer steps.

    Raises ValueError for batch normalisation over a step that spans independent replicas, whose gradients are summed
    only after that.
    """
    config = check_arguments(args, "miles")
    if config is not None and config.normalizes_step and _parallel_state().indep_dp.size > 1:
        raise ValueError(
            "batch normalisation over the step cannot be had with independent data-parallel replicas: choose "
            "--tis-batch-normalize-scope micro_batch."
        )
    ADAPTER.begin_step(args, rollout_id, step_id, model)


def init(args: Namespace) -> None:
    """When a training process starts: refuse arguments that cannot run, and say on rank 0 what will."""
    ADAPTER.start(args)


def _parallel_state() -> Any:
    from miles.backends.training_utils.parallel import get_parallel_state  # pyright: ignore[reportMissingImports]

    return get_parallel_state()


def _groups() -> ParallelGroups:
    state = _parallel_state()
    return ParallelGroups(
        tp=state.tp.group,
        cp=state.cp.group,
        dp=state.intra_dp.group,
        dp_cp=state.intra_dp_cp.group,
        pp=state.pp.group,
    )


def _padded_lengths(args: Namespace, batch: Mapping[str, Any]) -> Sequence[int] | None:
    return batch.get("max_seq_lens") if getattr(args, "qkv_format", "thd") == "bshd" else None


def _log_probs(args: Namespace, batch: Mapping[str, Any], logits: Tensor) -> tuple[list[Tensor], list[Tensor] | None]:
    from miles.backends.training_utils.loss_hub.logit_processors import (  # pyright: ignore[reportMissingImports]
        get_log_probs_and_entropy,
    )

    coefficient = getattr(args, "entropy_coef", 0.0)
    wanted = coefficient != 0 or bool(getattr(args, "observe_training_entropy", False))
    found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=wanted,
        entropy_requires_grad=coefficient != 0,
        max_seq_lens=batch.get("max_seq_lens"),
    )
    return found["log_probs"], found.get("entropy")


def _log(args: Namespace, metrics: dict[str, float]) -> None:
    if not _writes(args):
        return
    from miles.utils.tracking_utils import tracking  # pyright: ignore[reportMissingImports]

    tracking.log(args, metrics, step_key="train/step")


def _writes(args: Namespace) -> bool:
    return not _parallel_state().indep_dp.rank


ADAPTER = RayAdapter(Host("miles", _groups, _log_probs, _padded_lengths, _log, _writes))
