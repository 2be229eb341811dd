"""Were both sides given the same text? Another prompt, other ids, and ids that are biased show in where the gap sits.

For where the training side does not tell its ids. A change of weights moves the gap, too: prompts and ids are looked
for inside what one version sampled.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import (
    CLIP,
    Batch,
    Outcome,
    Tokens,
    compare,
    distances,
    medians,
    ordinary,
    rank_correlation,
    telling,
)
from mismatch_plugin.diagnose.detectors.alignment import IDS_FIX, LAGS, PROMPT_FIX, moved
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS
from mismatch_plugin.diagnose.result import Confidence, Finding, place_of

EARLY_TOKENS = 16
"""Tokens of a response that are early, at most; a third of a shorter one. Late ones are its second half."""
MIN_EACH, MIN_SAMPLES = 3, 6
"""Telling tokens of either kind in a sample; samples that have them."""
SOFT = 0.05
"""Added to both sides of a ratio, in units of the ordinary gap: samples where both are tiny tell nothing."""
DECAY, CLEAR_RATIO, STANDARD_ERRORS, STANDARD_ERRORS_OF_SOME = 1.25, 1.4, 4.5, 3.5
"""Early over late gap, and by how many standard errors: of all samples, of some that are far apart next to the others.

Measured: engine noise, int8 and weights some steps on .67 to 1.09; another template 1.66, a system prompt 1.31 to 1.5,
BOS 1.9 to 2.2, lost prompt tokens 1.4 to 9. After short prompts over after long ones: a system prompt of 30 ids 1.56 to
1.88, without one .9 to 1.3."""
LENGTHS_APART = 1.5
"""Of the longer prompts to the shorter ones, where they are compared."""
MIN_GAP_NATS = 0.02
"""A prompt that moves the first tokens by less is no one's problem."""
JUMP = 0.7
"""Between the logs of two samples' relative gaps, neighbours in size: what lies above are samples of another kind."""
FAR_NATS, FAR_TIMES, QUANTILE = 0.3, 16.0, 0.25
"""A token is far off by so many nats at least, and so many times the lower quartile of |gap| at its log-prob
(half the median of normal noise): half of all tokens may be far."""
INSIDE, ELSEWHERE = 0.5, 0.03
"""Share of far tokens in such a stretch, and outside it at least: MoE routers flip for one token in a hundred or so."""
BARS = ((6, 4, 1e-4), (3, 1, 0.05))
"""Far tokens in a stretch, telling tokens before it, and the chance that far tokens at random places make one: in the
batch. Once one sample has met this, each is judged alone by the second."""
UNRELATED_TOKENS, UNRELATED_GAP, UNRELATED_CORRELATION = 50, 0.5, 0.3
FAR_UNRELATED_GAP, FAR_UNRELATED_CORRELATION = 3.0, 0.45
"""At least so many tokens, so large a mean |gap| in nats, and at most so large a rank correlation; that far apart more
of it is left (measured: logits of the token's own position .21 to .44 at 3 to 4 nats, a lost prompt from .5 on)."""
MIN_OFFSET_NATS, OFFSET_TIMES_TYPICAL = 0.3, 7.5
"""A token is far off by so many nats and so many times what is typical of its log-prob and sample; nearly certain ones
tell nothing."""
OFFSET_TIMES_OTHER_IDS, MIN_OTHER_IDS = 6.0, 10
"""An id is odd by so many times what 90 % of the others stay below: a step of the weights moves some ids of a small
model five times as far."""
MIN_OFFSET_SAMPLES, OFFSET_SHARE, MAX_ODD_IDS, MAX_ODD_TOKENS = 6, 0.75, 0.1, 0.3
"""Samples with the id, the share of them that is far off; the share of ids and of tokens at most."""


def _borders(sample: Sample) -> list[int]:
    """Positions at which another version begins."""
    spans = [span for span in sample.weight_versions if span.end > span.start]
    return [after.start for before, after in pairwise(spans) if after.version != before.version]


