"""Weights that never reached the servers, or only in part: do the rollout log-probs fit those of the run's start?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_number
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.distance import logit_gap
from mismatch_plugin.diagnose.detectors.distribution import rank_correlation
from mismatch_plugin.diagnose.detectors.layers import find_parts
from mismatch_plugin.diagnose.detectors.populations import PRECISION, sample_gap
from mismatch_plugin.diagnose.findings import Confidence, Finding, Item

MIN_SAMPLES = 8
STANDARD_ERRORS = 4.0
SHARE, BEYOND = 0.75, 0.35
"""Of the way back to the start that names it, and how far beyond what the labels tell."""
FACTOR = 0.9
"""The start must fit better than by this. The mildest real update (mean |Δ log p| 0.012 under bf16) gave 0.6."""
APART = 1.3
"""Without a checkpoint of the present weights: the training side must be further from the start than the rollout side
is by this. Where it is not, the training side's own noise explains what is seen."""
MIDDLE = (0.15, 0.75)
"""Share of the way back that is neither end."""
MIN_VERSIONS, GROWTH, CLEAR_GROWTH, RANKS = 3, 1.25, 3.0, 5.0
"""Without a reference: versions needed, ratio of the last ones' gap to the first one's, and standard errors of the rank
correlation of a sample's gap with its version. The mildest of five real updates gave 1.6 and 7."""
FIX = (
    "The servers still compute with old weights: read what update_weights returns (success, message, of every rank), "
    'compare POST /weights_checker {"action": "checksum"} before and after an update (our client compares where our '
    "plugin serves), look for names that the server does not know (a `module.` prefix) and for tensors that are empty "
    "or views of freed memory at the moment of sending, and flush the cache after the update."
)
MIDDLE_FIX = (
    "Give --checkpoint and --reference-checkpoint together: mixes of both then show which layers did not arrive. Until "
    'then compare POST /weights_checker {"action": "checksum"} tensor by tensor with the trainer\'s weights, and check '
    "that the servers tell the right version."
)


class Way(NamedTuple):
    """Where the rollout side lies between the present weights (0) and those of the start (1).

    share: Σ (rollout − now)(start − now) / Σ (start − now)², of logit gaps. error: its standard error over samples.
    to_now, to_start, apart: mean |logit gap| rollout–now, rollout–start, start–now. nearer: to_now − to_start in
    standard errors over samples.
    """

    share: float
    error: float
    to_now: float
    to_start: float
    apart: float
    nearer: float


def find_not_updated(batch: Batch) -> Outcome:
    """With the start's log-probs by them, else by how the gap grows with the version."""
    if any(sample.ref_log_probs is not None for sample in batch):
        found = _against_reference(batch)
        grows = any(isinstance(item, Finding) and item.confidence == "likely" for item in _growing(batch))
        sure = {"confidence": "likely"} if grows else {}
        return [i.model_copy(update=sure) if i.fault == "weights_not_updated" else i for i in found], batch
    return _growing(batch), batch


def way_back(samples: Sequence[Sample], now: Sequence[Floats]) -> Way | None:
    """now: [n] of each sample, log-probs under the present weights. None where there is too little to tell."""
    rows = []
    for sample, current in zip(samples, now, strict=True):
        if sample.ref_log_probs is None or not sample.comparable:
            continue
        gaps = [
            logit_gap(sample, one, other)
            for one, other in (
                (sample.rollout_log_probs, current),
                (sample.ref_log_probs, current),
                (sample.rollout_log_probs, sample.ref_log_probs),
            )
        ]
        chosen = np.isfinite(np.stack(gaps)).all(axis=0)
        if chosen.any():
            a, b, c = (gap[chosen] for gap in gaps)
            rows.append((a @ b, b @ b, np.abs(a).sum(), np.abs(c).sum(), np.abs(b).sum(), len(a)))
    if len(rows) < MIN_SAMPLES:
        return None
    table = np.array(rows)
    along, length, to_now, to_start, apart, tokens = table.sum(axis=0)
    if length <= 0:
        return None
    share = float(along / length)
    error = float(np.sqrt(((table[:, 0] - share * table[:, 1]) ** 2).sum()) / length)
    gain = table[:, 2] - table[:, 3]
    deviations = float(gain.sum() / max(math.sqrt(len(gain)) * gain.std(ddof=1), 1e-12))
    return Way(share, error, float(to_now / tokens), float(to_start / tokens), float(apart / tokens), deviations)


