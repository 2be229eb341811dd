"""Many small RL runs in one tensor program: every seed under every variant of the loss, in one setting.

    warm = warm_weights(settings, seeds)                              # a model that half knows the task
    for records in Runs(settings, seeds, configs, warm).steps(): ...  # after each optimizer step one record a run

The file is in the order of the data: settings, task, model, rollout engine (where the mismatch is), reward, optimizer,
the loop itself, warm-up. Every weight and activation has a leading dimension, the run: run n is variant n // S with
seed n % S. Runs of a seed share initial weights, prompts and sampling noise, and so differ by their loss alone, which
is `mp.policy_loss` of their own responses; no formula of it is written here.

Shapes: N runs, P prompts and B responses a run, T positions, R of them the response's, V vocabulary.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F

import mismatch_plugin as mp
from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.files import replacing

Weights = dict[str, Tensor]
"""megatron-core's global names, each [N, …]: run n's `{name: weight[n]}` load into its GPTModel, to the same log-probs."""
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [N · B, heads, T, hidden / heads]."""
Reroute = Callable[[Tensor], Tensor]
"""Experts [N, tokens] that the router chose -> those that are taken."""

# -------------------------------------------------------------------------------------------------------- settings


class Settings(BaseModel):
    """What the runs of one setting share: task, model, rollout engine, optimizer. The defaults are the comparison's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: str = "reverse6"
    """A name in TASKS."""
    layers: int = Field(2, ge=1)
    """Transformer layers."""
    hidden: int = Field(32, ge=1)
    """Width."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    ffn: int = Field(64, ge=1)
    """Width of the MLP; of each expert."""
    experts: int = Field(0, ge=0)
    """Experts of each layer's MLP, of which a token takes one; 0 is a dense model."""

    rollout_dtype: Literal["float32", "int8", "int4", "int3", "int2"] = "float32"
    """Form of the rollout engine's linear layers; the trainer is float32."""
    staleness: int = Field(0, ge=0)
    """Optimizer steps by which the weights of a rollout batch lag behind those that train on it first."""
    expert_flips: float = Field(0.0, ge=0.0, le=1.0)
    """Share of tokens, in each layer, that the rollout engine gives to another expert than the router's, at random."""
    temperature: float = Field(1.0, gt=0.0)
    """Of the rollout engine and of the trainer's log-probs."""

    steps: int = Field(360, ge=1)
    """Optimizer steps."""
    prompts_per_batch: int = Field(16, ge=1)
    """Prompts of a rollout batch."""
    samples_per_prompt: int = Field(8, ge=2)
    """Responses to each; GRPO's group."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps on a rollout batch, each on its share of every group. With 1, algorithms 2 and 3 are the same
    update."""
    lr: float = Field(3e-3, gt=0.0)
    """AdamW's learning rate, constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = Field(0.0, ge=0.0)
    """AdamW's weight decay."""
    clip_grad: float = Field(1.0, gt=0.0)
    """Gradient norm above which gradients are scaled down."""

    warm_up_target: float = Field(0.6, gt=0.0, le=1.0)
    """Mean probability of the right token at which the supervised warm-up stops: a competence, not a number of steps."""
    warm_up_steps: int = Field(1000, ge=0)
    """Warm-up steps after which it stops in any case; 0: no warm-up."""
    warm_up_batch: int = Field(128, ge=1)
    """Examples of a warm-up step."""
    warm_up_lr: float = Field(3e-3, gt=0.0)
    """Its learning rate."""
    eval_every: int = Field(20, ge=0)
    """Optimizer steps between evaluations on held-out prompts; 0: only before the first and after the last."""
    eval_prompts: int = Field(128, ge=1)
    """Held-out prompts, the same at every evaluation."""

    @field_validator("task")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return get_task(name).name

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas is {list(betas)}: each is at least 0 and below 1.")
        return betas

    @model_validator(mode="after")
    def _fit(self) -> Settings:
        if self.samples_per_prompt % self.mini_batches:
            raise ValueError(
                f"mini_batches {self.mini_batches} must divide the {self.samples_per_prompt} samples of a prompt."
            )
        if self.hidden % self.heads:
            raise ValueError(f"heads {self.heads} must divide hidden, which is {self.hidden}.")
        if self.experts == 1 or (self.expert_flips and not self.experts):
            raise ValueError(
                f"experts {self.experts}, expert_flips {self.expert_flips}: a router chooses from at least 2 experts; "
                f"0 is a dense model, in which nothing flips."
            )
        return self

    @property
    def samples(self) -> int:
        """Responses of a rollout batch."""
        return self.prompts_per_batch * self.samples_per_prompt

    def version_for(self, step: int) -> int:
        """The optimizer step whose weights sample the rollout batch that is first trained on after `step`."""
        return max(0, step - self.staleness)

    def samples_later(self, step: int) -> bool:
        """Whether a rollout batch samples from the weights after `step` optimizer steps."""
        return step == 0 or (step + self.staleness) % self.mini_batches == 0

    def evaluates(self, step: int) -> bool:
        """Whether held-out prompts are asked after `step` optimizer steps."""
        return step in (0, self.steps) or (self.eval_every > 0 and step % self.eval_every == 0)

    def warm_up_key(self, seed: int) -> str:
        """A file name for a seed's warm weights: equal for all settings that start from the same ones."""
        shared = ("task", "layers", "hidden", "heads", "ffn", "experts", "betas", "clip_grad", "eval_prompts")
        values = {name: value for name, value in self.model_dump().items() if name in shared or "warm_up" in name}
        values["version"] = mp.__version__  # another release may draw other initial weights
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.task}-seed{seed}-{digest}.pt"


