"""The ids that a sampler's filters kept, from lists on the host to `RaggedSamplingMask`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import torch

from mismatch_plugin.log_probs.arguments import RaggedSamplingMask


def ragged_mask(kept: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> RaggedSamplingMask:
    """The kept ids of each target, in order; an empty list for one that was sampled unfiltered."""
    rows = list(kept)
    ids = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64, device=device)
    return RaggedSamplingMask(ids, torch.tensor([0, *accumulate(map(len, rows))]))


def check_kept_ids(
    kept_ids: Sequence[Sequence[int]], response_ids: Sequence[int], loss_mask: Sequence[int], sample: object
) -> None:
    """Raise ValueError, naming sample and position, where kept ids are not one list a response token, or lack the id
    that was sampled for a token that trains: every log-prob is over the kept ids, so they belong to other tokens."""
    if len(kept_ids) != len(response_ids):
        raise ValueError(
            f"kept_ids of sample {sample} has {len(kept_ids)} entries for {len(response_ids)} response tokens: give "
            f"one list a token, empty where it was sampled unfiltered."
        )
    for position, (kept, token, trained) in enumerate(zip(kept_ids, response_ids, loss_mask, strict=True)):
        if trained and len(kept) and token not in kept:
            raise ValueError(
                f"kept_ids of sample {sample}, position {position}: the sampled id {token} is not among the "
                f"{len(kept)} kept. Check that the mask is of this response, with nothing dropped or joined before it."
            )
