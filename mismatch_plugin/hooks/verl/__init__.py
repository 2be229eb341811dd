r"""verl: a registered policy loss, and the driver's rollout correction, where the configuration asks for them.

```bash
python -m verl.trainer.main_ppo … \
    algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.loss_type=reinforce \
    +algorithm.rollout_correction.mismatch.tis.level=geometric +algorithm.rollout_correction.mismatch.tis.mode=clip \
    actor_rollout_ref.actor.policy_loss.loss_mode=mismatch \
    +actor_rollout_ref.actor.policy_loss.rollout_correction='${algorithm.rollout_correction}'
```

verl loads this through its entry points (`verl.plugins`) in every process. A configuration with neither the block
`mismatch` nor `loss_mode=mismatch` runs verl's own code unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import group_advantages, group_metrics
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.hooks.base import announce, wrap_once
from mismatch_plugin.hooks.hosts import VERL
from mismatch_plugin.hooks.verl.config import LOSS_NAME, check_tree, describe, has_block, settings
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.report.log import report_logged, validate_same_settings

_CORE = "verl.trainer.ppo.core_algos"


def mismatch_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's policy loss `mismatch`: the algorithm that `policy_loss.rollout_correction` chooses.

    All tensors [B, S] padded; log_prob carries gradient. In bypass mode old_log_prob is log π_rollout, and weights and
    rejection are made here; otherwise it is log π_old, and weights [B, S] and mask come from the driver.
    Aggregated by verl's `agg_loss` with the batch sizes in `config.global_batch_info`; a batch from which everything
    was rejected gives 0, connected to the graph. Returns (0-d loss, metrics that verl averages over micro-batches).
    Collectives: none. Host syncs: one, in bypass mode two, for the metrics, as in verl's own losses.
    Raises: ValueError where settings contradict or weights are missing; InvalidLogProbError.
    """
    if config is None:
        raise ValueError(f"loss_mode {LOSS_NAME} needs the actor's configuration: call it as verl's ppo_loss does.")
    losses, mask, metrics = verl_token_loss(
        old_log_prob, log_prob, advantages, response_mask, settings(config), rollout_is_weights
    )
    # verl's batch sizes, its own defaults filled in, and none of them 0: agg_loss divides by them.
    info = dict(config.global_batch_info)
    for name, count in {"batch_num_tokens": mask.sum(), "global_batch_size": (mask.sum(-1) > 0).sum()}.items():
        size = info.get(name)
        if size is None and info.get("dp_size", 1) == 1:
            size = count
        if size is not None:
            info[name] = size.clamp(min=1) if isinstance(size, Tensor) else max(size, 1)
    loss = import_module(_CORE).agg_loss(loss_mat=losses, loss_mask=mask, loss_agg_mode=loss_agg_mode, **info)
    return loss, metrics


def register() -> None:
    """Register the loss and wrap what of verl reads a configuration or logs a step. Idempotent.

    Wrapped: the loss `bypass_mode`, `compute_rollout_correction_and_add_to_batch`, `validate_config` and `Tracking`;
    each does what verl's own does unless the configuration asks for this package.
    Raises: ImportError or AttributeError where verl has moved one of them.
    """
    core_algos: Any = import_module(_CORE)
    core_algos.register_policy_loss(LOSS_NAME)(mismatch_loss)
    own_bypass = core_algos.get_policy_loss_fn("bypass_mode")
    if not isinstance(own_bypass, partial):
        core_algos.register_policy_loss("bypass_mode")(wraps(own_bypass)(partial(_bypass_mode, own_bypass)))
    wrap_once(
        "verl.trainer.ppo.rollout_corr_helper", "compute_rollout_correction_and_add_to_batch", _rollout_correction
    )
    wrap_once("verl.utils.config", "validate_config", _validate_config)
    tracking = import_module("verl.utils.tracking").Tracking
    wrap_once(tracking, "__init__", begin_tracking)
    wrap_once(tracking, "log", log_step)


