"""Which weights sampled which token: versions mixed in a response or a batch, and how far the trainer is ahead."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mismatch_plugin.check.batch import Batch, Sample
from mismatch_plugin.check.findings import Finding, Undecided

DEFAULT_MAX_STALENESS = 1


def find_versions(batch: Batch, trainer_version: str | None, max_staleness: int) -> list[Finding | Undecided]:
    """Of tokens that train. trainer_version: of the training side, if its file does not tell; staleness is counted in
    steps of the number at the end of a version's name."""
    counts = Counter(version for sample in batch for version in _trained_versions(sample))
    if not counts:
        return []
    return [*_mixed(batch, counts), *_stale(batch, trainer_version, max_staleness)]


def version_number(version: str | int) -> int | None:
    """The number at the end of a version's name ("v12", "step-12", 12); None if there is none."""
    found = re.search(r"(\d+)$", str(version))
    return int(found[1]) if found else None


def _trained_versions(sample: Sample) -> list[str]:
    pairs = zip(sample.record.version_of_token, sample.mask, strict=True)
    return [version for version, trains in pairs if trains and version is not None]


def _mixed(batch: Batch, counts: Counter[str]) -> list[Finding]:
    if len(counts) < 2:
        return []
    inside = [sample for sample in batch if len(set(_trained_versions(sample))) > 1]
    shown = ", ".join(f"{version!r} {count}" for version, count in counts.most_common(5))
    gaps = _gap_by_version(batch, [version for version, _ in counts.most_common(5)])
    gap_text = f"; mean |difference| {', '.join(f'{name!r} {gap:.3g}' for name, gap in gaps)}" if gaps else ""
    if inside:
        first = inside[0]
        versions = first.record.version_of_token
        position = next(at for at in range(1, len(versions)) if versions[at] != versions[at - 1])
        place = first.place(position)
        where = f"{len(inside)} of {len(batch)} responses change version inside, the first at position {position}"
        fix = (
            "Weights were updated while responses ran: pause with mode retract or wait for running requests, or "
            "correct token by token and drop tokens of versions that are too old; accept it if it is meant."
        )
    else:
        common = counts.most_common(1)[0][0]
        first = next(sample for sample in batch if any(version != common for version in _trained_versions(sample)))
        place = first.place(0)
        where = "no response changes version inside, but samples differ"
        fix = (
            "Servers or moments differ: update all servers before sampling a batch, or accept it where an asynchronous "
            "trainer means it."
        )
    fewest = sum(counts.values()) - counts.most_common(1)[0][1]
    return [
        Finding(
            fault="mixed_versions",
            side="rollout",
            evidence=f"Tokens come from {len(counts)} weight versions ({shown} tokens{gap_text}): {where}.",
            statistics={"versions": float(len(counts)), "responses_mixed": float(len(inside))},
            samples=len(inside) or len(batch),
            of_samples=len(batch),
            tokens=fewest,
            of_tokens=batch.token_count,
            first=place,
            fix=fix,
        )
    ]


def _gap_by_version(batch: Batch, versions: Sequence[str]) -> list[tuple[str, float]]:
    """Mean |d| of each version's tokens."""
    gaps: dict[str, list[float]] = {version: [] for version in versions}
    for sample in batch:
        if sample.train is None or not sample.comparable:
            continue
        named = sample.record.version_of_token
        for position in np.flatnonzero(sample.usable):
            if named[position] in gaps:
                gaps[str(named[position])].append(abs(sample.train[position] - sample.rollout[position]))
    return [(version, float(np.mean(values))) for version, values in gaps.items() if values]


def _stale(batch: Batch, trainer_version: str | None, max_staleness: int) -> list[Finding | Undecided]:
    worst: tuple[int, Sample, int] | None = None
    late: list[int] = []
    samples: set[int] = set()
    unreadable: str | None = None
    for sample in batch:
        given = sample.training.weight_version if sample.training is not None else None
        trainer = trainer_version if given is None else given
        if trainer is None:
            continue
        ahead = version_number(trainer)
        for position, version in enumerate(sample.record.version_of_token):
            if version is None or not sample.mask[position] or str(version) == str(trainer):
                continue
            number = version_number(version)
            if ahead is None or number is None:
                unreadable = f"{version!r} and {str(trainer)!r}"
                continue
            steps = ahead - number
            if steps > max_staleness or steps < 0:
                late.append(steps)
                samples.add(sample.index)
                if worst is None or abs(steps) > abs(worst[0]):
                    worst = (steps, sample, position)
    if worst is None:
        if unreadable:
            reason = f"versions {unreadable} do not end in numbers, so steps cannot be counted"
            return [Undecided(faults=("staleness",), reason=reason)]
        return []
    steps, sample, position = worst
    trainer = sample.training.weight_version if sample.training and sample.training.weight_version else trainer_version
    ahead_text = f"up to {steps} steps behind" if steps > 0 else f"{-steps} steps ahead of"
    return [
        Finding(
            fault="staleness",
            side="rollout",
            evidence=f"{len(late)} tokens of {len(samples)} of {len(batch)} samples were sampled by weights "
            f"{ahead_text} the trainer's version {str(trainer)!r}; {max_staleness} allowed.",
            statistics={"largest": float(steps), "mean": float(np.mean(late)), "allowed": float(max_staleness)},
            samples=len(samples),
            of_samples=len(batch),
            tokens=len(late),
            of_tokens=batch.token_count,
            first=sample.place(
                position,
                rollout=sample.record.version_of_token[position],
                training=None if trainer is None else str(trainer),
            ),
            fix="Update the server's weights before each rollout batch and tell it the version, or drop samples older "
            "than you allow."
            if steps > 0
            else "The trainer's log-probs are of older weights than the server's: recompute them after the update, or "
            "load the checkpoint of that version.",
        )
    ]
