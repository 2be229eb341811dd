"""Is each number a natural log-prob that was sampled? What else it is shows in the values, alone or side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP
from mismatch_plugin.data.arrays import Bools, Floats, Ints, is_null
from mismatch_plugin.data.sample import LogProbSide, Sample
from mismatch_plugin.diagnose.batch import FIELD, Batch, Outcome
from mismatch_plugin.diagnose.result import SIDES, Confidence, FaultName, Item, place_of, too_few

FILL_GAP = 0.5
"""Several exact 0.0 where the other side is below −0.5: certain tokens do not differ by that much."""
MIN_FILLS = 3
NEARLY_CERTAIN, HONEST_FACTOR = 0.01, 5.0
"""Tokens within 0.01 nats of certain differ as honest 0.0 do; fills are far off more than five times as often."""
CLAMP_REPEATS, CLAMP_BELOW = 3, -2.0
"""The lowest value is a clamp if it comes back exactly that often, and is below that."""
UNLIKELY = -1.0
"""Tokens below this, clamped ones aside, show how far the two sides differ there."""
POSITIVE_SHARE, MIN_SIGNED = 0.9, 4
"""Of a sample's values are positive; values of one sample, to judge its sign."""
BASE_SMALLEST, MIN_BASE_TOKENS = 0.01, 45
"""Nearer to 0 the ratio of two log-probs is mostly noise; so many of the batch judge the factor, 15 a third."""
BASE_TOLERANCE, BASE_ERRORS, BASE_WORST, BASE_SPREAD = 0.01, 3.0, 0.06, 0.2
"""Of log(ratio of the sides) in each third of the tokens, ordered by size: proportional means the same everywhere. So
many standard errors of the median are added, up to the third number. Temperatures near the log of a base lie outside.
Last the typical deviation among the largest third, at most."""
FACTOR_SPREAD, MIN_FACTOR, FACTOR_LIKELY = 0.05, 0.05, 0.7
"""Any other factor: typical deviation in every third at most, its log at least, and |log p| of the likeliest third."""
NARROW_SMALLEST, MIN_NARROW, NARROW_SHARE = 0.05, 5, 0.95
"""Log-probs nearer to 0 are left out (float32 leaves few digits there). Values of one sample, and how many must fit; by
chance a float32 fits bf16 once in 65,536."""
DECIMALS = 4
"""Rounding to so many decimals or fewer is named: half a unit is then 5e-5, above float32's own error."""

NOT_LOG_PROBS: dict[FaultName, tuple[str, str, str]] = {
    "missing": ("null instead of a log-prob",
        "Send return_logprob with every request, and give tokens that were not sampled (tool output) loss_mask 0.",
        "Let the trainer write a number for every response token."),
    "nan": ("NaN",
        "Look for NaN logits in the engine (fp16, a broken update); else --rollout-log-prob-policy drop-sequence.",
        "Look for NaN logits in the trainer, or for padding that leaks into the response."),
    "infinite": ("+inf",
        "No log-prob is +inf: look for an overflow or a division by 0 between engine and file.",
        "No sampled token has one: look for a mask on the logits that excludes sampled tokens, or an overflow."),
    "positive": ("a number clearly above 0",
        "No log-prob is above 0: look at what is written into rollout_log_probs.",
        "No log-prob is above 0: look at what is written into train_log_probs."),
    "floor": ("−inf or a floor ({value:g})",
        "Take log-probs before filters and remove the engine's clamp, or choose --rollout-log-prob-policy drop-token.",
        "Remove the clamp on the training side's log-probs."),
    "zero_fill": ("exactly 0.0 where the other side is far from it",
        "The engine returned nothing there: give those tokens loss_mask 0, or ask the engine for their log-probs.",
        "Gather log-probs for every response token, and do not pad inside the response."),
}  # fmt: skip
"""What a sample has, and what to do on the rollout and on the training side."""
Hits = list[tuple[Sample, Ints]]
"""Samples, and positions in them."""


