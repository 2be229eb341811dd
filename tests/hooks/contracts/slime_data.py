"""A rollout in slime's and miles's layout, cut by brute force, and what one process makes of it.

Two steps of four samples. Tool tokens train nothing and carry 0.0 as rollout log-prob; one sample trains nothing at
all; some have prompts so long that a context-parallel rank holds nothing of their response.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp

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


def mask_sums(shared: bool) -> list[Tensor]:
    """slime's denominators: trained tokens of the sample's rollout, which is the sample alone unless `shared`."""
    own = [sample.rows["loss_masks"].sum().float() for sample in samples()]
    if not shared:
        return own
    return [
        torch.stack([value for value, other in zip(own, ROLLOUTS, strict=True) if other == rollout]).sum()
        for rollout in ROLLOUTS
    ]


@dataclass(frozen=True, eq=False)
class Expected:
    """What one process gets for a step: the host's loss, its gradient by logits [Σ total, V] and by log-probs."""

    loss: float
    by_logits: Tensor
    by_log_probs: Tensor
    metrics: dict[str, float]


def expected(args: Namespace, config: mp.MismatchConfig, step: int, old: bool = True, shared: bool = False) -> Expected:
    """`policy_loss` on the whole step, divided as slime divides: by its rollouts, or by its tokens (at least 1 each).

    shared: a rollout of several samples is one mean over all of its tokens.
    """
    ids = step_samples(step)
    chosen = [samples()[number] for number in ids]
    logits = [sample.logits.clone().requires_grad_() for sample in chosen]
    pairs = [from_logits(x, sample.tokens, sample.prompt) for x, sample in zip(logits, chosen, strict=True)]
    log_probs = [pair[0] for pair in pairs]
    for row in log_probs:
        row.retain_grad()
    rows = {name: [sample.rows[name] for sample in chosen] for name in chosen[0].rows}
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=rows["rollout_log_probs"],
        loss_masks=rows["loss_masks"],
        advantages=rows["advantages"],
        old_log_probs=rows["log_probs"] if old else None,
        ref_log_probs=rows["ref_log_probs"],
        entropy=[pair[1] for pair in pairs],
    )
    tokens = sum(max(1, int(mask.sum())) for mask in rows["loss_masks"])
    per_token = args.calculate_per_token_loss
    aggregation = "token-mean" if per_token or shared else "seq-mean-token-mean"
    config = config.model_copy(update={"denominator": "original", "aggregation": aggregation})
    if not shared:
        result = mp.policy_loss(torch.cat(log_probs), packed, config)
        loss = (result.loss_sum + sum(result.terms.values())) / (tokens if per_token else len(ids))
        metrics = result.statistics.metrics()
    else:
        whole = mp.correct(packed, config).statistics
        loss, metrics = torch.zeros(()), whole.metrics()
        for rollout in sorted({ROLLOUTS[number] for number in ids}):
            inside = [place for place, number in enumerate(ids) if ROLLOUTS[number] == rollout]
            part = mp.PackedSequences.from_lists(
                rollout_log_probs=[rows["rollout_log_probs"][i] for i in inside],
                loss_masks=[rows["loss_masks"][i] for i in inside],
                advantages=[rows["advantages"][i] for i in inside],
                old_log_probs=[rows["log_probs"][i] for i in inside],
                ref_log_probs=[rows["ref_log_probs"][i] for i in inside],
                entropy=[pairs[i][1] for i in inside],
            )
            factor = whole.batch_factor()
            result = mp.policy_loss(torch.cat([log_probs[i] for i in inside]), part, config, batch_factor=factor)
            loss = loss + result.loss / len({ROLLOUTS[number] for number in ids})
    loss.backward()
    value = float(loss.detach())
    by_log_probs = [torch.zeros_like(x) if x.grad is None else x.grad for x in log_probs]
    by_logits = [torch.zeros_like(x) if x.grad is None else x.grad for x in logits]
    return Expected(value, torch.cat(by_logits), torch.cat(by_log_probs), metrics)


def rollouts_of(step: int, shared: bool) -> int:
    """How many rollouts a step has: what slime divides the sum of their means by."""
    ids = step_samples(step)
    return len({ROLLOUTS[number] for number in ids}) if shared else len(ids)


def arguments(namespace: dict[str, Any], **changes: Any) -> Namespace:
    return Namespace(**{**namespace, "rollout_temperature": TEMPERATURE, **changes})
