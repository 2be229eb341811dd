"""How context parallelism cuts sequences (no process groups needed: each rank's part is computed on the host)."""

from __future__ import annotations

from itertools import chain, compress
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.parallel.context import shard, split_tokens

LENGTHS = [5, 1, 16]


@pytest.mark.parametrize(
    ("layout", "size", "align", "owned"),
    [
        # 5 tokens are chunks 01|23|4.|.., 1 token 0|.|.|., 16 tokens 0-3|4-7|8-11|12-15. Rank 0 owns the outer two.
        ("zigzag", 2, 1, [[0, 1, 5, *range(6, 10), *range(18, 22)], [2, 3, 4, *range(10, 18)]]),
        ("contiguous", 4, 1, [[0, 1, 5, *range(6, 10)], [2, 3, *range(10, 14)], [4, *range(14, 18)], [*range(18, 22)]]),
        ("contiguous", 2, 8, [[0, 1, 2, 5, *range(6, 14)], [3, 4, *range(14, 22)]]),
        ("none", 1, 1, [[*range(22)]]),
    ],
)
def test_split_tokens(layout: Any, size: int, align: int, owned: list[list[int]]) -> None:
    parts = [split_tokens(LENGTHS, layout=layout, size=size, rank=rank, align=align) for rank in range(size)]
    assert [list(compress(part.source_T.tolist(), part.is_real_T.tolist())) for part in parts] == owned
    assert sorted(chain(*owned)) == list(range(22))
    assert {part.source_T.numel() * size for part in parts} == {int(parts[0].cu_padded[-1])}
    assert all(part.source_T.numel() % align == 0 for part in parts)


def test_a_shard_knows_the_turns_of_the_whole_and_its_chunks() -> None:
    """5 tokens are chunks 01|23|4|, of two zigzag ranks, 1 token 0|||; a turn goes on over a cut, and one is split by
    what another rank holds."""
    whole = mp.PackedSequences.from_lists(loss_masks=[[0, 1, 1, 0, 1], [1], []])
    first, second = (shard(whole, "zigzag", 2, rank) for rank in range(2))
    assert first.unit_counts == second.unit_counts == (2, 1, 1)
    assert first.chunk_lengths == ((2, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0))
    assert second.chunk_lengths == ((0, 2, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    assert first.unit_ids is not None and first.unit_ids.tolist() == [0, 0, 0]
    assert second.unit_ids is not None and second.unit_ids.tolist() == [0, 0, 1]
    assert second.units.offsets.tolist() == [0, 2, 3, 3, 3]
    assert shard(whole, "none", 1, 0).chunk_lengths is None


def test_padding_takes_a_value_of_its_own() -> None:
    assert split_tokens([3]).source_T.tolist() == [0, 1, 2]
    part = split_tokens([3], layout="zigzag", size=2, rank=0)
    assert part.take(torch.tensor([7, 8, 9]), padding=-1).tolist() == [[7, -1]]
