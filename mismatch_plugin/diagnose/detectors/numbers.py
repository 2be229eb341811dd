"""Is each number a natural log-prob that was sampled? What else it is shows in the values, alone or side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP
from mismatch_plugin.data.arrays import Bools, Floats, Ints, is_null
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import FIELD, Batch, Outcome, median
from mismatch_plugin.diagnose.findings import (
    SIDES,
    FaultName,
    Finding,
    Item,
    LogProbSide,
    first_place,
    place_of,
    too_few,
)

FILL_GAP = 0.5
"""Several exact 0.0 where the other side is below −0.5: certain tokens do not differ by that much."""
MIN_FILLS = 3
NEARLY_CERTAIN, HONEST_FACTOR = 0.01, 5.0
"""Tokens within 0.01 nats of certain differ as honest 0.0 do; fills are far off more than five times as often."""
CLAMP_REPEATS, CLAMP_BELOW = 3, -2.0
"""The lowest value is a clamp if it comes back exactly that often, and is below that."""
UNLIKELY = -1.0
"""Tokens below this, clamped ones aside, show how far the two sides differ there."""

POSITIVE_SHARE = 0.9
MIN_SIGNED = 4
"""Values of one sample, to judge its sign."""
BASE_SMALLEST = 0.01
"""Nearer to 0 the ratio of two log-probs is mostly noise."""
MIN_BASE_TOKENS = 45
"""Of the batch, to judge the base: 15 a third."""
BASE_TOLERANCE, BASE_ERRORS, BASE_WORST = 0.01, 3.0, 0.06
"""Of log(ratio of the sides) in each third of the tokens, ordered by size: proportional means the same everywhere. So
many standard errors of the median are added, up to the last number. Temperatures near the log of a base lie outside."""
BASE_SPREAD = 0.2
"""Typical deviation from that ratio among the largest third, at most."""

NARROW_SMALLEST = 0.05
"""Log-probs nearer to 0 are left out: there float32 itself leaves few digits."""
MIN_NARROW, NARROW_SHARE = 5, 0.95
"""Values of one sample, and how many must fit; by chance a float32 fits bf16 once in 65,536."""
DECIMALS = 4
"""Rounding to so many decimals or fewer is named: half a unit is then 5e-5, above float32's own error."""

_NOT_LOG_PROBS: dict[FaultName, tuple[str, str, str]] = {
    "missing": (
        "null instead of a log-prob",
        "Send return_logprob with every request, and mask tokens that were not sampled (tool output) with loss_mask 0.",
        "Let the trainer write a number for every response token.",
    ),
    "nan": (
        "NaN",
        "Look for NaN logits in the rollout engine (fp16 overflow, broken weights after an update); until then choose "
        "--rollout-log-prob-policy drop-sequence.",
        "Look for NaN logits in the trainer, or for padding that leaks into the response.",
    ),
    "infinite": (
        "+inf",
        "No log-prob is +inf: look for an overflow or a division by 0 between engine and file.",
        "No log-prob is infinite on a sampled token: look for a mask applied to the logits that excludes sampled "
        "tokens, or an overflow.",
    ),
    "positive": (
        "a number clearly above 0",
        "No log-prob is above 0: look at what is written into rollout_log_probs.",
        "No log-prob is above 0: look at what is written into train_log_probs.",
    ),
    "floor": (
        "−inf or a floor ({value:g})",
        "The engine wrote a floor instead of a log-prob (cut out by a filter, or clamped): take log-probs before "
        "filters and remove the clamp, or choose --rollout-log-prob-policy drop-token.",
        "Remove the clamp on the training side's log-probs.",
    ),
    "zero_fill": (
        "exactly 0.0 where the other side is far from it",
        "0.0 was filled in where the engine returned nothing: mask those tokens with loss_mask 0, or ask the engine "
        "for their log-probs.",
        "0.0 was filled in on the training side: gather log-probs for every response token and do not pad inside the "
        "response.",
    ),
}
"""What a sample has, and what to do on the rollout and on the training side."""
_SIGN_FIX = "Store log-probs, not losses: negate the numbers on that side (cross-entropy is −log p)."
_PROBABILITIES_FIX = "Store natural logs: take log of the numbers on that side, better log-softmax in float32."
_EOS_FIX = (
    "Do not append EOS to what the server returned (finish_reason tells whether it stopped), or give the appended "
    "token loss_mask 0: nobody sampled it, so it has no rollout log-prob."
)

Hits = list[tuple[Sample, Ints]]
"""Samples, and the positions in each."""


# Values that are no log-probs