class _Contrast(NamedTuple):
    """samples: those judged. ratio: geometric mean of the larger gap over the smaller, each in units of what is
    ordinary at these log-probs. larger, smaller: mean |gap| in nats, near certain tokens aside."""

    samples: Ints
    ratio: float
    deviations: float
    larger: float
    smaller: float


def find_wrong_prompt(batch: Batch) -> Outcome:
    """The gap decays along responses, or is larger after shorter prompts. The batch stays as it is.

    Tokens are compared with what is usual in the batch at their log-prob, since first tokens are often less certain
    than later ones.
    """
    relative, level = _relative(batch)
    judged = np.flatnonzero(np.isfinite(relative).all(0))
    decay = (
        f"decays along responses, from their first tokens (up to {EARLY_TOKENS}) to their second half",
        "the two sides were given different prompts",
    )
    length = ("is larger after shorter prompts", "one side may lack a system prompt")
    contrasts = (
        (_decay(judged, relative, level), DECAY, STANDARD_ERRORS, decay),
        (_decay(_outlying(judged, relative), relative, level), DECAY, STANDARD_ERRORS_OF_SOME, decay),
        (_by_prompt_length(batch, judged, relative, level), CLEAR_RATIO, STANDARD_ERRORS, length),
    )
    for found, ratio, errors, (where, cause) in contrasts:
        if found is None or found.ratio < ratio or found.larger < MIN_GAP_NATS:
            continue
        if found.deviations <= errors * (1 + 4 / len(found.samples)):
            continue  # much as Student's t wants more of few samples
        samples = [batch.samples[index] for index in found.samples]
        fix = f"Compare both sides' prompt_ids: BOS, system prompt, thinking tags, tools, cut ends. {PROMPT_FIX}"
        confidence: Confidence = "likely" if where == decay[0] and found.ratio > CLEAR_RATIO else "possible"
        if all(sample.trained_prompt_ids is not None for sample in samples):  # differing ones are `prompt_ids`
            cause = "yet prompt ids are equal: the server may have used a KV cache of older weights"
            fix = "Flush the prefix cache with every weight update (flush_cache)."
            confidence = "possible"
        evidence = (
            f"The gap {where}: mean |gap| {found.larger:.3g} and {found.smaller:.3g} nats. That is {found.ratio:.2f} "
            f"times what log-probs explain ({found.deviations:.0f} standard errors over {len(samples)} samples): "
            f"{cause}."
        )
        told = {name: float(value) for name, value in found._asdict().items() if name != "samples"}
        about = {"statistics": told, "confidence": confidence}
        return [batch.finding("wrong_prompt", "both", evidence, fix, samples, **about)], batch
    return [], batch


