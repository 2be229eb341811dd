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
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import EPSILON, group_advantages, group_metrics
from mismatch_plugin.hooks.slime.batch import pack_local
from mismatch_plugin.hooks.slime.versions import Versions
from mismatch_plugin.parallel.groups import ParallelGroups


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
