"""A Hugging Face checkpoint as megatron-core's GPTModel on CPU, for `mismatch-plugin bisect --megatron`. Copy what you
need: with a GPU take your trainer's own function, such as one of Megatron Bridge.

    mismatch-plugin bisect --url URL --checkpoint FOLDER --megatron examples/megatron_core/from_hugging_face.py:build

Llama, Qwen2, Qwen3 and Qwen3-MoE, whole in one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn import functional as F

from examples.megatron_core import cpu_shim

cpu_shim.install()  # before megatron-core asks for a GPU

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def build(folder: str) -> GPTModel:
    """With the checkpoint's weights, in float32."""
    from transformers import AutoModelForCausalLM

    return of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def of(model: Any) -> GPTModel:
    """The same model. model: of transformers."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    if not hasattr(moe_utils, "te_general_gemm"):
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010 - without Transformer Engine it is not even defined
    given, weights = model.config, model.state_dict()
    experts = getattr(given, "num_experts", 0)
    config = TransformerConfig(
        num_layers=given.num_hidden_layers,
        hidden_size=given.hidden_size,
        num_attention_heads=given.num_attention_heads,
        num_query_groups=given.num_key_value_heads,
        kv_channels=getattr(given, "head_dim", None),
        ffn_hidden_size=given.intermediate_size,
        layernorm_epsilon=given.rms_norm_eps,
        qk_layernorm="model.layers.0.self_attn.q_norm.weight" in weights,
        add_bias_linear="model.layers.0.self_attn.o_proj.bias" in weights,  # of MLPs too: zeros
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in weights,
        num_moe_experts=experts or None,
        moe_ffn_hidden_size=given.moe_intermediate_size if experts else None,
        moe_router_topk=given.num_experts_per_tok if experts else 2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(experts or None, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"),
        vocab_size=given.vocab_size,
        max_sequence_length=given.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=given.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=given.tie_word_embeddings,
    )
    for name, value in gpt.named_parameters():
        if name.endswith("bias"):
            value.data.zero_()  # of a router it is drawn
    gpt.load_state_dict(renamed(weights, config), strict=False)
    return gpt.eval()


def renamed(weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Under megatron-core's names. Queries, key and value of a group lie together there, gate and up in one matrix."""
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    one_to_one = {
        "input_layernorm": "input_layernorm",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "self_attn.o_proj": "self_attention.linear_proj",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.gate": "mlp.router",
    }
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for leaf in ("weight", "bias"):
            own = {name.removeprefix(theirs): value for name, value in weights.items() if name.startswith(theirs)}
            own = {name.removesuffix(f".{leaf}"): value for name, value in own.items() if name.endswith(f".{leaf}")}
            found |= {f"{ours}{new}.{leaf}": own[old] for old, new in one_to_one.items() if old in own}
            if "self_attn.q_proj" in own:
                parts = (own[f"self_attn.{part}_proj"] for part in "qkv")
                groups = [part.unflatten(0, (config.num_query_groups, -1)) for part in parts]
                found[f"{ours}self_attention.linear_qkv.{leaf}"] = torch.cat(groups, 1).flatten(0, 1)
            if "mlp.gate_proj" in own:
                found[f"{ours}mlp.linear_fc1.{leaf}"] = torch.cat([own["mlp.gate_proj"], own["mlp.up_proj"]])
        for expert in range(config.num_moe_experts or 0):
            local = f"{ours}mlp.experts.local_experts.{expert}."
            found[f"{local}linear_fc1.weight"] = weights[f"{theirs}mlp.experts.gate_up_proj"][expert]
            found[f"{local}linear_fc2.weight"] = weights[f"{theirs}mlp.experts.down_proj"][expert]
    return found
