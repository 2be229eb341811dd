"""Which weights sampled which token: versions mixed in a response or a batch, and how far the trainer is ahead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_number, version_of_tokens
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.findings import Item, Undecided, place_of

INSIDE_FIX = (
    "Weights were updated while responses ran: pause with mode retract or wait for running requests, or correct token "
    "by token and drop tokens of versions that are too old; accept it if it is meant."
)
BETWEEN_FIX = (
    "Servers or moments differ: update all servers before sampling a batch, or accept it where an asynchronous trainer "
    "means it."
)
BEHIND_FIX = (
    "Update the server's weights before each rollout batch and tell it the version, or drop samples older than you "
    "allow."
)
AHEAD_FIX = (
    "The trainer's log-probs are of older weights than the server's: recompute them after the update, or load the "
    "checkpoint of that version."
)


def find_versions(batch: Batch) -> Outcome:
    """Of tokens that train. Staleness is counted in steps of the number at the end of a version's name."""
    return [*_mixed(batch), *_stale(batch)], batch


def _by_version(sample: Sample) -> dict[str, Bools]:
    """version → [n] which of its tokens train."""
    found: dict[str, Bools] = {}
    for span in sample.weight_versions:
        inside = sample.mask.copy()
        inside[: span.start] = inside[span.end :] = False
        if inside.any():
            found[span.version] = found[span.version] | inside if span.version in found else inside
    return found


def _mixed(batch: Batch) -> list[Item]:
    """Versions that differ inside a response or between responses of one training step; steps may differ."""
    of_samples = [(sample, versions) for sample in batch if (versions := _by_version(sample))]
    seen: dict[tuple[int | None, str | None], set[str]] = defaultdict(set)
    for sample, versions in of_samples:
        seen[_step(sample)].update(versions)
    of_samples = [(sample, versions) for sample, versions in of_samples if len(seen[_step(sample)]) > 1]
    if not of_samples:
        return []
    counts: Counter[str] = Counter()
    for _, versions in of_samples:
        counts.update({version: int(where.sum()) for version, where in versions.items()})
    most = counts.most_common(5)
    inside = [sample for sample, versions in of_samples if len(versions) > 1]
    if inside:
        spans = inside[0].weight_versions
        codes = version_of_tokens(spans, {span.version: at for at, span in enumerate(spans)}, len(inside[0]))
        position = int(np.flatnonzero(np.diff(codes))[0]) + 1
        place, fix = place_of(inside[0], position), INSIDE_FIX
        where = f"{len(inside)} of {len(batch)} responses change version inside, the first at position {position}"
    else:
        odd = next(sample for sample, versions in of_samples if {*versions} - {most[0][0]})
        place, fix = place_of(odd, 0), BETWEEN_FIX
        where = "no response changes version inside, but samples differ"
    shown = ", ".join(f"{version!r} {count}" for version, count in most)
    gaps = ", ".join(f"{name!r} {gap:.3g}" for name, gap in _gaps(of_samples, [version for version, _ in most]))
    gap_text = f"; mean |gap| {gaps} nats" if gaps else ""
    return [
        batch.finding(
            "mixed_versions",
            "rollout",
            f"Tokens come from {len(counts)} weight versions ({shown} tokens{gap_text}): {where}.",
            fix,
            inside or [sample for sample, _ in of_samples],
            tokens=counts.total() - most[0][1],
            first=place,
            statistics={"versions": len(counts), "responses_mixed": len(inside)},
        )
    ]


def _step(sample: Sample) -> tuple[int | None, str | None]:
    """What the dump calls a step (a rollout), and the trainer's version, which is another one in each step."""
    return sample.step, sample.trainer_version


def _gaps(of_samples: Sequence[tuple[Sample, dict[str, Bools]]], versions: Sequence[str]) -> list[tuple[str, float]]:
    """Mean |d| of each version's tokens."""
    gaps: dict[str, list[Floats]] = defaultdict(list)
    for sample, named in of_samples:
        for version, where in named.items():
            at = where & sample.usable
            if version in versions and at.any():
                gaps[version].append(np.abs(sample.train_log_probs[at] - sample.rollout_log_probs[at]))
    return [(version, float(np.concatenate(gaps[version]).mean())) for version in versions if version in gaps]


def _stale(batch: Batch) -> list[Item]:
    late: list[tuple[int, str, Sample, Bools]] = []  # steps behind, version, sample, which of its tokens
    unreadable = ""
    for sample in batch:
        trainer = sample.trainer_version
        if trainer is None:
            continue
        ahead = version_number(trainer)
        for version, where in _by_version(sample).items():
            number = version_number(version)
            if version == trainer:
                continue
            if ahead is None or number is None:
                unreadable = f"{version!r} and {trainer!r}"
            elif not 0 <= ahead - number <= batch.max_staleness:
                late.append((ahead - number, version, sample, where))
    if not late:
        reason = f"versions {unreadable} do not end in numbers, so steps cannot be counted"
        return [Undecided(faults=("staleness",), reason=reason)] if unreadable else []
    steps, version, sample, where = max(late, key=lambda item: abs(item[0]))
    position, count = int(np.argmax(where)), sum(int(where.sum()) for *_, where in late)
    samples = [batch.samples[index] for index in sorted({sample.index for _, _, sample, _ in late})]
    trainer = sample.trainer_version
    distance = f"up to {steps} steps behind" if steps > 0 else f"{-steps} steps ahead of"
    return [
        batch.finding(
            "staleness",
            "rollout",
            f"{count} tokens of {len(samples)} of {len(batch)} samples were sampled by weights {distance} the "
            f"trainer's version {trainer!r}; {batch.max_staleness} allowed.",
            BEHIND_FIX if steps > 0 else AHEAD_FIX,
            samples,
            tokens=count,
            first=place_of(sample, position, rollout=version, training=trainer),
            statistics={
                "largest": steps,
                "mean": float(sum(behind * where.sum() for behind, *_, where in late) / count),
                "allowed": batch.max_staleness,
            },
        )
    ]