def _bypass_mode(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    config = kwargs["config"] if "config" in kwargs else args[5] if len(args) > 5 else None
    block = config.policy_loss.get("rollout_correction") if config is not None else None
    return (mismatch_loss if has_block(block) else own)(*args, **kwargs)


def _rollout_correction(own: Callable[..., Any], batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    if not has_block(rollout_corr_config):
        return own(batch, rollout_corr_config)
    config = settings(rollout_corr_config)
    if config.rs.group != "keep":
        wrap_once("verl.trainer.ppo.ray_trainer", "compute_advantage", compute_advantage)
    return correct_rollout_batch(batch, config)


def _validate_config(own: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    chosen = check_tree(config)
    if chosen is not None:
        if chosen.report_dir is not None:
            validate_same_settings(chosen.report_dir, chosen)
        announce(VERL, describe(chosen, config))
    return own(config, *args, **kwargs)


def verl_token_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: MismatchConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(losses [B, S] with gradient, 0 outside the mask; the mask to aggregate over, [B, S] float; metrics).

    All inputs [B, S]. Bypass (algorithms 1, 3): old_log_prob is log π_rollout; weights and rejection are made here, and
    the mask is what is left, or the response mask where the denominator is `original`. Otherwise (0, 2): old_log_prob
    is log π_old, and rollout_is_weights and response_mask are what the driver made.
    The penalty on the distance to the sampler is in the losses (verl adds entropy and KL itself).
    Raises: ValueError where weights are needed and missing; InvalidLogProbError.
    """
    mask = response_mask.bool()
    bypass, shape = config.use_rollout_log_probs, mask.shape
    if not bypass and config.weighted and rollout_is_weights is None:
        raise ValueError(
            "rollout_is_weights is missing: verl's driver found no rollout_log_probs in the batch, so set "
            "actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    packed = PackedSequences(
        loss_mask=mask.flatten(),
        lengths=(shape[1],) * shape[0],
        rollout_log_probs=old_log_prob.detach().flatten() if bypass else None,
        old_log_probs=None if bypass else old_log_prob.detach().flatten(),
        advantages=advantages.detach().flatten(),
    )
    weights = None
    if not bypass:  # the driver has weighed and rejected
        weights = torch.ones_like(log_prob) if rollout_is_weights is None else rollout_is_weights
        weights = weights.flatten()
    token = token_loss(log_prob.flatten(), packed, config, weights=weights)
    keep = token.correction.keep.view(shape)
    stays = not bypass or config.denominator == "original"
    aggregated = mask.to(keep.dtype) if stays else keep
    # Raises where a log-prob is invalid.
    measured = token.correction.statistics.metrics(averaged_only=True) if bypass else {}
    columns = {name: column.view(shape) for name, column in token.clip_columns()}
    report = {
        "actor/ppo_kl": columns.get(
            "ppo_kl", -token.correction.tokens.log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).view(shape)
        )
    }
    if columns:
        report["actor/pg_clipfrac"] = columns["clip_high"] | columns["clip_low"]
        report["actor/pg_clipfrac_lower"] = columns.get("clip_dual", torch.zeros_like(mask))
    distance = token.rollout_kl()
    if distance is not None:
        report[f"{PREFIX}rollout_kl"] = distance.detach().view(shape)
    means = torch.stack([(column * aggregated).sum() for column in report.values()]) / aggregated.sum().clamp(min=1)
    metrics = dict(zip(report, means.tolist(), strict=True))
    return token.total().view(shape), aggregated, metrics | measured


# The driver -----------------------------------------------------------------------------------------------------------

# verl rejects before it computes advantages, but its GRPO goes by the prompt's `uid` alone: a rejected response stays
# in mean and deviation. What was rejected travels from one to the other in the batch.
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
    Raises: ValueError for shapes that differ, and under `rs.group` without uid or token_level_rewards [B, S];
    InvalidLogProbError naming row, position and value.
    """
    data = batch.batch
    mask = data["response_mask"]
    packed = pack_trained(data)
    correction = correct(packed, config)
    metrics = correction.statistics.metrics()  # raises before anything is written
    if config.rs.group != "keep":
        rewards, least = data.get("token_level_rewards", None), config.rs.least_accepted
        if "uid" not in batch.non_tensor_batch or rewards is None:
            raise ValueError(
                f"the batch has no uid or no token_level_rewards, and rs.group {config.rs.group} needs the group and "
                f"the reward of every response: leave it out."
            )
        accepted = data[_ACCEPTED] = correction.kept_N > 0
        batch.meta_info[_LEAST] = least
        if config.metrics != "off":
            metrics |= group_metrics(rewards.sum(-1), list(batch.non_tensor_batch["uid"]), accepted, least)
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
    rows' lengths. Raises: ValueError for shapes that differ.
    """
    mask = data["response_mask"]
    for name in ("old_log_probs", "rollout_log_probs"):
        if data[name].shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(data[name].shape)}, response_mask {tuple(mask.shape)}: both must "
                f"be of the same response tokens."
            )
    count, width = mask.shape
    order = torch.arange(1, width + 1, device=mask.device)
    lengths = ((mask != 0) * order).amax(-1).tolist() if mask.numel() else [0] * count

    def packed(rows: Tensor) -> Tensor:
        return torch.cat([rows[:0].flatten(), *(row[:length] for row, length in zip(rows, lengths, strict=True))])

    return PackedSequences(
        loss_mask=packed(mask) != 0,
        lengths=tuple(lengths),
        rollout_log_probs=packed(data["rollout_log_probs"]),
        old_log_probs=packed(data["old_log_probs"]),
        padded_width=width,
    )


def compute_advantage(own: Callable[..., Any], data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's `compute_advantage` by way of `own`, and for a marked batch `group_advantages` of each prompt's responses.

    advantages and returns become [B, S] under the response mask, as verl's GRPO has them. norm_adv_by_std_in_grpo
    (default true) says whether they are divided by the deviation. Raises ValueError for a reward that is not finite.
    """
    if data.batch.get(_ACCEPTED, None) is None:
        return own(data, adv_estimator, *args, **kwargs)
    scaled = kwargs.get("norm_adv_by_std_in_grpo", args[3] if len(args) > 3 else True)
    accepted, least = data.batch.pop(_ACCEPTED), data.meta_info.pop(_LEAST)
    rewards = data.batch["token_level_rewards"].sum(-1)
    found = group_advantages(rewards, list(data.non_tensor_batch["uid"]), accepted, scaled, min_accepted=least)
    data.batch["advantages"] = data.batch["returns"] = found[:, None] * data.batch["response_mask"]
    return data


# The report folder ----------------------------------------------------------------------------------------------------


def begin_tracking(own: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """verl's `Tracking.__init__`, which keeps our settings. verl's other trainers (SFT) have another tree."""
    own(self, *args, **kwargs)
    tree = kwargs["config"] if "config" in kwargs else args[3] if len(args) > 3 else None
    ours = isinstance(tree, Mapping) and {"algorithm", "actor_rollout_ref"} <= {*tree}
    self.mismatch_settings = check_tree(tree) if ours else None


def log_step(own: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """verl's `Tracking.log`, and a line of our report where this is a training step. In bypass mode our metrics are
    verl's mean over micro-batches."""
    config = self.mismatch_settings
    if config is None or config.report_dir is None:
        own(self, *args, **kwargs)
    else:
        report_logged(config, partial(own, self), *args, **kwargs)