def find_numbers(batch: Batch) -> Outcome:
    """Everything but 0.0 fills and clamps, on both sides; found values are NaN afterwards."""
    found: list[Item] = []
    changed: dict[int, dict[str, Any]] = defaultdict(dict)
    for side in SIDES:
        hits: dict[FaultName, Hits] = defaultdict(list)
        for sample in batch:
            values = sample.values(side)
            if not len(values) or (values.min() > FLOOR and values.max() <= POSITIVE_TOLERANCE):
                continue  # all sound, and no NaN among them
            trains = np.ones(len(values), dtype=bool)  # over what the list has too much, too
            trains[: len(sample)] = sample.mask[: len(values)]
            sound = np.isfinite(values)  # what a masked token carries is ignored, but must not enter a statistic
            for name, bad in _kinds(values):
                if (bad & trains).any():
                    hits[name].append((sample, np.flatnonzero(bad & trains)))
                    sound &= ~(bad & trains)
            changed[sample.index][FIELD[side]] = np.where(sound, values, np.nan)
        found += [_number_finding(batch, name, side, chosen) for name, chosen in hits.items()]
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
    for side, (name, find) in product(SIDES, kinds):
        chosen = batch.tokens.where(find(*batch.tokens.sides(side)))
        hits = [(batch.samples[at], chosen.position[chosen.sample == at]) for at in np.unique(chosen.sample)]
        if not hits:
            continue
        found.append(_number_finding(batch, name, side, hits))
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
    nearly = (own < 0) & (own > -NEARLY_CERTAIN)
    few = (zero & far).sum() < MIN_FILLS and not (zero & (other < -ZERO_FILL_GAP)).any()
    # Where the two sides are that far apart on nearly certain tokens, too, the zeros are honest.
    honest = few or (nearly.any() and far[zero].mean() < HONEST_FACTOR * far[nearly].mean())
    return zero & far & (not honest)


def _clamped(own: Floats, other: Floats) -> Bools:
    """A lowest value that comes back exactly while the other side varies and goes below it."""
    lowest = own == own.min(initial=0.0)
    if own.min(initial=0.0) > CLAMP_BELOW or lowest.sum() < CLAMP_REPEATS:
        return np.zeros_like(lowest)
    unlikely = ~lowest & (own < UNLIKELY)
    noise = float(np.quantile(np.abs(other - own)[unlikely], 0.9)) if unlikely.sum() >= 10 else 0.2
    below = other[lowest] - own.min()
    varies = np.ptp(below) > max(0.2, 2 * noise)  # the same token in the same context would be the same on both sides
    return lowest & bool(varies and np.median(below) <= -0.1 and (below > 2 * noise).mean() <= 0.2)


def _number_finding(batch: Batch, name: FaultName, side: LogProbSide, hits: Hits) -> Finding:
    sample, position = hits[0][0], int(hits[0][1][0])
    value = float(sample.values(side)[position])
    shown: dict[str, Any] = {side: "null" if is_null(sample.values(side))[position] else value}
    tokens = sum(len(positions) for _, positions in hits)
    what, *fixes = _NOT_LOG_PROBS[name]
    return batch.finding(
        name,
        side,
        f"{tokens} of {batch.token_count} tokens in {len(hits)} of {len(batch)} samples have {what.format(value=value)}"
        f" on the {side} side.",
        fixes[SIDES.index(side)],
        [sample for sample, _ in hits],
        tokens=tokens,
        first=place_of(sample, position, **shown),
        statistics={"fraction": tokens / max(batch.token_count, 1)},
    )


# An end-of-sequence token that the trainer appended: nobody sampled it, so it has no rollout log-prob


def find_null_eos(batch: Batch) -> Outcome:
    """Responses that have null on the last token and nowhere else."""
    chosen, elsewhere = [], 0
    for sample in batch:
        if len(sample.rollout_log_probs) != len(sample) or len(sample) < 2:
            continue
        nulls = is_null(sample.rollout_log_probs) & sample.mask
        if nulls[-1] and nulls.sum() == 1:
            chosen.append(sample)
        elsewhere += bool(nulls.any() and not nulls[-1])
    if elsewhere >= len(chosen):
        return [], batch  # nulls everywhere are no EOS
    return _without_eos(batch, chosen, "stands a token with null for a log-prob")


def find_zero_eos(batch: Batch) -> Outcome:
    """Responses that have 0.0 on the last token, where the training side is far from it; sides must be aligned."""
    ending = [sample for sample in batch if len(sample) > 1 and sample.usable[-1]]
    chosen = [one for one in ending if one.rollout_log_probs[-1] == 0.0 and one.train_log_probs[-1] < -FILL_GAP]
    theirs = [float(sample.train_log_probs[-1]) for sample in chosen]
    if not chosen or (len(chosen) < 2 and min(theirs) > -ZERO_FILL_GAP):
        return [], batch
    return _without_eos(
        batch, chosen, f"stands a token with exactly 0.0, which the trainer gives {np.mean(theirs):.3g}"
    )


