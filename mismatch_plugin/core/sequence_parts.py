"""Parts of sequences over which log-ratios are summed: turns, and the chunks that context parallelism cuts.

How many there are is known on the host, so that finding and summing them waits for no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceParts:
    """C parts of N sequences, those of a sequence one after the other. Any may be empty on this rank, or everywhere.

    offsets [C + 1] int64: a part holds this rank's tokens offsets[c] to offsets[c + 1]. index [T] integer: the part of
    each token. first [N + 1] int64: a sequence has the parts first[n] to first[n + 1]. sequence [C] int64: the sequence
    of each part. width: parts of every sequence where all have as many, else 0.
    """

    offsets: Tensor
    index: Tensor
    first: Tensor
    sequence: Tensor
    width: int = 0

    @property
    def splits(self) -> bool:
        """False where every sequence is one part, so that its sums are the parts'."""
        return self.width != 1

    def to_sequences(self, values_KC: Tensor) -> Tensor:
        """Σ over the parts of each sequence: [K, C] float64 → [K, N]."""
        return torch.segment_reduce(values_KC.T.contiguous(), "sum", offsets=self.first, unsafe=True).T

    def earlier(self, sums_C: Tensor) -> Tensor:
        """Σ over the parts of the same sequence that come before: [C] → [C]. All sequences have `width` parts."""
        sums = sums_C.view(-1, self.width)
        return (sums.cumsum(1) - sums).flatten()

    def running(self, values_T: Tensor, whole: bool = False) -> Tensor:
        """Σ over the tokens of the same part up to and with each: [T] → [T] float64. whole: of whole numbers.

        A value beyond ±1e4 counts as ±1e4: it decides for its own sequence, and leaves the others their digits.
        """
        sums = torch.zeros(len(values_T) + 1, dtype=torch.float64, device=values_T.device)
        values, before = sums[1:], sums
        values.copy_(values_T).clamp_(-LARGEST, LARGEST)
        if whole:
            values.cumsum_(0)
        else:  # one scan over all parts, brought back to 0 where each begins: it rounds as one part does, not as all do
            ended = torch.segment_reduce(values, "sum", offsets=self.offsets, unsafe=True)
            resets = torch.zeros_like(sums).index_add_(0, self.offsets[1:], ended)
            values.sub_(resets[:-1]).cumsum_(0)
            before = sums - resets
        return values - before.index_select(0, self.offsets[:-1]).index_select(0, self.index)


LARGEST = 1e4
"""Of one token in a running sum, on every rank."""


def chunk_parts(chunk_lengths: Sequence[Sequence[int]], device: torch.device) -> SequenceParts:
    """The chunks of every sequence, in order. chunk_lengths: this rank's tokens in each, as many chunks a sequence."""
    width = len(chunk_lengths[0]) if chunk_lengths else 1
    lengths = [length for chunks in chunk_lengths for length in chunks]
    tokens = torch.tensor(lengths, dtype=torch.int64, device=device)
    index = torch.repeat_interleave(_numbers(len(lengths), device), tokens, output_size=sum(lengths))
    first = _numbers(len(chunk_lengths) + 1, device) * width
    sequence = _numbers(len(lengths), device) // width
    return SequenceParts(torch.cat([tokens.new_zeros(1), tokens.cumsum(0)]), index, first, sequence, width)


def turn_parts(turn_ids_T: Tensor, turn_counts: Sequence[int], sequence_index_T: Tensor) -> SequenceParts:
    """The turns of every sequence, from the number of each token's turn in its sequence. See `number_turns`."""
    device, parts = turn_ids_T.device, sum(turn_counts)
    counts = torch.tensor(turn_counts, dtype=torch.int64, device=device)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    index = first.index_select(0, sequence_index_T) + turn_ids_T
    sequence = torch.repeat_interleave(_numbers(len(turn_counts), device), counts, output_size=parts)
    return SequenceParts(torch.searchsorted(index, _numbers(parts + 1, device)), index, first, sequence)


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def number_turns(
    loss_mask_T: Tensor, lengths: tuple[int, ...], sequence_index_T: Tensor
) -> tuple[Tensor, tuple[int, ...]]:
    """([T] int64 number of each token's turn in its sequence, turns of each sequence) of whole sequences.

    A turn is a maximal run of tokens that train; those between two belong to the first of them, where they add 0. A
    sequence has at least one, which may be empty. A mask on a device is not waited for: its sequences have as many as
    they could have, ⌈length / 2⌉, of which some are empty.
    """
    before = torch.cat([loss_mask_T.new_zeros(1), loss_mask_T[:-1]]) if len(loss_mask_T) else loss_mask_T
    within = torch.cat([loss_mask_T.new_zeros(1), sequence_index_T[1:] == sequence_index_T[:-1]])[: len(loss_mask_T)]
    starts = loss_mask_T & ~(before & within)
    running = torch.cat([torch.zeros(1, dtype=torch.int64, device=starts.device), starts.cumsum(0)])
    ends = torch.tensor([0, *lengths], device=starts.device).cumsum(0)
    turns = running.index_select(0, ends)
    ids = (running[1:] - turns.index_select(0, sequence_index_T) - 1).clamp_(min=0)
    if loss_mask_T.device.type != "cpu":
        return ids, tuple(max((length + 1) // 2, 1) for length in lengths)
    return ids, tuple(max(count, 1) for count in turns.diff().tolist())