def _relative(batch: Batch) -> tuple[Floats, Floats]:
    """[2, N] of early and late tokens of a response's first version: log of the gap in units of what is ordinary, NaN
    where there are too few tokens; and the mean gap in nats."""
    lengths = np.array([(_borders(sample) or [len(sample)])[0] for sample in batch])
    tokens = batch.tokens.where(batch.tokens.position < lengths[batch.tokens.sample])
    size = np.minimum(np.abs(tokens.gap), CLIP)
    usual_size = ordinary(tokens, size, np.mean)
    end = np.minimum(EARLY_TOKENS, lengths // 3)
    late = np.maximum(2 * end, lengths // 2)[tokens.sample]
    told = telling(tokens)
    parts = [told & at for at in (tokens.position < end[tokens.sample], tokens.position >= late)]
    counts, gaps, usual = (
        np.stack([np.bincount(tokens.sample[at], of[at], len(batch)) for at in parts])
        for of in (np.ones(len(size)), size, usual_size)
    )
    enough = (counts >= MIN_EACH) & (usual > 0)
    relative = np.log(np.divide(gaps, usual, where=enough, out=np.full(gaps.shape, np.nan)) + SOFT)
    return relative, gaps / np.maximum(counts, 1)


def _outlying(judged: Ints, relative: Floats) -> Ints:
    """Samples above the largest jump in size: a wrong template may concern some only. By early and late together, so
    that the choice favours neither."""
    order = judged[np.argsort(relative[:, judged].mean(0), kind="stable")]
    jumps = np.diff(relative[:, order].mean(0))
    return np.sort(order[int(np.argmax(jumps)) + 1 :]) if len(jumps) and jumps.max() > JUMP else order[:0]


def _decay(chosen: Ints, relative: Floats, level: Floats) -> _Contrast | None:
    """Paired within samples."""
    if len(chosen) < MIN_SAMPLES:
        return None
    change = relative[0, chosen] - relative[1, chosen]
    mean, error = float(change.mean()), float(change.std(ddof=1)) / math.sqrt(len(chosen))
    return _Contrast(chosen, math.exp(mean), mean / max(error, 1e-12), *level[:, chosen].mean(1).tolist())


def _by_prompt_length(batch: Batch, judged: Ints, relative: Floats, level: Floats) -> _Contrast | None:
    """A third of the samples, those with the shortest prompts, against that with the longest: a system prompt that one
    side lacks is the larger part of a short context."""
    count = len(judged) // 3
    lengths = np.array([len(sample.prompt_ids) for sample in batch])
    order = judged[np.argsort(lengths[judged], kind="stable")]
    short, long = order[:count], order[len(order) - count :]
    told = all(sample.trained_prompt_ids is not None for sample in batch)
    if told or count < MIN_SAMPLES or not np.median(lengths[long]) > LENGTHS_APART * np.median(lengths[short]):
        return None
    size, gap = relative.mean(0), level.mean(0)
    mean = float(size[short].mean() - size[long].mean())
    error = math.sqrt((size[short].var(ddof=1) + size[long].var(ddof=1)) / count)
    return _Contrast(np.sort(judged), math.exp(mean), mean / max(error, 1e-12), gap[short].mean(), gap[long].mean())


class Stretch(NamedTuple):
    """Response tokens start to stop − 1 of a sample. before, inside: mean |gap| of telling tokens there."""

    sample: Sample
    start: int
    stop: int
    before: float
    inside: float


def find_retokenised(batch: Batch) -> Outcome:
    """The likeliest stretch of far tokens in each sample; from its first token on nothing is compared afterwards."""
    tokens, size, far, parts = _far_tokens(batch)
    if far.sum() < BARS[0][0]:
        return [], batch
    rate = min(max(ELSEWHERE, float(np.median([far[part].mean() for part in parts]))), INSIDE / 2)
    found: list[Stretch] = []
    for least_far, least_before, chance in BARS:
        if least_far < BARS[0][0] and not found:
            break
        samples, longest = (1, max(map(len, batch))) if found else (len(batch), len(far))
        found = []
        for part in parts:
            first, last, gain = _likeliest(far[part], rate)
            before, inside = size[part][:first], size[part][first : last + 1]
            few = far[part][first : last + 1].sum() < least_far or len(before) < least_before
            if few or gain < math.log(longest / chance) or not _agreed(before, inside, samples / chance):
                continue
            start, stop = (int(tokens.position[part[at]]) for at in (first, last))
            sample = batch.samples[int(tokens.sample[part[0]])]
            item = Stretch(sample, start, stop + 1, float(before.mean()), float(inside.mean()))
            again = found and found[-1].sample is sample  # under a later version
            if not again and not _off_before(item):  # else the whole list is some positions off
                found.append(item)
    masks = {item.sample.index: item.sample.mask & (np.arange(len(item.sample)) < item.start) for item in found}
    changed = {index: {"loss_mask": mask} for index, mask in masks.items()}
    return [_ids_finding(batch, found)] if found else [], batch.with_values(changed)


def _far_tokens(batch: Batch) -> tuple[Tokens, Floats, Bools, list[Ints]]:
    """Telling tokens, their |gap|, which are far, and those of each version in each sample.

    What is ordinary is told apart for new tokens and those that occurred before (a penalty moves one kind only), and by
    how many versions a response went on to.
    """
    tokens = batch.tokens
    size = np.minimum(np.abs(tokens.gap), CLIP)
    later = np.zeros(len(size), dtype=np.int64)
    for sample in batch:
        if borders := _borders(sample):
            here = slice(*np.searchsorted(tokens.sample, (sample.index, sample.index + 1)))
            later[here] = len(borders) - np.searchsorted(borders, tokens.position[here], side="right")
    kinds = [(later == count) & (tokens.occurred == again) for count in np.unique(later) for again in (True, False)]
    usual = ordinary(tokens, size, lambda values: np.quantile(values, QUANTILE), kinds)
    told = telling(tokens)
    for values in (tokens.rollout, tokens.training):  # a fill or a floor is a number's fault
        told &= (values != 0.0) & (values != values.min(initial=0.0))
    tokens, size, later = tokens.where(told), size[told], later[told]
    starts = np.flatnonzero((np.diff(tokens.sample) != 0) | (np.diff(later) != 0)) + 1
    far = size > np.maximum(FAR_NATS, FAR_TIMES * usual[told])
    return tokens, size, far, np.split(np.arange(len(size)), starts)


def _likeliest(far: Bools, rate: float) -> tuple[int, int, float]:
    """(first, last, score) of the consecutive tokens with the largest score, in one pass (Kadane).

    Σ log(INSIDE/rate) over far tokens + Σ log((1 − INSIDE)/(1 − rate)) over the others, rate being the share of far
    tokens in an ordinary sample.
    """
    scores = np.where(far, math.log(INSIDE / rate), math.log((1 - INSIDE) / (1 - rate)))
    total = np.cumsum(scores)
    before = total - scores
    gains = total - np.minimum.accumulate(before)
    last = int(np.argmax(gains))
    return int(np.argmin(before[: last + 1])), last, float(gains[last])


def _agreed(before: Floats, inside: Floats, odds: float) -> bool:
    """What is before is not part of it by chance: log-likelihood ratio of |gap| as exponential of its own mean there,
    against the mean inside."""
    own, other = max(float(before.mean()), 1e-3), float(inside.mean())
    return own < other and len(before) * (math.log(other / own) - 1 + own / other) > math.log(odds)


def _off_before(item: Stretch) -> bool:
    """Under some lag what is before agrees at all better."""
    own = distances(item.sample)
    own[item.start :] = np.nan
    found = [compare(own, moved(item.sample, lag)) for lag in LAGS]
    return any(fit.tokens >= 2 and fit.other < fit.own for fit in found)


def _ids_finding(batch: Batch, found: list[Stretch]) -> Finding:
    first = found[0]
    ending = sum(len(item.sample) - item.stop < 4 for item in found)  # nothing that agrees follows
    before, inside = (float(np.mean([getattr(item, name) for item in found])) for name in ("before", "inside"))
    evidence = (
        f"{len(found)} of {len(batch)} samples agree up to some position (mean |gap| {before:.3g}) and are far apart "
        f"from there on ({inside:.3g}), to their end in {ending}, for a stretch in the others; in sample "
        f"{first.sample.index} from position {first.start} of {len(first.sample)}: the training side scores other ids."
    )
    about = {
        "tokens": sum(int(item.sample.mask[item.start :].sum()) for item in found),
        "first": place_of(first.sample, first.start),
        "statistics": {"mean_before": before, "mean_inside": inside, "to_the_end": ending},
    }
    return batch.finding("retokenised", "both", evidence, IDS_FIX, [item.sample for item in found], **about)


def find_unrelated(batch: Batch) -> Outcome:
    """Two sides that have nothing to do with each other; nothing finer can be said about such data."""
    tokens = batch.tokens
    gap = np.abs(tokens.gap)
    if len(tokens) < UNRELATED_TOKENS or gap.mean() < UNRELATED_GAP:
        return [], batch
    correlation = rank_correlation(tokens.rollout, tokens.training)
    if not correlation < (UNRELATED_CORRELATION if gap.mean() < FAR_UNRELATED_GAP else FAR_UNRELATED_CORRELATION):
        return [], batch
    evidence = (
        f"Over {len(tokens)} tokens the two sides have nearly nothing in common: rank correlation {correlation:.2f}, "
        f"mean |gap| {gap.mean():.3g} nats."
    )
    fix = (
        "Check that the trainer scores these ids after this prompt (chat template), with these weights, and takes the "
        "logits one position before each token (not those of the token itself)."
    )
    told = {"rank_correlation": correlation, "abs_mean": float(gap.mean())}
    return [batch.finding_at("unrelated", "both", evidence, fix, tokens, statistics=told)], batch


def find_token_offset(batch: Batch) -> Outcome:
    """Few token ids whose gap is far from that of all others, in nearly every sample that has them; then left out.

    By their first token in each sample, next to others of its log-prob: no penalty, temperature or bad samples look so.
    """
    tokens = batch.tokens
    if len(tokens) < ENOUGH_TOKENS:
        return [], batch
    ids = np.concatenate([sample.response_ids[sample.usable] for sample in batch if sample.usable.any()])
    first = ~tokens.occurred & telling(tokens)
    new = tokens.where(first)
    rest = new.gap - ordinary(new, new.gap, np.median)
    typical = ordinary(new, np.abs(rest), np.median)
    _, sample = np.unique(new.sample, return_inverse=True)
    of_sample = np.maximum(medians(np.abs(rest) / np.maximum(typical, 1e-9), sample), 1.0)[sample]
    far = np.abs(rest) > np.maximum(MIN_OFFSET_NATS, OFFSET_TIMES_TYPICAL * typical * of_sample)
    names, index, often = np.unique(ids[first], return_inverse=True, return_counts=True)
    above, below = (np.bincount(index[far & (sign * rest > 0)], minlength=len(names)) for sign in (1, -1))
    judged, size = often >= MIN_OFFSET_SAMPLES, np.abs(medians(rest, index))
    known, of_known = np.unique(ids[~tokens.occurred], return_counts=True)
    mostly_open = often >= of_known[np.searchsorted(known, names)] / 2  # an offset shows wherever an id is not certain
    is_odd = judged & mostly_open & (np.maximum(above, below) >= OFFSET_SHARE * often)
    others = size[judged & ~is_odd]
    if len(others) < MIN_OTHER_IDS:
        return [], batch
    usual = float(np.quantile(others, 0.9))
    odd = names[is_odd & (size > OFFSET_TIMES_OTHER_IDS * usual)]
    chosen = np.isin(ids, odd)
    if not len(odd) or len(odd) > max(3, MAX_ODD_IDS * judged.sum()) or chosen.mean() > MAX_ODD_TOKENS:
        return [], batch
    biased = tokens.where(chosen)
    mean, rest_mean = float(biased.gap.mean()), float(tokens.gap[~chosen].mean())
    evidence = (
        f"{len(biased)} of {len(tokens)} tokens are of id {', '.join(map(str, odd[:6]))}{', …' * (len(odd) > 6)} and "
        f"have a mean gap of {mean:+.3g} nats, the others {rest_mean:+.3g}: a logit bias or a ban on one side, or "
        f"other rows of the embedding or output layer (added tokens that one side lacks, padded rows)."
    )
    fix = (
        "Compare both engines' logits at these ids: logit_bias, banned or suppressed ids, rows of added tokens "
        "(resize, tied weights, padding of the vocabulary) and their update; or give those tokens loss mask 0."
    )
    told = {"ids": len(odd), "first_id": int(odd[0]), "mean_gap": mean, "mean_gap_of_others": rest_mean}
    told |= {"times_other_ids": float(size[is_odd].max()) / max(usual, 1e-9)}
    finding = batch.finding_at("token_offset", "both", evidence, fix, biased, statistics=told)
    with_odd = [batch.samples[at] for at in np.unique(biased.sample)]
    masks = {one.index: {"loss_mask": one.loss_mask & ~np.isin(one.response_ids, odd)} for one in with_odd}
    return [finding], batch.with_values(masks)
