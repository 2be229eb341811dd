"""Both sides of a batch as arrays: the form in which the detectors compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from mismatch_plugin.check.findings import SIDES, Confidence, FaultName, Finding, Item, LogProbSide, Place, Side
from mismatch_plugin.check.training import TrainingSample
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.responses import Bools, Floats, Ints, Response, Scored

DEFAULT_MAX_STALENESS = 1


@dataclass(frozen=True, eq=False)
class Sample:
    """One response. n = response tokens; all arrays of log-probs are float64 in nats, NaN where there is none.

    mask: [n], tokens that train. rollout: as long as the server's list. training: as long as the trainer's list, empty
    if there is no training side. null_rollout, null_training: where the list held null, as opposed to NaN.
    told: what the training side tells; its weight_version is the batch's where it tells none.
    reference: [n] log-probs under the weights that the run began with, None without them.
    """

    index: int
    record: Response
    mask: Bools
    rollout: Floats
    null_rollout: Bools
    training: Floats
    null_training: Bools
    told: Scored
    reference: Floats | None = None

    @property
    def tokens(self) -> int:
        """n, the number of response tokens."""
        return len(self.record.response_ids)

    def values(self, side: LogProbSide) -> Floats:
        """The log-probs of one side."""
        return self.rollout if side == "rollout" else self.training

    def nulls(self, side: LogProbSide) -> Bools:
        """Where the list of one side held null."""
        return self.null_rollout if side == "rollout" else self.null_training

    @property
    def comparable(self) -> bool:
        """Both lists are as long as the response."""
        return len(self.training) == len(self.rollout) == self.tokens

    @cached_property
    def usable(self) -> Bools:
        """[n] tokens that train and have a number on both sides; all False where lengths differ."""
        if not self.comparable:
            return np.zeros(self.tokens, dtype=bool)
        return self.mask & np.isfinite(self.rollout) & np.isfinite(self.training)

    @cached_property
    def occurred(self) -> Bools:
        """[n] tokens whose id was earlier in the response: those that SGLang's penalties act on."""
        flags = np.ones(self.tokens, dtype=bool)
        ids = self.record.response_ids
        order = stable_order(ids)
        flags[order[_first_of_equals(ids[order])]] = False
        return flags

    def place(self, position: int | None = None, *, rollout: Any = None, training: Any = None) -> Place:
        """This sample as the place of a fault, with both values at the position where they exist."""
        told = {"rollout": rollout, "training": training}
        for side in SIDES:
            if told[side] is None and position is not None and position < len(self.values(side)):
                told[side] = float(self.values(side)[position])
        return Place(sample=self.index, sample_id=self.record.sample_id, position=position, **told)

    def first(self, chosen: Bools) -> Place:
        """The first chosen token, or the sample as a whole where there is none."""
        found = np.flatnonzero(chosen)
        return self.place(int(found[0])) if len(found) else self.place()