def seed_for(seed: int, *purpose: object) -> int:
    """A seed for one purpose: independent of every other, and the same in every variant of the run."""
    return zlib.crc32(".".join(map(str, (seed, *purpose))).encode())


# ------------------------------------------------------------------------------------------------------------ task

BOS, SEP, EOS, PAD, FILL = 10, 11, 12, 13, 14  # 0 to 9 are the digits


@dataclass(frozen=True)
class Task:
    """A task on digits, learned in seconds and not at once: partial answers earn partial reward. Ids are below `vocab`.

    Prompts are of one length. Answers may differ in length, where they have an `eos`.
    """

    name: str
    draw: Callable[[random.Random], list[int]]
    """The digits of a prompt."""
    solve: Callable[[list[int]], list[int]]
    """The digits of the right answer."""
    max_response: int
    """Length of the longest right answer, `eos` included."""
    vocab: int = 14
    eos: int | None = EOS
    """The id that ends a response and counts as part of it; None: every response has `max_response` tokens."""
    about: str = ""
    """A sentence for people."""

    def prompts(self, count: int, seed: int, split: Literal["train", "held_out"] = "train") -> list[list[int]]:
        """`count` prompts [BOS, digits, SEP]. None is in both splits: the split is the prompt's, not the draw's."""
        generator = random.Random(f"{self.name}.{split}.{seed}")
        found: list[list[int]] = []
        while len(found) < count:
            prompt = [BOS, *self.draw(generator), SEP]
            held_out = zlib.crc32(bytes(prompt)) % 8 == 0  # one in eight
            if held_out == (split == "held_out"):
                found.append(prompt)
        return found

    def target(self, prompt: Sequence[int]) -> list[int]:
        """The right answer, `eos` included."""
        answer = self.solve(list(prompt[1:-1]))
        return answer if self.eos is None else [*answer, self.eos]


def _six_digits(generator: random.Random) -> list[int]:
    return generator.choices(range(10), k=6)


def _three_to_nine_digits(generator: random.Random) -> list[int]:
    length = generator.randint(3, 9)
    return [*[FILL] * (9 - length), *generator.choices(range(10), k=length)]


def _reversed(digits: list[int]) -> list[int]:
    return [digit for digit in digits if digit != FILL][::-1]


_REWARD = "; its reward is the share of right positions."
TASKS = {
    task.name: task
    for task in (
        Task("reverse6", _six_digits, _reversed, max_response=6, eos=None,
             about=f"The model is given six digits and answers with the same digits backwards, in six tokens{_REWARD}"),
        Task("reverse", _six_digits, _reversed, max_response=7,
             about=f"The model is given six digits and answers with the same digits backwards and an end token{_REWARD}"),
        Task("reverse3to9", _three_to_nine_digits, _reversed, max_response=10, vocab=15,
             about="The model is given three to nine digits, filled in front to nine, and answers with the same digits "
             f"backwards and an end token{_REWARD}"),
    )
}  # fmt: skip


