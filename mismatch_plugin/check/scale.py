"""Numbers that are not natural logs: probabilities, negated log-probs, logs of base 2 or 10."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mismatch_plugin.check.batch import Batch, Floats, Sample
from mismatch_plugin.check.findings import FaultName, Finding, Side, Undecided

POSITIVE_SHARE = 0.9
MIN_VALUES = 4
"""Of one sample, to judge its sign."""
SMALLEST = 0.01
"""Nearer to 0 the ratio of two log-probs is mostly noise."""
MIN_TOKENS = 45
"""Of the batch, to judge the base: 15 a third."""
BASE_TOLERANCE = 0.06
"""Of log(ratio of the sides) in each third of the tokens, ordered by size: proportional means the same everywhere."""
BASE_SPREAD = 0.2
"""Typical deviation from that ratio among the largest third, at most."""

_FIXES: dict[FaultName, str] = {
    "sign": "Store log-probs, not losses: negate the numbers on that side (cross-entropy is −log p).",
    "probabilities": "Store natural logs: take log of the numbers on that side, better log-softmax in float32.",
    "log_base": "Store natural logs: multiply the numbers on that side by {factor:.6g} (log of the base).",
}


def find_scale(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """Judge each side, and go on with natural logs."""
    findings: list[Finding | Undecided] = []
    sides: tuple[Side, ...] = ("rollout", "training")
    for side in sides:
        found, batch = _positive(batch, side)
        findings += found
    if not batch.has_training:
        return findings, batch
    found_base, batch = _base(batch)
    return [*findings, *found_base], batch


def _values(sample: Sample, side: Side) -> Floats | None:
    return sample.rollout if side == "rollout" else sample.train


def _positive(batch: Batch, side: Side) -> tuple[list[Finding], Batch]:
    """Samples nearly all of whose numbers are positive: probabilities or negated."""
    chosen: list[Sample] = []
    short: list[Sample] = []
    for sample in batch:
        values = _values(sample, side)
        if values is None:
            continue
        shared = min(len(values), sample.tokens)
        numbers = values[:shared][sample.mask[:shared]]
        numbers = numbers[np.isfinite(numbers) & (numbers != 0.0)]
        if len(numbers) >= MIN_VALUES and (numbers > 0).mean() >= POSITIVE_SHARE:
            chosen.append(sample)
        elif 0 < len(numbers) < MIN_VALUES and (numbers > 0).all():
            short.append(sample)
    if not chosen:
        return [], batch
    chosen = sorted([*chosen, *short], key=lambda sample: sample.index)
    name = _which(chosen, side)
    changed: dict[int, dict[str, Any]] = {}
    largest, count = 0.0, 0
    for sample in chosen:
        values = _values(sample, side)
        assert values is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            fixed = np.log(values) if name == "probabilities" else -values
        changed[sample.index] = {"rollout" if side == "rollout" else "train": fixed}
        largest = max(largest, float(np.nanmax(np.where(np.isfinite(values), values, np.nan))))
        count += len(values)
    what = "lie between 0 and 1: probabilities" if name == "probabilities" else "are positive: −log p"
    finding = Finding(
        fault=name,
        side=side,
        evidence=f"The {side} side's numbers of {len(chosen)} of {len(batch)} samples {what} (largest {largest:.4g}).",
        statistics={"largest": largest},
        samples=len(chosen),
        of_samples=len(batch),
        tokens=count,
        of_tokens=batch.token_count,
        first=chosen[0].place(0),
        fix=_FIXES[name],
    )
    return [finding], batch.with_values(changed)


def _which(chosen: list[Sample], side: Side) -> FaultName:
    """Beyond 1 it is no probability; else the reading that fits the other side better."""
    ours, theirs = [], []
    for sample in chosen:
        values, other = _values(sample, side), _values(sample, "training" if side == "rollout" else "rollout")
        assert values is not None
        shared = min(len(values), len(other)) if other is not None else 0
        ours.append(values[:shared] if other is not None else values)
        if other is not None:
            theirs.append(other[:shared])
    values = np.concatenate(ours)
    if np.nanmax(np.where(np.isfinite(values), values, np.nan)) > 1.0 + 1e-6:
        return "sign"
    if not theirs:
        return "probabilities"
    other = np.concatenate(theirs)
    fine = np.isfinite(values) & np.isfinite(other) & (values > 0)
    as_log = np.median(np.abs(np.log(values[fine]) - other[fine]))
    as_negated = np.median(np.abs(-values[fine] - other[fine]))
    return "probabilities" if as_log <= as_negated else "sign"


def _base(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """Proportional sides with the factor of base 2 or 10. A temperature never gives one factor for likely and unlikely
    tokens, so the factor must hold in each third of the tokens ordered by size."""
    tokens = batch.tokens
    # By the product of the two sides, so that neither side's scale chooses the tokens.
    chosen = (tokens.rollout < 0) & (tokens.train < 0) & (tokens.rollout * tokens.train > SMALLEST**2)
    tokens = tokens.where(chosen)
    if len(tokens) < MIN_TOKENS:
        return [Undecided(faults=("log_base",), reason=_few(len(tokens)))], batch
    log_ratio = np.log(tokens.rollout / tokens.train)
    order = np.argsort(tokens.rollout * tokens.train)
    parts = np.array_split(order, 3)
    thirds = [float(np.median(log_ratio[part])) for part in parts]
    if np.median(np.abs(log_ratio[parts[2]] - thirds[2])) > BASE_SPREAD:
        return [], batch  # not proportional at all, whatever the medians happen to be
    for side, sign in (("rollout", 1), ("training", -1)):
        for base in (2.0, 10.0):
            expected = -sign * math.log(math.log(base))  # numbers of base b are natural ones / ln b
            if max(abs(third - expected) for third in thirds) > BASE_TOLERANCE:
                continue
            factor = math.log(base)
            field = "rollout" if side == "rollout" else "train"
            changed = {
                sample.index: {field: values * factor}
                for sample in batch
                if (values := sample.rollout if field == "rollout" else sample.train) is not None
            }
            first = batch.samples[int(tokens.sample[0])]
            finding = Finding(
                fault="log_base",
                side="rollout" if side == "rollout" else "training",
                evidence=f"Rollout and training log-probs are proportional, factor {math.exp(thirds[1]):.4f} (thirds "
                f"of the tokens by size: {', '.join(f'{math.exp(third):.4f}' for third in thirds)}): base {base:g} on "
                f"the {side} side gives {math.exp(expected):.4f}.",
                statistics={"factor": math.exp(thirds[1]), "base": base},
                samples=len(np.unique(tokens.sample)),
                of_samples=len(batch),
                tokens=len(tokens),
                of_tokens=batch.token_count,
                first=first.place(int(tokens.position[0])),
                fix=_FIXES["log_base"].format(factor=factor),
            )
            return [finding], batch.with_values(changed)
    return [], batch


def _few(count: int) -> str:
    return f"not enough tokens to tell: {count} with log-probs clearly below 0 on both sides, {MIN_TOKENS} needed"
