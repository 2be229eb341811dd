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

from mismatch_plugin.hooks.base import start_block, wrap_once
from mismatch_plugin.hooks.hosts import VERL
from mismatch_plugin.hooks.verl.config import LOSS_NAME, check_tree, describe, has_block, settings
from mismatch_plugin.hooks.verl.driver import begin_tracking, compute_advantage, correct_rollout_batch, log_step
from mismatch_plugin.hooks.verl.loss import verl_token_loss
from mismatch_plugin.hooks.version import version_line
from mismatch_plugin.report.log import validate_same_settings

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
    loss = import_module(_CORE).agg_loss(
        loss_mat=losses, loss_mask=mask, loss_agg_mode=loss_agg_mode, **_batch_info(config.global_batch_info, mask)
    )
    return loss, metrics


def _batch_info(given: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    """verl's batch sizes, its own defaults filled in, and none of them 0: agg_loss divides by them."""
    info = dict(given)
    local = {"batch_num_tokens": mask.sum(), "global_batch_size": (mask.sum(-1) > 0).sum()}
    for name, count in local.items():
        size = info.get(name)
        if size is None and info.get("dp_size", 1) == 1:
            size = count
        if size is not None:
            info[name] = size.clamp(min=1) if isinstance(size, torch.Tensor) else max(size, 1)
    return info


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
        print(start_block("verl", [*describe(chosen, config), version_line(VERL)]), flush=True)
    return own(config, *args, **kwargs)