def get_task(name: str) -> Task:
    """The task of that name. Raises ValueError if there is none."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown: choose one of {', '.join(TASKS)}.")
    return TASKS[name]


def questions(
    task: Task, count: int, seeds: Sequence[int], split: Literal["train", "held_out"] = "train"
) -> tuple[Tensor, Tensor]:
    """(prompts [S, count, T], right answers [S, count, R] with PAD behind the end) of every seed."""
    prompts = [task.prompts(count, seed, split) for seed in seeds]
    targets = [[task.target(prompt) for prompt in row] for row in prompts]
    answers = [[[*target, *[PAD] * (task.max_response - len(target))] for target in row] for row in targets]
    return torch.tensor(prompts), torch.tensor(answers)


# ----------------------------------------------------------------------------------------------------------- model

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
    deviations: dict[str, tuple[tuple[int, ...], float]] = {
        WORDS: ((task.vocab, hidden), 0.5),
        POSITIONS: ((length, hidden), 0.5),
        OUTPUT: ((task.vocab, hidden), 0.05),
        FINAL_NORM: ((hidden,), 0.0),
    }
    for layer in range(settings.layers):
        parts: dict[str, tuple[tuple[int, ...], float]] = {
            "input_layernorm": ((hidden,), 0.0),
            "self_attention.linear_qkv": ((3 * hidden, hidden), 0.7 / math.sqrt(hidden)),
            "self_attention.linear_proj": ((hidden, hidden), 0.4 / math.sqrt(hidden)),
            "pre_mlp_layernorm": ((hidden,), 0.0),
        }
        for mlp in mlp_names(settings):
            parts[f"{mlp}.linear_fc1"] = (2 * ffn, hidden), 0.7 / math.sqrt(hidden)
            parts[f"{mlp}.linear_fc2"] = (hidden, ffn), 0.4 / math.sqrt(ffn)
        if settings.experts:
            parts["mlp.router"] = (settings.experts, hidden), 1.0 / math.sqrt(hidden)
        deviations |= {layer_name(layer, part): value for part, value in parts.items()}

    def drawn(seed: int, name: str) -> Tensor:
        size, deviation = deviations[name]
        if not deviation:
            return torch.ones(size)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}.{name}".encode()))
        return torch.randn(size, generator=generator) * deviation

    return {name: torch.stack([drawn(seed, name) for seed in seeds]) for name in deviations}


def forward(
    settings: Settings,
    weights: Mapping[str, Tensor],
    ids_NBT: Tensor,
    past: Cache | None = None,
    *,
    last_only: bool = False,
    reroute: Reroute | None = None,
) -> tuple[Tensor, Cache]:
    """(logits [N, B, T, V], cache of past and these positions) of a small GPT: learned positions, RMSNorm, SwiGLU.

    past: keys and values of the same sequences' earlier positions. last_only: logits of the last one, [N, B, 1, V].
    """
    N, B, T = ids_NBT.shape
    start = past[0][0].shape[2] if past else 0
    words = weights[WORDS].gather(1, ids_NBT.reshape(N, B * T, 1).expand(-1, -1, settings.hidden))
    x = words.view(N, B, T, -1) + weights[POSITIONS][:, None, start : start + T]
    x = x.view(N, B * T, -1)
    mask = torch.full((T, start + T), -math.inf).triu(start + 1) if T > 1 else None
    cache: Cache = []
    for i in range(settings.layers):
        own = partial(_layer_weight, weights, i)
        qkv = _linear(_norm(x, own("input_layernorm")), own("self_attention.linear_qkv"))
        # megatron's order of rows: head by head q, k, v
        q, k, v = qkv.view(N * B, T, settings.heads, 3, -1).permute(3, 0, 2, 1, 4)
        if past:
            k, v = (torch.cat(parts, dim=2) for parts in zip(past[i], (k, v), strict=True))
        cache.append((k, v))
        if last_only and i == settings.layers - 1:
            q, x, T = q[:, :, -1:], x.view(N, B, T, -1)[:, :, -1], 1
            mask = None
        y = _attention(q, k, v, mask)
        x = x + _linear(y.transpose(1, 2).reshape(N, B * T, -1), own("self_attention.linear_proj"))
        x = x + _mlp(settings, _norm(x, own("pre_mlp_layernorm")), own, reroute)
    logits = _linear(_norm(x, weights[FINAL_NORM]), weights[OUTPUT])
    return logits.view(N, B, T, -1), cache


def _layer_weight(weights: Mapping[str, Tensor], layer: int, part: str) -> Tensor:
    return weights[layer_name(layer, part)]


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
    return torch.stack(
        [share[..., None] * of(mlp) for share, mlp in zip(shares, mlp_names(settings), strict=True)]
    ).sum(0)


def log_softmax(logits: Tensor) -> Tensor:
    """log π over the last dimension, written out as `_attention` is."""
    logits = logits - logits.detach().amax(-1, keepdim=True)
    return logits - logits.exp().sum(-1, keepdim=True).log()


def response_log_probs(
    settings: Settings, weights: Mapping[str, Tensor], prompts_NPT: Tensor, responses_NBR: Tensor
) -> Tensor:
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
    """One prompt's keys and values for each of its responses, which are neighbours."""
    return [(k.repeat_interleave(samples, dim=0), v.repeat_interleave(samples, dim=0)) for k, v in cache]


