"""Is each training log-prob next to the rollout log-prob of the same token of the same sample, from the same experts?

Ids tell it where both sides have them. Else: is there another pairing under which the two sides agree far better?
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.sample import LogProbSide, Sample
from mismatch_plugin.diagnose.batch import CLIP, Batch, Comparison, Outcome, average, between, compare, distances, told
from mismatch_plugin.diagnose.detectors.numbers import eos_finding
from mismatch_plugin.diagnose.result import Item, place_of, too_few

MAX_LAG = 8
"""Boundaries are looked for up to so many tokens off."""
LAGS = [lag for size in range(1, MAX_LAG + 1) for lag in (size, -size)]
FACTOR, STANDARD_ERRORS, MIN_GAIN_NATS = 0.5, 4.0, 0.1
"""Another pairing must leave less than that share of the gap, by so many standard errors and so many nats."""
MIN_TOKENS, MIN_POOLED, FAIR_SHARE = 10, 40, 0.25
"""To judge one sample alone, and all samples together: there a lag that leaves few of the tokens fits by chance."""
MAX_SWAP_SAMPLES, MAX_SWAP_TOKENS = 512, 256
MAJORITY = 0.5
"""Of the samples that can be judged; what holds for them is then taken to hold for those that are too short."""

PROMPT_FIX = "Make token ids once, with one tokenizer and chat template: send them (input_ids), and train on them."
IDS_FIX = "Train on the ids that the server returned (output_ids): text that is encoded again gives other ids."
SHIFT_FIX = (
    "Pair the log-prob of token t with the logits before it: targets are tokens[1:] for logits[:-1]. Where the trainer "
    "does that, the rollout's list lost an entry, or has one too many, at its start."
)
BOUNDARY_FIX = "Cut training log-probs at the number of prompt ids the server saw, minus one for the shift of targets."
SWAP_FIX = "Match log-probs to samples by request or sample id after sorting and retries, never by order of arrival."
LENGTH_FIX = "Give exactly one log-prob a response token: cut, continue and pad ids and log-probs together."


def shifted(values: Floats, lag: int, length: int) -> Floats:
    """`values[lag : lag + length]`, with NaN where that reaches over an end."""
    result = np.full(length, np.nan)
    start, stop = max(0, -lag), min(length, len(values) - lag)
    if stop > start:
        result[start:stop] = values[start + lag : stop + lag]
    return result


def moved(sample: Sample, lag: int) -> Floats:
    """Distances of the rollout log-probs to the training ones so many positions on."""
    return distances(sample, shifted(sample.train_log_probs, lag, len(sample)))


def _clear(found: Comparison, minimum: int, standard_errors: float = STANDARD_ERRORS) -> bool:
    """The other fits better, far outside chance."""
    better = found.other < FACTOR * found.own and found.own - found.other > MIN_GAIN_NATS
    return found.tokens >= minimum and better and found.deviations > standard_errors


def _best_lag(
    samples: Sequence[Sample], lags: Collection[int] = LAGS, minimum: int = MIN_TOKENS, share: float = 0.0
) -> tuple[int, Comparison] | None:
    """The k with rollout[t] far closer to training[t + k] than to training[t]. minimum, share: tokens that both can
    judge, and of those that can be judged unmoved."""
    own = np.concatenate([distances(sample) for sample in samples])
    minimum = max(minimum, int(share * told(own)))
    if average(own) < MIN_GAIN_NATS:
        return None
    whole_prompt = _surplus(samples[0])  # in front of the response: likelier than any other lag
    found = [(lag, compare(own, np.concatenate([moved(sample, lag) for sample in samples]))) for lag in lags]
    clear = [pair for pair in found if _clear(pair[1], minimum, 2.0 if pair[0] == whole_prompt else STANDARD_ERRORS)]
    return min(clear, key=lambda pair: pair[1].other, default=None)


def _lag_findings(
    batch: Batch, lagged: Sequence[tuple[Sample, int]], why: str, *, boundary: bool = False
) -> list[Item]:
    """One finding for a shift by one, one for larger ones. boundary: of lists that are too long it is never a shift."""
    found: list[Item] = []
    for name, fix in (("shift_by_one", SHIFT_FIX), ("boundary", BOUNDARY_FIX)):
        chosen = [pair for pair in lagged if (abs(pair[1]) == 1 and not boundary) == (name == "shift_by_one")]
        if not chosen:
            continue
        lags = [lag for _, lag in chosen]
        main = max(sorted(set(lags)), key=lags.count)
        amounts = ", ".join(f"{lag:+d}" for lag in sorted(set(lags))[:6])
        evidence = (
            f"In {len(chosen)} of {len(batch)} samples the training side's list starts {abs(main)} token(s) too "
            f"{'early' if main > 0 else 'late'} (rollout[t] belongs to training[t + k], k = {amounts}): {why}."
        )
        samples = [sample for sample, _ in chosen]
        found.append(batch.finding(name, "both", evidence, fix, samples, statistics={"lag": main}))
    return found


def find_ids(batch: Batch) -> Outcome:
    """Compare prompt and response ids; what differs cannot be compared afterwards."""
    found: list[Item] = []
    prompts = [(one, one.prompt_ids, one.trained_prompt_ids) for one in batch if one.trained_prompt_ids is not None]
    if differing := [pair for pair in prompts if not np.array_equal(pair[1], pair[2])]:
        sample, ours, theirs = differing[0]
        unequal = (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        evidence = (
            f"The prompts of {len(differing)} of {len(prompts)} samples differ; sample {sample.index}: {len(ours)} "
            f"rollout ids, {len(theirs)} training ids, from prompt position "
            f"{next(unequal, min(len(ours), len(theirs)))} on."
        )
        about = {"tokens": 0, "of_samples": len(prompts), "first": place_of(sample)}
        samples = [sample for sample, *_ in differing]
        found.append(batch.finding("prompt_ids", "both", evidence, PROMPT_FIX, samples, **about))
    compared = [(sample, sample.trained_ids) for sample in batch if sample.trained_ids is not None]
    others = {}
    for sample, theirs in compared:
        shared = min(len(sample), len(theirs))  # what is left is a question of length
        positions = np.flatnonzero(sample.response_ids[:shared] != theirs[:shared])
        if len(positions):
            others[sample.index] = positions
    if not others:
        return found, batch
    samples = [batch.samples[index] for index in others]
    first, count = samples[0], sum(map(len, others.values()))
    at = int(others[first.index][0])
    evidence = f"{count} response ids in {len(samples)} of {len(compared)} samples are others on the training side."
    place = place_of(first, at, rollout=int(first.response_ids[at]), training=int(np.asarray(first.trained_ids)[at]))
    about = {"tokens": count, "of_samples": len(compared), "first": place}
    found.append(batch.finding("token_ids", "both", evidence, IDS_FIX, samples, **about))
    masks = {one.index: one.mask & ~np.isin(np.arange(len(one)), others[one.index]) for one in samples}
    return found, batch.with_values({index: {"loss_mask": mask} for index, mask in masks.items()})


def find_swapped(batch: Batch) -> Outcome:
    """Samples whose rollout log-probs fit another sample's training log-probs of the right length."""
    by_length: dict[int, list[Sample]] = defaultdict(list)
    for sample in batch:
        by_length[len(sample.train_log_probs)].append(sample)
    judged = [sample for sample in batch if told(distances(sample)) >= MIN_TOKENS][:MAX_SWAP_SAMPLES]
    if not judged:
        few = f"no sample has {MIN_TOKENS} with a log-prob other than 0 on both sides"
        return [too_few(few, "swapped_samples")], batch
    swapped: list[tuple[Sample, Sample, Comparison]] = []
    for sample in judged:
        others = [other for other in by_length[len(sample)] if other is not sample]
        if average(distances(sample)) < MIN_GAIN_NATS or not others or len(sample.rollout_log_probs) != len(sample):
            continue
        other = _closest(sample, others)
        comparison = compare(distances(sample), distances(sample, other.train_log_probs))
        if not _clear(comparison, 2):
            continue
        lagged = _best_lag([sample])  # its own list, some positions off, is the simpler reason
        if lagged is None or comparison.other < FACTOR * lagged[1].other:
            swapped.append((sample, other, comparison))
    if not swapped:
        return [], batch
    changed: dict[int, dict[str, Any]] = {
        sample.index: {"train_log_probs": other.train_log_probs} for sample, other, _ in swapped
    }
    if len(swapped) > MAJORITY * len(judged):  # what is too short to be found again is not at its place either
        whole = [sample for sample in judged if len(sample.train_log_probs) == len(sample)]
        fit = {sample.index for sample in whole if average(distances(sample)) < MIN_GAIN_NATS}
        for one in batch:  # the others are out of every comparison that follows
            if one.index not in fit:
                incomparable = {"train_log_probs": np.full(len(one), np.nan), "loss_mask": np.zeros(len(one), bool)}
                changed.setdefault(one.index, incomparable)
    pairs = ", ".join(f"{sample.index}→{owner.index}" for sample, owner, _ in swapped[:6])
    more = f" and {len(swapped) - 6} more" if len(swapped) > 6 else ""
    before, after = (np.mean([getattr(one, name) for *_, one in swapped]) for name in ("own", "other"))
    evidence = (
        f"The training side's log-probs of {len(swapped)} of {len(judged)} samples belong to other samples "
        f"({pairs}{more}): mean |gap| (clipped at {CLIP:g}) {before:.3g} as paired, {after:.3g} with the other sample."
    )
    samples = [sample for sample, *_ in swapped]
    found = batch.finding("swapped_samples", "both", evidence, SWAP_FIX, samples, of_samples=len(judged))
    return [found], batch.with_values(changed)


