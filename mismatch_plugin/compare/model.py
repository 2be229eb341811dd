"""A small GPT whose weights have a leading run dimension, so that one program computes N independent models.

Shapes: N runs, P prompts and B responses a run, T positions, R of them the response's, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mismatch_plugin.compare.experiments import Settings, get_task

Weights = dict[str, Tensor]
"""megatron-core's global names, each [N, …]: run n's `{name: weight[n]}` load into its GPTModel."""
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [N · B, heads, T, hidden / heads]."""
Reroute = Callable[[Tensor], Tensor]
"""Experts [N, tokens] that the router chose -> those that are taken."""

WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
FINAL_NORM, OUTPUT = "decoder.final_layernorm.weight", "output_layer.weight"


def layer_name(layer: int, part: str) -> str:
    """The name of a weight of layer 0, 1, …"""
    return f"decoder.layers.{layer}.{part}.weight"


def mlp_names(settings: Settings) -> list[str]:
    """Of every expert of a layer, or of its one MLP."""
    return [f"mlp.experts.local_experts.{e}" for e in range(settings.experts)] or ["mlp"]


def initial_weights(settings: Settings, seeds: Sequence[int]) -> Weights:
    """Weights of one run a seed: normal, norms 1. A weight depends on its run's seed and its name only."""
    task, hidden, ffn = get_task(settings.task), settings.hidden, settings.ffn
    length = len(task.prompts(1, 0)[0]) + task.max_response
    root = math.sqrt(hidden)
    # Rows, columns, standard deviation.
    sizes: dict[str, tuple[int, int, float]] = {
        WORDS: (task.vocab, hidden, 0.5),
        POSITIONS: (length, hidden, 0.5),
        OUTPUT: (task.vocab, hidden, 0.05),
        FINAL_NORM: (1, hidden, 0.0),
    }
    for layer in range(settings.layers):
        name = partial(layer_name, layer)
        sizes[name("input_layernorm")] = 1, hidden, 0.0
        sizes[name("self_attention.linear_qkv")] = 3 * hidden, hidden, 0.7 / root
        sizes[name("self_attention.linear_proj")] = hidden, hidden, 0.4 / root
        sizes[name("pre_mlp_layernorm")] = 1, hidden, 0.0
        for mlp in mlp_names(settings):
            sizes[name(f"{mlp}.linear_fc1")] = 2 * ffn, hidden, 0.7 / root
            sizes[name(f"{mlp}.linear_fc2")] = hidden, ffn, 0.4 / math.sqrt(ffn)
        if settings.experts:
            sizes[name("mlp.router")] = settings.experts, hidden, 1.0 / root

    def drawn(seed: int, name: str) -> Tensor:
        rows, columns, deviation = sizes[name]
        if not deviation:
            return torch.ones(columns)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}.{name}".encode()))
        return torch.randn(rows, columns, generator=generator) * deviation

    return {name: torch.stack([drawn(seed, name) for seed in seeds]) for name in sizes}


