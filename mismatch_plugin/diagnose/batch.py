"""Both sides of a batch as arrays, the form in which the detectors compute, and robust figures of their distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats, Ints
from mismatch_plugin.data.sample import LogProbSide, Sample
from mismatch_plugin.data.served import below_16_bits
from mismatch_plugin.diagnose.result import FaultName, Finding, Item, Side, place_of
from mismatch_plugin.diagnose.scorers import Checkpoint

DEFAULT_MAX_STALENESS = 1
CLIP = 3.0
"""A single token counts for at most so much, in nats."""
CERTAIN = 0.02
"""Tokens whose probability is nearer to 1 tell nothing of the logits."""
CERTAIN_NATS, BINS = 0.05, 10
"""Tokens that both sides give a log-prob above −CERTAIN_NATS say nothing: any two policies agree on them."""
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
        """The tokens from the likeliest one on by the rollout side; of equal ones the first first."""
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
        told = [below_16_bits(s.quantization, s.kv_cache_dtype) for one in self if (s := one.served)]
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


# How far apart two lists are, whether another fits better, and what is usual at a token ------------------------------


def between(a: Floats, b: Floats, chosen: Bools | bool = True) -> Floats:
    """|a − b| of two arrays of one shape, clipped; NaN where one has no number, or where it is not chosen."""
    valid = np.isfinite(a) & np.isfinite(b) & chosen
    return np.minimum(np.abs(np.subtract(a, b, where=valid, out=np.full(valid.shape, np.nan))), CLIP)


def distances(sample: Sample, training: Floats | None = None) -> Floats:
    """Of a sample's rollout log-probs to its training ones or to any list, over the shorter length.

    Exact zeros are left out: certain tokens fit everywhere, and fills nowhere.
    """
    theirs = sample.train_log_probs if training is None else training
    shared = min(len(sample.rollout_log_probs), len(theirs), len(sample))
    ours, theirs = sample.rollout_log_probs[:shared], theirs[:shared]
    return between(ours, theirs, sample.mask[:shared] & (ours != 0.0) & (theirs != 0.0))


def told(values: Floats) -> int:
    """How many are numbers."""
    return int(np.isfinite(values).sum())


def average(values: Floats) -> float:
    """Of the numbers among them; inf if there is none."""
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.inf


class Comparison(NamedTuple):
    """Two candidates over the tokens that both can judge. deviations: (own − other) in standard errors of the paired
    differences."""

    own: float
    other: float
    deviations: float
    tokens: int


def compare(own: Floats, other: Floats) -> Comparison:
    """Paired, token by token, over the shorter length."""
    shared = min(len(own), len(other))
    valid = np.isfinite(own[:shared]) & np.isfinite(other[:shared])
    a, b = own[:shared][valid], other[:shared][valid]
    if len(a) < 2:
        return Comparison(math.inf, math.inf, 0.0, len(a))
    error = float((a - b).std(ddof=1)) / math.sqrt(len(a))
    return Comparison(float(a.mean()), float(b.mean()), float((a - b).mean()) / max(error, 1e-12), len(a))


def logit_gap(sample: Sample, ours: Floats, theirs: Floats) -> Floats:
    """[n] T (ours − theirs) / (1 − p), p the smaller of the two probabilities; NaN where it tells nothing.

    To first order a change of the logits moves log p by (1 − p) of it over T, so that this measures the change itself:
    the tokens of sure and of unsure responses are then equally far apart.
    """
    temperature = sample.log_prob_temperature
    with np.errstate(invalid="ignore", over="ignore"):
        left = -np.expm1(np.minimum(ours, theirs))
        chosen = sample.usable & np.isfinite(ours) & np.isfinite(theirs) & (left > CERTAIN)
        return np.where(chosen, temperature * np.clip(ours - theirs, -CLIP, CLIP) / np.where(chosen, left, 1.0), np.nan)


def telling(tokens: Tokens) -> Bools:
    """[T] not near certain on both sides."""
    return np.minimum(tokens.rollout, tokens.training) < -CERTAIN_NATS


def ordinary(tokens: Tokens, values: Floats, typical: Callable[[Floats], Any], kinds: Sequence[Bools] = ()) -> Floats:
    """[T] what `typical` is of the values of tokens of the same kind in the same tenth by rollout log-prob."""
    found = np.zeros(len(values))
    for chosen in kinds or [np.ones(len(values), dtype=bool)]:
        for part in np.array_split(tokens.order[chosen[tokens.order]], BINS):
            if len(part):
                found[part] = typical(values[part])
    return found


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's, without care for ties; NaN for fewer than 3 values or a constant."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def mann_whitney(a: Floats, b: Floats) -> tuple[float, float]:
    """Are the values of `a` larger than those of `b`? The share of pairs in which they are, ties counting half, and the
    one-sided p by the normal approximation (H. B. Mann, D. R. Whitney, 1947)."""
    ordered = np.sort(b)
    below, upto = (np.searchsorted(ordered, a, side=side) for side in ("left", "right"))
    area = float((below + upto).sum()) / 2 / (len(a) * len(b))
    _, ties = np.unique(np.concatenate([a, b]), return_counts=True)
    n = len(a) + len(b)
    variance = (n + 1 - float((ties**3 - ties).sum()) / (n * (n - 1))) / (12 * len(a) * len(b))
    deviations = (area - 0.5) / math.sqrt(variance) if variance > 0 else 0.0
    return area, math.erfc(deviations / math.sqrt(2)) / 2


def z_score(values: Sequence[float] | Floats) -> float:
    """Of their sum, in standard errors over samples; 0 of a single one."""
    error = math.sqrt(len(values)) * float(np.std(values, ddof=1)) if len(values) > 1 else math.inf
    return float(np.sum(values)) / max(error, 1e-12)
