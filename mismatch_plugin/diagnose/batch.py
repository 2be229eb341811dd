"""Both sides of a batch as arrays: the form in which the detectors compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.result import FaultName, Finding, Item, LogProbSide, Side, place_of
from mismatch_plugin.diagnose.scorers import Checkpoint

DEFAULT_MAX_STALENESS = 1
FIELD: dict[LogProbSide, str] = {"rollout": "rollout_log_probs", "training": "train_log_probs"}


@dataclass(frozen=True, eq=False)
class Tokens:
    """Usable tokens of many samples, flat, [T]: log-probs of both sides, and where each token is.

    occurred: its id was earlier in the response: those that SGLang's penalties act on.
    """

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
        return np.argsort(self.rollout, kind="stable")

    @cached_property
    def order_down(self) -> Ints:
        """The same from the likeliest one on; of equal ones the first first."""
        return np.argsort(-self.rollout, kind="stable")

    def sides(self, side: LogProbSide) -> tuple[Floats, Floats]:
        """(log-probs of this side, those of the other)."""
        return (self.rollout, self.training) if side == "rollout" else (self.training, self.rollout)

    def where(self, chosen: Bools) -> Tokens:
        """The chosen ones alone."""
        return Tokens(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Batch:
    """N samples in the order of the records file, `index` being their place, and what else the detectors may know.

    eos_ids: ids known to end a response. max_staleness: steps that rollouts may be behind. now, start: checkpoints of
    the present weights, and of those that the run began with. from_checkpoint: `now` scored the training side.
    known_quantised: the user says that a side is.
    """

    samples: tuple[Sample, ...]
    eos_ids: frozenset[int] = frozenset()
    has_training: bool = True
    max_staleness: int = DEFAULT_MAX_STALENESS
    now: Checkpoint | None = None
    start: Checkpoint | None = None
    from_checkpoint: bool = False
    known_quantised: bool = False

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

    @property
    def quantised(self) -> bool | None:
        """Whether a side has weights or a KV cache below 16 bits, by its user or all servers; None where untold."""
        caches = (None, "auto", "float32", "bfloat16", "float16")
        told = [s.quantization is not None or s.kv_cache_dtype not in caches for one in self if (s := one.served)]
        return True if self.known_quantised or any(told) else None if len(told) < len(self) else False

    def tokens_of(self, samples: Sequence[Sample]) -> Tokens:
        """The usable tokens of some of its samples; of all of them they are made once."""
        return self.tokens if len(samples) == len(self) else flat(samples)

    def with_values(self, changed: Mapping[int, Mapping[str, Any]]) -> Batch:
        """The same batch with fields of some samples replaced, by index. A mask can only lose tokens."""
        if not any(changed.values()):
            return self
        samples = list(self.samples)  # what stays keeps what it has worked out
        for index, fields in changed.items():
            samples[index] = samples[index].with_fields(**fields)
        return replace(self, samples=tuple(samples))

    def finding(
        self, fault: FaultName, side: Side, evidence: str, fix: str, samples: Sequence[Sample], **more: Any
    ) -> Finding:
        """A finding about these samples: all their tokens that train, from the first one on. more: fields of it."""
        first = samples[0]
        about = {
            "of_samples": len(self),
            "tokens": trained(samples),
            "of_tokens": self.token_count,
            "first": place_of(first, int(np.argmax(first.mask)) if first.mask.any() else None),
        }
        return Finding(fault=fault, side=side, evidence=evidence, fix=fix, samples=len(samples), **(about | more))

    def finding_at(self, fault: FaultName, side: Side, evidence: str, fix: str, tokens: Tokens, **more: Any) -> Finding:
        """A finding about these tokens, one at least."""
        samples = [self.samples[index] for index in np.unique(tokens.sample)]
        first = place_of(self.samples[int(tokens.sample[0])], int(tokens.position[0]))
        return self.finding(fault, side, evidence, fix, samples, **({"tokens": len(tokens), "first": first} | more))


def medians(values: Floats, group: Ints) -> Floats:
    """[G] the median of each group's values. group: [T] numbers 0 to G − 1, each there at least once."""
    counts = np.bincount(group)
    start = np.cumsum(counts) - counts
    ordered = values[np.lexsort((values, group))]
    return (ordered[start + (counts - 1) // 2] + ordered[start + counts // 2]) / 2


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
        rollout[here], training[here] = sample.rollout_log_probs[at], sample.train_log_probs[at]
        index[here], position[here] = sample.index, at
        again = np.ones(len(sample), dtype=bool)
        again[np.unique(sample.response_ids, return_index=True)[1]] = False
        occurred[here] = again[at]
    return Tokens(rollout, training, index, position, occurred)


def make_batch(samples: Sequence[Sample], *, eos_ids: Sequence[int] = (), has_training: bool | None = None) -> Batch:
    """eos_ids: those that the requests name are added. has_training: whether a sample has any, unless given."""
    stop = (token for sample in samples for token in sample.sampling.stop_token_ids)
    if has_training is None:
        has_training = any(len(sample.train_log_probs) for sample in samples)
    numbered = tuple(sample.with_fields(index=index) for index, sample in enumerate(samples))
    return Batch(numbered, frozenset((*eos_ids, *stop)), has_training)
