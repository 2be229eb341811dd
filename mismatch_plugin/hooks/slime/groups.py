"""slime's advantages over the accepted responses of a group, for `--rs-group`: its custom advantage function.

slime centres and scales rewards when a rollout is generated, before anyone knows what will be rejected, and splits
groups over data-parallel ranks. Each rank has the raw rewards of the whole rollout; what travels is who is accepted.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import parse_bool
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import EPSILON, group_advantages, group_metrics
from mismatch_plugin.hooks.base import validate_group_advantages
from mismatch_plugin.hooks.slime.batch import pack_local
from mismatch_plugin.hooks.slime.versions import Versions
from mismatch_plugin.parallel.groups import ParallelGroups

_PATH = "custom_advantage_function_path"
_ESTIMATORS = ("grpo", "gspo", "cispo")
"""Those whose rewards slime centres within a group, and divides by its deviation."""


def check_groups(args: Namespace, config: MismatchConfig, host: str) -> None:
    """Refuse `--rs-group` where the host would not form advantages by it. Raises ValueError with what to change."""
    path, ours = getattr(args, _PATH, None), f"mismatch_plugin.hooks.{host}.group_advantages"
    if config.rs.group == "keep":
        if path == ours:
            raise ValueError(
                f"--{_flag(_PATH)} {ours} needs --rs-group exclude or drop: add it, or leave the path out."
            )
        return
    if host != "slime":
        validate_group_advantages(config, host, "it computes advantages itself and takes no function for them")
    given = f"--rs-group {config.rs.group}"
    if path is not None and path != ours:
        raise ValueError(f"--{_flag(_PATH)} {path} forms other advantages than {given}: leave one of the two out.")
    if path is None:
        raise ValueError(
            f"{given} has no effect unless --{_flag(_PATH)} runs {ours}: set it, or start through "
            f"`python -m mismatch_plugin.launch`."
        )
    estimator = getattr(args, "advantage_estimator", "grpo")
    instead = {
        f"--advantage-estimator {estimator}": estimator not in _ESTIMATORS,
        "--disable-rewards-normalization": not getattr(args, "rewards_normalization", True),
        "--custom-reward-post-process-path": getattr(args, "custom_reward_post_process_path", None),
        "--disable-compute-advantages-and-returns": not getattr(args, "compute_advantages_and_returns", True),
    }
    for flag in (flag for flag, there in instead.items() if there):
        raise ValueError(
            f"{given} takes the place of slime's advantages within a group (--advantage-estimator "
            f"{', '.join(_ESTIMATORS)}), and {flag} makes others: leave one of the two out."
        )
    reuses = getattr(args, "loss_type", "policy_loss") == "policy_loss"
    if reuses and not parse_bool(getattr(args, "get_mismatch_metrics", False), "get_mismatch_metrics"):
        raise ValueError(
            f"{given} needs old log-probs before advantages, and slime skips their pass where a rollout is one step: "
            f"add --get-mismatch-metrics."
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def rollout_advantages(
    args: Namespace, data: Mapping[str, Any], config: MismatchConfig, groups: ParallelGroups, versions: Versions
) -> tuple[Tensor, dict[str, float]]:
    """(advantage of each of this rank's samples, metrics of the rollout, the same on every rank).

    data: slime's `rollout_data` before a rollout's steps: raw_reward of the whole rollout, whose groups are
        n_samples_per_prompt neighbours, as slime's own normalisation has them; of this rank's samples their `partition`
        (places in the rollout), rewards as slime normalised them, and what `pack_local` takes. A sample that no rank
        trains on counts as rejected.
    Collectives, on the last pipeline stage: those of `correct` over CP, one SUM over DP of a float a sample.
    Host syncs: two. Raises ValueError, on every rank, where slime's groups or rewards are others.
    """
    raw, places, size = data["raw_reward"], data["partition"], args.n_samples_per_prompt
    if len(raw) != size * args.rollout_batch_size:
        raise ValueError(
            f"the rollout has {len(raw)} samples, not --rollout-batch-size {args.rollout_batch_size} groups of "
            f"--n-samples-per-prompt {size}, so that slime itself cannot tell groups apart: leave --rs-group out."
        )
    if not data.get("log_probs"):
        raise ValueError(
            "slime skipped the pass for old log-probs, which --rs-group needs: add --get-mismatch-metrics."
        )
    failure: ValueError | None = None
    compared = {"old_log_probs": data["log_probs"], "rollout_log_probs": data.get("rollout_log_probs")}
    kept_N = torch.zeros(len(places), device=data["loss_masks"][0].device)
    try:
        packed = pack_local(args, data, groups, config.unit.needs, **compared)
        kept_N = correct(versions.on(packed, config, data["loss_masks"]), config, groups).kept_N
    except ValueError as error:  # on all ranks together
        failure = error
    ids, at = torch.arange(len(raw)) // size, torch.tensor(places)
    others = ~torch.isclose(_normalised(args, raw)[at], torch.tensor(data["rewards"]), rtol=1e-4, atol=1e-4)
    found = torch.zeros(len(raw) + 2, device=kept_N.device)
    found[at.to(found.device)] = (kept_N > 0).float()
    found[-2:] = torch.tensor([float(others.any()), float(failure is not None)])
    *accepted, odd, failed = groups.sum_over_replicas(found).tolist()
    if failed:
        raise failure or ValueError("another rank cannot say which of its responses are accepted: its error says why.")
    if odd:
        raise ValueError(
            "slime's rewards are not its raw_reward, normalised within each group (does a sample's metadata set "
            "raw_reward?), and --rs-group works from raw rewards: leave it out."
        )
    least = config.rs.least_accepted
    rewards = torch.tensor(raw, dtype=torch.float64)
    advantages = group_advantages(rewards, ids, accepted, args.grpo_std_normalization, min_accepted=least)
    metrics = {} if config.metrics == "off" else group_metrics(rewards, ids, accepted, least)
    return advantages[at].float(), metrics


def _normalised(args: Namespace, raw: list[float]) -> Tensor:
    """slime's own rewards, to its last digit: to see that `raw` is what it made them of."""
    table = torch.tensor(raw, dtype=torch.float).reshape(-1, args.n_samples_per_prompt)
    table = table - table.mean(-1, keepdim=True)
    if args.grpo_std_normalization:
        table = table / (table.std(-1, keepdim=True) + EPSILON)
    return table.flatten()
