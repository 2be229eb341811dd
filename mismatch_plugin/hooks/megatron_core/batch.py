"""From samples to what one rank feeds the model and the loss: token ids, rows of the logits, packed log-probs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.core.packed import PackedSequences
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
from mismatch_plugin.parallel.kept_ids import check_kept_ids, ragged_mask
from mismatch_plugin.parallel.log_prob_arguments import RaggedSamplingMask
from mismatch_plugin.rollout.packing import numbered_versions
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.data.sampling import remaining_bias


@dataclass(frozen=True)
class Sample:
    """One response. Per-token lists are as long as `response_ids`; advantage may be one number or one a token.

    loss_mask: 1 where a response token trains (None: all). rollout_log_probs: what the rollout engine returned.
    kept_ids: the ids that the sampler's filters left to choose from, a list a token (empty: unfiltered; SGLang's
    sampling mask). Log-probs are then over these ids alone, and every other one of the sample must be, too.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    advantage: float | Sequence[float]
    rollout_log_probs: Sequence[float | None] | None = None
    old_log_probs: Sequence[float] | Tensor | None = None
    ref_log_probs: Sequence[float] | Tensor | None = None
    loss_mask: Sequence[int] | None = None
    weight_versions: Sequence[int] | None = None
    kept_ids: Sequence[Sequence[int]] | None = None
    id: object = None

    @classmethod
    def from_record(
        cls, record: RolloutRecord, advantage: float | Sequence[float], *, versions: Mapping[str, int] | None = None
    ) -> Sample:
        """One record of a rollout. With kept ids its rollout log-probs are `behaviour_log_probs`, renormalised over
        them.

        versions: weight version → number, of the whole batch; `rollout.packing.number_versions` makes it. None: left
            out.
        Raises ValueError where a token that trains has no version, or a record has kept ids without the log-probs
        over them. Warns MismatchWarning as `rollout.packing.to_packed`, of the bias that the sampling leaves.
        """
        kept, log_probs = record.kept_ids, record.rollout_log_probs
        if kept is not None:
            if record.behaviour_log_probs is None:
                raise ValueError(
                    f"sample {record.sample_id} has kept_ids and no behaviour_log_probs, the log-probs over them: keep "
                    f"both of the reply (output_token_sampling_logprobs), or drop the kept ids."
                )
            log_probs = record.behaviour_log_probs
        if note := remaining_bias(record.sampling, has_kept_ids=kept is not None):
            warnings.warn(note, MismatchWarning, stacklevel=2)
        return cls(
            record.prompt_ids,
            record.response_ids,
            advantage,
            rollout_log_probs=log_probs,
            loss_mask=record.loss_mask,
            weight_versions=None if versions is None else numbered_versions(record, versions),
            kept_ids=kept,
            id=record.sample_id,
        )


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
    trainer_version: int | None = None,
) -> MegatronBatch:
    """One micro-batch for this rank: sequences one after the other (thd) or padded to the longest ([b, s]).

    Logits at position p predict token p + 1, so under context parallelism a token's log-prob is computed where its
    predecessor lives. Rows of prompts, tool tokens and padding are left out.
    align: the local length is made a multiple of it (tp under sequence parallelism).
    trainer_version: number of the weights that are about to train, which `rs.max_staleness` counts back from.
    Raises ValueError for a sample without prompt, or whose lists differ in length, or whose kept ids lack the sampled
    one.
    """
    groups = groups or ParallelGroups()
    size, rank = groups.cp_size, groups.cp_rank
    whole = _pack_responses(samples, dtype, trainer_version)
    kept = _kept_ids(samples)
    totals = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    ids = torch.tensor([i for s in samples for i in (*s.prompt_ids, *s.response_ids)])
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
    responses = torch.tensor([*whole.lengths, 0])
    response_T = position_T + 1 - prompts[sequence_T]  # index of the token that this row predicts in its response
    predicts = real_T & (response_T >= 0) & (response_T < responses[sequence_T])
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
    response_ids = torch.tensor([i for s in samples for i in s.response_ids], dtype=torch.int64)
    return MegatronBatch(
        tokens.to(device),
        positions.to(device),
        rows.to(device),
        response_ids[source].to(device),
        packed.to(device).prepared(),
        local,
        None if kept is None else ragged_mask((kept[i] for i in source.tolist()), device),
    )


def _rows(samples: Sequence[Sample], name: str) -> list[Any] | None:
    """A field of every sample; None where none has it."""
    values = [getattr(s, name) for s in samples]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        missing = next(s.id if s.id is not None else i for i, s in enumerate(samples) if getattr(s, name) is None)
        raise ValueError(f"{name} is missing in sample {missing} and present in others: give it in all or none.")
    return values


def _kept_ids(samples: Sequence[Sample]) -> list[Sequence[int]] | None:
    """The kept ids of every response token, sample after sample."""
    rows = _rows(samples, "kept_ids")
    for index, (sample, kept) in enumerate(zip(samples, rows or (), strict=False)):
        check_kept_ids(kept, sample.response_ids, sample.loss_mask, index if sample.id is None else sample.id)
    return None if rows is None else [kept for row in rows for kept in row]


def _pack_responses(samples: Sequence[Sample], dtype: torch.dtype, trainer_version: int | None) -> PackedSequences:
    for index, sample in enumerate(samples):
        if not sample.prompt_ids:
            raise ValueError(f"sample {sample.id or index} has no prompt: its first token has no log-prob to train on.")

    def rows(name: str, kind: torch.dtype = dtype) -> list[Any] | None:
        values = _rows(samples, name)
        return None if values is None else [_as_tensor(value, kind) for value in values]

    return PackedSequences.from_lists(
        rollout_log_probs=rows("rollout_log_probs"),
        loss_masks=[s.loss_mask if s.loss_mask is not None else [1] * len(s.response_ids) for s in samples],
        advantages=[torch.as_tensor(s.advantage, dtype=dtype) for s in samples],
        old_log_probs=rows("old_log_probs"),
        ref_log_probs=rows("ref_log_probs"),
        weight_versions=rows("weight_versions", torch.int64),
        trainer_version=trainer_version,
        sequence_ids=[i if s.id is None else s.id for i, s in enumerate(samples)],
    )


def _as_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(values, Tensor):
        return values.to(dtype)
    return torch.tensor([float("nan") if v is None else v for v in values], dtype=dtype)
