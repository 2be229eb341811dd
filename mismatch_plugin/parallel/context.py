"""How context parallelism cuts sequences, and the part of a batch that one rank holds.

Layouts, for a sequence of n tokens on `size` ranks:

* none: every token on every rank (or one rank);
* zigzag: 2·size chunks of c = ceil(n / (2·size)) tokens, rank r owns chunks r and 2·size − 1 − r (Megatron, slime);
* contiguous: size chunks of c = ceil(n / size) tokens, rank r owns chunk r.

The last chunks may be short or empty: a rank may hold nothing of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences

ContextLayout = Literal["none", "zigzag", "contiguous"]


def chunk_count(layout: ContextLayout, size: int) -> int:
    """Chunks that a sequence is cut into, over all ranks."""
    return {"none": 1, "zigzag": 2 * size, "contiguous": size}[layout] if size > 1 else 1


def padded_length(length: int, layout: ContextLayout, size: int) -> int:
    """Tokens of a sequence over all ranks once every chunk is full: the next multiple of 2·size or size."""
    chunks = chunk_count(layout, size)
    return math.ceil(length / chunks) * chunks


def local_positions(padded: int, layout: ContextLayout, size: int, rank: int) -> Tensor:
    """Positions that `rank` owns of a sequence of `padded_length` tokens, in the order it holds them. int64."""
    if size == 1 or layout == "none":
        return torch.arange(padded)
    chunk = padded // chunk_count(layout, size)
    owned = (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)
    return torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in owned])


@dataclass(frozen=True)
class LocalTokens:
    """The tokens of one micro-batch of packed sequences that one rank feeds to the model; T counts padding too.

    source_T: index of each token in the micro-batch's real tokens, concatenated; 0 for padding. position_T: position
    in its sequence; 0 for padding. sequence_T: which sequence. is_real_T: False for padding. All int64 but the last.
    cu_real, cu_padded: cumulative lengths of whole sequences without and with padding, int32.
    """

    source_T: Tensor
    position_T: Tensor
    sequence_T: Tensor
    is_real_T: Tensor
    cu_real: Tensor
    cu_padded: Tensor

    def take(self, values: Tensor, padding: float = 0) -> Tensor:
        """[1, T] of this rank from `values` [tokens of the micro-batch, concatenated]."""
        return torch.where(self.is_real_T, values[self.source_T], padding)[None]


def split_tokens(
    lengths: Sequence[int], *, layout: ContextLayout = "none", size: int = 1, rank: int = 0, align: int = 1
) -> LocalTokens:
    """Cut a micro-batch for one rank, every rank getting the same number of tokens (padding behind each sequence).

    align: a dummy sequence at the end makes the local token count a multiple of it (tp, under sequence parallelism).
    """
    padded = [padded_length(n, layout, size) for n in lengths]
    dummy = -sum(padded) % math.lcm(padded_length(1, layout, size), size * align)
    real, padded = [*lengths, 0], [*padded, dummy]
    positions = [local_positions(n, layout, size, rank) for n in padded]
    is_real_T = torch.cat([p < n for p, n in zip(positions, real, strict=True)])
    starts = torch.tensor([0, *real]).cumsum(0)[:-1]
    sequence_T = torch.repeat_interleave(torch.tensor([p.numel() for p in positions]))
    position_T = torch.where(is_real_T, torch.cat(positions), 0)
    source_T = torch.where(is_real_T, starts[sequence_T] + position_T, 0)
    ends = len(lengths) + 1 + (dummy > 0)
    cu_real, cu_padded = (torch.tensor([0, *n])[:ends].cumsum(0).to(torch.int32) for n in (real, padded))
    return LocalTokens(source_T, position_T, sequence_T, is_real_T, cu_real, cu_padded)


def shard(packed: PackedSequences, layout: ContextLayout, size: int, rank: int) -> PackedSequences:
    """The part of whole sequences that one context-parallel rank holds, `positions` kept as in the whole.

    Made on the host at data preparation. Every rank gets the same sequences in the same order, some with no token.
    """
    local = split_tokens(packed.lengths, layout=layout, size=size, rank=rank)
    real_T, chunks = local.is_real_T, chunk_count(layout, size)
    sequence_T = local.sequence_T[real_T]
    chunk_size_N = [padded_length(n, layout, size) // chunks for n in packed.lengths]
    chunk_T = local.position_T[real_T] // torch.tensor(chunk_size_N, dtype=torch.int64)[sequence_T]
    chunk_T += sequence_T * chunks
    lengths = torch.bincount(sequence_T, minlength=len(packed.lengths)).tolist()
    index = local.source_T[real_T].to(packed.loss_mask.device)
    return select_tokens_of(packed, index, tuple(lengths), chunk_lengths(chunk_T, chunks, packed))


def chunk_lengths(chunk_T: Tensor, chunks: int, packed: PackedSequences) -> tuple[tuple[int, ...], ...] | None:
    """Tokens of each sequence in each of its chunks, None where that is one. chunk_T: n · chunks + the chunk of each
    token of sequence n, on the host."""
    if chunks == 1:
        return None
    counts = torch.bincount(chunk_T, minlength=len(packed.lengths) * chunks).view(-1, chunks)
    return tuple(tuple(row) for row in counts.tolist())


def select_tokens_of(
    packed: PackedSequences,
    index: Tensor,
    lengths: tuple[int, ...],
    chunk_lengths: tuple[tuple[int, ...], ...] | None = None,
    turns: bool = True,
) -> PackedSequences:
    """The same sequences with the tokens at `index` only ([T'] int64, sequence by sequence), `lengths` of them each.

    chunk_lengths: of `PackedSequences`, for a part that context parallelism cuts. turns: they stay those of the whole;
    without, they are lost, which costs fewer kernels.
    """
    tokens = packed.loss_mask.shape
    taken: dict[str, Any] = {}
    for item in fields(packed):
        value = getattr(packed, item.name)
        if isinstance(value, Tensor) and value.shape == tokens and item.name != "rewards":
            value = value.index_select(0, index)
        taken[item.name] = value
    # A defect is raised by the step on all ranks together, not here on the rank that happens to hold it.
    taken |= {
        "lengths": lengths,
        "chunk_lengths": chunk_lengths,
        "positions": packed.response_positions.index_select(0, index),
        "invalid": (),
        "padded_width": None,
    }
    if turns:
        unit_ids, unit_counts = packed.unit_numbers()
        taken |= {"unit_ids": unit_ids.index_select(0, index), "unit_counts": unit_counts}
    return PackedSequences(**taken)
