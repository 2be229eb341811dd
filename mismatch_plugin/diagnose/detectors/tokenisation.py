"""Ids that are others on the training side from some position of a response on: only what is before agrees.

Seen in the log-probs alone, where the training side does not tell its ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome, Tokens
from mismatch_plugin.diagnose.detectors.alignment import moved
from mismatch_plugin.diagnose.detectors.distance import compare, distances, scaled
from mismatch_plugin.diagnose.detectors.identity import IDS_FIX
from mismatch_plugin.diagnose.detectors.pairing import LAGS
from mismatch_plugin.diagnose.findings import Finding, place_of

FAR, TIMES, QUANTILE = 0.3, 16.0, 0.25
"""A token is far off by so many nats at least, and so many times the lower quartile of |gap| at its log-prob
(half the median of normal noise): half of all tokens may be far."""
INSIDE, ELSEWHERE = 0.5, 0.03
"""Share of far tokens in such a stretch, and outside it at least: MoE routers flip for one token in a hundred or so."""
NEAR_VERSION = 3
"""A stretch that begins so near to a change of weights is that change's."""


class _Bar(NamedTuple):
    """far, before: tokens inside that are far, and tokens before it, near certain ones aside. chance: that tokens which
    are far independently of each other make one such stretch, in the batch or in the one sample."""

    far: int
    before: int
    chance: float
    whole_batch: bool


BARS = (_Bar(6, 4, 1e-4, True), _Bar(3, 1, 0.05, False))
"""The first must be met by one sample; then others of the batch are judged each alone, by the second."""


class Stretch(NamedTuple):
    """Response tokens start to stop − 1 of a sample. before, inside: mean |gap| there, near certain tokens aside, each
    at most 3 nats."""

    sample: Sample
    start: int
    stop: int
    before: float
    inside: float

    @property
    def to_the_end(self) -> bool:
        """Nothing that agrees follows."""
        return len(self.sample) - self.stop < 4


def find_retokenised(batch: Batch) -> Outcome:
    """The likeliest stretch of far tokens in each sample; from its first token on nothing is compared afterwards.

    Its score: Σ log(INSIDE/q) over far tokens + Σ log((1 − INSIDE)/(1 − q)) over the others, q the far tokens' share
    in an ordinary sample. The largest sum of consecutive tokens is found in one pass (Kadane).
    """
    measured = scaled(batch, typical=QUANTILE)
    told = measured.informative
    tokens, size = measured.tokens.where(told), measured.size[told]
    far = size > np.maximum(FAR, TIMES * measured.ordinary[told])
    if far.sum() < BARS[0].far:
        return [], batch
    counts = np.bincount(tokens.sample)
    shares = np.bincount(tokens.sample, far)[counts > 0] / counts[counts > 0]
    scores = _scores(far, min(max(ELSEWHERE, float(np.median(shares))), INSIDE / 2))
    found: list[Stretch] = []
    for bar in BARS:
        if found or bar.whole_batch:
            found = _stretches(batch, tokens, size, far, scores, bar)
    changed = {
        item.sample.index: {"loss_mask": item.sample.mask & (np.arange(len(item.sample)) < item.start)}
        for item in found
    }
    return [_finding(batch, found)] if found else [], batch.with_values(changed)


def _stretches(batch: Batch, tokens: Tokens, size: Floats, far: Bools, scores: Floats, bar: _Bar) -> list[Stretch]:
    samples, longest = (len(batch), len(far)) if bar.whole_batch else (1, max(len(sample) for sample in batch))
    found: list[Stretch] = []
    for at, first, last in _best(scores, tokens.sample, math.log(longest / bar.chance)):
        begin = int(np.searchsorted(tokens.sample, at))
        before, inside = size[begin:first], size[first : last + 1]
        if far[first : last + 1].sum() < bar.far or len(before) < bar.before:
            continue
        start, stop = int(tokens.position[first]), int(tokens.position[last]) + 1
        item = Stretch(batch.samples[at], start, stop, float(before.mean()), float(inside.mean()))
        if _agreed(before, inside, samples / bar.chance) and not _otherwise(item):
            found.append(item)
    return found


