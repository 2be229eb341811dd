"""A rollout in slime's and miles's layout, cut by brute force, and what one process makes of it.

Two steps of four samples. Tool tokens train nothing and carry 0.0 as rollout log-prob; one sample trains nothing at
all; some have prompts so long that a context-parallel rank holds nothing of their response.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.hooks.slime.config import ARGUMENTS

VOCAB = 16
TEMPERATURE = 0.8
STEPS, MICRO_BATCHES = 2, 2
_LENGTHS = ((3, 9), (5, 20), (2, 1), (30, 4), (1, 31), (4, 13), (6, 7), (2, 16))  # prompt, response
_UNTRAINED = 6
ROLLOUTS = (0, 1, 2, 0, 3, 4, 5, 4)  # samples 0 and 3, and 5 and 7, belong to one rollout each


@dataclass(frozen=True, eq=False)
class Sample:
    """logits [total, V]; the rest [response]. log_probs: log π_θ as the logits give it at the rollout temperature."""

    prompt: int
    tokens: Tensor
    logits: Tensor
    log_probs: Tensor
    entropy: Tensor
    rows: dict[str, Tensor]

    @property
    def total(self) -> int:
        return self.tokens.numel()

    @property
    def response(self) -> int:
        return self.total - self.prompt


@cache
def samples() -> tuple[Sample, ...]:
    generator = torch.Generator().manual_seed(11)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    made = []
    for number, (prompt, response) in enumerate(_LENGTHS):
        total = prompt + response
        tokens = torch.randint(0, VOCAB, (total,), generator=generator)
        logits = normal(total, VOCAB)
        log_probs, entropy = from_logits(logits, tokens, prompt)
        mask = (torch.rand(response, generator=generator) < 0.85) | (response < 3)
        mask &= torch.tensor(number != _UNTRAINED)
        old = (log_probs + 0.1 * normal(response)).clamp(max=-0.01)
        rollout = (old + 0.3 * normal(response) * (0.3 if response > 15 else 1.0)).clamp(max=-0.01)
        rows = {
            "loss_masks": mask.int(),
            "log_probs": old,
            "rollout_log_probs": torch.where(mask, rollout, 0.0),
            "ref_log_probs": old + 0.2 * normal(response),
            "advantages": normal(1).expand(response) + 0.1 * normal(response),
        }
        made.append(Sample(prompt, tokens, logits, log_probs, entropy, rows))
    return tuple(made)


def from_logits(logits: Tensor, tokens: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """(log π_θ of the response tokens, entropy before each of them), [response]."""
    table = (logits / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
    return table.gather(1, tokens[prompt:, None])[:, 0], -(table.exp() * table).sum(-1)


def owned(total: int, prompt: int, cp: int, rank: int, padded: int | None = None) -> list[int]:
    """Response positions that a context-parallel rank holds, one by one: who owns the position that predicts it."""
    chunk = -(-(padded or total) // (2 * cp))
    mine: dict[int, list[int]] = {rank: [], 2 * cp - 1 - rank: []}
    for position in range(prompt, total):
        if (position - 1) // chunk in mine:
            mine[(position - 1) // chunk].append(position - prompt)
    return [position for part in mine.values() for position in part]


def schedule(dp_rank: int, dp: int) -> list[list[list[int]]]:
    """Steps of micro-batches of sample numbers, for one data-parallel rank."""
    mine = list(range(len(_LENGTHS)))[dp_rank::dp]
    size = len(mine) // (STEPS * MICRO_BATCHES)
    batches = [mine[start : start + size] for start in range(0, len(mine), size)]
    return [batches[start : start + MICRO_BATCHES] for start in range(0, len(batches), MICRO_BATCHES)]


def step_samples(step: int) -> list[int]:
    return sorted(sample for batch in schedule(0, 1)[step] for sample in batch)


def rollouts_of(step: int, shared: bool) -> list[list[int]]:
    """The step's samples by rollout, of which slime takes the mean; each sample is one, unless `shared`."""
    ids = step_samples(step)
    if not shared:
        return [[number] for number in ids]
    return [[i for i in ids if ROLLOUTS[i] == rollout] for rollout in sorted({ROLLOUTS[i] for i in ids})]


