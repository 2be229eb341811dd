"""Is each training log-prob next to the rollout log-prob of the same token of the same sample?

Everything here asks the same: is there another pairing under which the two sides agree far better?
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.check.batch import Batch, Sample
from mismatch_plugin.check.distance import CLIP, Comparison, Distances, compare, distances
from mismatch_plugin.check.eos import appended_finding
from mismatch_plugin.check.findings import Finding, Undecided
from mismatch_plugin.check.identity import MAX_LAG, incomparable, lag_findings, shifted, swap_finding

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


def find_swapped(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """Samples whose rollout log-probs fit another sample's training log-probs of the right length."""
    by_length: dict[int, list[Sample]] = defaultdict(list)
    for sample in batch:
        if sample.train is not None:
            by_length[len(sample.train)].append(sample)
    swapped: list[tuple[Sample, Sample]] = []
    judged = 0
    for sample in batch:
        if sample.train is None or judged >= MAX_SWAP_SAMPLES:
            continue
        own = distances(sample, sample.train)
        if own.tokens < MIN_TOKENS:
            continue
        judged += 1
        if own.mean < MINIMUM_GAIN:
            continue
        others = [other for other in by_length[sample.tokens] if other is not sample]
        best = _closest(sample, own, others)
        if best is None or not best[1].clearly_better(FACTOR, STANDARD_ERRORS, MINIMUM_GAIN):
            continue
        moved = _own_lag(sample)  # its own list, some positions off, is the simpler reason
        if moved is None or best[1].other < FACTOR * moved.comparison.other:
            swapped.append((sample, best[0]))
    if not judged:
        return [Undecided(faults=("swapped_samples",), reason=_few_samples())], batch
    if not swapped:
        return [], batch
    changed: dict[int, dict[str, Any]] = {
        sample.index: {"train": other.train, "null_train": other.null_train} for sample, other in swapped
    }
    if len(swapped) > MOST * judged:  # then what is too short to be found again is not at its place either
        found = {sample.index for sample, _ in swapped}
        fitting = {sample.index for sample in batch if _fits(sample)}
        changed |= {sample.index: incomparable(sample) for sample in batch if sample.index not in found | fitting}
    before = np.mean([distances(sample, sample.train).mean for sample, _ in swapped if sample.train is not None])
    after = np.mean([distances(sample, other.train).mean for sample, other in swapped if other.train is not None])
    why = f"mean |difference| {before:.3g} as paired, {after:.3g} with the other sample"
    return [swap_finding(batch, swapped, judged, why)], batch.with_values(changed)


def _fits(sample: Sample) -> bool:
    if sample.train is None or len(sample.train) != sample.tokens:
        return False
    own = distances(sample, sample.train)
    return own.tokens >= MIN_TOKENS and own.mean < MINIMUM_GAIN


def _closest(sample: Sample, own: Distances, others: list[Sample]) -> tuple[Sample, Comparison] | None:
    """The one of `others`, all with lists of the right length, whose training log-probs fit best."""
    trains = [other.train[:MAX_SWAP_TOKENS] for other in others if other.train is not None]
    if not trains or len(sample.rollout) != sample.tokens:
        return None
    table, ours, mask = np.stack(trains), sample.rollout[:MAX_SWAP_TOKENS], sample.mask[:MAX_SWAP_TOKENS]  # [M, n]
    valid = mask & np.isfinite(ours) & (ours != 0.0) & np.isfinite(table) & (table != 0.0)
    gaps = np.where(valid, np.minimum(np.abs(np.where(valid, table, 0.0) - np.nan_to_num(ours)), CLIP), 0.0)
    means = gaps.sum(-1) / np.maximum(valid.sum(-1), 1) + np.where(valid.sum(-1) < MIN_TOKENS, CLIP, 0.0)
    found = others[int(np.argmin(means))]
    assert found.train is not None
    return found, compare(own, distances(sample, found.train))


