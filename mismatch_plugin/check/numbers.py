"""Values that are no log-probs: null, NaN, infinities, positive ones, floors and 0.0 fills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.check.batch import Batch, Bools, Floats, Sample
from mismatch_plugin.check.findings import FaultName, Finding, Side
from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP

FILL_GAP = 0.5
"""Several exact 0.0 where the other side is below −0.5: certain tokens do not differ by that much."""
FILLS = 3
NEARLY_CERTAIN, HONEST = 0.01, 5.0
"""Tokens within 0.01 nats of certain differ as honest 0.0 do; fills are far off more than five times as often."""
CLAMP_REPEATS = 3
"""The lowest value must come back exactly this often to be a clamp."""
CLAMP_BELOW = -2.0
UNLIKELY = -1.0
"""Tokens below this, clamped ones aside, show how far the two sides differ there."""

_FIXES = {
    ("missing", "rollout"): "Send return_logprob with every request, and mask tokens that were not sampled "
    "(tool output) with loss_mask 0.",
    ("missing", "training"): "Let the trainer write a number for every response token.",
    ("nan", "rollout"): "Look for NaN logits in the rollout engine (fp16 overflow, broken weights after an update); "
    "until then choose --rollout-log-prob-policy drop-sequence.",
    ("nan", "training"): "Look for NaN logits in the trainer, or for padding that leaks into the response.",
    ("infinite", "rollout"): "No log-prob is +inf: look for an overflow or a division by 0 between engine and file.",
    ("infinite", "training"): "No log-prob is infinite on a sampled token: look for a mask applied to the logits that "
    "excludes sampled tokens, or an overflow.",
    ("positive", "rollout"): "No log-prob is above 0: look at what is written into rollout_log_probs.",
    ("positive", "training"): "No log-prob is above 0: look at what is written into train_log_probs.",
    ("floor", "rollout"): "The engine wrote a floor instead of a log-prob (cut out by a filter, or clamped): take "
    "log-probs before filters and remove the clamp, or choose --rollout-log-prob-policy drop-token.",
    ("floor", "training"): "Remove the clamp on the training side's log-probs.",
    ("zero_fill", "rollout"): "0.0 was filled in where the engine returned nothing: mask those tokens with "
    "loss_mask 0, or ask the engine for their log-probs.",
    ("zero_fill", "training"): "0.0 was filled in on the training side: gather log-probs for every response token "
    "and do not pad inside the response.",
}


class _Hit(NamedTuple):
    sample: Sample
    positions: Any


def find_numbers(batch: Batch) -> tuple[list[Finding], Batch]:
    """Everything but 0.0 fills and clamps, on both sides; found values are NaN afterwards."""
    findings: list[Finding] = []
    changed: dict[int, dict[str, Any]] = {}
    sides: tuple[Side, ...] = ("rollout", "training")
    for side in sides:
        hits: dict[FaultName, list[_Hit]] = {}
        for sample in batch:
            values = sample.rollout if side == "rollout" else sample.train
            nulls = sample.null_rollout if side == "rollout" else sample.null_train
            if values is None or nulls is None:
                continue
            trained = _trained(sample, len(values))
            clean = values
            for name, bad in _kinds(values, nulls):
                bad = bad & trained
                if bad.any():
                    hits.setdefault(name, []).append(_Hit(sample, np.flatnonzero(bad)))
                    clean = np.where(bad, np.nan, clean)
            # What a masked token carries is nobody's business, but it must not enter a statistic.
            clean = np.where(np.isfinite(clean), clean, np.nan)
            field = "rollout" if side == "rollout" else "train"
            changed.setdefault(sample.index, {})[field] = clean
        findings += [_finding(batch, name, side, found) for name, found in hits.items()]
    return findings, batch.with_values(changed)


def _kinds(values: Floats, nulls: Bools) -> Iterator[tuple[FaultName, Bools]]:
    """The same bounds as `core.validity.classify`."""
    yield "missing", nulls
    yield "nan", np.isnan(values) & ~nulls
    with np.errstate(invalid="ignore"):
        yield "infinite", np.isposinf(values)
        yield "positive", np.isfinite(values) & (values > POSITIVE_TOLERANCE)
        yield "floor", values <= FLOOR


def find_fills(batch: Batch) -> tuple[list[Finding], Batch]:
    """0.0 fills and clamps: they show only next to the other side, so the two must be aligned before."""
    findings: list[Finding] = []
    sides: tuple[Side, ...] = ("rollout", "training")
    for side in sides:
        kinds: tuple[tuple[FaultName, list[_Hit]], ...] = (
            ("zero_fill", _fills(batch, side)),
            ("floor", _clamped(batch, side)),
        )
        for name, chosen in kinds:
            if not chosen:
                continue
            findings.append(_finding(batch, name, side, chosen))
            field = "rollout" if side == "rollout" else "train"
            changed = {}
            for sample, positions in chosen:
                given = sample.rollout if side == "rollout" else sample.train
                assert given is not None
                values = given.copy()
                values[positions] = np.nan
                if name == "zero_fill":  # where one 0.0 is a fill, the others are not to be trusted either
                    values[values == 0.0] = np.nan
                changed[sample.index] = {field: values}
            batch = batch.with_values(changed)
    return findings, batch


def _fills(batch: Batch, side: Side) -> list[_Hit]:
    tokens = batch.tokens
    own, other = (tokens.rollout, tokens.train) if side == "rollout" else (tokens.train, tokens.rollout)
    zero = own == 0.0
    if not (zero & (other < -ZERO_FILL_GAP)).any() and (zero & (other < -FILL_GAP)).sum() < FILLS:
        return []
    nearly = (own < 0) & (own > -NEARLY_CERTAIN)
    far = other < -FILL_GAP
    if nearly.any() and far[zero].mean() < HONEST * far[nearly].mean():
        return []  # the two sides are that far apart on nearly certain tokens too: the zeros are honest
    return _hits(batch, tokens, zero & (other < -FILL_GAP))


def _clamped(batch: Batch, side: Side) -> list[_Hit]:
    """A lowest value that comes back exactly while the other side varies and goes below it."""
    tokens = batch.tokens
    own, other = (tokens.rollout, tokens.train) if side == "rollout" else (tokens.train, tokens.rollout)
    if len(tokens) == 0 or own.min() > CLAMP_BELOW:
        return []
    lowest = own == own.min()
    if lowest.sum() < CLAMP_REPEATS:
        return []
    unlikely = ~lowest & (own < UNLIKELY)
    noise = float(np.quantile(np.abs(tokens.gap[unlikely]), 0.9)) if unlikely.sum() >= 10 else 0.2
    below = other[lowest] - own.min()
    varies = np.ptp(below) > max(0.2, 2 * noise)  # the same token in the same context would be the same on both sides
    if not varies or np.median(below) > -0.1 or (below > 2 * noise).mean() > 0.2:
        return []
    return _hits(batch, tokens, lowest)


def _hits(batch: Batch, tokens: Any, chosen: Bools) -> list[_Hit]:
    found = tokens.where(chosen)
    indices = np.unique(found.sample)
    return [_Hit(batch.samples[index], found.position[found.sample == index]) for index in indices]


def _trained(sample: Sample, length: int) -> Bools:
    """The mask, stretched with True over what the list has too much."""
    mask = np.ones(length, dtype=bool)
    shared = min(length, sample.tokens)
    mask[:shared] = sample.mask[:shared]
    return mask


def _finding(batch: Batch, name: FaultName, side: Side, hits: list[_Hit]) -> Finding:
    sample, positions = hits[0]
    values = sample.rollout if side == "rollout" else sample.train
    position = int(positions[0])
    value = None if values is None else float(values[position])
    nulls = sample.null_rollout if side == "rollout" else sample.null_train
    shown: Any = "null" if nulls is not None and nulls[position] else value
    count = sum(len(found) for _, found in hits)
    total = batch.token_count
    what = {
        "missing": "null instead of a log-prob",
        "nan": "NaN",
        "infinite": "+inf",
        "positive": "a number clearly above 0",
        "floor": f"−inf or a floor ({value:g})" if value is not None else "a floor",
        "zero_fill": "exactly 0.0 where the other side is far from it",
    }[name]
    where = sample.place(position, **{"rollout" if side == "rollout" else "training": shown})
    return Finding(
        fault=name,
        side=side,
        evidence=f"{count} of {total} tokens in {len(hits)} of {len(batch)} samples have {what} on the {side} side.",
        statistics={"fraction": count / max(total, 1)},
        samples=len(hits),
        of_samples=len(batch),
        tokens=count,
        of_tokens=total,
        first=where,
        fix=_FIXES[name, side],
    )
