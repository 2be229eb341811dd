"""The data layout of slime and miles: one tensor a sample, context-parallel shares of two zigzag chunks.

A sequence of n tokens (prompt and response) is cut into 2·cp chunks of ceil(n / (2·cp)); rank r owns chunks r and
2·cp − 1 − r. What a rank holds of a response are the tokens whose *predicting* position lies in its chunks, the first
chunk's before the second's; it may be none.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.parallel.groups import ParallelGroups


def owned_ranges(
    total: int, response: int, cp_size: int, cp_rank: int, padded: int | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two half-open ranges of response positions that a rank holds.

    total, response: tokens of the whole sequence and of its response. padded: what the chunks are cut from, where that
    is not `total` (a padded batch).
    """
    if cp_size == 1:
        return (0, response), (response, response)
    prompt, chunk = total - response, -(-(padded or total) // (2 * cp_size))
    ranges = []
    for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        start, stop = max(index * chunk, prompt - 1), min((index + 1) * chunk, total - 1)
        ranges.append((start + 1 - prompt, stop + 1 - prompt) if start < stop else (0, 0))
    return ranges[0], ranges[1]


def pack_local(
    args: Namespace,
    batch: Mapping[str, Any],
    groups: ParallelGroups,
    needs: Sequence[str] = (),
    **tokens: Sequence[Tensor] | None,
) -> PackedSequences:
    """This rank's tokens of a micro-batch. No collective, no host sync on what the samples hold.

    batch: loss_masks ([response] a sample, whole on every rank; anything but 0 trains), total_lengths,
        response_lengths, and under `--qkv-format bshd` (miles) max_seq_lens, which the chunks are cut from.
    needs: `Unit.needs`, what is to be said of the whole sequences under context parallelism.
    tokens: per-token fields of `PackedSequences`, [this rank's tokens] a sample; None or [] leaves one out. All are
        detached but the entropy, whose gradient is the bonus.
    Raises ValueError where a field does not cover this rank's tokens of a sample.
    """
    masks, totals, responses = batch["loss_masks"], batch["total_lengths"], batch["response_lengths"]
    padded = batch.get("max_seq_lens") if getattr(args, "qkv_format", "thd") == "bshd" else None
    padded = padded or [None] * len(totals)
    size, rank = groups.cp_size, groups.cp_rank
    ranges = [
        owned_ranges(total, response, size, rank, width)
        for total, response, width in zip(totals, responses, padded, strict=True)
    ]
    lengths = tuple((b - a) + (d - c) for (a, b), (c, d) in ranges)
    for sample, (mask, response) in enumerate(zip(masks, responses, strict=True)):
        if mask.shape != (response,):
            raise ValueError(
                f"loss_masks of sample {sample} has shape {tuple(mask.shape)}, its response {response} tokens: the "
                f"mask must cover the whole response on every rank."
            )
    fields: dict[str, Any] = {}
    for name, values in tokens.items():
        for sample, (value, length) in enumerate(zip(values or (), lengths, strict=bool(values))):
            if value.shape != (length,):
                raise ValueError(
                    f"{name} of sample {sample} has shape {tuple(value.shape)}, but this rank holds {length} of "
                    f"the {responses[sample]} response tokens (rank {rank} of {size} in context parallelism)."
                )
        if values:
            joined = torch.cat(list(values))
            fields[name] = joined if name == "entropy" else joined.detach()

    def mine(rows: Sequence[Tensor]) -> Tensor:
        return torch.cat([row[start:stop] for row, parts in zip(rows, ranges, strict=True) for start, stop in parts])

    mask = mine(masks)
    if size > 1:
        positions = [torch.arange(start, stop) for parts in ranges for start, stop in parts]
        fields["positions"] = torch.cat(positions).to(mask.device)
        if "unit_ids" in needs:
            whole = PackedSequences(loss_mask=torch.cat(list(masks)) != 0, lengths=tuple(responses))
            unit_ids, fields["unit_counts"] = whole.unit_numbers()
            fields["unit_ids"] = mine(unit_ids.split(list(responses)))
        if "chunk_lengths" in needs:
            before, between = (0,) * rank, (0,) * (2 * (size - rank) - 2)
            fields["chunk_lengths"] = tuple((*before, b - a, *between, d - c, *before) for (a, b), (c, d) in ranges)
    return PackedSequences(loss_mask=mask != 0, lengths=lengths, **fields)