@dataclass(frozen=True, eq=False)
class Tokens:
    """Usable tokens of many samples, flat, [T]: log-probs of both sides, and where each token is."""

    rollout: Floats
    training: Floats
    sample: Ints
    position: Ints
    occurred: Bools

    def __len__(self) -> int:
        return len(self.rollout)

    @cached_property
    def gap(self) -> Floats:
        """d = log π_train − log π_rollout."""
        return self.training - self.rollout

    @cached_property
    def order(self) -> Ints:
        """The tokens from the least likely one on by the rollout side; of equal ones the first first."""
        return stable_order(self.rollout, self.order_down[::-1].copy())

    @cached_property
    def order_down(self) -> Ints:
        """The same from the likeliest one on; of equal ones the first first."""
        return stable_order(-self.rollout)

    def sides(self, side: LogProbSide) -> tuple[Floats, Floats]:
        """(log-probs of this side, those of the other)."""
        return (self.rollout, self.training) if side == "rollout" else (self.training, self.rollout)

    def where(self, chosen: Bools) -> Tokens:
        """The chosen ones alone."""
        return Tokens(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


class Between(Protocol):
    """Models between the weights that the run began with and the present ones (`layers.Mix`).

    parts: ways to divide the tensors that differ: name of a part → its parameters.
    """

    parts: tuple[dict[str, tuple[str, ...]], ...]

    def log_probs(self, sample: Sample, from_start: Collection[str]) -> Floats:
        """[n] with these parameters from the start and all others from now."""
        ...


@dataclass(frozen=True, eq=False)
class Batch:
    """N samples in the order of the records file, and what else the detectors may know.

    eos_ids: ids known to end a response. max_staleness: steps that rollouts may be behind. logits: gives the [n, V]
    float32 logits of a sample before temperature, row t is what response token t was drawn from; None without a
    checkpoint. from_checkpoint: the training side's log-probs were themselves computed from these logits. between: with
    both checkpoints.
    """

    samples: tuple[Sample, ...]
    eos_ids: frozenset[int] = frozenset()
    has_training: bool = True
    max_staleness: int = DEFAULT_MAX_STALENESS
    logits: Callable[[Sample], Tensor] | None = None
    from_checkpoint: bool = False
    between: Between | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    @property
    def token_count(self) -> int:
        """Response tokens that train."""
        return trained(self.samples)

    @cached_property
    def tokens(self) -> Tokens:
        """All usable tokens."""
        return flat(self.samples)

    def tokens_of(self, samples: Sequence[Sample]) -> Tokens:
        """The usable tokens of some of its samples; of all of them they are made once."""
        return self.tokens if len(samples) == len(self) else flat(samples)

    def with_values(self, changed: Mapping[int, Mapping[str, Any]]) -> Batch:
        """The same batch with fields of some samples replaced, by index."""
        if not any(changed.values()):
            return self
        fields = (changed.get(sample.index) for sample in self.samples)  # what stays keeps what it has worked out
        samples = (replace(sample, **new) if new else sample for sample, new in zip(self.samples, fields, strict=True))
        return replace(self, samples=tuple(samples))

    def finding(
        self,
        fault: FaultName,
        side: Side,
        evidence: str,
        fix: str,
        samples: Sequence[Sample],
        *,
        tokens: int | None = None,
        of_samples: int | None = None,
        first: Place | None = None,
        statistics: Mapping[str, float] = {},
        confidence: Confidence = "likely",
    ) -> Finding:
        """A finding about these samples of the batch.

        tokens: all that train, unless given. of_samples: all, unless given. first: the first token of the first sample.
        """
        return Finding(
            fault=fault,
            side=side,
            evidence=evidence,
            statistics=dict(statistics),
            samples=len(samples),
            of_samples=len(self) if of_samples is None else of_samples,
            tokens=trained(samples) if tokens is None else tokens,
            of_tokens=self.token_count,
            first=first or samples[0].first(np.ones(samples[0].tokens, dtype=bool)),
            fix=fix,
            confidence=confidence,
        )


def _first_of_equals(ranked: Floats | Ints) -> Bools:
    """Of values in order, those that the one before does not equal."""
    first = np.ones(len(ranked), dtype=bool)
    first[1:] = ranked[1:] != ranked[:-1]
    return first


def stable_order(values: Floats | Ints, order: Ints | None = None) -> Ints:
    """np.argsort(values, kind="stable") in a third of its time; no NaN. order: one that sorts them; it is changed."""
    order = np.argsort(values) if order is None else order
    ranked = values[order]
    ties = np.flatnonzero(ranked[1:] == ranked[:-1])
    if len(ties):
        tied = np.zeros(len(values), dtype=bool)
        tied[ties] = tied[ties + 1] = True
        at = np.flatnonzero(tied)
        run = np.cumsum(_first_of_equals(ranked[at])) * len(values)
        order[at] = np.sort(run + order[at]) - run
    return order


def median(values: Floats) -> float:
    """np.median of at least one number, none of them NaN, without its overhead."""
    middle = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, middle)[middle])
    return float(np.partition(values, (middle - 1, middle))[middle - 1 : middle + 1].mean())


Outcome = tuple[list[Item], Batch]
"""What a detector found, and the batch in which that is undone as far as possible."""


def trained(samples: Sequence[Sample]) -> int:
    """Their response tokens that train."""
    return sum(int(sample.mask.sum()) for sample in samples)


def flat(samples: Sequence[Sample]) -> Tokens:
    """The usable tokens of these samples, one after the other."""
    samples = [sample for sample in samples if sample.usable.any()]
    ends = np.cumsum([0, *(int(sample.usable.sum()) for sample in samples)])
    rollout, training = np.empty(ends[-1]), np.empty(ends[-1])
    index, position = np.empty(ends[-1], dtype=np.int64), np.empty(ends[-1], dtype=np.int64)
    occurred = np.empty(ends[-1], dtype=bool)
    for sample, (start, end) in zip(samples, pairwise(ends), strict=True):  # no parts to be joined: half the memory
        at, here = np.flatnonzero(sample.usable), slice(start, end)
        rollout[here], training[here] = sample.rollout[at], sample.training[at]
        index[here], position[here], occurred[here] = sample.index, at, sample.occurred[at]
    return Tokens(rollout, training, index, position, occurred)


def make_batch(
    records: Sequence[RolloutRecord | Response],
    training: Sequence[TrainingSample | Scored] | None = None,
    *,
    eos_ids: Sequence[int] = (),
    trainer_version: str | None = None,
    reference: Sequence[Floats] | None = None,
) -> Batch:
    """Put responses next to the training side's samples, already in the same order (`training.match`).

    trainer_version: weights of the training side, where its samples do not tell. reference: `Sample.reference` of each.
    """
    if training is not None and len(training) != len(records):
        raise ValueError(f"{len(training)} training samples for {len(records)} records: give one a record.")
    samples = []
    for index, record in enumerate(records):
        response = Response.of(record) if isinstance(record, RolloutRecord) else record
        told = _NOTHING_TOLD if training is None else training[index]
        told = told.scored() if isinstance(told, TrainingSample) else told
        if told.weight_version is None and trainer_version is not None:
            told = replace(told, weight_version=trainer_version)
        mask = response.loss_mask
        if told.loss_mask is not None and len(told.loss_mask) == len(mask):
            mask = mask & told.loss_mask
        rollout, training_side = response.rollout_log_probs, told.log_probs
        nulls = [
            np.zeros(len(values), dtype=bool) if where is None else where
            for values, where in ((rollout, response.nulls), (training_side, told.nulls))
        ]
        own = None if reference is None else reference[index]
        samples.append(Sample(index, response, mask, rollout, nulls[0], training_side, nulls[1], told, own))
    known = frozenset((*eos_ids, *(token for record in records for token in record.sampling.stop_token_ids)))
    return Batch(tuple(samples), known, training is not None)


_NOTHING_TOLD = Scored(log_probs=np.zeros(0))
