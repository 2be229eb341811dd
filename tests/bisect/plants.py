"""Tiny models of three families, and faults of one module each, planted on the trainer's side."""

from __future__ import annotations

from collections.abc import Mapping
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
DENSE, MOE = FAMILIES[:2], FAMILIES[2:]
VOCAB = 256
IDS = [5 + (7 * place * place + place) % 240 for place in range(48)]


def tiny(family: Family, seed: int) -> Any:
    """Three layers, biases in the attention. Llama's norms are all ones, as in a fresh model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}
    shape |= {"max_position_embeddings": 512, "initializer_range": 0.2}
    shape |= {"tie_word_embeddings": family in DENSE}  # SGLang leaves the other's head at zero if it is tied
    if family in MOE:
        shape |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or (parameter.dim() == 1 and family != "llama"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.float().eval().requires_grad_(False)


def trainer_of(model: Any, dtype: torch.dtype = torch.float32) -> Trainer:
    """Weights are rounded to `dtype`, in which it computes."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return Trainer(model, lambda ids: model(ids, use_cache=False).logits)


def build(family: Any) -> list[nn.Module]:
    """For `--megatron`: the same model as megatron-core's, in a list and wrapped, as its trainers hold it."""
    from examples.megatron_core.from_hugging_face import of

    return [nn.DataParallel(of(tiny(family, 0)))]


class Fault(NamedTuple):
    """Where it must be found, and what is said. changes: attribute → its new value, or a function of the old one."""

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


class _Fp8Cache:
    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        return [kept.to(torch.float8_e4m3fn).to(kept.dtype) for kept in (keys, values)]


def _cached(call: Any) -> Any:
    return lambda **given: call(**{**given, "cache": _Fp8Cache()})


def _packed(call: Any) -> Any:
    """Tokens of the second half do not see the first, as if they were another sequence."""
    places = torch.arange(len(IDS))
    sees = (places[:, None] >= places) & (places[:, None] // 24 == places // 24)
    return lambda **given: call(**{**given, "attention_mask": sees[None, None]})


_BASE = 5e4 ** -(torch.arange(8) / 8)
_ATTENTION, _MLP, _IN = "model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.1.input_layernorm"
_CORE, _PROJ, _NORM = f"{_ATTENTION}.attention", f"{_ATTENTION}.o_proj", "model.layers.1.post_attention_layernorm"
_DROPOUT = {f"{_ATTENTION}.training": True, f"{_ATTENTION}.attention_dropout": 0.1}
FAULTS = {
    "transposed": Fault(_PROJ, "output", "projection", {f"{_PROJ}.weight.data": lambda weight: weight.T}),
    "RoPE base": Fault("model.layers.0.self_attn.attention", "input", "RoPE", {"model.rotary_emb.inv_freq": _BASE}),
    "eps": Fault(_NORM, "output", "eps", {f"{_NORM}.variance_epsilon": 1e-3}),
    "scale": Fault(_CORE, "output", "scale", {f"{_ATTENTION}.scaling": 0.275}),
    "dropout": Fault(_CORE, "output", "dropout", _DROPOUT),
    "fp8 cache": Fault(_CORE, "input", "cache", {f"{_ATTENTION}.forward": _cached}),
    "router order": Fault(f"{_MLP}.experts", "routing", "top-k", {f"{_MLP}.gate.norm_topk_prob": False}, MOE),
    "head not tied": Fault("lm_head", "output", "other values", {"lm_head.weight": lambda own: nn.Parameter(2 * own)}),
    "activation": Fault(f"{_MLP}.down_proj", "input", "activation", {f"{_MLP}.act_fn": nn.GELU()}, DENSE),
    "expert activation": Fault(f"{_MLP}.experts", "output", "", {f"{_MLP}.experts.act_fn": nn.GELU()}, MOE),
    "packed neighbours": Fault(_CORE, "output", "mask", {f"{_ATTENTION}.forward": _packed}),
    "bf16 norm": Fault(_IN, "output", "norm", {f"{_IN}.forward": lambda call: lambda x: call(x).bfloat16().to(x)}),
    "no bias": Fault(f"{_ATTENTION}.q_proj", "output", "q_proj has no bias", {f"{_ATTENTION}.q_proj.bias": None}),
}

_ATTENTION, _MLP = "decoder.layers.1.self_attention", "decoder.layers.0.mlp"
_NORM = "decoder.layers.1.pre_mlp_layernorm"
_CORE, _QKV, _PROJ = f"{_ATTENTION}.core_attention", f"{_ATTENTION}.linear_qkv", f"{_ATTENTION}.linear_proj"
_BY_HEAD = torch.arange(128).view(2, 4, 16).transpose(0, 1).flatten()  # not a group's queries, key and value together
_OWN_HEAD = {"share_embeddings_and_output_weights": False, "output_layer.weight": lambda own: nn.Parameter(1.1 * own)}
_GELU, _EARLY = {"config.activation_func": F.gelu}, {"config.moe_router_pre_softmax": True}  # of all layers
_EXPERT = f"{_MLP}.experts.local_experts.0.config.activation_func"
MEGATRON_FAULTS = {
    "transposed": Fault(_PROJ, "output", "projection", {f"{_PROJ}.weight.data": lambda weight: weight.T}),
    "rows by head": Fault(_QKV, "output", "keys", {f"{_QKV}.weight.data": lambda own: own[_BY_HEAD]}),
    "no bias": Fault(_QKV, "output", "linear_qkv has no bias", {f"{_QKV}.bias": None}),
    "no bias behind": Fault(_PROJ, "output", "linear_proj has no bias", {f"{_PROJ}.bias": None}),
    "RoPE": Fault(_CORE.replace("1", "0"), "input", "RoPE", {"rotary_pos_emb.inv_freq": _BASE}),
    "eps": Fault(_NORM, "output", "eps", {f"{_NORM}.eps": 1e-3}),
    "scale": Fault(_CORE, "output", "scale", {f"{_CORE}.softmax_scale": 0.275}),
    "head not tied": Fault("output_layer", "output", "other values", _OWN_HEAD),
    "activation": Fault(f"{_MLP}.linear_fc2", "input", "activation", _GELU, DENSE),
    "router order": Fault(f"{_MLP}.experts", "routing", "top-k", _EARLY, MOE),
    "expert activation": Fault(f"{_MLP}.experts", "output", "experts", {_EXPERT: F.gelu}, MOE),
}
