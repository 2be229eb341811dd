"""A small GPT whose weights carry a leading run dimension, so that one program computes N independent models.

Names, shapes and values are those of megatron-core's GPTModel with `position="learned_absolute"`: run n's weights,
`{name: weight[n]}`, load there (`lab.parameters.load_parameters`) and give the same log-probs.

Shapes: N runs, B sequences a run, T positions, H width, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
"""megatron's global names; [N, …] each."""
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [N · B, heads, T, H / heads]."""
Reroute = Callable[[Tensor], Tensor]
"""Experts [N, tokens] that the router chose -> those that are taken."""

WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
FINAL_NORM, OUTPUT = "decoder.final_layernorm.weight", "output_layer.weight"
_EPSILON = 1e-5
"""megatron's default of `layernorm_epsilon`."""


class Shape(NamedTuple):
    """Sizes of the model; all query heads have keys and values of their own. experts 0: a dense model."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    max_length: int
    experts: int = 0


class _Layer(NamedTuple):
    """Names of a layer's weights."""

    norm: str
    qkv: str
    proj: str
    mlp_norm: str
    router: str
    mlps: tuple[tuple[str, str], ...]
    """(fc1, fc2) of every expert, or of the one MLP."""


def layer_names(layer: int, experts: int = 0) -> _Layer:
    """Of layer 0, 1, …"""
    parts = ("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm")
    parts += ("mlp.router",)
    mlps = [f"mlp.experts.local_experts.{e}" for e in range(experts)] or ["mlp"]

    def name(part: str) -> str:
        return f"decoder.layers.{layer}.{part}.weight"

    pairs = tuple((name(f"{mlp}.linear_fc1"), name(f"{mlp}.linear_fc2")) for mlp in mlps)
    return _Layer._make([*map(name, parts), pairs])


def initial_weights(shape: Shape, seeds: Sequence[int]) -> Weights:
    """Weights of one run a seed: normal, norms 1. A weight depends on its run's seed and its name only."""
    hidden, ffn = shape.hidden, shape.ffn
    deviations: dict[str, tuple[tuple[int, ...], float]] = {
        WORDS: ((shape.vocab, hidden), 0.5),
        POSITIONS: ((shape.max_length, hidden), 0.5),
        OUTPUT: ((shape.vocab, hidden), 0.05),
        FINAL_NORM: ((hidden,), 0.0),
    }
    for layer in (layer_names(i, shape.experts) for i in range(shape.layers)):
        deviations |= {
            layer.norm: ((hidden,), 0.0),
            layer.qkv: ((3 * hidden, hidden), 0.7 / math.sqrt(hidden)),
            layer.proj: ((hidden, hidden), 0.4 / math.sqrt(hidden)),
            layer.mlp_norm: ((hidden,), 0.0),
        }
        for fc1, fc2 in layer.mlps:
            deviations[fc1] = (2 * ffn, hidden), 0.7 / math.sqrt(hidden)
            deviations[fc2] = (hidden, ffn), 0.4 / math.sqrt(ffn)
        if shape.experts:
            deviations[layer.router] = (shape.experts, hidden), 1.0 / math.sqrt(hidden)

    def drawn(seed: int, name: str) -> Tensor:
        size, deviation = deviations[name]
        if not deviation:
            return torch.ones(size)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}.{name}".encode()))
        return torch.randn(size, generator=generator) * deviation

    return {name: torch.stack([drawn(seed, name) for seed in seeds]) for name in deviations}


