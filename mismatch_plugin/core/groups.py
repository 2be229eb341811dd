"""Advantages within a group of responses to one prompt (GRPO), over those that rejection accepts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.core.metrics.registry import PREFIX

EPSILON = 1e-6
"""Added to the deviation, as slime, miles, verl and NeMo-RL do."""
GROUP_METRICS = {
    "rollout_rs_group_changed_fraction": "share of groups in which an accepted response's advantage changes",
    "rollout_rs_advantage_changed_fraction": "share of accepted responses whose advantage changes",
    "rollout_rs_group_dropped_fraction": "share of groups left without advantages: fewer accepted responses than "
    "`rs.min_group`, or than 2",
}
"""Name (under `rollout_corr/`) → meaning. Advantages are compared normalised, with and without the rejected."""


@torch.no_grad()
def group_advantages(
    rewards: Sequence[float] | Tensor,
    group_ids: Sequence[Hashable] | Tensor,
    accepted: Sequence[bool | float] | Tensor | None = None,
    normalize: bool = True,
    *,
    min_accepted: int = 1,
    leave_one_out: bool = False,
) -> Tensor:
    """GRPO's advantage of every response, mean and deviation over the accepted responses of its group only.

    A_i = (R_i − mean) / (deviation + 1e-6), the sample deviation (n − 1). 0 for what is not accepted, and for a single
    accepted response, which has no baseline. A rejected response in the mean would add (E[R | accepted] − E[R]) ·
    ∇ log P(accepted) to the gradient of E[R | accepted].

    rewards [N], group_ids [N]: any order; ids are compared for equality. accepted [N]: True, or a count above 0, for
        responses that keep a token (`mp.correct(…).kept_N`); None: all. normalize False: centred only (Dr. GRPO).
    min_accepted: groups with fewer accepted responses get 0 (`rs.group` drop: `rs.min_group`).
    leave_one_out: the baseline is the mean of the *other* accepted responses (RLOO, arXiv 2402.14740); the deviation
        stays that of all accepted ones.
    Returns [N] on the rewards' device, in their dtype (torch's default for lists and integers), formed in float64.
    Collectives, host syncs, gradient: none. Source: arXiv 2402.03300 (GRPO).
    Raises ValueError for lengths that differ and, on the CPU, for rewards that are not finite.
    """
    values, index, kept = _checked(rewards, group_ids, accepted)
    if min_accepted < 1:
        raise ValueError(f"min_accepted {min_accepted} is below 1: leave it out, or give the smallest group to train.")
    counts = _sums(kept.double(), index)
    # Measured from the group's largest reward, so that equal rewards give exactly 0.
    largest = torch.full_like(values, -math.inf).scatter_reduce(0, index, values.masked_fill(~kept, -math.inf), "amax")
    shifted = torch.where(kept, values - largest[index], 0.0)
    centred = shifted - (_sums(shifted, index) / counts.clamp(min=1))[index]
    centred = torch.where(kept & (counts >= min_accepted)[index], centred, 0.0)
    others = (counts - 1).clamp(min=1)
    deviation = (_sums(centred.square(), index) / others).sqrt()
    if leave_one_out:
        centred = centred * (counts / others)[index]
    if normalize:
        centred = centred / (deviation[index] + EPSILON)
    dtype = rewards.dtype if isinstance(rewards, Tensor) and rewards.is_floating_point() else torch.get_default_dtype()
    return centred.to(dtype)


def group_metrics(
    rewards: Sequence[float] | Tensor,
    group_ids: Sequence[Hashable] | Tensor,
    accepted: Sequence[bool | float] | Tensor,
    min_accepted: int = 1,
) -> dict[str, float]:
    """What excluding the rejected changes: `GROUP_METRICS`, under `rollout_corr/`; 0 where there is nothing.
    Arguments and errors: as `group_advantages`. Collectives: none. Host syncs: one."""
    values, index, kept = _checked(rewards, group_ids, accepted)
    after = group_advantages(values, index, kept, min_accepted=min_accepted)
    changed = kept & ~torch.isclose(group_advantages(values, index), after, rtol=1e-6, atol=1e-6)
    members, counts = _sums(torch.ones_like(values), index), _sums(kept.double(), index)
    groups = (members > 0).sum()
    moved = (_sums(changed.double(), index) > 0).sum() / groups.clamp(min=1)
    dropped = ((members > 0) & (counts < max(min_accepted, 2))).sum() / groups.clamp(min=1)
    shares = torch.stack([moved, changed.sum() / kept.sum().clamp(min=1), dropped]).tolist()
    return dict(zip((PREFIX + name for name in GROUP_METRICS), shares, strict=True))


def _checked(rewards: Any, group_ids: Any, accepted: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards [N] float64, group of each in [0, N), accepted [N] bool). Raises ValueError as `group_advantages`."""
    if not isinstance(rewards, Tensor):
        rewards = torch.tensor([math.nan if r is None else float(r) for r in rewards], dtype=torch.float64)
    for name, given in (("rewards", rewards), ("group_ids", group_ids), ("accepted", accepted)):
        if isinstance(given, Tensor) and given.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(given.shape)}: give one value a response, [N].")
        if given is not None and len(given) != len(rewards):
            raise ValueError(f"{name} has {len(given)} values, rewards {len(rewards)}: give one of each a response.")
    values = rewards.detach().double()
    if values.device.type == "cpu" and not (finite := values.isfinite()).all():
        place = int(finite.logical_not().nonzero()[0])
        raise ValueError(
            f"rewards[{place}] is {float(values[place])}: every response of a group needs a finite reward; give it "
            f"one, or leave the response out."
        )
    kept = torch.ones_like(values) > 0 if accepted is None else torch.as_tensor(accepted, device=values.device) > 0
    if not isinstance(group_ids, Tensor):
        numbers: dict[Hashable, int] = {}
        ids = [i.item() if isinstance(i, Tensor) else i for i in group_ids]  # tensors are equal to themselves alone
        places = [numbers.setdefault(i, len(numbers)) for i in ids]
        return values, torch.tensor(places, dtype=torch.int64, device=values.device), kept
    ordered, order = group_ids.to(values.device).sort(stable=True)
    numbers_N = torch.zeros_like(order)
    numbers_N[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    return values, torch.empty_like(order).scatter_(0, order, numbers_N), kept


def _sums(values: Tensor, index: Tensor) -> Tensor:
    """[N] Σ of the values of each group, at its number."""
    return torch.zeros_like(values).index_add_(0, index, values)