def _scores(far: Bools, rate: float) -> Floats:
    return np.where(far, math.log(INSIDE / rate), math.log((1 - INSIDE) / (1 - rate)))


def _best(scores: Floats, owner: Ints, least: float) -> list[tuple[int, int, int]]:
    """(sample, first, last) of each sample's largest sum of consecutive scores, if above `least`. owner: ascending."""
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    # A step down between samples that no sum can climb: the smallest sum so far is then always one of the own sample.
    total = np.cumsum(scores) - owner * (2 * np.abs(scores).sum() + 1)
    before = total - scores
    lowest = np.minimum.accumulate(before)
    gains = total - lowest
    found = []
    for start, stop in zip(starts, [*starts[1:], len(owner)], strict=True):
        if gains[start:stop].max() > least:
            last = int(start + np.argmax(gains[start:stop]))
            first = int(start + np.argmin(before[start : last + 1]))
            found.append((int(owner[start]), first, last))
    return found


def _agreed(before: Floats, inside: Floats, odds: float) -> bool:
    """What is before is not part of it by chance: log-likelihood ratio of |gap| as exponential of its own mean there,
    against the mean inside."""
    own, other = max(float(before.mean()), 1e-3), float(inside.mean())
    return own < other and len(before) * (math.log(other / own) - 1 + own / other) > math.log(odds)


def _otherwise(item: Stretch) -> bool:
    """The weights change there, or the whole list is some positions off."""
    sample = item.sample
    if any(span.start > 0 and abs(span.start - item.start) <= NEAR_VERSION for span in sample.weight_versions):
        return True
    own = distances(sample)
    early = own._replace(valid=own.valid & (np.arange(len(own.valid)) < item.start))
    comparisons = (compare(early, moved(sample, lag)) for lag in LAGS)
    return any(found.other < found.own for found in comparisons if found.tokens >= 2)


def _moved_on(item: Stretch) -> int | None:
    """The lag under which what follows agrees far better: a token became two, or two one."""
    own = distances(item.sample)
    inside = own._replace(valid=own.valid & (np.arange(len(own.valid)) >= item.start))
    found = [(lag, compare(inside, moved(item.sample, lag))) for lag in LAGS]
    lag, best = min(found, key=lambda pair: pair[1].other)
    return lag if best.tokens >= BARS[-1].far and best.clearly_better(0.5, 3.0, 0.1) else None


def _finding(batch: Batch, found: list[Stretch]) -> Finding:
    first = found[0]
    lags = [lag for lag in map(_moved_on, found) if lag is not None]
    ending = sum(item.to_the_end for item in found)
    until = "to their end" if ending == len(found) else f"to their end in {ending}, for a stretch in the others"
    why = f"; in {len(lags)} of them the rest fits {lags[0]:+d} on, as where one token became two" if lags else ""
    return batch.finding(
        "retokenised",
        "both",
        f"{len(found)} of {len(batch)} samples agree up to some position (mean |gap| {_mean(found, 'before'):.3g}) "
        f"and are far apart from there on ({_mean(found, 'inside'):.3g}), {until}; in sample {first.sample.index} from "
        f"position {first.start} of {len(first.sample)}{why}: the training side scores other ids there.",
        IDS_FIX,
        [item.sample for item in found],
        tokens=sum(int(item.sample.mask[item.start :].sum()) for item in found),
        first=place_of(first.sample, first.start),
        statistics={
            "fraction": len(found) / len(batch),
            "mean_before": _mean(found, "before"),
            "mean_inside": _mean(found, "inside"),
            "to_the_end": ending,
            "moved": len(lags),
        },
    )


def _mean(found: list[Stretch], name: str) -> float:
    return float(np.mean([getattr(item, name) for item in found]))