def _closest(sample: Sample, others: list[Sample]) -> Sample:
    """The one of `others`, all with lists of the right length, whose training log-probs fit best."""
    table = np.stack([other.train_log_probs[:MAX_SWAP_TOKENS] for other in others])  # [M, n]
    ours = np.broadcast_to(sample.rollout_log_probs[:MAX_SWAP_TOKENS], table.shape)
    values = between(ours, table, sample.mask[:MAX_SWAP_TOKENS] & (ours != 0.0) & (table != 0.0))
    count = np.isfinite(values).sum(-1)
    means = np.nansum(values, axis=-1) / np.maximum(count, 1)
    return others[int(np.argmin(means + np.where(count < MIN_TOKENS, CLIP, 0.0)))]


def find_lengths(batch: Batch) -> Outcome:
    """Name them; afterwards both lists of each sample are as long as its response."""
    short = [sample for sample in batch if len(sample.rollout_log_probs) != len(sample)]
    uneven = [sample for sample in batch if _surplus(sample)]
    offsets = _offsets(uneven)
    ends = _fits_by_its_end(short)
    changed: dict[int, dict[str, Any]] = defaultdict(dict)
    for sample in short:
        changed[sample.index] |= _rollout_from(sample, _surplus(sample, "rollout") if ends else 0)
    for sample in uneven:
        changed[sample.index]["train_log_probs"] = shifted(sample.train_log_probs, offsets[sample.index], len(sample))
    found = _length_findings(batch, short, "rollout", ends=ends)
    if longer := [(sample, lag) for sample in uneven if (lag := offsets[sample.index])]:
        first = longer[0][0]
        why = (
            f"it is {_surplus(first):+d} tokens longer than the response in sample {first.index} (its prompt has "
            f"{len(first.prompt_ids)})"
        )
        found += _lag_findings(batch, longer, why, boundary=True)
    found += _length_findings(batch, [sample for sample in uneven if not offsets[sample.index]], "training")
    return found, batch.with_values(changed)


