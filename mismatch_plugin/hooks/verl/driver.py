"""verl's driver: in decoupled mode weights and rejection over the whole rollout batch, advantages under `rs.group`, and
the report folder, a line for each step that verl logs.

verl rejects before it computes advantages, but its GRPO goes by the prompt's `uid` alone: a rejected response stays in
mean and deviation. What was rejected travels from one to the other in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import group_advantages, group_metrics
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.hooks.verl.config import check_tree
from mismatch_plugin.report.log import report_logged

_ACCEPTED, _LEAST = "mismatch_accepted", "mismatch_min_group"


def correct_rollout_batch(batch: Any, config: MismatchConfig) -> tuple[Any, dict[str, float]]:
    """(the batch with weights and mask, metrics): what verl's compute_rollout_correction_and_add_to_batch returns.

    batch.batch holds old_log_probs, rollout_log_probs and response_mask, [B, S]. Denominator `original` leaves
    response_mask as it is and gives rejected tokens the weight 0; otherwise they leave response_mask, and so verl's
    count of tokens too. rollout_is_weights [B, S] is added where there are weights or the mask stays.
    Where everything is rejected the mask stays and all weights are 0: a zero loss instead of a division by 0
    (`rollout_corr/all_rejected` is 1). Under `rs.group` the batch also says who is accepted, for the advantages.
    Host syncs: none on the driver, whose batch is on the CPU (the rows' lengths, the metrics, and whether anything is
    left are read there). Collectives: none.
    Raises: ValueError for shapes that differ or a mask that is not 0 and 1; InvalidLogProbError naming row, position
    and value.
    """
    data = batch.batch
    mask = data["response_mask"]
    packed = pack_trained(data)
    correction = correct(packed, config)
    metrics = correction.statistics.metrics()  # raises before anything is written
    if config.rs.group != "keep":
        metrics |= mark_accepted(batch, config, correction.kept_N > 0)
    stays = config.denominator == "original"
    if config.rejects and packed.loss_mask.numel():
        stays = stays or not bool(correction.keep.any())
    if config.rejects and not stays:
        data["response_mask"] = packed.to_padded(correction.keep).to(mask.dtype)
    if config.weighted or (stays and config.rejects):
        data["rollout_is_weights"] = packed.to_padded(correction.applied)
    return batch, metrics


def pack_trained(data: Mapping[str, Tensor]) -> PackedSequences:
    """The rows up to their last token under the response mask: padding is left behind.

    Positions are those in the padded response, where a tool's output in the middle counts. Host syncs: one, for the
    rows' lengths. Raises: ValueError for shapes that differ or a mask that is not 0 and 1.
    """
    mask = data["response_mask"]
    for name in ("old_log_probs", "rollout_log_probs"):
        if data[name].shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(data[name].shape)}, response_mask {tuple(mask.shape)}: both must "
                f"be of the same response tokens."
            )
    count, width = mask.shape
    if not mask.numel():
        lengths, odd = [0] * count, [0]
    else:
        order = torch.arange(1, width + 1, device=mask.device)
        lengths, odd = torch.stack([((mask != 0) * order).amax(-1), _odd(mask).any(-1).long()]).tolist()
    if any(odd):
        raise ValueError(f"response_mask of row {odd.index(1)} holds values other than 0 and 1: find what writes them.")

    def packed(rows: Tensor) -> Tensor:
        return torch.cat([rows[:0].flatten(), *(row[:length] for row, length in zip(rows, lengths, strict=True))])

    return PackedSequences(
        loss_mask=packed(mask) != 0,
        lengths=tuple(lengths),
        rollout_log_probs=packed(data["rollout_log_probs"]),
        old_log_probs=packed(data["old_log_probs"]),
        padded_width=width,
    )


def _odd(mask: Tensor) -> Tensor:
    """[B, …] bool: what is neither 0 nor 1."""
    if mask.is_floating_point():
        return mask != (mask != 0)
    if mask.dtype == torch.bool:
        return mask[:, :0]
    return torch.stack([mask.amin(-1) < 0, mask.amax(-1) > 1], -1)


def mark_accepted(batch: Any, config: MismatchConfig, accepted_N: Tensor) -> dict[str, float]:
    """Leave in the batch who is accepted, for the advantages that verl computes next. Returns metrics.

    batch: verl's DataProto, with token_level_rewards [B, S] and uid. Raises ValueError where one of them is missing.
    """
    if "uid" not in batch.non_tensor_batch or batch.batch.get("token_level_rewards", None) is None:
        raise ValueError(
            f"the batch has no uid or no token_level_rewards, and rs.group {config.rs.group} needs the group and the "
            f"reward of every response: leave it out."
        )
    least = config.rs.least_accepted
    batch.batch[_ACCEPTED], batch.meta_info[_LEAST] = accepted_N, least
    if config.metrics == "off":
        return {}
    return group_metrics(_rewards(batch), list(batch.non_tensor_batch["uid"]), accepted_N, least)


def compute_advantage(own: Callable[..., Any], data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's `compute_advantage` by way of `own`, and for a marked batch `group_advantages` of each prompt's responses.

    advantages and returns become [B, S] under the response mask, as verl's GRPO has them. norm_adv_by_std_in_grpo
    (default true) says whether they are divided by the deviation. Raises ValueError for a reward that is not finite.
    """
    if data.batch.get(_ACCEPTED, None) is None:
        return own(data, adv_estimator, *args, **kwargs)
    scaled = kwargs.get("norm_adv_by_std_in_grpo", args[3] if len(args) > 3 else True)
    accepted, least = data.batch.pop(_ACCEPTED), data.meta_info.pop(_LEAST)
    found = group_advantages(_rewards(data), list(data.non_tensor_batch["uid"]), accepted, scaled, min_accepted=least)
    data.batch["advantages"] = data.batch["returns"] = found[:, None] * data.batch["response_mask"]
    return data


def _rewards(batch: Any) -> Tensor:
    return batch.batch["token_level_rewards"].sum(-1)


# The report folder ----------------------------------------------------------------------------------------------------


def begin_tracking(own: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """verl's `Tracking.__init__`, which keeps our settings. verl's other trainers (SFT) have another tree."""
    own(self, *args, **kwargs)
    tree = kwargs["config"] if "config" in kwargs else args[3] if len(args) > 3 else None
    ours = isinstance(tree, Mapping) and {"algorithm", "actor_rollout_ref"} <= {*tree}
    self.mismatch_settings = check_tree(tree) if ours else None


def log_step(
    own: Callable[..., None], self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any
) -> None:
    """verl's `Tracking.log`, and a line of our report where this is a training step (verl logs its validation, too).

    In bypass mode our metrics are verl's mean over micro-batches. Next to ours a line has verl's other numbers.
    """
    own(self, data, step, *args, **kwargs)
    config = self.mismatch_settings
    if config is not None and config.report_dir is not None:
        report_logged(config, int(step), data)
