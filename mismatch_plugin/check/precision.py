"""Log-probs that lost digits on the way: bf16, fp16, or decimals rounded off."""

from __future__ import annotations

import numpy as np

from mismatch_plugin.check.batch import Batch, Bools, Floats, Sample
from mismatch_plugin.check.findings import FaultName, Finding, Side, Undecided

SMALLEST = 0.05
"""Log-probs nearer to 0 are left out: there float32 itself leaves few digits."""
MIN_SAMPLE, SHARE = 5, 0.95
"""Values of one sample, and how many must fit; by chance a float32 fits bf16 once in 65,536."""
DECIMALS = 4
"""Rounding to so many decimals or fewer is named: half a unit is then 5e-5, above float32's own error."""

_STEP = {"bf16": "2^-8 of its size", "fp16": "2^-11 of its size"}
_FIXES: dict[str, str] = {
    "bf16": "Keep log-probs in float32 from the log-softmax on: cast logits to float32 before it, and do not store or "
    "send the result in bf16.",
    "fp16": "Keep log-probs in float32 from the log-softmax on: do not store or send them in fp16.",
    "rounded": "Write log-probs with all their digits (repr of a float32 has up to nine).",
}


def find_precision(batch: Batch) -> list[Finding | Undecided]:
    """By sample and side, so that one of several engines is found too. Looks at the values as they were given."""
    found: list[Finding | Undecided] = []
    sides: tuple[Side, ...] = ("rollout", "training")
    for side in sides:
        by_kind: dict[FaultName, list[Sample]] = {}
        judged = 0
        for sample in batch:
            values = sample.rollout if side == "rollout" else sample.train
            if values is None:
                continue
            values = values[np.isfinite(values)]
            values = np.unique(values[np.abs(values) > SMALLEST])
            if len(values) < MIN_SAMPLE:
                continue
            judged += 1
            kind = _kind(values)
            if kind is not None:
                by_kind.setdefault(kind, []).append(sample)
        if not judged and (side == "rollout" or batch.has_training):
            reason = f"no sample has {MIN_SAMPLE} different {side} log-probs below −{SMALLEST:g}"
            found.append(Undecided(faults=("bf16", "fp16", "rounded"), reason=f"not enough tokens to tell: {reason}"))
        found += [_finding(batch, kind, side, samples, judged) for kind, samples in by_kind.items()]
    return found


def _kind(values: Floats) -> FaultName | None:
    tests: tuple[tuple[FaultName, Bools], ...] = (
        ("bf16", fits_bf16(values)),
        ("fp16", fits_fp16(values)),
        ("rounded", fits_decimals(values)),
    )
    for name, fits in tests:
        if fits.mean() >= SHARE:
            return name
    return None


def fits_bf16(values: Floats) -> Bools:
    """Which values bf16 can hold exactly, seen through float32: its low 16 bits are 0."""
    return values.astype(np.float32).view(np.uint32) & 0xFFFF == 0


def fits_fp16(values: Floats) -> Bools:
    """Which values fp16 can hold exactly, seen through float32."""
    single = values.astype(np.float32)
    with np.errstate(over="ignore"):
        return single.astype(np.float16).astype(np.float32) == single


def fits_decimals(values: Floats) -> Bools:
    """Which values are decimals of `DECIMALS` places."""
    return np.abs(values - np.round(values, DECIMALS)) < 1e-9


def _finding(batch: Batch, kind: FaultName, side: Side, samples: list[Sample], judged: int) -> Finding:
    first = samples[0]
    values = first.rollout if side == "rollout" else first.train
    assert values is not None
    position = int(np.argmax(np.isfinite(values) & (np.abs(values) > SMALLEST)))
    what = f"{kind} can hold, steps of {_STEP[kind]}" if kind in _STEP else f"have at most {DECIMALS} decimals"
    evidence = (
        f"All {side} log-probs of {len(samples)} of {judged} samples are numbers that {what}"
        if kind in _STEP
        else f"All {side} log-probs of {len(samples)} of {judged} samples {what}"
    )
    return Finding(
        fault=kind,
        side=side,
        evidence=f"{evidence}: digits were lost before the file was written.",
        statistics={"fraction": len(samples) / judged},
        samples=len(samples),
        of_samples=judged,
        tokens=sum(int(sample.mask.sum()) for sample in samples),
        of_tokens=batch.token_count,
        first=first.place(position),
        fix=_FIXES[kind],
    )
