"""verl's advantages over the accepted responses of a group, for `rs.group`, on the driver.

verl rejects before it computes advantages, but its GRPO goes by the prompt's `uid` alone: a rejected response stays in
mean and deviation. What was rejected travels from one to the other in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.groups import group_advantages, group_metrics
from mismatch_plugin.hooks.base import wrap_once

ESTIMATORS = ("grpo", "grpo_vectorized")
"""verl's estimators that are (R − mean) / (deviation + 1e-6) within a prompt's responses."""
_ACCEPTED, _LEAST = "mismatch_accepted", "mismatch_min_group"


def check_estimator(config: MismatchConfig, algorithm: Mapping[str, Any]) -> None:
    """Raise ValueError where verl would form other advantages. algorithm: its section; absent keys are not known."""
    estimator = algorithm.get("adv_estimator")
    if config.rs.group != "keep" and estimator is not None and estimator not in ESTIMATORS:
        raise ValueError(
            f"rs.group {config.rs.group} is about the responses to one prompt, and algorithm.adv_estimator "
            f"{getattr(estimator, 'value', estimator)} compares other ones: choose {' or '.join(ESTIMATORS)}, or leave "
            f"rs.group out."
        )


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


def use_group_advantages() -> None:
    """Put ours in the place of verl's `compute_advantage`, wherever its trainers have imported it. Idempotent.

    It acts on batches that `mark_accepted` has marked; verl's own computes the others.
    """
    wrap_once("verl.trainer.ppo.ray_trainer", "compute_advantage", compute_advantage)


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