def forward(
    shape: Shape,
    weights: Mapping[str, Tensor],
    ids_NBT: Tensor,
    past: Cache | None = None,
    *,
    last_only: bool = False,
    reroute: Reroute | None = None,
) -> tuple[Tensor, Cache]:
    """(logits [N, B, T, V], cache of past and these positions).

    past: keys and values of the same sequences' earlier positions. last_only: logits of the last one, [N, B, 1, V].
    reroute: changes the experts that were chosen.
    """
    N, B, T = ids_NBT.shape
    start = past[0][0].shape[2] if past else 0
    words = weights[WORDS].gather(1, ids_NBT.reshape(N, B * T, 1).expand(-1, -1, shape.hidden))
    x = words.view(N, B, T, -1) + weights[POSITIONS][:, None, start : start + T]
    x = x.view(N, B * T, -1)
    mask = torch.full((T, start + T), -math.inf).triu(start + 1) if T > 1 else None
    cache: Cache = []
    for i in range(shape.layers):
        layer = layer_names(i, shape.experts)
        qkv = _linear(_norm(x, weights[layer.norm]), weights[layer.qkv])
        # megatron's order of rows: head by head q, k, v
        q, k, v = qkv.view(N * B, T, shape.heads, 3, -1).permute(3, 0, 2, 1, 4)
        if past:
            k, v = (torch.cat(parts, dim=2) for parts in zip(past[i], (k, v), strict=True))
        cache.append((k, v))
        if last_only and i == shape.layers - 1:
            q, x, T = q[:, :, -1:], x.view(N, B, T, -1)[:, :, -1], 1
            mask = None
        y = _attention(q, k, v, mask)
        x = x + _linear(y.transpose(1, 2).reshape(N, B * T, -1), weights[layer.proj])
        x = x + _mlp(_norm(x, weights[layer.mlp_norm]), weights, layer, reroute)
    logits = _linear(_norm(x, weights[FINAL_NORM]), weights[OUTPUT])
    return logits.view(N, B, T, -1), cache


def repeated(cache: Cache, times: int) -> Cache:
    """The cache with every sequence `times` over, neighbours: one prompt's for each of its responses."""
    return [(k.repeat_interleave(times, dim=0), v.repeat_interleave(times, dim=0)) for k, v in cache]


def response_log_probs(
    shape: Shape, weights: Mapping[str, Tensor], prompts_NPT: Tensor, responses_NBR: Tensor, temperature: float = 1.0
) -> Tensor:
    """log π of every token of the responses over the whole vocabulary, [N, B, R, V]; B / P responses a prompt.

    A prompt is computed once for all its responses.
    """
    first, cache = forward(shape, weights, prompts_NPT, last_only=True)
    times = responses_NBR.shape[1] // prompts_NPT.shape[1]
    logits = first.repeat_interleave(times, dim=1)
    if responses_NBR.shape[2] > 1:
        cache = repeated(cache, times)
        rest, _ = forward(shape, weights, responses_NBR[:, :, :-1], cache)
        logits = torch.cat([logits, rest], dim=2)
    return log_softmax(logits / temperature)


def token_log_probs(
    shape: Shape, weights: Mapping[str, Tensor], prompts_NPT: Tensor, responses_NBR: Tensor, temperature: float = 1.0
) -> Tensor:
    """log π of the responses' own tokens, [N, B, R]."""
    log_probs = response_log_probs(shape, weights, prompts_NPT, responses_NBR, temperature)
    return log_probs.gather(3, responses_NBR[..., None])[..., 0]


def map_weights(weights: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> Weights:
    """Every weight changed."""
    return {name: change(weight) for name, weight in weights.items()}


def log_softmax(logits: Tensor) -> Tensor:
    """log π over the last dimension. torch's own takes three times as long for rows this short."""
    logits = logits - logits.detach().amax(-1, keepdim=True)
    return logits - logits.exp().sum(-1, keepdim=True).log()


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √width + mask) v, written out for the same reason."""
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _mlp(x: Tensor, weights: Mapping[str, Tensor], layer: _Layer, reroute: Reroute | None) -> Tensor:
    """The MLP; or of the experts the one whose softmax probability, by the router, is largest, times it (megatron's
    top 1 with `moe_router_pre_softmax`). Every expert is computed: at this size one product is faster than dispatch."""

    def of(fc1: str, fc2: str) -> Tensor:
        gate, up = _linear(x, weights[fc1]).chunk(2, dim=-1)
        return _linear(F.silu(gate) * up, weights[fc2])

    if len(layer.mlps) == 1:
        return of(*layer.mlps[0])
    probabilities = _linear(x, weights[layer.router]).softmax(-1)
    chosen = probabilities.argmax(-1)
    if reroute is not None:
        chosen = reroute(chosen)
    shares = (probabilities * F.one_hot(chosen, len(layer.mlps))).unbind(-1)
    terms = [share[..., None] * of(*mlp) for share, mlp in zip(shares, layer.mlps, strict=True)]
    return torch.stack(terms).sum(0)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPSILON) * weight[:, None]
