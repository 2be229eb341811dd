"""The one function of Transformer Engine that Megatron-LM RL calls itself under context parallelism."""

from __future__ import annotations

import torch


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """A rank's tokens: of each sequence's 2·world_size chunks those at `rank` and at 2·world_size − 1 − rank."""
    found: list[torch.Tensor] = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        chunks = torch.arange(start, end).view(2 * world_size, -1)
        found += [chunks[rank], chunks[2 * world_size - 1 - rank]]
    return torch.cat(found).int()