def _without_eos(batch: Batch, chosen: list[Sample], what: str) -> Outcome:
    """Named EOS if it is one by id, or the same id in several responses."""
    ids = {int(sample.response_ids[-1]) for sample in chosen}
    if not chosen or not (ids <= batch.eos_ids or (len(ids) == 1 and len(chosen) > 1)):
        return [], batch
    changed: dict[int, dict[str, Any]] = {}
    for sample in chosen:
        last = np.arange(len(sample)) == len(sample) - 1
        values = np.where(last, np.nan, sample.rollout_log_probs)
        changed[sample.index] = {"rollout_log_probs": values, "loss_mask": sample.mask & ~last}
    named = f" (id {ids.pop()})" if len(ids) == 1 else ""
    return [eos_finding(batch, chosen, len(chosen[0]) - 1, f"{what}{named}")], batch.with_values(changed)


def eos_finding(batch: Batch, samples: list[Sample], position: int, what: str) -> Finding:
    """An end-of-sequence token that was not sampled. position: of it, in the first sample."""
    return batch.finding(
        "eos_appended",
        "training",
        f"At the end of {len(samples)} of {len(batch)} responses {what}: an end-of-sequence token that was not "
        f"sampled.",
        _EOS_FIX,
        samples,
        tokens=len(samples),
        first=place_of(samples[0], position),
        statistics={"fraction": len(samples) / len(batch)},
    )


# Numbers that are not natural logs: probabilities, negated log-probs, logs of base 2 or 10


def find_scale(batch: Batch) -> Outcome:
    """Judge each side, and go on with natural logs."""
    found: list[Item] = []
    for side in SIDES:
        items, batch = _positive(batch, side)
        found += items
    items, batch = _base(batch) if batch.has_training else ([], batch)
    return [*found, *items], batch


def _positive(batch: Batch, side: LogProbSide) -> Outcome:
    """Samples nearly all of whose numbers are positive: probabilities or negated."""
    chosen: list[Sample] = []
    most = 0
    for sample in batch:
        shared = sample.values(side)[: len(sample)]
        if not len(shared) or shared.max() <= 0:
            continue
        numbers = shared[sample.mask[: len(shared)]]
        numbers = numbers[np.isfinite(numbers) & (numbers != 0.0)]
        if len(numbers) and (numbers > 0).mean() >= POSITIVE_SHARE:
            chosen.append(sample)
            most = max(most, len(numbers))
    if most < MIN_SIGNED:
        return [], batch
    lists = [sample.values(side) for sample in chosen]
    largest = float(max(values[np.isfinite(values)].max() for values in lists))
    name: FaultName = "probabilities" if largest <= 1 + 1e-6 and _fit_as_probabilities(batch, chosen, side) else "sign"
    what, fix, undo = "are positive: −log p", _SIGN_FIX, np.negative
    if name == "probabilities":
        what, fix, undo = "lie between 0 and 1: probabilities", _PROBABILITIES_FIX, np.log
    with np.errstate(divide="ignore", invalid="ignore"):
        changed = {
            sample.index: {FIELD[side]: np.where(is_null(values), values, undo(values))}
            for sample, values in zip(chosen, lists, strict=True)
        }
    finding = batch.finding(
        name,
        side,
        f"The {side} side's numbers of {len(chosen)} of {len(batch)} samples {what} (largest {largest:.4g}).",
        fix,
        chosen,
        tokens=sum(map(len, lists)),
        statistics={"largest": largest},
    )
    return [finding], batch.with_values(changed)


def _fit_as_probabilities(batch: Batch, chosen: list[Sample], side: LogProbSide) -> bool:
    """Their logs fit the other side at least as well as their negatives do."""
    if not batch.has_training:
        return True
    pairs = [(one.rollout_log_probs, one.train_log_probs) for one in chosen]
    both = np.concatenate([np.stack([own[: len(other)], other[: len(own)]]) for own, other in pairs], axis=1)
    values, other = both if side == "rollout" else both[::-1]
    fine = np.isfinite(values) & np.isfinite(other) & (values > 0)
    values, other = values[fine], other[fine]
    return bool(np.median(np.abs(np.log(values) - other)) <= np.median(np.abs(-values - other)))