def find_numbers(batch: Batch) -> Outcome:
    """Everything but 0.0 fills and clamps, on both sides, by the bounds of `core.validity`; it is NaN afterwards."""
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
            finite, nulls = np.isfinite(values), is_null(values)
            kinds: dict[FaultName, Bools] = {
                "missing": nulls,
                "nan": np.isnan(values) & ~nulls,
                "infinite": np.isposinf(values),
                "positive": finite & (values > POSITIVE_TOLERANCE),
                "floor": values <= FLOOR,
            }
            sound = finite  # what a masked token carries is ignored, but must not enter a statistic
            for name, bad in kinds.items():
                if (bad & trains).any():
                    hits[name].append((sample, np.flatnonzero(bad & trains)))
                    sound = sound & ~(bad & trains)
            changed[sample.index][FIELD[side]] = np.where(sound, values, np.nan)
        found += [_number_finding(batch, name, side, chosen) for name, chosen in hits.items()]
    return found, batch.with_values(changed)


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


def _number_finding(batch: Batch, name: FaultName, side: LogProbSide, hits: Hits) -> Item:
    sample, position = hits[0][0], int(hits[0][1][0])
    value = float(sample.values(side)[position])
    tokens = sum(len(positions) for _, positions in hits)
    what, *fixes = NOT_LOG_PROBS[name]
    of = f"{tokens} of {batch.token_count} tokens in {len(hits)} of {len(batch)} samples"
    evidence = f"{of} have {what.format(value=value)} on the {side} side."
    first = place_of(sample, position, **{side: "null" if name == "missing" else value})
    fix, samples = fixes[SIDES.index(side)], [sample for sample, _ in hits]
    sure: Confidence = "certain" if name in ("missing", "nan", "infinite", "positive") else "likely"
    return batch.finding(name, side, evidence, fix, samples, tokens=tokens, first=first, confidence=sure)


# An end-of-sequence token that the trainer appended: nobody sampled it, so it has no rollout log-prob


def find_null_eos(batch: Batch) -> Outcome:
    """Responses that have null on the last token."""
    whole = [one for one in batch if len(one.rollout_log_probs) == len(one) > 1]
    hits = [(one, is_null(one.rollout_log_probs) & one.mask) for one in whole]
    return _without_eos(batch, hits, "stands a token with null for a log-prob")


def find_zero_eos(batch: Batch) -> Outcome:
    """Responses that have 0.0 on the last token, where the training side is far from it; sides must be aligned."""
    whole = [one for one in batch if one.comparable and len(one) > 1]
    hits = [(one, one.usable & (one.rollout_log_probs == 0.0) & (one.train_log_probs < -FILL_GAP)) for one in whole]
    ending = [one.train_log_probs[-1] for one, at in hits if at[-1]]
    if len(ending) == 1 and ending[0] > -ZERO_FILL_GAP:
        return [], batch
    return _without_eos(batch, hits, "stands a token with exactly 0.0, which is far from that to the trainer")


def _without_eos(batch: Batch, hits: list[tuple[Sample, Bools]], what: str) -> Outcome:
    """Named EOS if it is one by id, or the same id in several responses; where as many responses have such values
    elsewhere, those at an end are like them. hits: [n] which tokens of a sample have them."""
    chosen = [sample for sample, at in hits if at[-1] and at.sum() == 1]
    ids = {int(sample.response_ids[-1]) for sample in chosen}
    eos = ids <= batch.eos_ids or (len(ids) == 1 and len(chosen) > 1)
    if not eos or sum(bool(at[:-1].any()) for _, at in hits) >= len(chosen):
        return [], batch
    changed: dict[int, dict[str, Any]] = {}
    for sample in chosen:
        last = np.arange(len(sample)) == len(sample) - 1
        values = np.where(last, np.nan, sample.rollout_log_probs)
        changed[sample.index] = {"rollout_log_probs": values, "loss_mask": sample.mask & ~last}
    return [eos_finding(batch, chosen, len(chosen[0]) - 1, what)], batch.with_values(changed)


