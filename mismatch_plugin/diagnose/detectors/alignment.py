"""Is each training log-prob next to the rollout log-prob of the same token of the same sample?

Everything here asks the same: is there another pairing under which the two sides agree far better?
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.distance import (
    CLIP,
    CLIPPED_GAP,
    Comparison,
    Distances,
    between,
    compare,
    distances,
    pooled,
)
from mismatch_plugin.diagnose.detectors.pairing import LAGS, incomparable, lag_findings, shifted, swap_finding
from mismatch_plugin.diagnose.findings import too_few

FACTOR = 0.5
STANDARD_ERRORS = 4.0
MINIMUM_GAIN = 0.1
"""In nats: where both pairings fit that well, none is wrong enough to name."""
MIN_TOKENS = 10
"""Of one sample, to judge it alone."""
MIN_POOLED = 40
"""Of the batch, to judge all samples together."""
MAX_SWAP_SAMPLES, MAX_SWAP_TOKENS = 512, 256
MOST = 0.5
"""Of the samples that can be judged; what holds for them is then taken to hold for those that are too short."""


def moved(sample: Sample, lag: int) -> Distances:
    """Of the rollout log-probs to the training ones so many positions on."""
    return distances(sample, shifted(sample.train_log_probs, lag, len(sample)))


def _clear(comparison: Comparison) -> bool:
    return comparison.clearly_better(FACTOR, STANDARD_ERRORS, MINIMUM_GAIN)


def find_swapped(batch: Batch) -> Outcome:
    """Samples whose rollout log-probs fit another sample's training log-probs of the right length."""
    by_length: dict[int, list[Sample]] = defaultdict(list)
    for sample in batch:
        by_length[len(sample.train_log_probs)].append(sample)
    judged = [sample for sample in batch if distances(sample).tokens >= MIN_TOKENS][:MAX_SWAP_SAMPLES]
    if not judged:
        few = f"no sample has {MIN_TOKENS} with a log-prob other than 0 on both sides"
        return [too_few(few, "swapped_samples")], batch
    swapped: list[tuple[Sample, Sample]] = []
    for sample in judged:
        if distances(sample).mean < MINIMUM_GAIN:
            continue
        best = _closest(sample, [other for other in by_length[len(sample)] if other is not sample])
        if best is None or not _clear(best[1]):
            continue
        lagged = _own_lag(sample)  # its own list, some positions off, is the simpler reason
        if lagged is None or best[1].other < FACTOR * lagged.comparison.other:
            swapped.append((sample, best[0]))
    if not swapped:
        return [], batch
    changed = {sample.index: {"train_log_probs": other.train_log_probs} for sample, other in swapped}
    if len(swapped) > MOST * len(judged):  # then what is too short to be found again is not at its place either
        changed = {sample.index: incomparable(sample) for sample in batch if not _fits(sample)} | changed
    before = np.mean([distances(sample).mean for sample, _ in swapped])
    after = np.mean([distances(sample, other.train_log_probs).mean for sample, other in swapped])
    why = f"{CLIPPED_GAP} {before:.3g} as paired, {after:.3g} with the other sample"
    return [swap_finding(batch, swapped, len(judged), why)], batch.with_values(changed)


def _fits(sample: Sample) -> bool:
    own = distances(sample)
    return len(sample.train_log_probs) == len(sample) and own.tokens >= MIN_TOKENS and own.mean < MINIMUM_GAIN


def _closest(sample: Sample, others: list[Sample]) -> tuple[Sample, Comparison] | None:
    """The one of `others`, all with lists of the right length, whose training log-probs fit best."""
    if not others or len(sample.rollout_log_probs) != len(sample):
        return None
    table = np.stack([other.train_log_probs[:MAX_SWAP_TOKENS] for other in others])  # [M, n]
    ours = np.broadcast_to(sample.rollout_log_probs[:MAX_SWAP_TOKENS], table.shape)
    values, valid = between(ours, table, sample.mask[:MAX_SWAP_TOKENS] & (ours != 0.0) & (table != 0.0))
    means = values.sum(-1) / np.maximum(valid.sum(-1), 1) + np.where(valid.sum(-1) < MIN_TOKENS, CLIP, 0.0)
    found = others[int(np.argmin(means))]
    return found, compare(distances(sample), distances(sample, found.train_log_probs))


class _Lagged(NamedTuple):
    sample: Sample
    lag: int
    comparison: Comparison


def find_shift(batch: Batch) -> Outcome:
    """Rollout log-probs that fit the training side's some positions earlier or later, best of ±1 to ±8."""
    candidates = [sample for sample in batch if sample.comparable]
    own = [distances(sample) for sample in candidates]
    count = sum(item.tokens for item in own)
    if count < MIN_POOLED:
        return [too_few(f"{count}, {MIN_POOLED} needed", "shift_by_one", "boundary")], batch
    some = slice(None, None, max(1, len(candidates) // MAX_SWAP_SAMPLES))
    together = _pooled_lag(candidates[some], pooled(own[some]))
    lagged: list[_Lagged] = []
    for sample, as_paired in zip(candidates, own, strict=True):
        alone = _own_lag(sample, None if together is None else together[0])
        if alone is not None:
            lagged.append(alone)
        elif together is not None:  # too short to tell alone: it follows the others unless it fits as it is
            found = compare(as_paired, moved(sample, together[0]))
            if found.tokens < 2 or found.other < found.own:
                lagged.append(_Lagged(sample, *together))
    if not lagged:
        return [], batch
    numbers = lagged[0].comparison
    why = f"{CLIPPED_GAP} {numbers.own:.3g} as paired, {numbers.other:.3g} if moved; lists are "
    by_lag: dict[int, list[Comparison]] = defaultdict(list)
    for item in lagged:
        by_lag[item.lag].append(item.comparison)
    statistics = {
        lag: {
            "distance_as_paired": float(np.mean([item.own for item in items])),
            "distance_moved": float(np.mean([item.other for item in items])),
        }
        for lag, items in by_lag.items()
    }
    changed = {
        sample.index: {"train_log_probs": shifted(sample.train_log_probs, lag, len(sample))}
        for sample, lag, _ in lagged
    }
    pairs = [(sample, lag) for sample, lag, _ in lagged]
    return lag_findings(batch, pairs, len(candidates), why, statistics), batch.with_values(changed)


def _pooled_lag(samples: list[Sample], own: Distances) -> tuple[int, Comparison] | None:
    """The lag under which all samples together agree far better, if there is one."""
    if own.mean <= MINIMUM_GAIN:
        return None
    found = [(lag, compare(own, pooled([moved(sample, lag) for sample in samples]))) for lag in LAGS]
    lag, best = min(found, key=lambda item: item[1].other / max(item[1].own, 1e-9))
    return (lag, best) if best.tokens >= MIN_POOLED and _clear(best) else None


def _own_lag(sample: Sample, likely: int | None = None) -> _Lagged | None:
    """The lag under which this sample agrees far better. likely: tried first, and taken if it leaves hardly a gap."""
    own = distances(sample)
    if own.tokens < MIN_TOKENS or own.mean < MINIMUM_GAIN:
        return None
    if likely is not None:
        as_others = compare(own, moved(sample, likely))
        if as_others.tokens >= MIN_TOKENS and as_others.other < MINIMUM_GAIN and _clear(as_others):
            return _Lagged(sample, likely, as_others)
    found = [(lag, compare(own, moved(sample, lag))) for lag in LAGS]
    lag, best = min(found, key=lambda item: item[1].other)
    return _Lagged(sample, lag, best) if best.tokens >= MIN_TOKENS and _clear(best) else None
