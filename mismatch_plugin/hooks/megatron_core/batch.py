"""From samples to what one rank feeds the model and the loss: token ids, rows of the logits, packed log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.data.arrays import Ids
from mismatch_plugin.data.pack import kept_rows, pack
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.log_probs.arguments import RaggedSamplingMask, ragged_mask
from mismatch_plugin.parallel.context import (
    ContextLayout,
    LocalTokens,
    chunk_count,
    chunk_lengths,
    local_positions,
    padded_length,
    select_tokens_of,
    split_tokens,
)
from mismatch_plugin.parallel.groups import ParallelGroups


@dataclass(frozen=True, eq=False)
class MegatronBatch:
    """One micro-batch on one rank.

    tokens, position_ids: [b, s] (packed: [1, T]). rows: [R] int64, the row of the flattened logits that predicts each
    trained token. targets: [R] int64. packed: those R tokens. local: their place in whole sequences. sampling_mask: the
    kept ids of the R targets; None where nothing was filtered.
    """

    tokens: Tensor
    position_ids: Tensor
    rows: Tensor
    targets: Tensor
    packed: PackedSequences
    local: LocalTokens | None = field(default=None, repr=False)
    sampling_mask: RaggedSamplingMask | None = field(default=None, repr=False)

    @property
    def packed_seq_params(self) -> Any:
        """megatron's PackedSeqParams for packed sequences; None for [b, s]."""
        return None if self.local is None else packed_seq_params(self.local)

    @property
    def padded_seq_params(self) -> Any:
        """The same with padding counted as part of each sequence: megatron's MTP reads no padded lengths."""
        return None if self.local is None else packed_seq_params(replace(self.local, cu_real=self.local.cu_padded))


def packed_seq_params(local: LocalTokens) -> Any:
    """megatron's PackedSeqParams: real and padded cumulative lengths of whole sequences, not of this rank's part."""
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = int(local.cu_padded.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=local.cu_real,
        cu_seqlens_kv=local.cu_real,
        cu_seqlens_q_padded=local.cu_padded,
        cu_seqlens_kv_padded=local.cu_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def make_batch(
    samples: Sequence[Sample],
    groups: ParallelGroups | None = None,
    *,
    layout: ContextLayout = "zigzag",
    form: Literal["thd", "bshd"] = "thd",
    align: int = 1,
    padding_id: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trainer_version: int | str | None = None,
) -> MegatronBatch:
    """One micro-batch for this rank: sequences one after the other (thd) or padded to the longest ([b, s]).

    Logits at position p predict token p + 1, so under context parallelism a token's log-prob is computed where its
    predecessor lives. Rows of prompts, tool tokens and padding are left out.
    align: the local length is made a multiple of it (tp under sequence parallelism).
    trainer_version: as in `data.pack.pack`. The samples' `train_log_probs` are log π_old.
    Where samples have kept ids, all log-probs are over these ids alone.
    Raises ValueError for a sample without prompt or advantage, or what `pack` refuses, or whose kept ids lack the
    sampled one. Invalid log-probs are left to the step.
    """
    for index, sample in enumerate(samples):
        name = index if sample.sample_id is None else sample.sample_id
        if not len(sample.prompt_ids):
            raise ValueError(f"sample {name} has no prompt: its first token has no log-prob to train on.")
        if any(one.kept_ids is not None for one in samples) and sample.kept_ids is None:
            raise ValueError(f"sample {name} has no kept_ids and others have: give them in all or in none.")
        if sample.kept_ids is not None and len(sample.rollout_log_probs) and sample.behaviour_log_probs is None:
            raise ValueError(
                f"sample {name} has kept_ids and no behaviour_log_probs, the log-probs over them: keep both of every "
                f"reply (output_token_sampling_logprobs), or drop the kept ids."
            )
        if sample.advantages is None:
            raise ValueError(f"sample {name} has no advantages: give one number, or one for each token.")
    groups = groups or ParallelGroups()
    size, rank = groups.cp_size, groups.cp_rank
    kept = kept_rows(samples)
    whole = pack(samples, trainer_version=trainer_version, dtype=dtype, checked=False)
    responses = [s.response_ids if s.trained_ids is None else s.trained_ids for s in samples]
    totals = [len(s.prompt_ids) + len(ids) for s, ids in zip(samples, responses, strict=True)]
    ids = _joined([part for s, ids in zip(samples, responses, strict=True) for part in (s.prompt_ids, ids)])
    if form == "thd":
        local = split_tokens(totals, layout=layout, size=size, rank=rank, align=align)
        tokens, positions = local.take(ids, padding_id), local.position_T[None]
        sequence_T, position_T, real_T = local.sequence_T, local.position_T, local.is_real_T
        padded = [padded_length(n, layout, size) for n in totals]
    else:
        local = None
        unit = math.lcm(padded_length(1, layout, size), size * align)
        width = math.ceil(max(totals) / unit) * unit
        padded = [width] * len(samples)
        place = local_positions(width, layout, size, rank)
        starts = torch.tensor([0, *totals]).cumsum(0)
        real = place[None] < torch.tensor(totals)[:, None]
        tokens = torch.where(real, ids[torch.where(real, starts[:-1, None] + place, 0)], padding_id)
        positions = place.expand(len(samples), -1).contiguous()
        sequence_T = torch.arange(len(samples))[:, None].expand_as(positions).flatten()
        position_T, real_T = positions.flatten(), real.flatten()

    prompts = torch.tensor([len(s.prompt_ids) for s in samples] + [0])
    counts_N = torch.tensor([*whole.lengths, 0])
    response_T = position_T + 1 - prompts[sequence_T]  # index of the token that this row predicts in its response
    predicts = real_T & (response_T >= 0) & (response_T < counts_N[sequence_T])
    source_T = torch.where(predicts, whole.offsets[sequence_T] + response_T, 0)
    predicts &= whole.loss_mask[source_T] if whole.loss_mask.numel() else False
    rows = predicts.nonzero().flatten()
    source = source_T[rows]
    counts = torch.bincount(sequence_T[rows], minlength=len(samples))[: len(samples)]
    # A row's chunk is that of the predecessor it is computed at.
    chunks = chunk_count(layout, size)
    chunk = position_T[rows] // (torch.tensor(padded) // chunks)[sequence_T[rows]]
    chunk_T = sequence_T[rows] * chunks + chunk
    packed = select_tokens_of(whole, source, tuple(counts.tolist()), chunk_lengths(chunk_T, chunks, whole))
    return MegatronBatch(
        tokens.to(device),
        positions.to(device),
        rows.to(device),
        _joined(responses)[source].to(device),
        packed.to(device).prepared(),
        local,
        None if kept is None else ragged_mask((kept[i] for i in source.tolist()), device),
    )


def _joined(rows: Sequence[Ids]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *rows]))
