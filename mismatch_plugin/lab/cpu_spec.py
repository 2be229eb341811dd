"""Layer spec that lets GPTModel run on CPU with sequence parallelism, packed sequences and context parallelism.

megatron-core's local spec refuses these three without Transformer Engine. Two modules put in through its `ModuleSpec`
seam lift that: a norm that marks its parameters `sequence_parallel`, and a core attention that gathers keys and values.

Context-parallel layouts are those of `parallel.context`, every chunk filled with padding behind its own sequence:
RoPE, the gather of keys and sequence parallelism need the same number of tokens on every rank. This is exact: the
causal mask hides padding from every real token, and the loss selects it away.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
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
        _mark_sequence_parallel(self, config)


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm whose weights' gradients megatron sums over TP under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_sequence_parallel(self, config)


def _mark_sequence_parallel(norm: torch.nn.Module, config: TransformerConfig) -> None:
    for parameter in norm.parameters():
        setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - megatron's own attribute


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


def block_spec(
    config: TransformerConfig, cp_layout: CpLayout, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """megatron's local GPT layer with the two modules above, for the layers of this pipeline stage (or chunk of it)."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # The router asks whether this is None, and without Transformer Engine it is not even defined.
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010 - not among the names that the module declares
    norm: Any = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    submodules: Any = layer.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = norm
    attention = submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=CoreAttention, params={"cp_layout": cp_layout})
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def mtp_spec(config: TransformerConfig, spec: TransformerBlockSubmodules, vp_stage: int | None = None) -> Any:
    """megatron's local multi-token prediction block around the last layer of `spec`, with the norm above."""
    block: Any = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = spec.layer_norm
    return block
