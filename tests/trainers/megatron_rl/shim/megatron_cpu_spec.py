"""For `--spec megatron_cpu_spec layer_spec`: megatron's local GPT layer with attention that takes packed sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from mismatch_plugin.lab.cpu_spec import CoreAttention


class PackedAttention(CoreAttention):
    """Megatron-LM RL gives `cu_seqlens_q` of padded sequences and no `cu_seqlens_q_padded`."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.pop("packed_seq_params", None)
        if packed is not None and packed.cu_seqlens_q_padded is None:
            packed = dataclasses.replace(packed, cu_seqlens_q_padded=packed.cu_seqlens_q)
        return super().forward(query, key, value, attention_mask, packed_seq_params=packed)


layer_spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
layer_spec.submodules.self_attention.submodules.core_attention = PackedAttention