def forward(
    settings: Settings, weights: Weights, ids_NBT: Tensor, past: Cache | None = None, last_only: bool = False,
    reroute: Reroute | None = None,
) -> tuple[Tensor, Cache]:  # fmt: skip
    """(logits [N, B, T, V], cache of past and these positions) of a small GPT: learned positions, RMSNorm, SwiGLU.

    past: keys and values of the same sequences' earlier positions. last_only: logits of the last one, [N, B, 1, V].
    """
    N, B, T = ids_NBT.shape
    start = past[0][0].shape[2] if past else 0
    words = weights[WORDS].gather(1, ids_NBT.reshape(N, B * T, 1).expand(-1, -1, settings.hidden))
    x = (words.view(N, B, T, -1) + weights[POSITIONS][:, None, start : start + T]).view(N, B * T, -1)
    mask = torch.full((T, start + T), -math.inf).triu(start + 1) if T > 1 else None
    cache: Cache = []
    for i in range(settings.layers):

        def own(part: str, layer: int = i) -> Tensor:
            return weights[layer_name(layer, part)]

        qkv = _linear(_norm(x, own("input_layernorm")), own("self_attention.linear_qkv"))
        # megatron's order of rows: head by head q, k, v
        q, k, v = qkv.view(N * B, T, settings.heads, 3, -1).permute(3, 0, 2, 1, 4)
        if past:
            k, v = (torch.cat(parts, dim=2) for parts in zip(past[i], (k, v), strict=True))
        cache.append((k, v))
        if last_only and i == settings.layers - 1:
            q, x, T, mask = q[:, :, -1:], x.view(N, B, T, -1)[:, :, -1], 1, None
        y = _attention(q, k, v, mask)
        x = x + _linear(y.transpose(1, 2).reshape(N, B * T, -1), own("self_attention.linear_proj"))
        x = x + _mlp(settings, _norm(x, own("pre_mlp_layernorm")), own, reroute)
    logits = _linear(_norm(x, weights[FINAL_NORM]), weights[OUTPUT])
    return logits.view(N, B, T, -1), cache


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight[:, None]


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √width + mask) v. torch's own takes three times as long for rows this short."""
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


def _mlp(settings: Settings, x: Tensor, own: Callable[[str], Tensor], reroute: Reroute | None) -> Tensor:
    """The MLP; or of the experts the one whose softmax probability, by the router, is largest, times it (megatron's
    top 1 with `moe_router_pre_softmax`). Every expert is computed: at this size one product is faster than dispatch."""

    def of(mlp: str) -> Tensor:
        gate, up = _linear(x, own(f"{mlp}.linear_fc1")).chunk(2, dim=-1)
        return _linear(F.silu(gate) * up, own(f"{mlp}.linear_fc2"))

    if not settings.experts:
        return of("mlp")
    probabilities = _linear(x, own("mlp.router")).softmax(-1)
    chosen = probabilities.argmax(-1)
    if reroute is not None:
        chosen = reroute(chosen)
    shares = (probabilities * F.one_hot(chosen, settings.experts)).unbind(-1)
    terms = [share[..., None] * of(mlp) for share, mlp in zip(shares, mlp_names(settings), strict=True)]
    return torch.stack(terms).sum(0)


def log_softmax(logits: Tensor) -> Tensor:
    """log π over the last dimension, written out as `_attention` is."""
    logits = logits - logits.detach().amax(-1, keepdim=True)
    return logits - logits.exp().sum(-1, keepdim=True).log()


def response_log_probs(settings: Settings, weights: Weights, prompts_NPT: Tensor, responses_NBR: Tensor) -> Tensor:
    """log π of every token of the responses over the whole vocabulary, [N, B, R, V]; B / P responses a prompt, which
    is computed once for all of them."""
    first, cache = forward(settings, weights, prompts_NPT, last_only=True)
    samples = responses_NBR.shape[1] // prompts_NPT.shape[1]
    logits = first.repeat_interleave(samples, dim=1)
    if responses_NBR.shape[2] > 1:
        rest, _ = forward(settings, weights, responses_NBR[:, :, :-1], repeated(cache, samples))
        logits = torch.cat([logits, rest], dim=2)
    return log_softmax(logits / settings.temperature)


def repeated(cache: Cache, samples: int) -> Cache:
    """A prompt's keys and values for each of its responses, which are neighbours."""
    return [(k.repeat_interleave(samples, dim=0), v.repeat_interleave(samples, dim=0)) for k, v in cache]


def token_log_probs(settings: Settings, weights: Weights, prompts_NPT: Tensor, responses_NBR: Tensor) -> Tensor:
    """log π of the responses' own tokens, [N, B, R]."""
    table = response_log_probs(settings, weights, prompts_NPT, responses_NBR)
    return table.gather(3, responses_NBR[..., None])[..., 0]


def map_weights(weights: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    """Every weight changed."""
    return {name: change(weight) for name, weight in weights.items()}
