"""Megatron weights as a Hugging Face Llama checkpoint, exactly.

    state = llama_state_dict(gather_parameters(model), settings)       # from any tp × pp; collective over both
    LlamaForCausalLM(LlamaConfig(**llama_config(settings))).load_state_dict(state)

Importing this imports megatron-core, but not transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mismatch_plugin.lab.model_settings import ModelSettings
from mismatch_plugin.lab.parameters import EMBEDDING, OUTPUT

_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def llama_config(settings: ModelSettings, *, eos: int | None = None, pad: int | None = None) -> dict[str, Any]:
    """The fields of transformers' LlamaConfig for this model: plain JSON.

    Raises ValueError for a model that is not Llama-like.
    """
    if (settings.norm, settings.activation, settings.position) != ("RMSNorm", "swiglu", "rope"):
        raise ValueError("only a model with RMSNorm, swiglu and rope is a Llama: export of others is not there.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": settings.vocab,
        "hidden_size": settings.hidden,
        "intermediate_size": settings.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_groups,
        "head_dim": settings.hidden // settings.heads,
        "max_position_embeddings": settings.max_length,
        "rms_norm_eps": 1e-5,  # megatron's default, which the lab's model keeps; so is the base of RoPE
        "rope_theta": 10000.0,
        "tie_word_embeddings": settings.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def llama_state_dict(weights: Mapping[str, Tensor], settings: ModelSettings) -> dict[str, Tensor]:
    """Full megatron weights by global name (`gather_parameters`) under Llama's names, values unchanged.

    megatron's qkv matrix holds, for each group of query heads, those heads, the group's key head and its value head;
    its first MLP matrix the gate and then the up projection.
    Raises ValueError for a weight that Llama does not have.
    """
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            state[_known(_TOP, name, name)] = weight
            continue
        prefix, part = f"model.layers.{layer[1]}.", layer[2]
        if part == "self_attention.linear_qkv.weight":
            head = settings.hidden // settings.heads
            queries = settings.heads // settings.kv_groups
            grouped = weight.view(settings.kv_groups, queries + 2, head, settings.hidden)
            for letter, heads in zip("qkv", grouped.split([queries, 1, 1], dim=1), strict=True):
                state[f"{prefix}self_attn.{letter}_proj.weight"] = heads.reshape(-1, settings.hidden)
        elif part == "mlp.linear_fc1.weight":
            state[f"{prefix}mlp.gate_proj.weight"], state[f"{prefix}mlp.up_proj.weight"] = weight.chunk(2)
        else:
            state[prefix + _known(_LAYER, part, name)] = weight
    if settings.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _known(names: Mapping[str, str], part: str, name: str) -> str:
    if part not in names:
        raise ValueError(f"the weight {name} has no place in a Llama: export of this model is not there.")
    return names[part]
