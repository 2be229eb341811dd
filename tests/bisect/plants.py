"""Tiny models of three families, and faults of one module each, planted on the trainer's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import reduce
from types import FunctionType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mismatch_plugin.bisect.engines import Trainer
from mismatch_plugin.sglang.modules import Which

Family = Literal["llama", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = get_args(Family)
DENSE: tuple[Family, ...] = ("llama", "qwen3")
MOE: tuple[Family, ...] = ("qwen3_moe",)
VOCAB = 256
IDS = [5 + (7 * place * place + place) % 240 for place in range(48)]


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


def build(family: str) -> list[Any]:
    """For `--megatron`: the same model as megatron-core's, in a list and wrapped, as its trainers hold it."""
    from examples.megatron_core.from_hugging_face import of

    return [nn.DataParallel(of(tiny(family, 0)))]  # type: ignore[arg-type]


def _transposed(weight: Tensor) -> Tensor:
    return weight.T.contiguous()


def _fp8(chosen: str) -> str:
    """Another attention function, whose keys and values come from a cache of float8."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    call = ALL_ATTENTION_FUNCTIONS[chosen]

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx == 1:
            key, value = (kept.to(torch.float8_e4m3fn).to(kept.dtype) for kept in (key, value))
        return call(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("fp8", rounded)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fp8", ALL_MASK_ATTENTION_FUNCTIONS[chosen])
    return "fp8"


def _flipped(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden: Tensor) -> Any:
        logits, shares, ids = call(hidden)
        return logits, shares.flip(-1), ids

    return forward


def _swapped(mlp: Any) -> Any:
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = mlp.up_proj.weight.data, mlp.gate_proj.weight.data
    return mlp


def _untied(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight + 0.02 * torch.randn_like(weight), requires_grad=False)


def _packed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Tokens of the second half do not see the first, as if they were another sequence."""

    def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
        places = torch.arange(hidden_states.shape[1])
        half = len(places) // 2
        sees = (places[:, None] >= places) & ((places[:, None] < half) == (places < half))
        return call(hidden_states, **{**kwargs, "attention_mask": sees[None, None]})

    return forward


def _bf16(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda hidden: call(hidden).bfloat16().to(hidden.dtype)


def _by_head(weight: Tensor) -> Tensor:
    """The first query of each group, then the second, …: not a group's queries, key and value together."""
    return weight.unflatten(0, (2, 4, 16)).transpose(0, 1).flatten(0, 2)


def _gelu(config: Any) -> Any:
    other = copy(config)
    other.activation_func = F.gelu
    return other


class Fault(NamedTuple):
    """module, which: where it must be found, and what the verdict says. changes: attribute → its new value, or a
    function of the old one."""

    module: str
    which: Which
    says: str
    changes: Mapping[str, Any]
    families: tuple[Family, ...] = FAMILIES

    def plant(self, model: Any) -> None:
        for path, change in self.changes.items():
            *owners, name = path.split(".")
            owner = reduce(getattr, owners, model)
            setattr(owner, name, change(getattr(owner, name)) if isinstance(change, FunctionType) else change)


_BASE = 5e4 ** -(torch.arange(8) / 8)
_HF, _ATTENTION, _MLP = "model.layers.1.", "model.layers.1.self_attn", "model.layers.1.mlp"
_CORE = f"{_ATTENTION}.attention"
_DROPOUT = {f"{_ATTENTION}.training": True, f"{_ATTENTION}.attention_dropout": 0.1}
_NORM = f"{_HF}post_attention_layernorm"
FAULTS = {
    "transposed": Fault(f"{_ATTENTION}.o_proj", "output", "", {f"{_ATTENTION}.o_proj.weight.data": _transposed}),
    "RoPE base": Fault("model.layers.0.self_attn.attention", "input", "RoPE", {"model.rotary_emb.inv_freq": _BASE}),
    "eps": Fault(_NORM, "output", "eps", {f"{_NORM}.variance_epsilon": 1e-3}),
    "scale": Fault(_CORE, "output", "scale", {f"{_ATTENTION}.scaling": 0.275}),
    "dropout": Fault(_CORE, "output", "dropout", _DROPOUT),
    "fp8 cache": Fault(_CORE, "output", "keys and values", {"model.config._attn_implementation": _fp8}),
    "router order": Fault(f"{_MLP}.experts", "routing", "choice", {f"{_MLP}.gate.forward": _flipped}, MOE),
    "gate and up": Fault(f"{_MLP}.gate_proj", "output", "gate and up", {_MLP: _swapped}, DENSE),
    "head not tied": Fault("lm_head", "output", "other values in its weight", {"lm_head.weight": _untied}),
    "activation": Fault(f"{_MLP}.down_proj", "input", "activation", {f"{_MLP}.act_fn": nn.GELU()}, DENSE),
    "expert activation": Fault(f"{_MLP}.experts", "output", "", {f"{_MLP}.experts.act_fn": nn.GELU()}, MOE),
    "packed neighbours": Fault(_CORE, "output", "mask", {f"{_ATTENTION}.forward": _packed}),
    "bf16 norm": Fault(f"{_HF}input_layernorm", "output", "norm", {f"{_HF}input_layernorm.forward": _bf16}),
    "no bias": Fault(f"{_ATTENTION}.q_proj", "output", "q_proj has no bias", {f"{_ATTENTION}.q_proj.bias": None}),
}

_MC, _ATTENTION, _MLP = "decoder.layers.1.", "decoder.layers.1.self_attention", "decoder.layers.1.mlp"
_CORE, _QKV, _PROJ = f"{_ATTENTION}.core_attention", f"{_ATTENTION}.linear_qkv", f"{_ATTENTION}.linear_proj"
_FIRST = "decoder.layers.0.self_attention.core_attention"
_EARLY = {f"{_MLP}.router.config.moe_router_pre_softmax": True}  # one configuration for all layers
_OWN_HEAD = {"share_embeddings_and_output_weights": False, "output_layer.weight": _untied}
_ONE = {f"{_MLP}.experts.local_experts.3.config": _gelu}
MEGATRON_FAULTS = {
    "transposed": Fault(_PROJ, "output", "", {f"{_PROJ}.weight.data": _transposed}),
    "rows by head": Fault(_QKV, "output", "queries, keys and values", {f"{_QKV}.weight.data": _by_head}),
    "no bias": Fault(_QKV, "output", "linear_qkv has no bias", {f"{_QKV}.bias": None}),
    "no bias behind": Fault(_PROJ, "output", "linear_proj has no bias", {f"{_PROJ}.bias": None}),
    "RoPE base": Fault(_FIRST, "input", "RoPE", {"rotary_pos_emb.inv_freq": _BASE}),
    "eps": Fault(f"{_MC}pre_mlp_layernorm", "output", "eps", {f"{_MC}pre_mlp_layernorm.eps": 1e-3}),
    "scale": Fault(_CORE, "output", "scale", {f"{_CORE}.softmax_scale": 0.275}),
    "head not tied": Fault("output_layer", "output", "other values", _OWN_HEAD),
    "activation": Fault(f"{_MLP}.linear_fc2", "input", "activation", {f"{_MLP}.config": _gelu}, DENSE),
    "choice": Fault("decoder.layers.0.mlp.experts", "routing", "choice of experts", _EARLY, MOE),
    "expert activation": Fault(f"{_MLP}.experts", "output", "experts", _ONE, MOE),
}