def token_log_probs(
    settings: Settings, weights: Mapping[str, Tensor], prompts_NPT: Tensor, responses_NBR: Tensor
) -> Tensor:
    """log π of the responses' own tokens, [N, B, R]."""
    table = response_log_probs(settings, weights, prompts_NPT, responses_NBR)
    return table.gather(3, responses_NBR[..., None])[..., 0]


def map_weights(weights: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> Weights:
    """Every weight changed."""
    return {name: change(weight) for name, weight in weights.items()}


# ----------------------------------------------------------------------------------- rollout engine: the mismatch


def rollout_weights(weights: Mapping[str, Tensor], dtype: str) -> Weights:
    """The weights as the rollout engine has them: linear layers (no embeddings, norms, routers) rounded, or as they
    are."""
    if dtype == "float32":
        return dict(weights)
    bits = int(dtype.removeprefix("int"))
    return {
        name: quantised(weight, bits) if "linear" in name or name == OUTPUT else weight
        for name, weight in weights.items()
    }


def quantised(weight: Tensor, bits: int) -> Tensor:
    """`weight` [..., out, in] rounded to symmetric integers of `bits` with one scale per output channel, as floats."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8) / largest
    return (weight / scale).round().clamp(-largest, largest) * scale


class ExpertFlips:
    """Instead of a share of the chosen experts another one, each as likely, independently by token and layer.

    Draws of a seed come from its own generator and are shared by its runs.
    """

    def __init__(self, share: float, experts: int, seeds: Sequence[int]) -> None:
        self.share, self.experts = share, experts
        self.generators = [torch.Generator().manual_seed(zlib.crc32(f"{seed}.experts".encode())) for seed in seeds]

    def __call__(self, chosen: Tensor) -> Tensor:
        drawn = torch.stack([torch.rand(2, chosen.shape[1], generator=generator) for generator in self.generators])
        flips, by = drawn.repeat(len(chosen) // len(drawn), 1, 1).unbind(1)
        others = (chosen + 1 + (by * (self.experts - 1)).long()) % self.experts
        return others.where(flips < self.share, chosen)


class Responses(NamedTuple):
    """Each [N, B, R]. ids: PAD behind the end. log_probs: log π_rollout, 0 there. mask: True up to the end."""

    ids: Tensor
    log_probs: Tensor
    mask: Tensor


def exponential(seeds: Sequence[int], *size: int) -> Tensor:
    """Noise for `generate`, [len(seeds), *size]: of each seed from a generator of its own."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.empty(size).exponential_(generator=generator) for generator in generators])


@torch.no_grad()
def generate(
    settings: Settings,
    weights: Mapping[str, Tensor],
    prompts_NPT: Tensor,
    noise_NBRV: Tensor,
    reroute: Reroute | None = None,
) -> Responses:
    """`settings.samples_per_prompt` responses a prompt, as long as the noise; with an `eos` they end there.

    noise_NBRV: Exponential(1) draws. argmax p / E draws from p; runs that share noise and weights draw the same.
    """
    eos = get_task(settings.task).eos
    logits, cache = forward(settings, weights, prompts_NPT, last_only=True, reroute=reroute)
    cache = repeated(cache, settings.samples_per_prompt)
    logits = logits.repeat_interleave(settings.samples_per_prompt, dim=1)
    N, B, R, _ = noise_NBRV.shape
    alive = torch.ones(N, B, dtype=torch.bool)
    ids, log_probs, mask = [], [], []
    for t in range(R):
        log_p = log_softmax(logits[:, :, 0] / settings.temperature)
        drawn = (log_p.exp() / noise_NBRV[:, :, t]).argmax(-1)
        ids.append(drawn.where(alive, PAD))
        log_probs.append(log_p.gather(2, drawn[..., None])[..., 0].where(alive, 0.0))
        mask.append(alive)
        if eos is not None:
            alive = alive & (drawn != eos)
        if t + 1 < R:
            logits, cache = forward(settings, weights, ids[-1][..., None], cache, reroute=reroute)
    return Responses(*(torch.stack(parts, dim=2) for parts in (ids, log_probs, mask)))


# ---------------------------------------------------------------------------------------------- reward, optimizer


def score(answers_NBR: Tensor, drawn: Responses) -> tuple[Tensor, Tensor]:
    """(dense, exact) rewards [N, B]. dense: right positions / the longer of answer and response, so that running on
    costs as much as stopping; exact: 1.0 if all are right, else 0.0."""
    there = answers_NBR != PAD
    right = (drawn.ids == answers_NBR) & drawn.mask & there
    longer = torch.maximum(there.sum(-1), drawn.mask.sum(-1))
    dense = right.sum(-1).double() / longer
    return dense, (dense == 1.0).float()


class BatchedAdamW:
    """torch's AdamW, which works element by element and so on each run by itself, after megatron's clipping:
    gradients times min(1, clip_grad / (norm + 1e-6)), with each run's own norm.

    `live` [N] says which runs go on. A run whose gradient norm is not finite stops for good: its weights stay.
    """

    def __init__(self, weights: Weights, settings: Settings, lr: float, weight_decay: float = 0.0) -> None:
        self.weights, self.clip_grad = list(weights.values()), settings.clip_grad
        self.adamw = torch.optim.AdamW(
            self.weights, lr=lr, betas=settings.betas, weight_decay=weight_decay, foreach=True
        )
        self.live = torch.ones(len(self.weights[0]), dtype=torch.bool)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """One step; returns the gradient norms before clipping, [N]."""
        # Rows of dimension 1: sums over dimension 0 would add up in an order that depends on the number of runs.
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients], dim=1).sum(1).sqrt()
        self.live &= norms.isfinite()
        scale = (self.clip_grad / (norms + 1e-6)).clamp(max=1.0)
        stopped = (~self.live).nonzero()[:, 0]
        before = [weight[stopped] for weight in self.weights]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient * scale.view(-1, *[1] * (gradient.dim() - 1))
        self.adamw.step()
        for weight, kept in zip(self.weights, before, strict=True):
            weight[stopped] = kept
        return norms


