"""What whole distributions tell: logits of a checkpoint at the sampled tokens, next to both sides' log-probs.

A part of the tokens is enough. Its logits are kept in memory, at most `MAX_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.check.batch import Batch, Floats, Sample
from mismatch_plugin.rollout.sampling import SamplingParameters

Logits = Callable[[Sample], Tensor]
"""[n, V] float32 logits of a sample, before temperature: row t is what response token t was drawn from."""

MAX_BYTES = 256 * 2**20
MAX_SAMPLES, MAX_TOKENS = 256, 4000
MIN_TOKENS = 100


@dataclass(frozen=True, eq=False)
class Rows:
    """T sampled tokens with the logits they were drawn from.

    logits [T, V]: raw. drawn_from [T, V]: after the recorded penalties. temperature [T]: recorded, 1 where greedy.
    previous: for each token the ids before it in the response. late [T]: log-prob of the token under the logits one
    position too late (those that have seen it), NaN at a response's end.
    """

    logits: Tensor
    drawn_from: Tensor
    ids: Tensor
    temperature: Tensor
    rollout: Floats
    train: Floats
    late: Floats
    samples: tuple[Sample, ...]
    positions: tuple[int, ...]
    previous: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)

    def log_probs(self, scale: float = 1.0, *, raw: bool = False, logits: Tensor | None = None) -> Floats:
        """[T] of the sampled tokens at `scale` times the recorded temperature; raw: without penalties, at 1."""
        source = logits if logits is not None else self.logits if raw else self.drawn_from
        divided = source if raw else source / (self.temperature * scale)[:, None]
        return _picked(divided, self.ids)

    def penalised(self, penalty: float) -> Tensor:
        """[T, V] raw logits under a repetition penalty on each token's `previous`."""
        return torch.stack(
            [
                penalise(row, previous, SamplingParameters(repetition_penalty=penalty))
                for row, previous in zip(self.logits, self.previous, strict=True)
            ]
        )

    def sorted_mass(self) -> tuple[Tensor, Tensor]:
        """([T, V] probabilities from the largest down, [T] place of the sampled token among them, from 0)."""
        probabilities = (self.drawn_from / self.temperature[:, None]).softmax(-1)
        own = probabilities.gather(-1, self.ids[:, None])
        place = (probabilities > own).sum(-1)
        return probabilities.sort(-1, descending=True).values, place

    def where(self, chosen: list[int]) -> Rows:
        """Some of them."""
        index = torch.tensor(chosen, dtype=torch.long)
        return Rows(
            self.logits[index],
            self.drawn_from[index],
            self.ids[index],
            self.temperature[index],
            self.rollout[chosen],
            self.train[chosen],
            self.late[chosen],
            tuple(self.samples[at] for at in chosen),
            tuple(self.positions[at] for at in chosen),
            tuple(self.previous[at] for at in chosen),
        )


def penalise(logits: Tensor, previous: tuple[int, ...], sampling: SamplingParameters) -> Tensor:
    """[V] logits after SGLang's penalties, which act on the tokens that were generated before.

    repetition: positive logits are divided, negative ones multiplied; frequency: minus the count times it; presence:
    minus it once. Checked against SGLang 0.5.23.
    """
    if not previous or not sampling.penalised:
        return logits
    ids, counts = torch.tensor(previous).unique(return_counts=True)
    changed = logits.clone()
    values = changed[ids]
    values = values - counts * sampling.frequency_penalty - sampling.presence_penalty
    penalty = sampling.repetition_penalty
    changed[ids] = torch.where(values > 0, values / penalty, values * penalty)
    return changed


@torch.no_grad()
def gather_rows(batch: Batch, logits_of: Logits) -> Rows | None:
    """Tokens with both sides, from all over the batch; None if there is none."""
    samples = [sample for sample in batch if sample.usable.any()]
    if not samples:
        return None
    samples = samples[:: math.ceil(len(samples) / MAX_SAMPLES)]
    parts: list[tuple[Sample, int, Tensor, float]] = []
    share: int | None = None
    for at, sample in enumerate(samples):
        logits = logits_of(sample).float()
        if share is None:
            budget = min(MAX_TOKENS, max(1, MAX_BYTES // (4 * logits.shape[-1])))
            share = max(1, math.ceil(budget / len(samples)))
        usable = np.flatnonzero(sample.usable)
        step = max(1, math.ceil(len(usable) / share))
        temperature = sample.record.sampling.log_prob_temperature
        ids = torch.from_numpy(sample.response_ids)
        after = np.full(sample.tokens, np.nan)
        if sample.tokens > 1:
            after[:-1] = _picked(logits[1:] / temperature, ids[:-1])
        parts += [
            (sample, int(position), logits[position].clone(), float(after[position]))
            for position in usable[at % step :: step]
        ]
    if not parts:
        return None
    previous = tuple(tuple(sample.record.response_ids[:position]) for sample, position, _, _ in parts)
    raw = torch.stack([row for _, _, row, _ in parts])
    drawn = [
        penalise(row, before, sample.record.sampling)
        for (sample, _, row, _), before in zip(parts, previous, strict=True)
    ]
    penalised = any(sample.record.sampling.penalised for sample in samples)
    return Rows(
        logits=raw,
        drawn_from=torch.stack(drawn) if penalised else raw,
        ids=torch.tensor([sample.record.response_ids[position] for sample, position, _, _ in parts]),
        temperature=torch.tensor([sample.record.sampling.log_prob_temperature for sample, _, _, _ in parts]),
        rollout=np.array([sample.rollout[position] for sample, position, _, _ in parts]),
        train=np.array([np.nan if s.train is None else s.train[position] for s, position, _, _ in parts]),
        late=np.array([late for _, _, _, late in parts]),
        samples=tuple(sample for sample, _, _, _ in parts),
        positions=tuple(position for _, position, _, _ in parts),
        previous=previous,
    )


def _picked(logits: Tensor, ids: Tensor) -> Floats:
    values = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return values.double().numpy()
