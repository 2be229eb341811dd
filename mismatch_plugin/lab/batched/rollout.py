"""The rollout side: the weights in another numerical form, and responses sampled from them for N runs at once."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.lab.batched.model import (
    OUTPUT,
    POSITIONS,
    WORDS,
    Reroute,
    Shape,
    Weights,
    forward,
    log_softmax,
    map_weights,
    repeated,
)
from mismatch_plugin.lab.engines import BITS, quantised
from mismatch_plugin.rollout.records import RolloutRecord, WeightSpan
from mismatch_plugin.rollout.sampling import SamplingParameters


class Responses(NamedTuple):
    """Each [N, B, R]. ids: `pad` behind the end. log_probs: log π_rollout, 0 there. mask: True up to the end."""

    ids: Tensor
    log_probs: Tensor
    mask: Tensor


def rollout_weights(weights: Mapping[str, Tensor], dtype: str) -> Weights:
    """The weights as the rollout engine has them: linear layers rounded to integers (not embeddings and norms), or as
    they are. Raises ValueError for a form that only the other engines have."""
    if dtype == "float32":
        return dict(weights)
    if dtype not in BITS:
        raise ValueError(f"rollout_dtype {dtype} is not this engine's: choose float32, {', '.join(BITS)}.")
    bits = BITS[dtype]
    linear = {n for n in weights if n not in (WORDS, POSITIONS) and (n == OUTPUT or "linear" in n)}
    return {name: quantised(weight, bits) if name in linear else weight for name, weight in weights.items()}


@torch.no_grad()
def generate(
    shape: Shape,
    weights: Mapping[str, Tensor],
    prompts_NPT: Tensor,
    noise_NBRV: Tensor,
    *,
    samples: int,
    temperature: float = 1.0,
    eos: int | None = None,
    pad: int = 0,
    reroute: Reroute | None = None,
) -> Responses:
    """`samples` responses a prompt, as long as the noise; with `eos` they end there.

    noise_NBRV: Exponential(1) draws. argmax p / E draws from p; runs that share noise and weights draw the same.
    reroute: as in `forward`.
    """
    logits, cache = forward(shape, weights, prompts_NPT, last_only=True, reroute=reroute)
    cache = repeated(cache, samples)
    logits = logits.repeat_interleave(samples, dim=1)
    N, B, R, _ = noise_NBRV.shape
    alive = torch.ones(N, B, dtype=torch.bool)
    ids, log_probs, mask = [], [], []
    for t in range(R):
        log_p = log_softmax(logits[:, :, 0] / temperature)
        drawn = (log_p.exp() / noise_NBRV[:, :, t]).argmax(-1)
        ids.append(drawn.where(alive, pad))
        log_probs.append(log_p.gather(2, drawn[..., None])[..., 0].where(alive, 0.0))
        mask.append(alive)
        if eos is not None:
            alive = alive & (drawn != eos)
        if t + 1 < R:
            logits, cache = forward(shape, weights, ids[-1][..., None], cache, reroute=reroute)
    return Responses(*(torch.stack(parts, dim=2) for parts in (ids, log_probs, mask)))


def exponential(seeds: Sequence[int], *size: int) -> Tensor:
    """Noise for `generate`, [len(seeds), *size]: of each seed from a generator of its own."""
    return torch.stack(
        [torch.empty(size).exponential_(generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


class ExpertFlips:
    """Instead of a share of the chosen experts another one, each as likely, independently by token and layer.

    Draws of a seed come from its own generator and are shared by its runs: run n is variant n // S, seed n % S.
    """

    def __init__(self, share: float, experts: int, seeds: Sequence[int]) -> None:
        self.share, self.experts = share, experts
        self.generators = [torch.Generator().manual_seed(zlib.crc32(f"{seed}.experts".encode())) for seed in seeds]

    def __call__(self, chosen: Tensor) -> Tensor:
        drawn = torch.stack([torch.rand(2, chosen.shape[1], generator=generator) for generator in self.generators])
        flips, by = drawn.repeat(len(chosen) // len(drawn), 1, 1).unbind(1)
        others = (chosen + 1 + (by * (self.experts - 1)).long()) % self.experts
        return others.where(flips < self.share, chosen)


def expert_flips(share: float, experts: int, seeds: Sequence[int]) -> ExpertFlips | None:
    """None if nothing flips."""
    return ExpertFlips(share, experts, seeds) if share else None


class BatchedEngine:
    """The same engine for one run, as the megatron-core lab uses it: `lab.engines.RolloutEngine`.

    Weights come under megatron's names. Prompts must be of one length, sampling unfiltered. flips: share of
    `ExpertFlips`.
    """

    def __init__(self, shape: Shape, dtype: str = "float32", *, eos: int | None, pad: int, flips: float = 0.0) -> None:
        self.flips = flips
        self.shape, self.dtype, self.eos, self.pad = shape, dtype, eos, pad
        self.weights: Weights = {}
        self.version = -1

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        self.weights = rollout_weights(map_weights(state_dict, lambda w: w.detach()[None]), self.dtype)
        self.version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples_per_prompt: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int,
    ) -> list[RolloutRecord]:
        if top_p != 1.0 or not temperature:
            raise ValueError(f"top_p {top_p}, temperature {temperature}: the batched engine samples unfiltered.")
        noise = exponential([seed], len(prompts) * samples_per_prompt, max_new_tokens, self.shape.vocab)
        # The megatron shim looks at every torch call; nothing in here needs it to.
        with torch._C.DisableTorchFunction():
            drawn = generate(
                self.shape,
                self.weights,
                torch.tensor(prompts)[None],
                noise,
                samples=samples_per_prompt,
                temperature=temperature,
                eos=self.eos,
                pad=self.pad,
                reroute=expert_flips(self.flips, self.shape.experts, [seed]),
            )
        stops = () if self.eos is None else (self.eos,)
        sampling = SamplingParameters(
            temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=stops, seed=seed
        )
        rows: Any = zip(drawn.ids[0].tolist(), drawn.log_probs[0].tolist(), drawn.mask[0].sum(-1).tolist(), strict=True)
        return [
            RolloutRecord(
                prompt_ids=list(prompts[row // samples_per_prompt]),
                response_ids=ids[:length],
                rollout_log_probs=log_probs[:length],
                loss_mask=[1] * length,
                sampling=sampling,
                finish_reason="stop" if ids[length - 1] == self.eos else "length",
                weight_versions=[WeightSpan(version=str(self.version), start=0, end=length)],
            )
            for row, (ids, log_probs, length) in enumerate(rows)
        ]
