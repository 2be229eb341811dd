"""Numbers that are not natural logs: probabilities, negated log-probs, logs of base 2 or 10."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from mismatch_plugin.data.arrays import Floats, is_null
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import FIELD, Batch, Outcome, median
from mismatch_plugin.diagnose.findings import SIDES, FaultName, Item, LogProbSide, place_of, too_few

POSITIVE_SHARE = 0.9
MIN_VALUES = 4
"""Of one sample, to judge its sign."""
SMALLEST = 0.01
"""Nearer to 0 the ratio of two log-probs is mostly noise."""
MIN_TOKENS = 45
"""Of the batch, to judge the base: 15 a third."""
BASE_TOLERANCE, BASE_ERRORS, BASE_WORST = 0.01, 3.0, 0.06
"""Of log(ratio of the sides) in each third of the tokens, ordered by size: proportional means the same everywhere. So
many standard errors of the median are added, up to the last number. Temperatures near the log of a base lie outside."""
BASE_SPREAD = 0.2
"""Typical deviation from that ratio among the largest third, at most."""

_FIXES: dict[FaultName, str] = {
    "sign": "Store log-probs, not losses: negate the numbers on that side (cross-entropy is −log p).",
    "probabilities": "Store natural logs: take log of the numbers on that side, better log-softmax in float32.",
    "log_base": "Store natural logs: multiply the numbers on that side by {factor:.6g} (log of the base).",
}


_BASES: list[tuple[LogProbSide, float, float, float]] = [
    (side, base, math.log(base), math.log(math.log(base)) * (-1 if side == "rollout" else 1))
    for side, base in product(SIDES, (2.0, 10.0))
]
"""Side, base, its log: numbers of base b are natural ones / ln b; and the log of the ratio of the sides then."""


def find_scale(batch: Batch) -> Outcome:
    """Judge each side, and go on with natural logs."""
    found: list[Item] = []
    for side in SIDES:
        items, batch = _positive(batch, side)
        found += items
    if not batch.has_training:
        return found, batch
    items, batch = _base(batch)
    return [*found, *items], batch


def _positive(batch: Batch, side: LogProbSide) -> Outcome:
    """Samples nearly all of whose numbers are positive: probabilities or negated."""
    chosen: list[Sample] = []
    short: list[Sample] = []
    for sample in batch:
        shared = sample.values(side)[: len(sample)]
        if not len(shared) or shared.max() <= 0:
            continue
        numbers = shared[sample.mask[: len(shared)]]
        numbers = numbers[np.isfinite(numbers) & (numbers != 0.0)]
        if len(numbers) >= MIN_VALUES and (numbers > 0).mean() >= POSITIVE_SHARE:
            chosen.append(sample)
        elif 0 < len(numbers) < MIN_VALUES and (numbers > 0).all():
            short.append(sample)
    if not chosen:
        return [], batch
    chosen = sorted([*chosen, *short], key=lambda sample: sample.index)
    lists = [sample.values(side) for sample in chosen]
    largest = float(max(values[np.isfinite(values)].max() for values in lists))
    name = _which(batch, chosen, side)
    what = "lie between 0 and 1: probabilities" if name == "probabilities" else "are positive: −log p"
    undo = np.log if name == "probabilities" else np.negative
    with np.errstate(divide="ignore", invalid="ignore"):
        changed = {
            sample.index: {FIELD[side]: np.where(is_null(values), values, undo(values))}
            for sample, values in zip(chosen, lists, strict=True)
        }
    finding = batch.finding(
        name,
        side,
        f"The {side} side's numbers of {len(chosen)} of {len(batch)} samples {what} (largest {largest:.4g}).",
        _FIXES[name],
        chosen,
        tokens=sum(map(len, lists)),
        statistics={"largest": largest},
    )
    return [finding], batch.with_values(changed)


def _which(batch: Batch, chosen: list[Sample], side: LogProbSide) -> FaultName:
    """Beyond 1 it is no probability; else the reading that fits the other side better."""
    ours, theirs = [], []
    for sample in chosen:
        values, other = sample.values(side), sample.values("training" if side == "rollout" else "rollout")
        shared = min(len(values), len(other)) if batch.has_training else len(values)
        ours.append(values[:shared])
        theirs.append(other[:shared])
    values, other = np.concatenate(ours), np.concatenate(theirs)
    if np.nanmax(np.where(np.isfinite(values), values, np.nan)) > 1.0 + 1e-6:
        return "sign"
    if not batch.has_training:
        return "probabilities"
    fine = np.isfinite(values) & np.isfinite(other) & (values > 0)
    as_log = np.median(np.abs(np.log(values[fine]) - other[fine]))
    as_negated = np.median(np.abs(-values[fine] - other[fine]))
    return "probabilities" if as_log <= as_negated else "sign"


def _base(batch: Batch) -> Outcome:
    """Proportional sides with the factor of base 2 or 10. A temperature never gives one factor for likely and unlikely
    tokens, so the factor must hold in each third of the tokens ordered by size."""
    tokens = batch.tokens
    # By the product of the two sides, so that neither side's scale chooses the tokens.
    size = tokens.rollout * tokens.training
    told = (tokens.rollout < 0) & (tokens.training < 0) & (size > SMALLEST**2)
    if told.sum() < MIN_TOKENS:
        few = f"{told.sum()} with log-probs clearly below 0 on both sides, {MIN_TOKENS} needed"
        return [too_few(few, "log_base")], batch
    log_ratio = np.log(tokens.rollout[told] / tokens.training[told])
    if not any(_possible(log_ratio - expected) for _, _, _, expected in _BASES):
        return [], batch  # without sorting
    parts = np.array_split(np.argsort(size[told]), 3)
    thirds = [median(log_ratio[part]) for part in parts]
    if all(max(abs(third - expected) for third in thirds) > BASE_WORST for _, _, _, expected in _BASES):
        return [], batch
    spreads = [float(np.median(np.abs(log_ratio[part] - third))) for part, third in zip(parts, thirds, strict=True)]
    # Median of n normal values: 1.253 σ/√n, and σ is 1.483 times their median deviation.
    errors = [1.86 * spread / math.sqrt(len(part)) for part, spread in zip(parts, spreads, strict=True)]
    allowed = [min(BASE_TOLERANCE + BASE_ERRORS * error, BASE_WORST) for error in errors]
    if spreads[2] > BASE_SPREAD:
        return [], batch  # not proportional at all, whatever the medians happen to be
    tokens = tokens.where(told)
    for side, base, factor, expected in _BASES:
        if any(abs(third - expected) > most for third, most in zip(thirds, allowed, strict=True)):
            continue
        finding = batch.finding(
            "log_base",
            side,
            f"Rollout and training log-probs are proportional, factor {math.exp(thirds[1]):.4f} (thirds of the tokens "
            f"by size: {', '.join(f'{math.exp(third):.4f}' for third in thirds)}): base {base:g} on the {side} side "
            f"gives {math.exp(expected):.4f}.",
            _FIXES["log_base"].format(factor=factor),
            [batch.samples[index] for index in np.unique(tokens.sample)],
            tokens=len(tokens),
            first=place_of(batch.samples[int(tokens.sample[0])], int(tokens.position[0])),
            statistics={"factor": math.exp(thirds[1]), "base": base},
        )
        changed = {sample.index: {FIELD[side]: sample.values(side) * factor} for sample in batch}
        return [finding], batch.with_values(changed)
    return [], batch


def _possible(off: Floats) -> bool:
    """Medians of thirds, however these are chosen, can all lie within BASE_WORST: a half of each is on either side."""
    least = len(off) // 2 - 2
    return (off >= -BASE_WORST).sum() >= least and (off <= BASE_WORST).sum() >= least