def find_lengths(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """Lists that are not as long as the response: an appended EOS, prompt tokens, or simply another length.

    Afterwards both lists of each sample are as long as its response.
    """
    findings: list[Finding | Undecided] = []
    changed: dict[int, dict[str, Any]] = defaultdict(dict)
    short = [sample for sample in batch if len(sample.rollout) != sample.tokens]
    appended = [sample for sample in short if len(sample.rollout) == sample.tokens - 1]
    for sample in short:
        changed[sample.index]["rollout"] = shifted(sample.rollout, 0, sample.tokens)
    if appended:
        findings.append(
            appended_finding(batch, appended, "rollout", "one token more than the server has log-probs for")
        )
    other = [sample for sample in short if sample not in appended]
    if other:
        findings.append(_length_finding(batch, other, "rollout"))
    longer: list[tuple[Sample, int]] = []
    wrong: list[Sample] = []
    extra: list[Sample] = []
    offsets = _offsets([sample for sample in batch if _surplus(sample)])
    for sample in batch:
        if sample.train is None or len(sample.train) == sample.tokens:
            continue
        lag = offsets[sample.index]
        if lag:
            longer.append((sample, lag))
        elif len(sample.train) == sample.tokens + 1:
            extra.append(sample)
        else:
            wrong.append(sample)
        changed[sample.index]["train"] = shifted(sample.train, lag, sample.tokens)
    if extra:
        findings.append(appended_finding(batch, extra, "training", "one token more than was sampled"))
    if longer:
        difference = len(longer[0][0].train if longer[0][0].train is not None else ()) - longer[0][0].tokens
        prompt = len(longer[0][0].record.prompt_ids)
        included = f" (its prompt has {prompt} tokens)" if abs(difference - prompt) <= 1 else ""
        why = f"it is {difference:+d} tokens longer than the response in sample {longer[0][0].index}{included}; lists "
        as_boundary = [(sample, lag if abs(lag) > 1 else 2 * lag) for sample, lag in longer]
        findings += lag_findings(batch, as_boundary, len(batch), why)
    if wrong:
        findings.append(_length_finding(batch, wrong, "training"))
    return findings, batch.with_values(changed)


def _offsets(samples: list[Sample]) -> dict[int, int]:
    """By index, the k with rollout[t] closest to training[t + k]; samples too short to tell follow most others."""
    offsets = {sample.index: _best_offset(sample) for sample in samples}
    clear = [(sample, offsets[sample.index]) for sample in samples if offsets[sample.index]]
    unclear = [sample for sample in samples if not offsets[sample.index]]
    whole_prompt = sum(lag == _surplus(sample) for sample, lag in clear)
    judged = len(clear) + sum(_judgeable(sample) for sample in unclear)
    for sample in unclear:
        if _judgeable(sample) or _surplus(sample) <= 0:
            continue
        if whole_prompt > MOST * judged:
            offsets[sample.index] = _surplus(sample)
    return offsets


def _surplus(sample: Sample) -> int:
    return 0 if sample.train is None else len(sample.train) - sample.tokens


def _judgeable(sample: Sample) -> bool:
    return sample.train is not None and distances(sample, sample.train).tokens >= MIN_TOKENS


def find_shift(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """Rollout log-probs that fit the training side's some positions earlier or later, best of ±1 to ±8."""
    candidates = [sample for sample in batch if sample.comparable]
    own = [distances(sample, sample.train) for sample in candidates if sample.train is not None]
    count = sum(item.tokens for item in own)
    if count < MIN_POOLED:
        reason = f"not enough tokens to tell: {count}, {MIN_POOLED} needed"
        return [Undecided(faults=("shift_by_one", "boundary"), reason=reason)], batch
    together = _pooled_lag(candidates) if _pool(own).mean > MINIMUM_GAIN else None
    lagged: list[_Lagged] = []
    for sample, as_paired in zip(candidates, own, strict=True):
        alone = _own_lag(sample)
        if alone is not None:
            lagged.append(alone)
        elif together is not None:  # too short to tell alone: it follows the others unless it fits as it is
            moved = compare(as_paired, _moved(sample, together[0]))
            if moved.tokens < 2 or moved.other < moved.own:
                lagged.append(_Lagged(sample, *together))
    if not lagged:
        return [], batch
    numbers = lagged[0].comparison
    why = f"mean |difference| {numbers.own:.3g} as paired, {numbers.other:.3g} if moved; lists are "
    statistics = {
        lag: {
            "distance_as_paired": float(np.mean([item.comparison.own for item in lagged if item.lag == lag])),
            "distance_moved": float(np.mean([item.comparison.other for item in lagged if item.lag == lag])),
        }
        for lag in {item.lag for item in lagged}
    }
    changed = {
        item.sample.index: {"train": shifted(item.sample.train, item.lag, item.sample.tokens)} for item in lagged
    }
    pairs = [(item.sample, item.lag) for item in lagged]
    return [*lag_findings(batch, pairs, len(candidates), why, statistics)], batch.with_values(changed)


_LAGS = [lag for distance in range(1, MAX_LAG + 1) for lag in (distance, -distance)]


class _Lagged(NamedTuple):
    sample: Sample
    lag: int
    comparison: Comparison


def _moved(sample: Sample, lag: int) -> Distances:
    return distances(sample, shifted(sample.train, lag, sample.tokens))


def _pool(parts: list[Distances]) -> Distances:
    """All samples' tokens as one list."""
    return Distances(np.concatenate([part.values for part in parts]), np.concatenate([part.valid for part in parts]))


def _pooled_lag(samples: list[Sample]) -> tuple[int, Comparison] | None:
    """The lag under which all samples together agree far better, if there is one."""
    own = _pool([distances(sample, sample.train) for sample in samples if sample.train is not None])
    found = [(lag, compare(own, _pool([_moved(sample, lag) for sample in samples]))) for lag in _LAGS]
    lag, best = min(found, key=lambda item: item[1].other / max(item[1].own, 1e-9))
    clear = best.tokens >= MIN_POOLED and best.clearly_better(FACTOR, STANDARD_ERRORS, MINIMUM_GAIN)
    return (lag, best) if clear else None


def _own_lag(sample: Sample) -> _Lagged | None:
    if sample.train is None:
        return None
    own = distances(sample, sample.train)
    if own.tokens < MIN_TOKENS or own.mean < MINIMUM_GAIN:
        return None
    found = [(lag, compare(own, _moved(sample, lag))) for lag in _LAGS]
    lag, best = min(found, key=lambda item: item[1].other)
    if best.tokens < MIN_TOKENS or not best.clearly_better(FACTOR, STANDARD_ERRORS, MINIMUM_GAIN):
        return None
    return _Lagged(sample, lag, best)


def _best_offset(sample: Sample) -> int:
    """The k with rollout[t] closest to training[t + k], for lists of another length; 0 if nothing is clear."""
    if sample.train is None:
        return 0
    difference = len(sample.train) - sample.tokens
    own = distances(sample, sample.train)
    near = set(range(min(0, difference) - MAX_LAG, max(0, difference) + MAX_LAG + 1))
    if difference > 4 * MAX_LAG:  # a whole prompt: the two ends are where a response can start
        near = {*range(-MAX_LAG, MAX_LAG + 1), *range(difference - MAX_LAG, difference + MAX_LAG + 1)}
    found = {lag: compare(own, _moved(sample, lag)) for lag in sorted(near - {0})}
    clear = {
        lag: item
        for lag, item in found.items()
        if item.tokens >= 4 and item.clearly_better(FACTOR, 2.0 if lag == difference else STANDARD_ERRORS, MINIMUM_GAIN)
    }
    return min(clear, key=lambda lag: clear[lag].other) if clear else 0


def _length_finding(batch: Batch, samples: list[Sample], side: str) -> Finding:
    first = samples[0]
    values = first.rollout if side == "rollout" else first.train
    count = 0 if values is None else len(values)
    dropped = " (the last token, perhaps EOS, was dropped)" if count == first.tokens - 1 else ""
    return Finding(
        fault="length",
        side="rollout" if side == "rollout" else "training",
        evidence=f"The {side} side's log-probs of {len(samples)} of {len(batch)} samples are not as many as the "
        f"response tokens: {count} for {first.tokens} in sample {first.index}{dropped}.",
        statistics={"fraction": len(samples) / len(batch)},
        samples=len(samples),
        of_samples=len(batch),
        tokens=sum(sample.tokens for sample in samples),
        of_tokens=batch.token_count,
        first=first.place(min(count, first.tokens)),
        fix="Give exactly one log-prob a response token: keep the lists together when responses are cut, continued "
        "or padded.",
    )


def _few_samples() -> str:
    return f"not enough tokens to tell: no sample has {MIN_TOKENS} with a log-prob other than 0 on both sides"
