"""Values that are no log-probs: null, NaN, infinities, positive ones, floors and 0.0 fills."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP
from mismatch_plugin.data.arrays import Bools, Floats, Ints, is_null
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import FIELD, Batch, Outcome
from mismatch_plugin.diagnose.findings import SIDES, FaultName, Finding, Item, LogProbSide, place_of

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

_WHAT: dict[FaultName, str] = {
    "missing": "null instead of a log-prob",
    "nan": "NaN",
    "infinite": "+inf",
    "positive": "a number clearly above 0",
    "floor": "−inf or a floor ({value:g})",
    "zero_fill": "exactly 0.0 where the other side is far from it",
}
_FIXES: dict[tuple[FaultName, LogProbSide], str] = {
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
    positions: Ints


def find_numbers(batch: Batch) -> Outcome:
    """Everything but 0.0 fills and clamps, on both sides; found values are NaN afterwards."""
    found: list[Item] = []
    changed: dict[int, dict[str, Any]] = defaultdict(dict)
    for side in SIDES:
        hits: dict[FaultName, list[_Hit]] = defaultdict(list)
        for sample in batch:
            values = sample.values(side)
            if not len(values) or (values.min() > FLOOR and values.max() <= POSITIVE_TOLERANCE):
                continue  # all sound, and no NaN among them
            trains = np.ones(len(values), dtype=bool)  # over what the list has too much, too
            trains[: len(sample)] = sample.mask[: len(values)]
            sound = np.isfinite(values)  # what a masked token carries is ignored, but must not enter a statistic
            for name, bad in _kinds(values):
                bad = bad & trains
                sound &= ~bad
                if bad.any():
                    hits[name].append(_Hit(sample, np.flatnonzero(bad)))
            changed[sample.index][FIELD[side]] = np.where(sound, values, np.nan)
        found += [_finding(batch, name, side, chosen) for name, chosen in hits.items()]
    return found, batch.with_values(changed)


def _kinds(values: Floats) -> Iterator[tuple[FaultName, Bools]]:
    """The same bounds as `core.validity.classify`."""
    nulls = is_null(values)
    yield "missing", nulls
    yield "nan", np.isnan(values) & ~nulls
    yield "infinite", np.isposinf(values)
    yield "positive", np.isfinite(values) & (values > POSITIVE_TOLERANCE)
    yield "floor", values <= FLOOR


def find_fills(batch: Batch) -> Outcome:
    """0.0 fills and clamps: they show only next to the other side, so the two must be aligned before."""
    found: list[Item] = []
    kinds: tuple[tuple[FaultName, Callable[..., Bools]], ...] = (("zero_fill", _fills), ("floor", _clamped))
    for side in SIDES:
        for name, find in kinds:
            chosen = batch.tokens.where(find(*batch.tokens.sides(side)))
            indices = np.unique(chosen.sample)
            hits = [_Hit(batch.samples[index], chosen.position[chosen.sample == index]) for index in indices]
            if not hits:
                continue
            found.append(_finding(batch, name, side, hits))
            changed = {}
            for sample, positions in hits:
                values = sample.values(side).copy()
                values[positions] = np.nan
                if name == "zero_fill":  # where one 0.0 is a fill, the others are not to be trusted either
                    values[values == 0.0] = np.nan
                changed[sample.index] = {FIELD[side]: values}
            batch = batch.with_values(changed)
    return found, batch


def _fills(own: Floats, other: Floats) -> Bools:
    zero, far = own == 0.0, other < -FILL_GAP
    fills = zero & far
    nearly = (own < 0) & (own > -NEARLY_CERTAIN)
    if not (zero & (other < -ZERO_FILL_GAP)).any() and fills.sum() < FILLS:
        return np.zeros_like(fills)
    # Where the two sides are that far apart on nearly certain tokens, too, the zeros are honest.
    honest = nearly.any() and far[zero].mean() < HONEST * far[nearly].mean()
    return np.zeros_like(fills) if honest else fills


def _clamped(own: Floats, other: Floats) -> Bools:
    """A lowest value that comes back exactly while the other side varies and goes below it."""
    lowest = own == own.min(initial=0.0)
    none = np.zeros_like(lowest)
    if own.min(initial=0.0) > CLAMP_BELOW or lowest.sum() < CLAMP_REPEATS:
        return none
    unlikely = ~lowest & (own < UNLIKELY)
    noise = float(np.quantile(np.abs(other - own)[unlikely], 0.9)) if unlikely.sum() >= 10 else 0.2
    below = other[lowest] - own.min()
    varies = np.ptp(below) > max(0.2, 2 * noise)  # the same token in the same context would be the same on both sides
    return lowest if varies and np.median(below) <= -0.1 and (below > 2 * noise).mean() <= 0.2 else none


def _finding(batch: Batch, name: FaultName, side: LogProbSide, hits: Sequence[_Hit]) -> Finding:
    sample, position = hits[0].sample, int(hits[0].positions[0])
    value = float(sample.values(side)[position])
    shown: dict[str, Any] = {side: "null" if is_null(sample.values(side))[position] else value}
    tokens = sum(len(hit.positions) for hit in hits)
    what = _WHAT[name].format(value=value)
    return batch.finding(
        name,
        side,
        f"{tokens} of {batch.token_count} tokens in {len(hits)} of {len(batch)} samples have {what} on the {side} "
        f"side.",
        _FIXES[name, side],
        [hit.sample for hit in hits],
        tokens=tokens,
        first=place_of(sample, position, **shown),
        statistics={"fraction": tokens / max(batch.token_count, 1)},
    )
