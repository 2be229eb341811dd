"""Modules for megatron-core's `ModuleSpec` that run on CPU, where its own need Transformer Engine.

A norm that marks its weight for sequence parallelism, and a core attention for packed (thd) sequences and context
parallelism. Context-parallel layouts are those of `parallel.context`, every chunk filled with padding behind its own
sequence: the causal mask hides padding from every real token, and the loss selects it away.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from mismatch_plugin.parallel.context import local_positions

CpLayout = Literal["zigzag", "contiguous"]


@lru_cache(maxsize=256)
def _causal_mask(padded: tuple[int, ...], layout: CpLayout, cp_size: int, cp_rank: int) -> Tensor:
    """[local queries, all keys], True where a query sees a key; keys in the order in which CP ranks are gathered."""
    sequences, positions = [], []
    for rank in range(cp_size):
        local = [local_positions(n, layout, cp_size, rank) for n in padded]
        positions.append(torch.cat(local))
        sequences.append(torch.repeat_interleave(torch.tensor([p.numel() for p in local])))
    query_sequence, query_position = sequences[cp_rank][:, None], positions[cp_rank][:, None]
    return (query_sequence == torch.cat(sequences)) & (query_position >= torch.cat(positions))


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight's gradient megatron sums over TP under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined] - megatron's own


class CoreAttention(MegatronModule):
    """Causal attention by torch's SDPA, for dense and packed (thd) inputs, grouped queries, and both CP layouts.

    Collectives, with context parallelism: an all-gather of keys and one of values, backward a reduce-scatter of each.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        cp_layout: CpLayout = "zigzag",
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels or 1)
        self.cp_group: Any = (
            pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()
        )
        self.cp_layout: CpLayout = cp_layout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[s, b, heads, d] and [s, b, kv heads, d] (packed: without b) to [s, b, heads·d] (packed: [s, heads·d]).

        `attention_mask` is ignored: the mask is causal within each sequence.
        """
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        packed = packed_seq_params is not None
        if packed:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            ends = packed_seq_params.cu_seqlens_q_padded
            ends = packed_seq_params.cu_seqlens_q if ends is None else ends  # of padded sequences, in RL trainers
            padded = tuple(ends.diff().tolist())
        else:
            padded = (query.size(0) * cp_size,)
        if cp_size > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        mask = _causal_mask(padded, self.cp_layout, cp_size, cp_rank).to(query.device)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, mask, scale=self.scale, enable_gqa=True)
        output = output.permute(2, 0, 1, 3).flatten(2)
        return output.squeeze(1) if packed else output