def eos_finding(batch: Batch, samples: list[Sample], position: int, what: str) -> Item:
    """An end-of-sequence token that was not sampled. position: of it, in the first sample."""
    ids = {int(one.response_ids[-1]) for one in samples if position < len(samples[0])}
    count, named = f"{len(samples)} of {len(batch)} responses", f" (id {ids.pop()})" if len(ids) == 1 else ""
    evidence = f"At the end of {count} {what}{named}: an end-of-sequence token that was not sampled."
    fix = "Do not append EOS to what the server returned, or give it loss_mask 0: nobody sampled it."
    first = place_of(samples[0], position)
    return batch.finding("eos_appended", "training", evidence, fix, samples, tokens=len(samples), first=first)


# Numbers that are not natural logs: probabilities, negated log-probs, logs of base 2 or 10


def find_scale(batch: Batch) -> Outcome:
    """Judge each side, and go on with natural logs."""
    rollout, batch = _positive(batch, "rollout")
    training, batch = _positive(batch, "training")
    base, batch = _factor(batch) if batch.has_training else ([], batch)
    return [*rollout, *training, *base], batch


def _positive(batch: Batch, side: LogProbSide) -> Outcome:
    """Samples nearly all of whose numbers are positive: probabilities or negated."""
    chosen: list[Sample] = []
    most = 0
    for sample in batch:
        shared = sample.values(side)[: len(sample)]
        numbers = shared[sample.mask[: len(shared)]]
        numbers = numbers[np.isfinite(numbers) & (numbers != 0.0)]
        if len(numbers) and (numbers > 0).mean() >= POSITIVE_SHARE:
            chosen.append(sample)
            most = max(most, len(numbers))
    if most < MIN_SIGNED:
        return [], batch
    lists = {sample.index: sample.values(side) for sample in chosen}
    largest = float(max(values[np.isfinite(values)].max() for values in lists.values()))
    if largest <= 1 + 1e-6:
        name, what, undo = "probabilities", "lie between 0 and 1: probabilities", np.log
        fix = "Store natural logs: take log of the numbers on that side, better log-softmax in float32."
    else:
        name, what, undo = "sign", "are positive: −log p", np.negative
        fix = "Store log-probs, not losses: negate the numbers on that side (cross-entropy is −log p)."
    with np.errstate(divide="ignore", invalid="ignore"):
        changed = {at: {FIELD[side]: np.where(is_null(one), one, undo(one))} for at, one in lists.items()}
    of = f"{len(chosen)} of {len(batch)} samples"
    evidence = f"The {side} side's numbers of {of} {what} (largest {largest:.4g})."
    return [batch.finding(name, side, evidence, fix, chosen)], batch.with_values(changed)


