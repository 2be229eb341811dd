"""The data layout of slime and miles: one tensor a sample, context-parallel shares of two zigzag chunks.

A sequence of n tokens (prompt and response) is cut into 2·cp chunks of ceil(n / (2·cp)); rank r owns chunks r and
2·cp − 1 − r. What a rank holds of a response are the tokens whose *predicting* position lies in its chunks, the first
chunk's before the second's; it may be none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences


def owned_ranges(
    total: int, response: int, cp_size: int, cp_rank: int, padded: int | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two half-open ranges of response positions that a rank holds.

    total, response: tokens of the whole sequence and of its response. padded: what the chunks are cut from, where that
    is not `total` (a padded batch).
    """
    if cp_size == 1:
        return (0, response), (response, response)
    prompt, chunk = total - response, -(-(total if padded is None else padded) // (2 * cp_size))
    ranges = []
    for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        start, stop = max(index * chunk, prompt - 1), min((index + 1) * chunk, total - 1)
        ranges.append((start + 1 - prompt, stop + 1 - prompt) if start < stop else (0, 0))
    return ranges[0], ranges[1]


def pack_local(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp_size: int,
    cp_rank: int,
    *,
    padded_lengths: Sequence[int] | None = None,
    **tokens: Sequence[Tensor] | None,
) -> PackedSequences:
    """This rank's tokens of a micro-batch. No collective, no host sync on what the samples hold.

    loss_masks: [response] a sample, whole on every rank; anything but 0 trains. tokens: per-token fields of
    `PackedSequences`, [this rank's tokens] a sample; None or [] leaves one out. They are detached.
    Raises ValueError where a field does not cover this rank's tokens of a sample.
    """
    padded = padded_lengths or [None] * len(total_lengths)
    ranges = [
        owned_ranges(total, response, cp_size, cp_rank, pad)
        for total, response, pad in zip(total_lengths, response_lengths, padded, strict=True)
    ]
    lengths = tuple((b - a) + (d - c) for (a, b), (c, d) in ranges)
    for sample, (mask, response) in enumerate(zip(loss_masks, response_lengths, strict=True)):
        if mask.shape != (response,):
            raise ValueError(
                f"loss_masks of sample {sample} has shape {tuple(mask.shape)}, its response {response} tokens: the "
                f"mask must cover the whole response on every rank."
            )
    shares = [mask[start:stop] for mask, parts in zip(loss_masks, ranges, strict=True) for start, stop in parts]
    fields: dict[str, Any] = {}
    for name, values in tokens.items():
        if values:
            for sample, (value, length) in enumerate(zip(values, lengths, strict=True)):
                if value.shape != (length,):
                    raise ValueError(
                        f"{name} of sample {sample} has shape {tuple(value.shape)}, but this rank holds {length} of "
                        f"the {response_lengths[sample]} response tokens (rank {cp_rank} of {cp_size} in context "
                        f"parallelism)."
                    )
            fields[name] = torch.cat(list(values)).detach()
    mask = torch.cat(shares) != 0
    if cp_size > 1:
        positions = [torch.arange(start, stop) for parts in ranges for start, stop in parts]
        fields["positions"] = torch.cat(positions).to(mask.device)
    return PackedSequences(loss_mask=mask, lengths=lengths, **fields)
