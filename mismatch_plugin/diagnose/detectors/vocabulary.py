"""What whole distributions tell: logits of a checkpoint at the sampled tokens, next to both sides' log-probs.

A part of the tokens is enough. Its logits are kept in memory, at most `MAX_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.diagnose.batch import Batch

MAX_BYTES = 256 * 2**20
MAX_SAMPLES, MAX_TOKENS = 256, 4000


@dataclass(frozen=True, eq=False)
class Rows:
    """T sampled tokens with the logits they were drawn from.

    tokens: sample and position of each. logits [T, V]: raw. drawn_from [T, V]: after the recorded penalties.
    temperature [T]: recorded, 1 where greedy. late [T]: log-prob of the token under the logits one position too late
    (those that have seen it), NaN at a response's end.
    """

    tokens: tuple[tuple[Sample, int], ...]
    logits: Tensor
    drawn_from: Tensor
    ids: Tensor
    temperature: Tensor
    rollout: Floats
    training: Floats
    late: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sampling(self) -> SamplingParameters:
        """Of the first token's sample."""
        return self.tokens[0][0].sampling

    def log_probs(self, scale: float = 1.0, logits: Tensor | None = None) -> Floats:
        """[T] of the sampled tokens at `scale` times the recorded temperature."""
        source = self.drawn_from if logits is None else logits
        return _picked(source / (self.temperature * scale)[:, None], self.ids)

    def penalised(self, penalty: float) -> Tensor:
        """[T, V] raw logits under a repetition penalty on what came before each token."""
        return _penalised(self.logits, self.tokens, SamplingParameters(repetition_penalty=penalty))

    def sorted_mass(self) -> tuple[Tensor, Tensor]:
        """([T, V] probabilities from the largest down, [T] place of the sampled token among them, from 0)."""
        probabilities = (self.drawn_from / self.temperature[:, None]).softmax(-1)
        place = (probabilities > probabilities.gather(-1, self.ids[:, None])).sum(-1)
        return probabilities.sort(-1, descending=True).values, place

    def where(self, chosen: list[int]) -> Rows:
        """Some of them."""
        names = [name for name in self.__dataclass_fields__ if name != "tokens"]
        return Rows(tuple(self.tokens[at] for at in chosen), *(getattr(self, name)[chosen] for name in names))


def penalise(logits: Tensor, previous: Ints, sampling: SamplingParameters) -> Tensor:
    """[V] logits after SGLang's penalties, which act on the tokens that were generated before.

    repetition: positive logits are divided, negative ones multiplied; frequency: minus the count times it; presence:
    minus it once. Checked against SGLang 0.5.23.
    """
    if not len(previous) or not sampling.penalised:
        return logits
    ids, counts = torch.as_tensor(previous).unique(return_counts=True)
    changed = logits.clone()
    values = changed[ids] - counts * sampling.frequency_penalty - sampling.presence_penalty
    penalty = sampling.repetition_penalty
    changed[ids] = torch.where(values > 0, values / penalty, values * penalty)
    return changed


@torch.no_grad()
def gather_rows(batch: Batch) -> Rows | None:
    """Tokens with both sides, from all over a batch that has logits; None if there is none."""
    samples = [sample for sample in batch if sample.usable.any()]
    samples = samples[:: max(1, math.ceil(len(samples) / MAX_SAMPLES))]
    if batch.logits is None or not samples:
        return None
    tokens: list[tuple[Sample, int]] = []
    rows: list[Tensor] = []
    late: list[Floats] = []
    share = 0
    for index, sample in enumerate(samples):
        logits = batch.logits(sample).float()
        budget = min(MAX_TOKENS, max(1, MAX_BYTES // (4 * logits.shape[-1])))
        share = share or max(1, math.ceil(budget / len(samples)))
        usable = np.flatnonzero(sample.usable)
        step = max(1, math.ceil(len(usable) / share))
        at = usable[index % step :: step]
        seen = _picked(logits[1:] / sample.log_prob_temperature, _ids(sample)[:-1])
        tokens += [(sample, int(position)) for position in at]
        rows.append(logits[at])
        late.append(np.append(seen, np.nan)[at])
    if not tokens:
        return None
    raw = torch.cat(rows)
    return Rows(
        tokens=tuple(tokens),
        logits=raw,
        drawn_from=_penalised(raw, tokens),
        ids=torch.tensor([int(sample.response_ids[at]) for sample, at in tokens]),
        temperature=torch.tensor([sample.log_prob_temperature for sample, _ in tokens]),
        rollout=np.array([sample.rollout_log_probs[at] for sample, at in tokens]),
        training=np.array([sample.train_log_probs[at] for sample, at in tokens]),
        late=np.concatenate(late),
    )


def _penalised(logits: Tensor, tokens: Sequence[tuple[Sample, int]], by: SamplingParameters | None = None) -> Tensor:
    """[T, V]: each row penalised for what came before its token, as recorded or by other parameters."""
    if by is None and not any(sample.sampling.penalised for sample, _ in tokens):
        return logits
    rows = [
        penalise(row, sample.response_ids[:at], by or sample.sampling)
        for row, (sample, at) in zip(logits, tokens, strict=True)
    ]
    return torch.stack(rows)


def _ids(sample: Sample) -> Tensor:
    return torch.as_tensor(sample.response_ids, dtype=torch.long)


def _picked(logits: Tensor, ids: Tensor) -> Floats:
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0].double().numpy()
