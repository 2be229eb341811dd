"""Temperature and penalties that only one side applied, and sides that have nothing in common.

Seen in the sampled tokens' log-probs alone; with the whole vocabulary's logits `vocabulary` sees more sharply.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from mismatch_plugin.check.batch import Batch, Sample, Tokens, flat
from mismatch_plugin.check.findings import Finding, Side, Undecided
from mismatch_plugin.check.regression import Fit, fit, rank_correlation
from mismatch_plugin.rollout.sampling import SamplingParameters

MIN_TOKENS = 100
"""Below that a slope or an offset is not judged."""
MIN_REPEATED = 20
SLOPE, SLOPE_EXPECTED, SLOPE_DEVIATIONS = 0.03, 0.02, 8.0
SLOPE_SHARE, SLOPE_SHARE_EXPECTED = 0.3, 0.08
"""Of the gap's variance a temperature must explain; less is asked where the slope is that of the recorded one."""
SLOPE_OVER_NOISE = 0.6
"""Noise of that size, relative to the spread of the log-probs, makes a slope by itself: sampling prefers tokens whose
rollout log-prob the noise raised."""
REPEATED_DEVIATIONS, REPEATED_SHARE = 6.0, 0.04
UNRELATED_CORRELATION, UNRELATED_GAP, UNRELATED_TOKENS = 0.3, 0.5, 50

TEMPERATURE_FIXES = {
    "trainer_without": "Divide the trainer's logits by the sampling temperature before log-softmax.",
    "rollout_raw": "The server returns log-probs before temperature: start it without SGLANG_RETURN_ORIGINAL_LOGPROB=1 "
    "(rescored and greedy log-probs are always at temperature 1).",
    "other": "Use one temperature on both sides: sampling_params of the request, and what the trainer divides its "
    "logits by.",
}
PENALTY_FIX = (
    "Send repetition_penalty=1, frequency_penalty=0 and presence_penalty=0 explicitly (a model's generation_config may "
    "set others), or apply the same penalties to the trainer's logits."
)


def greedy(sampling: SamplingParameters) -> bool:
    """Nothing was drawn, so nothing about sampling can be told from the tokens."""
    return sampling.greedy


