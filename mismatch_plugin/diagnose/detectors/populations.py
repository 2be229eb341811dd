"""One server or worker that is further from the trainer than the others: two populations of samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome, median
from mismatch_plugin.diagnose.detectors.distance import logit_gap
from mismatch_plugin.diagnose.findings import Confidence, Finding

MIN_TOKENS, HALVED = 6, 16
"""Of one sample, to judge it; and to judge both of its halves."""
MIN_SAMPLES = 8
"""Of one server or worker."""
FLOOR = 0.003
"""Logit gaps below count as that: two servers that both compute in float32 do not differ by a ratio of rounding."""
PRECISION = 0.07
"""Logit gap that bf16 does not explain: its medians of responses were 0.013 to 0.038 with real servers, p90 0.065."""
LEVEL, AREA, RATIO = 1e-4, 0.75, 1.25
"""Of Mann-Whitney tests after Holm; its effect size (share of pairs in which the server's sample is further off); and
how far the medians must be apart. One small update on top of bf16 noise measured 1.35."""
CLEAR_RATIO = 2.0
SPLIT_RATIO, SEPARATION, SMALLEST_SHARE = 2.5, 4.5, 0.1
"""Where no server is recorded: ratio of the two medians, their distance in standard deviations inside (a normal
distribution cut in two has 2.7, a uniform one 3.5), and the share of the smaller population."""
FIX = (
    'Send the present weights to {which} again and compare POST /weights_checker {{"action": "checksum"}} over all '
    "servers and workers, each asked directly, not through the router; check the return code of every update, and that "
    "all servers compute in one precision."
)
RECORD_FIX = (
    "Record with each response which server and worker sampled it (`server`, `dp_rank`): then the one that is behind "
    'can be named. Until then compare POST /weights_checker {"action": "checksum"} over all servers and workers.'
)


class Scored(NamedTuple):
    """A sample and its median |logit gap| (that of the nearer half), and the same over the median of its like: those of
    one temperature and one pair of weight versions."""

    sample: Sample
    gap: float
    relative: float


def find_stale_server(batch: Batch) -> Outcome:
    """By server and worker where both are recorded, else by server."""
    scored = score(batch)
    for key in (_worker, _server):
        groups: dict[Hashable, list[Scored]] = defaultdict(list)
        for item in scored:
            if (name := key(item.sample)) is not None:
                groups[name].append(item)
        judged = {name: items for name, items in groups.items() if len(items) >= MIN_SAMPLES}
        if finding := _odd(batch, judged):
            return [finding], batch
    return [], batch


def find_split(batch: Batch) -> Outcome:
    """Two clear populations where no record names a server or worker."""
    scored = sorted(score(batch), key=lambda item: item.relative)
    if len(scored) < 2 * MIN_SAMPLES or len({_worker(item.sample) for item in scored}) > 1:
        return [], batch
    logs = np.log([item.relative for item in scored])
    least = max(math.ceil(SMALLEST_SHARE * len(logs)), MIN_SAMPLES // 2)
    cuts = np.arange(least, len(logs) - least + 1)
    inside = [cut * logs[:cut].var() + (len(logs) - cut) * logs[cut:].var() for cut in cuts]
    cut = int(cuts[int(np.argmin(inside))])
    low, high = scored[:cut], scored[cut:]
    near, far = _median(low), _median(high)
    spread = math.sqrt((logs[:cut].var() + logs[cut:].var()) / 2)
    apart = float(logs[cut:].mean() - logs[:cut].mean()) / max(spread, 0.05)
    if far < PRECISION or far < SPLIT_RATIO * near or apart < SEPARATION:
        return [], batch
    samples = sorted((item.sample for item in high), key=lambda sample: sample.index)
    finding = batch.finding(
        "stale_server",
        "rollout",
        f"The samples are of two kinds: {len(high)} of {len(scored)} lie {far / near:.1f} times as far from the "
        f"training side as the rest (median logit gap {far:.3g} against {near:.3g}), {apart:.1f} standard deviations "
        f"apart, from their first tokens on: as if one of several servers or workers had other weights.",
        RECORD_FIX,
        samples,
        of_samples=len(scored),
        statistics={"ratio": far / near, "separation": apart, "far": far, "near": near},
        confidence="possible",
    )
    return [finding], batch


def score(batch: Batch) -> list[Scored]:
    """The samples with enough tokens."""
    gaps = [(sample, gap) for sample in batch if (gap := sample_gap(sample)) is not None]
    like: dict[Hashable, list[float]] = defaultdict(list)
    for sample, gap in gaps:
        like[_like(sample)].append(math.log(gap))
    level = float(np.median([math.log(gap) for _, gap in gaps])) if gaps else 0.0
    middle = {key: float(np.median(values)) for key, values in like.items()}
    return [Scored(s, gap, math.exp(math.log(gap) - middle[_like(s)] + level)) for s, gap in gaps]


def sample_gap(sample: Sample) -> float | None:
    """Median |logit gap|, of the half of the response where it is smaller: other weights show in both halves, other ids
    or another prompt in one. None for too few tokens."""
    if sample not in _GAPS:
        _GAPS[sample] = _gap_of_nearer_half(sample)
    return _GAPS[sample]


_GAPS: WeakKeyDictionary[Sample, float | None] = WeakKeyDictionary()
"""Several detectors ask for the same."""


def _gap_of_nearer_half(sample: Sample) -> float | None:
    if not sample.comparable:
        return None
    gap = np.abs(logit_gap(sample, sample.rollout_log_probs, sample.train_log_probs))
    gap = gap[np.isfinite(gap)]
    if len(gap) < MIN_TOKENS:
        return None
    halves: list[Floats] = np.array_split(gap, 2) if len(gap) >= HALVED else [gap]
    return max(min(map(median, halves)), FLOOR)


def _like(sample: Sample) -> Hashable:
    versions = frozenset(span.version for span in sample.weight_versions)
    return sample.temperature, versions, sample.trainer_version


def _server(sample: Sample) -> Hashable:
    return sample.worker[0]


def _worker(sample: Sample) -> Hashable:
    worker = sample.worker
    return None if worker == (None, None) else worker


def _median(items: list[Scored]) -> float:
    return float(np.median([item.relative for item in items]))


def _odd(batch: Batch, groups: dict[Hashable, list[Scored]]) -> Finding | None:
    """Each group against the nearest one and those that are about as near."""
    if len(groups) < 2:
        return None
    nearest = min(groups, key=lambda name: _median(groups[name]))
    near_by = [name for name in groups if _median(groups[name]) < RATIO * _median(groups[nearest])]
    base = [item.relative for name in near_by for item in groups[name]]
    tests = {
        name: mann_whitney(np.array([item.relative for item in items]), np.array(base))
        for name, items in groups.items()
        if name not in near_by
    }
    odd: list[Hashable] = []
    pairs = len(groups) * (len(groups) - 1) // 2  # the nearest was chosen after looking
    for rank, name in enumerate(sorted(tests, key=lambda name: tests[name].p)):
        if tests[name].p * (pairs - rank) > LEVEL:
            break
        if tests[name].area >= AREA:
            odd.append(name)
    if not odd:
        return None
    near, far = float(np.median(base)), _median([item for name in odd for item in groups[name]])
    clear = far >= CLEAR_RATIO * near and far >= PRECISION
    confidence: Confidence = "likely" if clear else "possible"
    names = ", ".join(called(name) for name in odd)
    samples = sorted((item.sample for name in odd for item in groups[name]), key=lambda sample: sample.index)
    others = ", ".join(map(called, near_by[:4])) + (" and others" if len(near_by) > 4 else "")
    area = min(tests[name].area for name in odd)
    p = max(tests[name].p for name in odd)
    return batch.finding(
        "stale_server",
        "rollout",
        f"Responses of {names} ({len(samples)} samples) lie {far / near:.2g} times as far from the training side as "
        f"those of {others} (median logit gap {far:.3g} against {near:.3g}; in {area:.0%} of pairs, "
        f"p = {p:.1g}), under the same versions and temperature: other weights there"
        + ("." if clear else ", or another precision or kernel."),
        FIX.format(which=names),
        samples,
        of_samples=sum(map(len, groups.values())),
        statistics={"ratio": far / near, "far": far, "near": near, "area": area, "p": p, "groups": len(groups)},
        confidence=confidence,
    )


def called(name: Hashable) -> str:
    """A server, or a server and its data-parallel rank, in words."""
    server, rank = name if isinstance(name, tuple) else (name, None)
    parts = [str(server)] if server is not None else []
    return " ".join([*parts, *([f"dp_rank {rank}"] if rank is not None else [])])


class Ranks(NamedTuple):
    """area: share of pairs in which the first is larger. p: one-sided, by the normal approximation."""

    area: float
    p: float


def mann_whitney(a: Floats, b: Floats) -> Ranks:
    """Are the values of `a` larger than those of `b`? Ties count half (H. B. Mann, D. R. Whitney, 1947)."""
    ordered = np.sort(b)
    below, upto = (np.searchsorted(ordered, a, side=side) for side in ("left", "right"))
    area = float((below + upto).sum()) / 2 / (len(a) * len(b))
    _, ties = np.unique(np.concatenate([a, b]), return_counts=True)
    n = len(a) + len(b)
    variance = (n + 1 - float((ties**3 - ties).sum()) / (n * (n - 1))) / (12 * len(a) * len(b))
    deviations = (area - 0.5) / math.sqrt(variance) if variance > 0 else 0.0
    return Ranks(area, math.erfc(deviations / math.sqrt(2)) / 2)