def _base(batch: Batch) -> Outcome:
    """Proportional sides with the factor of base 2 or 10: numbers of base b are natural ones / ln b.

    A temperature never gives one factor for likely and unlikely tokens, so the factor must hold in each third of the
    tokens ordered by size.
    """
    tokens = batch.tokens
    # By the product of the two sides, so that neither side's scale chooses the tokens.
    size = tokens.rollout * tokens.training
    told = (tokens.rollout < 0) & (tokens.training < 0) & (size > BASE_SMALLEST**2)
    tokens, size = tokens.where(told), size[told]
    if len(tokens) < MIN_BASE_TOKENS:
        few = f"{len(tokens)} with log-probs clearly below 0 on both sides, {MIN_BASE_TOKENS} needed"
        return [too_few(few, "log_base")], batch
    log_ratio = np.log(tokens.rollout / tokens.training)
    cuts = [len(size) // 3, 2 * len(size) // 3]
    parts = [log_ratio[part] for part in np.split(np.argpartition(size, cuts), cuts)]
    thirds = np.array([median(part) for part in parts])
    spreads = np.array([median(np.abs(part - third)) for part, third in zip(parts, thirds, strict=True)])
    if spreads[2] > BASE_SPREAD:
        return [], batch  # not proportional at all, whatever the medians happen to be
    # Median of n normal values: 1.253 σ/√n, and σ is 1.483 times their median deviation.
    errors = 1.86 * spreads / np.sqrt([len(part) for part in parts])
    allowed = np.minimum(BASE_TOLERANCE + BASE_ERRORS * errors, BASE_WORST)
    for side, base in product(SIDES, (2.0, 10.0)):
        factor = math.log(base)
        expected = math.log(factor) * (-1 if side == "rollout" else 1)
        if (np.abs(thirds - expected) > allowed).any():
            continue
        finding = batch.finding(
            "log_base",
            side,
            f"Rollout and training log-probs are proportional, factor {math.exp(thirds[1]):.4f} (thirds of the tokens "
            f"by size: {', '.join(f'{math.exp(third):.4f}' for third in thirds)}): base {base:g} on the {side} side "
            f"gives {math.exp(expected):.4f}.",
            f"Store natural logs: multiply the numbers on that side by {factor:.6g} (log of the base).",
            [batch.samples[index] for index in np.unique(tokens.sample)],
            tokens=len(tokens),
            first=place_of(batch.samples[int(tokens.sample[0])], int(tokens.position[0])),
            statistics={"factor": math.exp(thirds[1]), "base": base},
        )
        changed = {sample.index: {FIELD[side]: sample.values(side) * factor} for sample in batch}
        return [finding], batch.with_values(changed)
    return [], batch


# Log-probs that lost digits on the way


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


class _Narrow(NamedTuple):
    """A form of number: which values it can hold, what is said of them, and what to do."""

    fits: Callable[[Floats], Bools]
    are: str
    fix: str


NARROW: dict[FaultName, _Narrow] = {
    "bf16": _Narrow(
        fits_bf16,
        "are numbers that bf16 can hold, steps of 2^-8 of its size",
        "Keep log-probs in float32 from the log-softmax on: cast logits to float32 before it, and do not store or send "
        "the result in bf16.",
    ),
    "fp16": _Narrow(
        fits_fp16,
        "are numbers that fp16 can hold, steps of 2^-11 of its size",
        "Keep log-probs in float32 from the log-softmax on: do not store or send them in fp16.",
    ),
    "rounded": _Narrow(
        fits_decimals,
        f"have at most {DECIMALS} decimals",
        "Write log-probs with all their digits (repr of a float32 has up to nine).",
    ),
}


def find_precision(batch: Batch) -> Outcome:
    """By sample and side, so that one of several engines is found too. Looks at the values as they were given."""
    found: list[Item] = []
    for side in SIDES:
        by_kind: dict[FaultName, list[Sample]] = defaultdict(list)
        judged = 0
        for sample in batch:
            values = sample.values(side)
            values = np.unique(values[_told(values)])
            if len(values) < MIN_NARROW:
                continue
            judged += 1
            fitting: list[FaultName] = [name for name in NARROW if NARROW[name].fits(values).mean() >= NARROW_SHARE]
            if fitting:
                by_kind[fitting[0]].append(sample)
        if not judged and (side == "rollout" or batch.has_training):
            few = f"no sample has {MIN_NARROW} different {side} log-probs below −{NARROW_SMALLEST:g}"
            found.append(too_few(few, *NARROW))
        found += [_narrow_finding(batch, name, side, samples, judged) for name, samples in by_kind.items()]
    return found, batch


def _told(values: Floats) -> Bools:
    return np.isfinite(values) & (np.abs(values) > NARROW_SMALLEST)


def _narrow_finding(
    batch: Batch, name: FaultName, side: LogProbSide, samples: Sequence[Sample], judged: int
) -> Finding:
    return batch.finding(
        name,
        side,
        f"All {side} log-probs of {len(samples)} of {judged} samples {NARROW[name].are}: digits were lost before the "
        f"file was written.",
        NARROW[name].fix,
        samples,
        of_samples=judged,
        first=first_place(samples[0], _told(samples[0].values(side))),
        statistics={"fraction": len(samples) / judged},
    )