def find_unrelated(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """Two sides that have nothing to do with each other; nothing finer can be said about such data."""
    tokens = batch.tokens
    if len(tokens) < UNRELATED_TOKENS:
        return [], batch
    correlation = rank_correlation(tokens.rollout, tokens.train)
    gap = float(np.abs(tokens.gap).mean())
    if gap < UNRELATED_GAP or not correlation < UNRELATED_CORRELATION:
        return [], batch
    worst = int(np.argmax(np.abs(tokens.gap) > UNRELATED_GAP))
    finding = Finding(
        fault="unrelated",
        side="both",
        evidence=f"Over {len(tokens)} tokens the two sides hardly have anything in common: rank correlation "
        f"{correlation:.2f}, mean |difference| {gap:.3g} nats.",
        statistics={"rank_correlation": correlation, "abs_mean": gap},
        samples=len(np.unique(tokens.sample)),
        of_samples=len(batch),
        tokens=len(tokens),
        of_tokens=batch.token_count,
        first=batch.samples[int(tokens.sample[worst])].place(int(tokens.position[worst])),
        fix="Check that the trainer scores these ids after this prompt (chat template), with these weights, and takes "
        "the logits one position before each token (not those of the token itself).",
    )
    return [finding], batch


def find_temperature(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """The regression slope of centred log-probs, by recorded temperature; each group of samples is judged alone."""
    groups: dict[float, list[Sample]] = defaultdict(list)
    for sample in batch:
        if sample.train is not None and not greedy(sample.record.sampling):
            groups[sample.record.sampling.temperature].append(sample)
    found: list[Finding | Undecided] = _declared(batch)
    if found:
        return found, batch
    judged = False
    for temperature, samples in sorted(groups.items()):
        tokens = flat(samples)
        if len(tokens) < MIN_TOKENS:
            continue
        judged = True
        result = fit(tokens)
        if _is_temperature(result, temperature):
            found.append(_temperature_finding(batch, samples, tokens, result, temperature))
    if not judged:
        return [Undecided(faults=("temperature",), reason=_few(len(batch.tokens)))], batch
    return found, batch


def _declared(batch: Batch) -> list[Finding | Undecided]:
    """Temperatures that the training side itself tells."""
    chosen = [
        sample
        for sample in batch
        if sample.training is not None
        and sample.training.temperature is not None
        and not sample.record.sampling.greedy
        and not math.isclose(sample.training.temperature, sample.record.sampling.temperature, rel_tol=1e-6)
    ]
    if not chosen:
        return []
    theirs = chosen[0].training.temperature if chosen[0].training else None
    ours = chosen[0].record.sampling.temperature
    return [
        Finding(
            fault="temperature",
            side="both",
            evidence=f"{len(chosen)} of {len(batch)} samples were drawn at another temperature than the training side "
            f"says it used: {ours:g} and {theirs:g}.",
            statistics={"rollout_temperature": ours, "train_temperature": theirs or math.nan},
            samples=len(chosen),
            of_samples=len(batch),
            tokens=sum(int(sample.mask.sum()) for sample in chosen),
            of_tokens=batch.token_count,
            first=chosen[0].place(0) if chosen[0].tokens else chosen[0].place(),
            fix=TEMPERATURE_FIXES["other"],
        )
    ]


def _is_temperature(result: Fit, recorded: float) -> bool:
    slope = result.slope
    low, high = result.quarters[0], result.quarters[3]
    if low * high >= 0 or (high > 0) != (slope.size > 0):
        return False  # a temperature moves likely and unlikely tokens in opposite directions
    expected = recorded not in (0.0, 1.0) and _explanation(result, recorded) != "other"
    if abs(slope.size) < (SLOPE_EXPECTED if expected else SLOPE) or abs(slope.deviations) < SLOPE_DEVIATIONS:
        return False
    if abs(slope.size) < SLOPE_OVER_NOISE * result.noise:
        return False
    return slope.share >= (SLOPE_SHARE_EXPECTED if expected else SLOPE_SHARE)


def _sharpness(result: Fit) -> tuple[float, float]:
    """Bounds of τ: the training side's log-probs are those of the rollout side's distribution to the power τ."""
    bounds = sorted((1 + result.slope.size, 1 + result.upper))
    return bounds[0], bounds[1]


def _explanation(result: Fit, recorded: float) -> str:
    """Which side left the recorded temperature out, if τ is that temperature or its inverse."""
    low, high = _sharpness(result)
    for kind, expected in (("trainer_without", recorded), ("rollout_raw", 1 / recorded)):
        if low * 0.93 <= expected <= high * 1.07 and (expected > 1) == (result.slope.size > 0):
            return kind
    return "other"


def _temperature_finding(batch: Batch, samples: list[Sample], tokens: Tokens, result: Fit, recorded: float) -> Finding:
    low, high = _sharpness(result)
    kind = _explanation(result, recorded) if recorded != 1.0 else "other"
    told = {
        "trainer_without": f"the training side is at temperature 1, the rollout side at the recorded {recorded:g}",
        "rollout_raw": f"the rollout side is at temperature 1, the training side at the recorded {recorded:g}",
        "other": f"the training temperature is {1 / max(high, 1e-3):.3g} to {1 / max(low, 1e-3):.3g} times the "
        f"rollout's (recorded: {recorded:g})",
    }[kind]
    side: Side = {"trainer_without": "training", "rollout_raw": "rollout", "other": "both"}[kind]  # type: ignore[assignment]
    first = samples[0]
    usable = np.flatnonzero(first.usable)
    return Finding(
        fault="temperature",
        side=side,
        evidence=f"Centred training log-probs follow the rollout's with slope {1 + result.slope.size:.3f} instead of 1 "
        f"({abs(result.slope.deviations):.0f} standard errors, {result.slope.share:.0%} of the gap explained, "
        f"{result.tokens} tokens): {told}.",
        statistics={
            "slope": 1 + result.slope.size,
            "standard_errors": result.slope.deviations,
            "explained": result.slope.share,
            "temperature_ratio_low": 1 / max(high, 1e-3),
            "temperature_ratio_high": 1 / max(low, 1e-3),
        },
        samples=len(samples),
        of_samples=len(batch),
        tokens=len(tokens),
        of_tokens=batch.token_count,
        first=first.place(int(usable[0])) if len(usable) else first.place(),
        fix=TEMPERATURE_FIXES[kind],
    )


def find_penalty(batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
    """An offset on tokens that occurred before, beyond what their log-prob explains."""
    samples = [sample for sample in batch if sample.train is not None and not greedy(sample.record.sampling)]
    recorded = [sample for sample in samples if sample.record.sampling.penalised]
    groups = [recorded, [sample for sample in samples if not sample.record.sampling.penalised]]
    found: list[Finding | Undecided] = []
    for group in (group for group in groups if group):
        penalised = group is recorded
        tokens = flat(group)
        if len(tokens) < MIN_TOKENS:
            found.append(Undecided(faults=("penalty",), reason=_few(len(tokens))))
            continue
        result = fit(tokens)
        repeated = result.repeated_tokens
        if min(repeated, len(tokens) - repeated) < MIN_REPEATED:
            reason = f"not enough tokens to tell: {repeated} of {len(tokens)} occurred before, {MIN_REPEATED} needed"
            found.append(Undecided(faults=("penalty",), reason=f"{reason} of either kind"))
            continue
        effect = result.repeated
        share = REPEATED_SHARE / 2 if penalised else REPEATED_SHARE
        temperature = _is_temperature(result, group[0].record.sampling.temperature)
        if temperature:
            share = max(share, 0.1)  # a wrong temperature is not linear in the log-prob, and repeats are likelier
        if abs(effect.deviations) < REPEATED_DEVIATIONS or effect.share < share:
            continue
        if effect.size < 0 and (temperature or effect.share < 2 * share):
            continue
        found.append(_penalty_finding(batch, group, tokens, result))
    return found, batch


def _penalty_finding(batch: Batch, group: list[Sample], tokens: Tokens, result: Fit) -> Finding:
    sampling = group[0].record.sampling
    effect = result.repeated
    side: Side = "rollout" if effect.size > 0 else "training"
    set_to = [
        f"{name} {getattr(sampling, name):g}"
        for name, off in (("repetition_penalty", 1.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0))
        if getattr(sampling, name) != off
    ]
    recorded = f"the request had {', '.join(set_to)}" if set_to else "although the record has no penalty"
    index, position = (int(column[np.argmax(tokens.occurred)]) for column in (tokens.sample, tokens.position))
    mean = [float(np.mean(tokens.gap[tokens.occurred == flag])) for flag in (True, False)]
    return Finding(
        fault="penalty",
        side=side,
        evidence=f"Tokens that occurred before are {abs(effect.size):.3g} nats {'less' if effect.size > 0 else 'more'} "
        f"likely on the rollout side than the rest would suggest ({abs(effect.deviations):.0f} standard errors; "
        f"{result.repeated_tokens} such tokens, mean gap {mean[0]:+.3g} against {mean[1]:+.3g}): {recorded}.",
        statistics={
            "offset": effect.size,
            "standard_errors": effect.deviations,
            "explained": effect.share,
            "mean_gap_repeated": mean[0],
            "mean_gap_new": mean[1],
        },
        samples=len(group),
        of_samples=len(batch),
        tokens=result.repeated_tokens,
        of_tokens=batch.token_count,
        first=batch.samples[index].place(position),
        fix=PENALTY_FIX,
    )


def _few(count: int) -> str:
    return f"not enough tokens to tell: {count} that can be compared, {MIN_TOKENS} needed"
