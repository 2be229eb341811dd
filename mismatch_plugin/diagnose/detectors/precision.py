"""Log-probs that lost digits on the way: bf16, fp16, or decimals rounded off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.findings import SIDES, FaultName, Item, first_place, too_few

SMALLEST = 0.05
"""Log-probs nearer to 0 are left out: there float32 itself leaves few digits."""
MIN_SAMPLE, SHARE = 5, 0.95
"""Values of one sample, and how many must fit; by chance a float32 fits bf16 once in 65,536."""
DECIMALS = 4
"""Rounding to so many decimals or fewer is named: half a unit is then 5e-5, above float32's own error."""


def find_precision(batch: Batch) -> Outcome:
    """By sample and side, so that one of several engines is found too. Looks at the values as they were given."""
    found: list[Item] = []
    for side in SIDES:
        lists: list[tuple[Sample, Floats]] = []
        for sample in batch:
            values = sample.values(side)
            values = np.sort(values[_told(values)])
            values = values[np.diff(values, prepend=0.0) != 0]  # each once; 0 is never told
            if len(values) >= MIN_SAMPLE:
                lists.append((sample, values))
        judged, by_kind = len(lists), _by_kind(lists)
        if not judged and (side == "rollout" or batch.has_training):
            few = f"no sample has {MIN_SAMPLE} different {side} log-probs below −{SMALLEST:g}"
            found.append(too_few(few, *KINDS))
        for name, samples in by_kind.items():
            finding = batch.finding(
                name,
                side,
                f"All {side} log-probs of {len(samples)} of {judged} samples {KINDS[name].are}: digits were lost "
                f"before the file was written.",
                KINDS[name].fix,
                samples,
                of_samples=judged,
                first=first_place(samples[0], _told(samples[0].values(side))),
                statistics={"fraction": len(samples) / judged},
            )
            found.append(finding)
    return found, batch


def _by_kind(lists: Sequence[tuple[Sample, Floats]]) -> dict[FaultName, list[Sample]]:
    """The samples whose values fit a form, the first one of KINDS."""
    found: dict[FaultName, list[Sample]] = defaultdict(list)
    names: list[FaultName] = [*KINDS]
    if not lists:
        return found
    counts = np.array([len(values) for _, values in lists])
    starts = np.cumsum(counts) - counts
    flat = np.concatenate([values for _, values in lists])
    fits = [np.add.reduceat(form.fits(flat), starts, dtype=np.int64) / counts >= SHARE for form in KINDS.values()]
    for (sample, _), *fitting in zip(lists, *fits, strict=True):
        if any(fitting):
            found[names[fitting.index(True)]].append(sample)
    return found


def _told(values: Floats) -> Bools:
    """Which values are finite and far enough from 0."""
    return np.isfinite(values) & (np.abs(values) > SMALLEST)


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


class _Kind(NamedTuple):
    """A form of number: which values it can hold, what is said of them, and what to do."""

    fits: Callable[[Floats], Bools]
    are: str
    fix: str


KINDS: dict[FaultName, _Kind] = {
    "bf16": _Kind(
        fits_bf16,
        "are numbers that bf16 can hold, steps of 2^-8 of its size",
        "Keep log-probs in float32 from the log-softmax on: cast logits to float32 before it, and do not store or send "
        "the result in bf16.",
    ),
    "fp16": _Kind(
        fits_fp16,
        "are numbers that fp16 can hold, steps of 2^-11 of its size",
        "Keep log-probs in float32 from the log-softmax on: do not store or send them in fp16.",
    ),
    "rounded": _Kind(
        fits_decimals,
        f"have at most {DECIMALS} decimals",
        "Write log-probs with all their digits (repr of a float32 has up to nine).",
    ),
}