def _against_reference(batch: Batch) -> list[Finding]:
    mixes = batch.between
    samples = list(batch.samples) if mixes is None else _newest(batch)
    if mixes is None or batch.from_checkpoint:
        now = [sample.train_log_probs for sample in samples]
    else:
        now = [mixes.log_probs(sample, ()) for sample in samples]
    way = way_back(samples, now)
    if way is None or way.error > SHARE / STANDARD_ERRORS:
        return []
    told_share, told = _told(samples)
    beyond = way.share - told_share
    if mixes is not None and (way.to_now > PRECISION or beyond > max(STANDARD_ERRORS * way.error, 0.03)):
        parts = find_parts(batch, samples, now, way.share)
        if parts is not None:
            return [parts]
    sure = mixes is not None or batch.from_checkpoint
    known = sure or way.apart > APART * way.to_start
    numbers = (
        f"mean logit gap {way.to_start:.3g} to the start and {way.to_now:.3g} to the present weights, which are "
        f"{way.apart:.3g} apart"
    )
    statistics = {**way._asdict(), "told_share": told_share}
    nearer = way.to_start < FACTOR * way.to_now and way.nearer > STANDARD_ERRORS
    if known and nearer and way.share >= max(SHARE, told_share + BEYOND):
        finding = batch.finding(
            "weights_not_updated",
            "rollout",
            f"The rollout log-probs fit the weights that the run began with better than the present ones: {numbers} "
            f"({way.nearer:.0f} standard errors). They are {way.share:.0%} ± {way.error:.0%} of the way back{told}."
            + (" Some of the new ones may have arrived." if way.share + STANDARD_ERRORS * way.error < 0.95 else "")
            + ("" if sure else " A training side that scores another text looks the same."),
            FIX + ("" if sure else " --checkpoint with the present weights decides it."),
            samples,
            statistics=statistics,
            confidence="likely" if sure else "possible",
        )
        return [finding]
    both = min(way.to_now, way.to_start)
    inside = MIDDLE[0] + told_share < way.share < MIDDLE[1]
    if mixes is None and not told_share and inside and both > PRECISION and way.error < 0.05:
        finding = batch.finding(
            "weights_partly_updated",
            "rollout",
            f"The rollout log-probs lie between the weights that the run began with and the present ones, "
            f"{way.share:.0%} ± {way.error:.0%} of the way back{told}: {numbers}. Some layers did not arrive, or the "
            f"servers hold a version in between.",
            MIDDLE_FIX,
            samples,
            statistics=statistics,
            confidence="possible",
        )
        return [finding]
    return []


def _numbers(sample: Sample) -> tuple[int | None, int | None]:
    """Versions that the sample and its training side claim, as numbers; the newest where a response has several."""
    versions = [version_number(span.version) for span in sample.weight_versions]
    told = sample.trainer_version
    known = [version for version in versions if version is not None]
    return max(known, default=None), None if told is None else version_number(told)


def _newest(batch: Batch) -> list[Sample]:
    """Those of the newest version, which the checkpoint is of; all where no version is told."""
    of = {
        sample.index: theirs if theirs is not None else ours for sample in batch for ours, theirs in [_numbers(sample)]
    }
    newest = max((number for number in of.values() if number is not None), default=None)
    return [sample for sample in batch if of[sample.index] == newest]


def _told(samples: Sequence[Sample]) -> tuple[float, str]:
    """How far back to the start the labels say that the samples are (versions count from 0); and in words."""
    pairs = [_numbers(sample) for sample in samples]
    newest = max((theirs for _, theirs in pairs if theirs is not None), default=None)
    newest = newest if newest is not None else max((ours for ours, _ in pairs if ours is not None), default=None)
    if newest is None or all(ours is None for ours, _ in pairs):
        return 0.0, ", and no record names a version"
    if newest <= 0:
        return 1.0, ", as their version 0 says"
    behind = [max((theirs if theirs is not None else newest) - ours, 0) for ours, theirs in pairs if ours is not None]
    share = min(float(np.mean(behind)) / newest, 1.0)
    newest_label = max(ours for ours, _ in pairs if ours is not None)
    return share, f", although their labels go up to version {newest_label}"


def _growing(batch: Batch) -> list[Item]:
    """The labels move, each training side is of its own version, and the gap grows from the first version on."""
    by_lag: dict[int, list[tuple[int, float, Sample]]] = defaultdict(list)
    for sample in batch:
        ours, theirs = _numbers(sample)
        gap = sample_gap(sample)
        if ours is not None and gap is not None:
            by_lag[0 if theirs is None else theirs - ours].append((ours, gap, sample))
    if batch.from_checkpoint or not by_lag:
        return []  # one checkpoint scored all versions: older ones are further from it in a sound run
    rows = max(by_lag.values(), key=len)
    versions = sorted({version for version, _, _ in rows})
    if len(versions) < MIN_VERSIONS or len(rows) < MIN_SAMPLES * MIN_VERSIONS:
        return []
    middle = [float(np.median([gap for version, gap, _ in rows if version == one])) for one in versions]
    ranks = rank_correlation(np.array([row[0] for row in rows], float), np.array([row[1] for row in rows]))
    deviations = ranks * math.sqrt((len(rows) - 2) / max(1 - ranks**2, 1e-9))
    last = float(np.mean(middle[-max(len(middle) // 3, 1) :]))
    growth = last / middle[0]
    if not deviations > RANKS or growth < GROWTH:
        return []
    early = float(np.mean(middle[1 : 1 + max(len(middle) // 3, 1)])) / middle[0]
    clear = growth >= CLEAR_GROWTH and middle[0] < PRECISION and early >= GROWTH
    confidence: Confidence = "likely" if clear else "possible"
    samples = [sample for version, _, sample in rows if version != versions[0]]
    shown = ", ".join(f"{version}: {gap:.3g}" for version, gap in _few(list(zip(versions, middle, strict=True))))
    finding = batch.finding(
        "weights_not_updated",
        "rollout",
        f"The labels move from version {versions[0]} to {versions[-1]}, and the gap to the trainer grows with the "
        f"distance from the first ({deviations:.0f} standard errors; median logit gap by version {shown}): the servers "
        f"take the new name, not the new weights"
        + ("." if clear else ", or the two engines move apart for another reason."),
        FIX + ("" if clear else " --reference-checkpoint decides it."),
        samples,
        of_samples=len(rows),
        statistics={
            "growth": growth,
            "rank_correlation": ranks,
            "standard_errors": deviations,
            "first": middle[0],
            "last": last,
        },
        confidence=confidence,
    )
    return [finding]


def _few(rows: list[tuple[int, float]], most: int = 6) -> list[tuple[int, float]]:
    """Evenly chosen, with both ends."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int))
    return [rows[int(at)] for at in chosen]