def _surplus(sample: Sample, side: LogProbSide = "training") -> int:
    return len(sample.values(side)) - len(sample)


def _rollout_from(sample: Sample, start: int) -> dict[str, Floats]:
    return {"rollout_log_probs": shifted(sample.rollout_log_probs, start, len(sample))}


def _fits_by_its_end(samples: list[Sample]) -> bool:
    """Rollout lists of another length fit far better so that they end where their responses do, all together."""
    ended = [one.with_fields(**_rollout_from(one, _surplus(one, "rollout"))) for one in samples]
    pooled = [np.concatenate([distances(one) for one in of]) for of in (samples, ended) if of]
    return bool(pooled) and _clear(compare(*pooled), MIN_TOKENS)


def _offsets(samples: list[Sample]) -> dict[int, int]:
    """By index, the k with rollout[t] closest to training[t + k]; samples too short to tell follow most others."""
    offsets = {}
    for sample in samples:  # the two ends of a list are where a response can start
        near = {lag for end in (0, _surplus(sample)) for lag in range(end - MAX_LAG, end + MAX_LAG + 1)} - {0}
        best = _best_lag([sample], sorted(near), minimum=4)
        offsets[sample.index] = best[0] if best else 0
    whole_prompt = [sample for sample in samples if offsets[sample.index] == _surplus(sample)]
    vague = [sample for sample in samples if not offsets[sample.index] and told(distances(sample)) < MIN_TOKENS]
    if len(whole_prompt) > MAJORITY * (len(samples) - len(vague)):
        offsets |= {sample.index: _surplus(sample) for sample in vague if _surplus(sample) > 0}
    return offsets


def _length_findings(batch: Batch, samples: list[Sample], side: LogProbSide, *, ends: bool = False) -> list[Item]:
    """Of lists that start where the response does: one token that nobody sampled, or simply another length.

    ends: they end where it does, so that entries lack, or are too many, at the start.
    """
    found: list[Item] = []
    appended, what = (-1, "the server has log-probs for") if side == "rollout" else (1, "was sampled")
    extra = [] if ends else [sample for sample in samples if _surplus(sample, side) == appended]
    if extra:
        position = len(extra[0]) - (side == "rollout")
        found.append(eos_finding(batch, extra, position, f"the {side} side has one token more than {what}"))
    if wrong := [sample for sample in samples if ends or _surplus(sample, side) != appended]:
        first, count = wrong[0], len(wrong[0].values(side))
        evidence = (
            f"The {side} side's log-probs of {len(wrong)} of {len(batch)} samples are not as many as the response "
            f"tokens: {count} for {len(first)} in sample {first.index}"
            f"{' (they fit from the end on, so the start is wrong)' if ends else ''}."
        )
        place = place_of(first, 0 if ends else min(count, len(first)))
        found.append(batch.finding("length", side, evidence, LENGTH_FIX, wrong, first=place, confidence="certain"))
    return found


