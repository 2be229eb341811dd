"""Temperature and penalties that only one side applied, and sides that have nothing in common.

Seen in the sampled tokens' log-probs alone; with the whole vocabulary's logits `vocabulary` sees more sharply.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.regression import Effect, Fit, fit, rank_correlation
from mismatch_plugin.diagnose.findings import FaultName, Finding, Item, Side, Undecided, first_place, place_of, too_few
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS

MIN_REPEATED = 20
SLOPE, SLOPE_EXPECTED, SLOPE_DEVIATIONS = 0.03, 0.01, 8.0
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
    "raw": "Ask the engine for log-probs after the temperature (vLLM: --logprobs-mode processed_logprobs; SGLang: "
    "without SGLANG_RETURN_ORIGINAL_LOGPROB=1), or sample at temperature 1.",
    "other": "Use one temperature on both sides: sampling_params of the request, and what the trainer divides its "
    "logits by.",
}
_OTHER = {"rollout": "training", "training": "rollout"}
PENALTY_FIX = (
    "Send repetition_penalty=1, frequency_penalty=0 and presence_penalty=0 explicitly (a model's generation_config may "
    "set others), or apply the same penalties to the trainer's logits."
)


def find_unrelated(batch: Batch) -> Outcome:
    """Two sides that have nothing to do with each other; nothing finer can be said about such data."""
    tokens = batch.tokens
    if len(tokens) < UNRELATED_TOKENS:
        return [], batch
    gap = float(np.abs(tokens.gap).mean())
    correlation = rank_correlation(tokens.rollout, tokens.training) if gap >= UNRELATED_GAP else 1.0
    if not correlation < UNRELATED_CORRELATION:
        return [], batch
    worst = int(np.argmax(np.abs(tokens.gap) > UNRELATED_GAP))
    finding = batch.finding(
        "unrelated",
        "both",
        f"Over {len(tokens)} tokens the two sides hardly have anything in common: rank correlation {correlation:.2f}, "
        f"mean |gap| {gap:.3g} nats.",
        "Check that the trainer scores these ids after this prompt (chat template), with these weights, and takes the "
        "logits one position before each token (not those of the token itself).",
        [batch.samples[index] for index in np.unique(tokens.sample)],
        tokens=len(tokens),
        first=place_of(batch.samples[int(tokens.sample[worst])], int(tokens.position[worst])),
        statistics={"rank_correlation": correlation, "abs_mean": gap},
    )
    return [finding], batch


def find_temperature(batch: Batch) -> Outcome:
    """The regression slope of centred log-probs, by recorded temperature; each group of samples is judged alone."""
    groups: dict[float, list[Sample]] = defaultdict(list)
    for sample in drawn(batch):
        groups[sample.temperature].append(sample)
    found = [*_raw(batch), *_declared(batch)][:1]
    if found:
        return found, batch
    tokens = {temperature: batch.tokens_of(samples) for temperature, samples in groups.items()}
    judged = {
        temperature: samples for temperature, samples in groups.items() if len(tokens[temperature]) >= ENOUGH_TOKENS
    }
    if not judged:
        return [few_tokens(len(batch.tokens), "temperature")], batch
    for temperature, samples in sorted(judged.items()):
        result = fit(tokens[temperature])
        if _is_temperature(result, temperature):
            found.append(_temperature_finding(batch, samples, result, temperature))
    return found, batch


def drawn(batch: Batch) -> list[Sample]:
    """Samples that were not greedy: of the others nothing about sampling can be told from the tokens."""
    return [sample for sample in batch if not sample.sampling.greedy]


def few_tokens(count: int, fault: FaultName) -> Undecided:
    """Too few tokens to judge a slope or an offset."""
    return too_few(f"{count} that can be compared, {ENOUGH_TOKENS} needed", fault)


def _raw(batch: Batch) -> list[Item]:
    """Log-probs from before the temperature, by what the record tells (vLLM's raw ones): not of what tokens were drawn
    from, whatever the trainer does."""
    chosen = [sample for sample in drawn(batch) if sample.log_probs_of == "raw" and sample.temperature != 1.0]
    if not chosen:
        return []
    recorded = chosen[0].temperature
    told = chosen[0].trainer_temperature
    tokens = batch.tokens_of(chosen)
    same = told == 1.0 if told is not None else False
    if told is None and len(tokens) >= ENOUGH_TOKENS:
        same = not _is_temperature(fit(tokens), recorded)
    trainer = (
        "the trainer's are at temperature 1, too: both sides agree on a policy that no token was drawn from"
        if same
        else "the trainer's are not at temperature 1"
        if told is not None or len(tokens) >= ENOUGH_TOKENS
        else "the trainer's temperature is not known"
    )
    fix = TEMPERATURE_FIXES["raw"] + (" " + TEMPERATURE_FIXES["trainer_without"] if same else "")
    return [
        batch.finding(
            "temperature",
            "both" if same else "rollout",
            f"{len(chosen)} of {len(batch)} samples were drawn at temperature {recorded:g}, but their log-probs are "
            f"those before it (log_probs_of raw); {trainer}.",
            fix,
            chosen,
            statistics={"rollout_temperature": 1.0, "recorded": recorded},
            confidence="certain",
        )
    ]


def _declared(batch: Batch) -> list[Item]:
    """Temperatures that the training side itself tells."""
    pairs = [(sample, sample.temperature, sample.trainer_temperature) for sample in drawn(batch)]
    chosen = [
        (sample, ours, theirs)
        for sample, ours, theirs in pairs
        if theirs is not None and not math.isclose(theirs, ours, rel_tol=1e-6)
    ]
    if not chosen:
        return []
    _, ours, theirs = chosen[0]
    return [
        batch.finding(
            "temperature",
            "both",
            f"{len(chosen)} of {len(batch)} samples were drawn at another temperature than the training side says it "
            f"used: {ours:g} and {theirs:g}.",
            TEMPERATURE_FIXES["other"],
            [sample for sample, _, _ in chosen],
            statistics={"rollout_temperature": ours, "train_temperature": theirs},
            confidence="certain",
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
    low, high = sorted((1 + result.slope.size, 1 + result.upper))
    return low, high


def _explanation(result: Fit, recorded: float) -> str:
    """Which side left the recorded temperature out, if τ is that temperature or its inverse."""
    low, high = _sharpness(result)
    for kind, expected in (("trainer_without", recorded), ("rollout_raw", 1 / recorded)):
        if low * 0.93 <= expected <= high * 1.07 and (expected > 1) == (result.slope.size > 0):
            return kind
    return "other"


def _temperature_finding(batch: Batch, samples: list[Sample], result: Fit, recorded: float) -> Finding:
    low, high = (1 / max(bound, 1e-3) for bound in reversed(_sharpness(result)))
    kind = _explanation(result, recorded) if recorded != 1.0 else "other"
    sides: dict[str, Side] = {"trainer_without": "training", "rollout_raw": "rollout", "other": "both"}
    side = sides[kind]
    told = f"the {side} side is at temperature 1, the {_OTHER.get(side)} side at the recorded {recorded:g}"
    if side == "both":
        told = f"the training temperature is {low:.3g} to {high:.3g} times the rollout's (recorded: {recorded:g})"
    slope, tokens = result.slope, len(batch.tokens_of(samples))
    return batch.finding(
        "temperature",
        side,
        f"Centred training log-probs follow the rollout's with slope {1 + slope.size:.3f} instead of 1 "
        f"({abs(slope.deviations):.0f} standard errors, {slope.share:.0%} of the gap explained, {tokens} tokens): "
        f"{told}.",
        TEMPERATURE_FIXES[kind],
        samples,
        tokens=tokens,
        first=first_place(samples[0], samples[0].usable),
        statistics={
            "slope": 1 + slope.size,
            "standard_errors": slope.deviations,
            "explained": slope.share,
            "temperature_ratio_low": low,
            "temperature_ratio_high": high,
        },
    )


def find_penalty(batch: Batch) -> Outcome:
    """An offset on tokens that occurred before, beyond what their log-prob explains."""
    found: list[Item] = []
    for penalised in (True, False):
        group = [sample for sample in drawn(batch) if sample.sampling.penalised == penalised]
        tokens = batch.tokens_of(group)
        repeated = int(tokens.occurred.sum())
        if not group:
            continue
        if len(tokens) < ENOUGH_TOKENS:
            found.append(few_tokens(len(tokens), "penalty"))
            continue
        if min(repeated, len(tokens) - repeated) < MIN_REPEATED:
            few = f"{repeated} of {len(tokens)} occurred before, {MIN_REPEATED} needed of either kind"
            found.append(too_few(few, "penalty"))
            continue
        result = fit(tokens)
        effect = result.repeated
        share = REPEATED_SHARE / 2 if penalised else REPEATED_SHARE
        temperature = _is_temperature(result, group[0].temperature)
        if temperature:
            share = max(share, 0.1)  # a wrong temperature is not linear in the log-prob, and repeats are likelier
        if abs(effect.deviations) < REPEATED_DEVIATIONS or effect.share < share:
            continue
        if effect.size > 0 or (not temperature and effect.share >= 2 * share):
            found.append(_penalty_finding(batch, group, effect))
    return found, batch


def _penalty_finding(batch: Batch, group: list[Sample], effect: Effect) -> Finding:
    tokens, sampling = batch.tokens_of(group), group[0].sampling
    off = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    set_to = [f"{name} {value:g}" for name in off if (value := getattr(sampling, name)) != off[name]]
    recorded = f"the request had {', '.join(set_to)}" if set_to else "although the record has no penalty"
    index, position = (int(column[np.argmax(tokens.occurred)]) for column in (tokens.sample, tokens.position))
    again, new = (float(np.mean(tokens.gap[tokens.occurred == flag])) for flag in (True, False))
    repeated = int(tokens.occurred.sum())
    return batch.finding(
        "penalty",
        "rollout" if effect.size > 0 else "training",
        f"Tokens that occurred before are {abs(effect.size):.3g} nats {'less' if effect.size > 0 else 'more'} likely "
        f"on the rollout side than the rest would suggest ({abs(effect.deviations):.0f} standard errors; {repeated} "
        f"such tokens, mean gap {again:+.3g} against {new:+.3g}): {recorded}.",
        PENALTY_FIX,
        group,
        tokens=repeated,
        first=place_of(batch.samples[index], position),
        statistics={
            "offset": effect.size,
            "standard_errors": effect.deviations,
            "explained": effect.share,
            "mean_gap_repeated": again,
            "mean_gap_new": new,
        },
    )
