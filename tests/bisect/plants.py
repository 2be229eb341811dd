"""Tiny models of three families, and twelve faults of one module each, planted on the trainer's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mismatch_plugin.bisect.engines import Trainer
from mismatch_plugin.sglang.modules import Which

Family = Literal["llama", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = get_args(Family)
VOCAB = 256
IDS = [5 + (7 * place * place + place) % 240 for place in range(48)]
_FP8_KEYS = "sdpa_of_fp8_keys"


def tiny(family: Family, seed: int) -> Any:
    """Three layers, biases in the attention. Llama's norms are all ones, as in a fresh model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    kinds: dict[Family, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family != "qwen3_moe",  # whose head SGLang leaves at zero if it is tied
        "attention_bias": True,
        "initializer_range": 0.2,
    }
    if family == "qwen3_moe":
        shape |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(kinds[family](**shape), attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or (parameter.dim() == 1 and family != "llama"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.float().eval().requires_grad_(False)


def trainer_of(model: Any, dtype: torch.dtype = torch.float32) -> Trainer:
    """Weights are rounded to `dtype`, in which it computes."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return Trainer(model, lambda ids: model(ids, use_cache=False).logits)


def _layer(model: Any) -> Any:
    return model.model.layers[1]


def _transposed(model: Any) -> None:
    projection = _layer(model).self_attn.o_proj
    projection.weight.data = projection.weight.data.T.contiguous()


def _rope_base(model: Any) -> None:
    rotary = model.model.rotary_emb
    width = len(rotary.inv_freq)
    rotary.inv_freq = 5e4 ** -(torch.arange(width) / width)


def _eps(model: Any) -> None:
    _layer(model).post_attention_layernorm.variance_epsilon = 1e-3


def _scale(model: Any) -> None:
    _layer(model).self_attn.scaling *= 1.1


def _dropout(model: Any) -> None:
    attention = _layer(model).self_attn
    attention.training, attention.attention_dropout = True, 0.1


def _fp8_keys(model: Any) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    call = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx == 1:
            key, value = (kept.to(torch.float8_e4m3fn).to(kept.dtype) for kept in (key, value))
        return call(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_FP8_KEYS, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FP8_KEYS, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = _FP8_KEYS


def _router_order(model: Any) -> None:
    gate = _layer(model).mlp.gate
    call = gate.forward

    def forward(hidden: Tensor) -> Any:
        logits, shares, ids = call(hidden)
        return logits, shares.flip(-1), ids

    gate.forward = forward


def _gate_and_up(model: Any) -> None:
    mlp = _layer(model).mlp
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = mlp.up_proj.weight.data, mlp.gate_proj.weight.data


def _untied(model: Any) -> None:
    weight = model.lm_head.weight.data
    model.lm_head.weight = torch.nn.Parameter(weight + 0.02 * torch.randn_like(weight), requires_grad=False)


def _activation(model: Any) -> None:
    mlp = _layer(model).mlp
    (mlp if hasattr(mlp, "act_fn") else mlp.experts).act_fn = torch.nn.GELU()


def _packed_neighbours(model: Any) -> None:
    """Tokens of the second half do not see the first, as if they were another sequence."""
    attention = _layer(model).self_attn
    call = attention.forward

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        places = torch.arange(hidden_states.shape[1])
        half = len(places) // 2
        sees = (places[:, None] >= places) & ((places[:, None] < half) == (places < half))
        return call(hidden_states, **{**kwargs, "attention_mask": sees[None, None]})

    attention.forward = forward


def _bf16_norm(model: Any) -> None:
    norm = _layer(model).input_layernorm
    call = norm.forward
    norm.forward = lambda hidden: call(hidden).bfloat16().to(hidden.dtype)


def _no_bias(model: Any) -> None:
    _layer(model).self_attn.q_proj.bias = None


class Fault(NamedTuple):
    """plant: changes the model. module, which: where it must be found; says: in the verdict's words."""

    plant: Callable[[Any], None]
    module: str
    which: Which
    says: str
    families: tuple[Family, ...] = FAMILIES


_AT = "model.layers.1."
_ATTENTION = f"{_AT}self_attn.attention"
_DENSE: tuple[Family, ...] = ("llama", "qwen3")
FAULTS: dict[str, Fault] = {
    "transposed projection": Fault(_transposed, f"{_AT}self_attn.o_proj", "output", ""),
    "RoPE base": Fault(_rope_base, "model.layers.0.self_attn.attention", "input", "RoPE"),
    "eps": Fault(_eps, f"{_AT}post_attention_layernorm", "output", "norm"),
    "scale": Fault(_scale, _ATTENTION, "output", "scale"),
    "dropout": Fault(_dropout, _ATTENTION, "output", "dropout"),
    "fp8 keys and values": Fault(_fp8_keys, _ATTENTION, "output", "keys and values"),
    "router order": Fault(_router_order, f"{_AT}mlp.experts", "routing", "choice of experts", ("qwen3_moe",)),
    "gate and up": Fault(_gate_and_up, f"{_AT}mlp.gate_proj", "output", "gate and up", _DENSE),
    "head not tied": Fault(_untied, "lm_head", "output", "other values in its weight"),
    "activation": Fault(_activation, f"{_AT}mlp.down_proj", "input", "activation", _DENSE),
    "activation of experts": Fault(_activation, f"{_AT}mlp.experts", "output", "", ("qwen3_moe",)),
    "packed neighbours": Fault(_packed_neighbours, _ATTENTION, "output", "mask"),
    "bf16 norm": Fault(_bf16_norm, f"{_AT}input_layernorm", "output", "norm"),
    "no bias": Fault(_no_bias, f"{_AT}self_attn.q_proj", "output", "q_proj has no bias"),
}