def mask_sums(shared: bool) -> list[Tensor]:
    """slime's denominators: trained tokens of the sample's rollout."""
    own = [sample.rows["loss_masks"].sum().float() for sample in samples()]
    rollouts = {i: rollout for step in range(STEPS) for rollout in rollouts_of(step, shared) for i in rollout}
    return [torch.stack([own[other] for other in rollouts[number]]).sum() for number in range(len(own))]


@dataclass(frozen=True, eq=False)
class Expected:
    """What one process gets for a step: the host's loss, its gradient by logits [Σ total, V] and by log-probs."""

    loss: float
    by_logits: Tensor
    by_log_probs: Tensor
    metrics: dict[str, float]


def expected(args: Namespace, config: mp.MismatchConfig, step: int, old: bool = True, shared: bool = False) -> Expected:
    """`policy_loss` on each rollout, with the step's mean weight, divided as slime divides.

    That is by the step's tokens (at least 1 a sample), or by the rollout's, and then by the number of rollouts.
    """
    ids = step_samples(step)
    logits = {i: samples()[i].logits.clone().requires_grad_() for i in ids}
    found = {i: from_logits(x, samples()[i].tokens, samples()[i].prompt) for i, x in logits.items()}
    for log_probs, _ in found.values():
        log_probs.retain_grad()
    config = config.model_copy(update={"denominator": "original", "aggregation": "token-mean"})

    def loss_of(chosen: list[int], factor: Any = None) -> mp.PolicyLoss:
        rows: dict[str, Any] = {name: [samples()[i].rows[name] for i in chosen] for name in samples()[0].rows}
        old_log_probs, entropy = rows.pop("log_probs"), [found[i][1] for i in chosen]
        packed = mp.PackedSequences.from_lists(**rows, old_log_probs=old_log_probs if old else None, entropy=entropy)
        return mp.policy_loss(torch.cat([found[i][0] for i in chosen]), packed, config, batch_factor=factor)

    statistics, loss, rollouts = loss_of(ids).statistics, torch.zeros(()), rollouts_of(step, shared)
    tokens = [int(samples()[i].rows["loss_masks"].sum()) for i in range(len(_LENGTHS))]
    for rollout in rollouts:
        result = loss_of(rollout, statistics.batch_factor())
        divisor = len(rollouts) * max(1, sum(tokens[i] for i in rollout))
        if args.calculate_per_token_loss:
            divisor = sum(max(1, tokens[i]) for i in ids)
        loss = loss + (result.loss_sum + sum(result.terms.values())) / divisor
    loss.backward()
    by_logits = torch.cat([_gradient(leaf) for leaf in logits.values()])
    by_log_probs = torch.cat([_gradient(log_probs) for log_probs, _ in found.values()])
    return Expected(float(loss.detach()), by_logits, by_log_probs, statistics.metrics())


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def arguments(host: str = "slime", /, **changes: Any) -> Namespace:
    """The host's arguments as its parser leaves them, as far as the loss reads them, with `changes`."""
    values = {name: default for name, (_, default) in ARGUMENTS.items()}
    values |= {"recompute_loss_function": False, "allgather_cp": False, "log_probs_chunk_size": -1, "rank": 0}
    values |= {"rollout_temperature": TEMPERATURE, "eps_clip_high": 0.2, "grpo_std_normalization": True}
    if host == "miles":
        names = ("true_on_policy_mode", "skip_actor_forward_only", "observe_training_entropy")
        values |= dict.fromkeys((*names, "use_dynamic_global_batch_size"), False)
        values |= {"qkv_format": "thd", "global_batch_size": 0, "dump_details": None}
    return Namespace(**{**values, **changes})


ACCEPTED_MEAN = "tests.hooks.contracts.slime_data.accepted_mean"
"""A reducer of the policy loss as a user writes one: the hosts' path argument names it."""


def accepted_mean(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """The micro-batch's sum over what is left in the masks, divided by how many tokens that are."""
    from megatron.core import parallel_state

    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    pairs = zip(total_lengths, response_lengths, strict=True)
    places = [owned(total, total - response, cp, rank) for total, response in pairs]
    local = torch.cat([mask[at].float() for mask, at in zip(loss_masks, places, strict=True)])
    count = torch.stack([mask.sum() for mask in loss_masks]).sum().clamp(min=1)
    return lambda x: (x * local).sum() / count