def find_shift(batch: Batch) -> Outcome:
    """Rollout log-probs that fit the training side's some positions earlier or later, best of ±1 to ±8."""
    candidates = [sample for sample in batch if sample.comparable]
    count = sum(told(distances(sample)) for sample in candidates)
    if count < MIN_POOLED:
        return [too_few(f"{count}, {MIN_POOLED} needed", "shift_by_one", "boundary")], batch
    some = slice(None, None, max(1, len(candidates) // MAX_SWAP_SAMPLES))
    together = _best_lag(candidates[some], minimum=MIN_POOLED, share=FAIR_SHARE)
    alone = [_best_lag([sample]) for sample in candidates]
    usual = [lag for lag, _ in Counter(best[0] for best in alone if best).most_common(1)]
    lagged: list[tuple[Sample, int, Comparison]] = []
    for sample, best in zip(candidates, alone, strict=True):
        if best is not None:
            lagged.append((sample, *best))
        elif together is not None:  # too short to tell alone: it follows all unless it fits as it is
            followed = compare(distances(sample), moved(sample, together[0]))
            if followed.tokens < 2 or followed.other < followed.own:
                lagged.append((sample, *together))
        elif usual:  # or it follows the others if it fits far better
            followed = compare(distances(sample), moved(sample, usual[0]))
            if _clear(followed, 2, 0.0):
                lagged.append((sample, usual[0], followed))
    if not lagged:
        return [], batch
    own, other, *_ = lagged[0][2]
    why = f"mean |gap| (clipped at {CLIP:g}) {own:.3g} as paired, {other:.3g} if moved"
    lists = {one.index: {"train_log_probs": shifted(one.train_log_probs, lag, len(one))} for one, lag, _ in lagged}
    return _lag_findings(batch, [item[:2] for item in lagged], why), batch.with_values(lists)


# Experts of a MoE model: did the trainer compute with those that the rollout engine computed with? -------------------

REPLAYED = 0.999
"""Share of choices that agree where a trainer replays them: all but what a kernel may reorder."""
REPLAY_FIX = (
    "Replay the rollout's routes at their own positions: row t is of token t, and the last token has none. Where a "
    "request was retracted and computed again, keep the routes of the run whose log-probs are kept. Rows that are "
    "padded or missing at a pipeline stage replay one expert several times over."
)


def find_replay(batch: Batch) -> Outcome:
    """Routes of both sides, where records hold them: the samples in which they differ. Also compared with the trainer's
    row one earlier and one later."""
    compared: list[tuple[Sample, list[float]]] = []
    for sample in batch:
        rollout, training = sample.routed_experts, sample.trained_experts
        rows = len(sample.prompt_ids) - 1 + np.flatnonzero(sample.mask)  # row t computes the logits of token t + 1
        rows = rows[rows >= 0]
        if rollout is not None and training is not None and rollout.shape == training.shape and len(rows):
            compared.append((sample, [_agreement(rollout, training, rows, by) for by in (0, -1, 1)]))
    wrong = [pair for pair in compared if pair[1][0] < REPLAYED]
    if not wrong:
        return [], batch
    own, *neighbours = np.mean([shares for _, shares in wrong], axis=0)
    best = max(neighbours)
    evidence = (
        f"In {len(wrong)} of {len(compared)} samples with routes of both sides {own:.1%} of the experts agree, where "
        f"{REPLAYED:.1%} or more was expected. With the trainer's row one position "
        f"{'earlier' if best == neighbours[0] else 'later'} {best:.1%} agree."
    )
    about = {
        "of_samples": len(compared),
        "statistics": {"agreement": float(own), "shifted": float(best)},
        "confidence": "certain",
    }
    samples = [sample for sample, _ in wrong]
    return [batch.finding("replay_off", "both", evidence, REPLAY_FIX, samples, **about)], batch


def _agreement(ours: Ints, theirs: Ints, rows: Ints, by: int) -> float:
    """Share of the experts in these rows that the other side has too, so many rows on: the smaller share, where an
    expert is there twice. 0 without such a row."""
    rows = rows[(rows + by >= 0) & (rows + by < len(theirs))]
    if not len(rows):
        return 0.0
    same = ours[rows][..., :, None] == theirs[rows + by][..., None, :]
    return float(np.minimum(same.any(axis=-1).mean(axis=-1), same.any(axis=-2).mean(axis=-1)).mean())