def _factor(batch: Batch) -> Outcome:
    """Proportional sides: by base 2 or 10 (numbers of base b are natural ones / ln b), else by any factor. A
    temperature never gives one for likely and unlikely tokens: it must hold in each third of the tokens by size."""
    tokens = batch.tokens
    size = tokens.rollout * tokens.training  # of both sides, so that neither side's scale chooses the tokens
    told = (tokens.rollout < 0) & (tokens.training < 0) & (size > BASE_SMALLEST**2)
    tokens, size = tokens.where(told), size[told]
    if len(tokens) < MIN_BASE_TOKENS:
        few = f"{len(tokens)} with log-probs clearly below 0 on both sides, {MIN_BASE_TOKENS} needed"
        return [too_few(few, "log_base")], batch
    places = np.array_split(np.argsort(size), 3)
    parts = [np.log(tokens.training / tokens.rollout)[place] for place in places]
    thirds = np.array([np.median(part) for part in parts])
    spreads = np.array([np.median(np.abs(part - third)) for part, third in zip(parts, thirds, strict=True)])
    # Median of n normal values: 1.253 σ/√n, and σ is 1.483 times their median deviation.
    errors = 1.86 * spreads / np.sqrt([len(part) for part in parts])
    allowed = np.minimum(BASE_TOLERANCE + BASE_ERRORS * errors, BASE_WORST)
    if spreads[2] > BASE_SPREAD:
        return [], batch  # not proportional, whatever the medians happen to be
    factor = math.exp(thirds[1])
    evidence = f"Training log-probs are {factor:.4f} times the rollout's, whatever their size"
    recorded = {abs(math.log(one.temperature)) for one in batch if one.temperature > 0}
    for side, base in product(SIDES, (2.0, 10.0)):
        expected = math.log(math.log(base)) * (1 if side == "rollout" else -1)
        nearer = any(abs(abs(thirds[1]) - one) < abs(thirds[1] - expected) for one in recorded)  # 0.7 is near log 2
        if nearer or (np.abs(thirds - expected) > allowed).any():
            continue
        evidence += f": base {base:g} on the {side} side gives {math.exp(expected):.4f}."
        fix = f"Store natural logs: multiply the numbers on that side by {math.log(base):.6g} (log of the base)."
        figures = {"factor": factor, "base": base}
        finding = batch.finding("log_base", side, evidence, fix, batch.samples, statistics=figures)
        natural = {one.index: {FIELD[side]: one.values(side) * math.log(base)} for one in batch}
        return [finding], batch.with_values(natural)
    # Of unlikely tokens alone a temperature is nearly one factor, too.
    likely = math.sqrt(np.median(size[places[0]])) <= FACTOR_LIKELY
    one_factor = (np.abs(thirds - thirds[1]) <= allowed).all() and (spreads <= FACTOR_SPREAD).all()
    if not (one_factor and likely) or abs(thirds[1]) < MIN_FACTOR:
        return [], batch
    evidence += ": one side was multiplied after its log-softmax, which a temperature is not."
    fix = "Divide logits by the temperature before the log-softmax, never log-probs, and multiply by nothing else."
    finding = batch.finding("log_base", "both", evidence, fix, batch.samples, statistics={"factor": factor})
    return [finding], batch.with_values({one.index: {FIELD["training"]: one.train_log_probs / factor} for one in batch})


# Log-probs that lost digits on the way


NARROW: dict[FaultName, tuple[Callable[[Floats], Bools], str, str]] = {
    "bf16": (lambda values: values.astype(np.float32).view(np.uint32) & 0xFFFF == 0,  # its low 16 bits
        "are numbers that bf16 can hold, steps of 2^-8 of its size",
        "Cast logits to float32 before the log-softmax, and do not store or send log-probs in bf16."),
    "fp16": (lambda values: values.astype(np.float16).astype(np.float32) == values.astype(np.float32),
        "are numbers that fp16 can hold, steps of 2^-11 of its size",
        "Keep log-probs in float32 from the log-softmax on: do not store or send them in fp16."),
    "rounded": (lambda values: np.abs(values - np.round(values, DECIMALS)) < 1e-9,
        f"have at most {DECIMALS} decimals",
        "Write log-probs with all their digits (repr of a float32 has up to nine)."),
}  # fmt: skip
"""Which values a form of number can hold, what is said of them, and what to do."""


@np.errstate(over="ignore")
def find_precision(batch: Batch) -> Outcome:
    """By sample and side, so that one of several engines is found too. Looks at the values as they were given."""
    found: list[Item] = []
    for side in SIDES:
        by_kind: dict[FaultName, list[Sample]] = defaultdict(list)
        judged = 0
        for sample in batch:
            values = sample.values(side)
            values = np.unique(values[np.isfinite(values) & (np.abs(values) > NARROW_SMALLEST)])
            if len(values) >= MIN_NARROW:
                judged += 1
                for name, (fits, *_) in NARROW.items():
                    if fits(values).mean() >= NARROW_SHARE:
                        by_kind[name].append(sample)
                        break
        if not judged and (side == "rollout" or batch.has_training):
            few = f"no sample has {MIN_NARROW} different {side} log-probs below −{NARROW_SMALLEST:g}"
            found.append(too_few(few, *NARROW))
        for name, samples in by_kind.items():
            _, are, fix = NARROW[name]
            of = f"{len(samples)} of {judged} samples"
            evidence = f"All {side} log-probs of {of} {are}: digits were lost before the file was written."
            found.append(batch.finding(name, side, evidence, fix, samples, of_samples=judged))
    return found, batch
