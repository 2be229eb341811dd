"""Both sides of a batch as arrays: the form in which the detectors compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_plugin.check.findings import Place
from mismatch_plugin.check.training import TrainingSample
from mismatch_plugin.rollout.records import RolloutRecord

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sample:
    """One response. n = response tokens; all arrays of log-probs are float64 in nats, NaN where there is none.

    rollout: as long as the server's list. train: as long as the trainer's list, None if there is no training side.
    null_rollout, null_train: where the list held null, as opposed to NaN. mask: [n], tokens that train.
    """

    index: int
    record: RolloutRecord
    response_ids: Ints
    mask: Bools
    rollout: Floats
    null_rollout: Bools
    train: Floats | None = None
    null_train: Bools | None = None
    training: TrainingSample | None = None

    @property
    def tokens(self) -> int:
        """n, the number of response tokens."""
        return len(self.response_ids)

    @property
    def comparable(self) -> bool:
        """Both lists are there and as long as the response."""
        return self.train is not None and len(self.train) == len(self.rollout) == self.tokens

    @cached_property
    def usable(self) -> Bools:
        """[n] tokens that train and have a number on both sides; all False where lengths differ."""
        if self.train is None or not self.comparable:
            return np.zeros(self.tokens, dtype=bool)
        return self.mask & np.isfinite(self.rollout) & np.isfinite(self.train)

    @cached_property
    def occurred(self) -> Bools:
        """[n] tokens whose id was earlier in the response: those that SGLang's penalties act on."""
        before: set[int] = set()
        flags = np.zeros(self.tokens, dtype=bool)
        for position, token in enumerate(self.record.response_ids):
            flags[position] = token in before
            before.add(token)
        return flags

    def place(self, position: int | None = None, *, rollout: Any = None, training: Any = None) -> Place:
        """This sample as the place of a fault, with both values at the position where they exist."""
        if position is not None and rollout is None and position < len(self.rollout):
            rollout = float(self.rollout[position])
        if position is not None and training is None and self.train is not None and position < len(self.train):
            training = float(self.train[position])
        return Place(
            sample=self.index,
            sample_id=self.record.sample_id,
            position=position,
            rollout=rollout,
            training=training,
        )


@dataclass(frozen=True, eq=False)
class Tokens:
    """Usable tokens of many samples, flat, [T]: log-probs of both sides, and where each token is."""

    rollout: Floats
    train: Floats
    sample: Ints
    position: Ints
    occurred: Bools

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def gap(self) -> Floats:
        """d = log π_train − log π_rollout."""
        return self.train - self.rollout

    def where(self, chosen: Bools) -> Tokens:
        """The chosen ones alone."""
        return Tokens(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Batch:
    """N samples in the order of the records file. eos_ids: ids known to end a response."""

    samples: tuple[Sample, ...]
    eos_ids: frozenset[int] = frozenset()
    has_training: bool = True

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    @property
    def token_count(self) -> int:
        """Response tokens that train."""
        return sum(int(sample.mask.sum()) for sample in self.samples)

    @cached_property
    def tokens(self) -> Tokens:
        """All usable tokens."""
        return flat(self.samples)

    def with_values(self, changed: Mapping[int, Mapping[str, Any]]) -> Batch:
        """The same batch with fields of some samples replaced, by index."""
        if not changed:
            return self
        samples = (replace(sample, **changed.get(sample.index, {})) for sample in self.samples)
        return replace(self, samples=tuple(samples))


def flat(samples: Sequence[Sample]) -> Tokens:
    """The usable tokens of these samples, one after the other."""
    parts = [(sample, np.flatnonzero(sample.usable)) for sample in samples if sample.train is not None]

    def joined(columns: Iterable[NDArray[Any]], kind: type) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype=kind), *columns])

    return Tokens(
        rollout=joined((sample.rollout[chosen] for sample, chosen in parts), float),
        train=joined((sample.train[chosen] for sample, chosen in parts if sample.train is not None), float),
        sample=joined((np.full(len(chosen), sample.index) for sample, chosen in parts), int),
        position=joined((chosen for _, chosen in parts), int),
        occurred=joined((sample.occurred[chosen] for sample, chosen in parts), bool),
    )


def make_batch(
    records: Sequence[RolloutRecord],
    training: Sequence[TrainingSample] | None = None,
    *,
    eos_ids: Sequence[int] = (),
) -> Batch:
    """Put records next to the training side's samples, already in the same order (`training.match`)."""
    if training is not None and len(training) != len(records):
        raise ValueError(f"{len(training)} training samples for {len(records)} records: give one a record.")
    samples = []
    for index, record in enumerate(records):
        other = None if training is None else training[index]
        rollout, null_rollout = _array(record.rollout_log_probs)
        train, null_train = (None, None) if other is None else _array(other.train_log_probs)
        mask = np.array(record.loss_mask, dtype=bool)
        if other is not None and other.loss_mask is not None and len(other.loss_mask) == len(mask):
            mask &= np.array(other.loss_mask, dtype=bool)
        response = np.array(record.response_ids, dtype=np.int64)
        samples.append(Sample(index, record, response, mask, rollout, null_rollout, train, null_train, other))
    known = {*eos_ids, *(token for record in records for token in record.sampling.stop_token_ids)}
    return Batch(tuple(samples), frozenset(known), training is not None)


def _array(values: Sequence[float | None]) -> tuple[Floats, Bools]:
    nulls = np.array([value is None for value in values], dtype=bool)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64), nulls
