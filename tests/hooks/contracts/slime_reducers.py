"""A reducer of the policy loss as a user writes one: the path argument of slime and miles names it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.hooks.contracts.slime_data import owned

ACCEPTED_MEAN = "tests.hooks.contracts.slime_reducers.accepted_mean"


def accepted_mean(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """The micro-batch's sum over what is left in the masks, divided by how many tokens that are."""
    from megatron.core import parallel_state

    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    pairs = zip(total_lengths, response_lengths, strict=True)
    places = [owned(total, total - response, cp, rank) for total, response in pairs]
    local = torch.cat([mask[at].float() for mask, at in zip(loss_masks, places, strict=True)])
    count = torch.stack([mask.sum() for mask in loss_masks]).sum().clamp(min=1)
    return lambda x: (x * local).sum() / count