# -------------------------------------------------------------------------------------------------------- the loop

IMPOSSIBLE = math.log(1e-4)
"""A sampled token that the trainer gives less than this is all but impossible to it."""
Record = dict[str, Any]


class Batch(NamedTuple):
    """A rollout batch of every run, or a mini-batch of it. Responses to a prompt are neighbours."""

    prompts: Tensor
    """[N, P, T]."""
    drawn: Responses
    advantages: Tensor
    """[N, B]."""
    version: int
    """Optimizer steps that the weights had made which sampled it."""
    old: Tensor | None = None
    """log π_old [N, B, R]; 0 for runs that need none."""

    def mini(self, j: int, count: int) -> Batch:
        """Mini-batch j of `count`: its share of every prompt's responses."""

        def share(rows: Tensor) -> Tensor:
            groups = rows.unflatten(1, (self.prompts.shape[1], -1))
            return groups.chunk(count, dim=2)[j].flatten(1, 2)

        old = None if self.old is None else share(self.old)
        return self._replace(drawn=Responses(*map(share, self.drawn)), advantages=share(self.advantages), old=old)


class Runs:
    """The runs of a block; run n is variant n // S, seed n % S.

    Args:
        warm_weights: [S, …], of the seeds in their order; variants of a seed start from the same.
    """

    def __init__(
        self, settings: Settings, seeds: Sequence[int], configs: Sequence[MismatchConfig], warm_weights: Weights
    ) -> None:
        self.settings, self.seeds, self.variants = settings, tuple(seeds), len(configs)
        self.task = get_task(settings.task)
        self.configs = [config for config in configs for _ in seeds]
        self.quiet = [config.replace(metrics="off") for config in self.configs]
        self.needs_old = [n for n, config in enumerate(self.configs) if not config.use_rollout_log_probs]
        self.weights = map_weights(warm_weights, lambda weight: self._by_variant(weight).requires_grad_())
        self.optimizer = BatchedAdamW(self.weights, settings, settings.lr, settings.weight_decay)
        held_out = questions(self.task, settings.eval_prompts, self._seeds("held-out"), "held_out")
        self.held_out = tuple(map(self._by_variant, held_out))
        self.versions: dict[int, Weights] = {}
        """Copies of the weights by optimizer steps, as long as a rollout batch is to be sampled from them."""

    def steps(self) -> Iterator[list[Record]]:
        """Train; after each optimizer step, and before the first, the records of all runs.

        step; reward, exact, response_length (means over the rollout batch), weight_version (that sampled it); loss,
        grad_norm (before clipping); seconds {rollout, old_log_probs, train} of CPU time, the block's divided by the
        runs that took part; held_out_exact after an evaluation, an expectation without sampling noise; metrics (the
        plugin's) and impossible_tokens (share of sampled tokens with log π_train below log 1e-4) at the first step
        after one. A record of step 0 holds the evaluation alone.
        """
        settings, mini_batches = self.settings, self.settings.mini_batches
        self._keep(0)
        yield [{"step": 0, "held_out_exact": exact} for exact in self._held_out_exact()]
        for first in range(0, settings.steps, mini_batches):
            start = time.process_time()
            batch, facts = self._roll_out(first)
            rolled_out = time.process_time()
            batch = batch._replace(old=self._old_log_probs(batch))
            seconds = rolled_out - start, time.process_time() - rolled_out
            for j, step in enumerate(range(first + 1, min(first + mini_batches, settings.steps) + 1)):
                start = time.process_time()
                measured = j == 0 and first % (settings.eval_every or settings.steps) < mini_batches
                trained = self._train_step(batch.mini(j, mini_batches), step, measured)
                self._keep(step)
                times = self._seconds(*seconds, time.process_time() - start)
                records = [
                    {"step": step, **fact, **record, "seconds": own}
                    for fact, record, own in zip(facts, trained, times, strict=True)
                ]
                if settings.evaluates(step):
                    for record, exact in zip(records, self._held_out_exact(), strict=True):
                        record["held_out_exact"] = exact
                yield records
                seconds = 0.0, 0.0  # a rollout batch's are of its first step

    def _roll_out(self, step: int) -> tuple[Batch, list[Record]]:
        """A rollout batch with its advantages, and what is reported of each run's."""
        settings, task = self.settings, self.task
        version = settings.version_for(step)
        self.versions = {known: kept for known, kept in self.versions.items() if known >= version}
        weights = rollout_weights(self.versions[version], settings.rollout_dtype)

        asked = questions(task, settings.prompts_per_batch, self._seeds("prompts", step))
        prompts, answers = map(self._by_variant, asked)
        seeds = self._seeds("rollout", step)
        noise = self._by_variant(exponential(seeds, settings.samples, task.max_response, task.vocab))
        flips = ExpertFlips(settings.expert_flips, settings.experts, seeds) if settings.expert_flips else None
        drawn = generate(settings, weights, prompts, noise, flips)

        dense, exact = score(answers.repeat_interleave(settings.samples_per_prompt, dim=1), drawn)
        groups = torch.arange(dense.numel() // settings.samples_per_prompt)
        groups = groups.repeat_interleave(settings.samples_per_prompt)
        advantages = mp.group_advantages(dense.flatten(), groups).view(dense.shape).float()

        lengths = drawn.mask.float().sum(-1)
        means = zip(dense.mean(1).tolist(), exact.mean(1).tolist(), lengths.mean(1).tolist(), strict=True)
        names = ("reward", "exact", "response_length", "weight_version")
        return Batch(prompts, drawn, advantages, version), [
            dict(zip(names, (*mean, version), strict=True)) for mean in means
        ]

    @torch.no_grad()
    def _old_log_probs(self, batch: Batch) -> Tensor | None:
        """log π_old, of the weights that are about to train on the batch: of the runs that need it."""
        n = self.needs_old
        if not n:
            return None
        old = torch.zeros_like(batch.drawn.log_probs)
        some = map_weights(self.weights, lambda weight: weight[n])
        old[n] = token_log_probs(self.settings, some, batch.prompts[n], batch.drawn.ids[n])
        return old

    def _train_step(self, batch: Batch, step: int, measured: bool) -> list[Record]:
        """One optimizer step of every run on a mini-batch: loss, grad_norm and, if `measured`, the metrics."""
        ids, mask = batch.drawn.ids, batch.drawn.mask
        table = response_log_probs(self.settings, self.weights, batch.prompts, ids)
        log_probs = table.gather(3, ids[..., None])[..., 0]
        entropy = -(table.detach().exp() * table.detach()).sum(-1) if measured else None
        finite = (log_probs.isfinite() & batch.drawn.log_probs.isfinite() | ~mask).all(-1).all(-1).tolist()

        # Each run's loss is of its own log-probs. Their gradients then go back through the model all at once.
        leaves = [own.requires_grad_() for own in log_probs.detach().unbind()]
        losses: list[Tensor] = []
        records: list[Record] = [{} for _ in leaves]
        for n, (record, own) in enumerate(zip(records, leaves, strict=True)):
            if not finite[n]:  # its weights overflowed: it stops, and the others of the block go on
                losses.append((own * math.nan).sum())
                continue
            config = self.configs[n] if measured else self.quiet[n]
            result = mp.policy_loss(own[mask[n]], self._packed(batch, n, step, entropy), config)
            losses.append(result.loss)
            if measured:
                below = (own < IMPOSSIBLE) & mask[n]
                record["impossible_tokens"] = (below.sum() / mask[n].sum()).item()
                record["metrics"] = result.statistics.metrics()
        upstream = torch.stack(torch.autograd.grad(losses, leaves))
        gradients = torch.autograd.grad(log_probs, list(self.weights.values()), upstream)
        norms = self.optimizer.step(gradients).tolist()
        for record, loss, norm in zip(records, torch.stack(losses).tolist(), norms, strict=True):
            record |= {"loss": loss, "grad_norm": norm}
        return records

    def _packed(self, batch: Batch, n: int, step: int, entropy_NBR: Tensor | None) -> mp.PackedSequences:
        """Run n's responses, one behind the other."""
        mask = batch.drawn.mask[n]
        lengths = mask.sum(-1)
        tokens = int(lengths.sum())
        old = None if self.configs[n].use_rollout_log_probs else batch.old
        return mp.PackedSequences(
            loss_mask=torch.ones(tokens, dtype=torch.bool),
            lengths=tuple(lengths.tolist()),
            rollout_log_probs=batch.drawn.log_probs[n][mask],
            old_log_probs=None if old is None else old[n][mask],
            advantages=batch.advantages[n].repeat_interleave(lengths),
            weight_versions=torch.full((tokens,), batch.version),
            trainer_version=step - 1,
            entropy=None if entropy_NBR is None else entropy_NBR[n][mask],
        )

    def _keep(self, step: int) -> None:
        """Keep a copy of the weights after `step` optimizer steps, if a later rollout batch samples from them."""
        if self.settings.samples_later(step):
            self.versions[step] = map_weights(self.weights, lambda weight: weight.detach().clone())

    def _held_out_exact(self) -> list[float]:
        return exact_match(self.settings, self.weights, *self.held_out)[0].tolist()

    def _seeds(self, *purpose: object) -> list[int]:
        return [seed_for(seed, *purpose) for seed in self.seeds]

    def _by_variant(self, of_seeds: Tensor) -> Tensor:
        """[S, …] -> [N, …]: the same for every variant."""
        return of_seeds.repeat(self.variants, *[1] * (of_seeds.dim() - 1))

    def _seconds(self, rollout: float, old: float, train: float) -> list[dict[str, float]]:
        """Of every run: what it took part in, shared equally."""
        N, passes = len(self.configs), len(self.needs_old)
        return [
            {"rollout": rollout / N, "old_log_probs": old / passes if n in self.needs_old else 0.0, "train": train / N}
            for n in range(N)
        ]


@torch.no_grad()
def exact_match(
    settings: Settings, weights: Mapping[str, Tensor], prompts_NPT: Tensor, answers_NPR: Tensor
) -> tuple[Tensor, Tensor]:
    """(expected exact match, mean probability of the right token) over the prompts, [N] each: no sampling, no noise.

    The first is the mean of π(answer | prompt), the product over its tokens.
    """
    settings = settings.model_copy(update={"temperature": 1.0})
    rows = []
    for n in range(len(prompts_NPT)):  # run by run: its activations fit the processor's cache
        one = map_weights(weights, lambda weight, n=n: weight[n : n + 1])
        rows.append(token_log_probs(settings, one, prompts_NPT[n : n + 1], answers_NPR[n : n + 1]))
    there = answers_NPR != PAD
    log_probs = torch.cat(rows).where(there, 0.0)
    right = log_probs.exp().where(there, 0.0).sum((1, 2)) / there.sum((1, 2))
    return log_probs.sum(-1).exp().mean(1), right


# --------------------------------------------------------------------------------------------------------- warm-up


def warm_up(settings: Settings, seeds: Sequence[int]) -> Weights:
    """Supervised training of every seed until its mean probability of the right token is `warm_up_target`: [S, …].

    A seed that is there stops, the others go on: its weights do not depend on those that are trained with it, to the
    last bit on one thread.
    """
    settings, task = settings.model_copy(update={"temperature": 1.0}), get_task(settings.task)
    weights = map_weights(initial_weights(settings, seeds), lambda weight: weight.requires_grad_())
    optimizer = BatchedAdamW(weights, settings, settings.warm_up_lr)
    held_out = questions(task, settings.eval_prompts, [seed_for(seed, "held-out") for seed in seeds], "held_out")
    for step in range(settings.warm_up_steps):
        if step % 4 == 0:
            optimizer.live &= exact_match(settings, weights, *held_out)[1] < settings.warm_up_target
            if not bool(optimizer.live.any()):
                break
        own = [seed_for(seed, "warm-up", step) for seed in seeds]
        prompts, answers = questions(task, settings.warm_up_batch, own)
        log_probs = token_log_probs(settings, weights, prompts, answers)
        there = answers != PAD
        loss = -(log_probs.where(there, 0.0).sum((1, 2)) / there.sum((1, 2))).sum()
        optimizer.step(torch.autograd.grad(loss, list(weights.values())))
    return map_weights(weights, torch.Tensor.detach)


def warm_weights(settings: Settings, seeds: Sequence[int], cache: Path | None = None) -> Weights:
    """`warm_up` of every seed, [S, …] in their order. The folder `cache` keeps them, a file a seed.

    Raises OSError where a file cannot be written; one that cannot be read is made again.
    """
    files = {seed: cache / settings.warm_up_key(seed) for seed in seeds} if cache else {}
    found: dict[int, Weights] = {}
    for seed, file in files.items():
        try:
            found[seed] = torch.load(file, weights_only=True)
        except Exception:  # absent, cut short or damaged, which torch says in many ways
            continue
    if missing := [seed for seed in seeds if seed not in found]:
        trained = warm_up(settings, missing)
        for i, seed in enumerate(missing):
            found[seed] = map_weights(trained, lambda weight, i=i: weight[i].clone())
            if cache:
                cache.mkdir(parents=True, exist_ok=True)
                data = io.BytesIO()  # torch.save to a file that cannot grow raises a sentence about streams
                torch.save(found[seed], data)
                with replacing(files[seed]) as part:
                    part.write_bytes(data.getvalue())
    return {name: torch.stack([found[seed][name] for seed in seeds]) for name in found[seeds[0]]}
