"""Temperatures, penalties and filters that the two sides do not share, by sampled tokens and entropies."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome, Tokens
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS, FAR_ABS_MEAN
from mismatch_plugin.diagnose.result import Finding, Item, Side, Undecided, too_few

GAP_TRIM = 0.005
"""Of the gap's distribution on each side is pulled in to that quantile: one wild token must not decide a slope."""
MIN_SLOPE, MIN_SLOPE_EXPECTED, SLOPE_Z_SCORE = 0.03, 0.01, 8.0
SLOPE_SHARE, SLOPE_SHARE_EXPECTED = 0.5, 0.08
"""Of the gap's variance a temperature must explain; less is asked where the slope is that of the recorded one."""
SLOPE_OVER_NOISE = 0.6
"""Noise of that size, relative to the spread of the log-probs, makes a slope by itself: sampling prefers tokens whose
rollout log-prob the noise raised."""
MIN_REPEATED, REPEATED_Z_SCORE, REPEATED_SHARE = 20, 12.0, 0.1
"""Tokens of either kind; of the offset in standard errors (clean batches reach 6, the mildest plant 55), and of the
gap's variance (.04 and .5)."""
RENORMALISED_Z_SCORE, ONE_SIDED, NEGATIVE, MISSING_MASS, NO_BIAS = 6.0, 0.4, 0.65, 0.003, 1e-3
"""A renormalised side: the other lacks mass, in standard errors and in all; gaps have one sign, by size and number.
With a bias of less than the last in nats a filter cut nothing."""
ENTROPY_Z_SCORE, MIN_ENTROPY_GAP_NATS, MAX_LOG_RATIO = 6.0, 0.02, 1.6
MAX_LOG_VOCABULARY, MAX_MISFITS, MIN_NEARLY_CERTAIN = 12.5, 0.02, 50
"""Entropies belong to the log-probs where they lie between the bounds that a token's own probability sets: at most so
many nats over the other ids, so large a share outside, and below temperature 1 so many tokens that tell."""
TEMPERATURE_FIXES = {
    "trainer_without": "Divide the trainer's logits by the sampling temperature before log-softmax.",
    "rollout_raw": "The server returns log-probs before temperature: start it without SGLANG_RETURN_ORIGINAL_LOGPROB=1 "
    "(rescored and greedy log-probs are always at temperature 1).",
    "raw": "Ask the engine for log-probs after the temperature (vLLM: --logprobs-mode processed_logprobs; SGLang: "
    "without SGLANG_RETURN_ORIGINAL_LOGPROB=1), or sample at temperature 1.",
    "other": "Use one temperature on both sides: sampling_params of the request, and what the trainer divides its "
    "logits by.",
}
PENALTY_FIX = (
    "Send repetition_penalty=1, frequency_penalty=0 and presence_penalty=0 explicitly (a model's generation_config may "
    "set others), or apply the same penalties to the trainer's logits."
)
TRUNCATION_FIXES = {
    "renormalised": "Take log-probs over the whole vocabulary (SGLang's default), or keep the kept ids "
    "(return_sampling_mask) and mask the trainer's logits with them; or sample with top_p=1, top_k=-1, min_p=0.",
    "recorded": "Sample with top_p=1, top_k=-1, min_p=0, or request return_sampling_mask (with a finite top_k), use "
    "behaviour_log_probs as rollout log-probs and mask the trainer's logits with kept_ids.",
    "behaviour": "Use behaviour_log_probs as rollout log-probs and mask the trainer's logits with kept_ids.",
}


class Effect(NamedTuple):
    """One regressor's coefficient. z_score: in standard errors. share: of the gap's variance that it explains beyond
    the others (partial R²)."""

    size: float
    z_score: float
    share: float


class Fit(NamedTuple):
    """d = a + slope · rollout + repeated · occurred + noise, by least squares.

    slope: centred log-probs of the training side follow the rollout side's with slope 1 + `slope.size`.
    upper: Var(d) / Cov(d, rollout), from the reverse regression; to first order a ratio of temperatures τ (training
    log-probs as sharp as rollout ones to the power τ) has slope ≤ τ − 1 ≤ upper in size, with equality on the right
    where there is no noise.
    left: mean |noise|. noise: its variance over that of the rollout log-probs. quarters: mean gap in the quarters of
    the tokens ordered by rollout log-prob, least likely first.
    """

    left: float
    slope: Effect
    repeated: Effect
    upper: float
    noise: float
    quarters: tuple[float, ...]

    def temperature(self, recorded: float) -> str | None:
        """None: no other temperature. Else which side left the recorded one out, if τ is that or its inverse."""
        slope, low, high = self.slope, self.quarters[0], self.quarters[3]
        if low * high >= 0 or (high > 0) != (slope.size > 0):
            return None  # a temperature moves likely and unlikely tokens in opposite directions
        kind = "other"
        smallest, largest = sorted((1 + slope.size, 1 + self.upper))
        for name, expected in (("rollout_raw", 1 / recorded), ("trainer_without", recorded)):
            near = smallest * 0.93 <= expected <= largest * 1.07
            kind = name if near and recorded != 1.0 and (expected > 1) == (slope.size > 0) else kind
        bar, share = (MIN_SLOPE, SLOPE_SHARE) if kind == "other" else (MIN_SLOPE_EXPECTED, SLOPE_SHARE_EXPECTED)
        share = SLOPE_SHARE if self.left > FAR_ABS_MEAN else share  # so much noise has another cause
        bar = max(bar, SLOPE_OVER_NOISE * self.noise)
        return kind if abs(slope.size) >= bar and abs(slope.z_score) >= SLOPE_Z_SCORE and slope.share >= share else None


@lru_cache(maxsize=1)  # several detectors ask for the same tokens one after the other
def fit(tokens: Tokens) -> Fit:
    """Of at least 8 tokens; without both kinds of token `repeated` is 0."""
    gap, x = np.clip(tokens.gap, *np.quantile(tokens.gap, [GAP_TRIM, 1 - GAP_TRIM])), tokens.rollout
    columns = [np.ones(len(x)), x - x.mean()]
    both = 0 < tokens.occurred.sum() < len(x)
    if both:
        columns.append(tokens.occurred - tokens.occurred.mean())
    design = np.stack(columns, axis=1)
    covariance = np.linalg.pinv(design.T @ design)
    coefficients = covariance @ (design.T @ gap)
    left = gap - design @ coefficients
    freedom = max(len(x) - design.shape[1], 1)
    variance = float(left @ left) / freedom

    def effect(column: int) -> Effect:
        size = float(coefficients[column])
        z_score = size / math.sqrt(max(variance * covariance[column, column], 1e-30))
        return Effect(size, z_score, z_score**2 / (z_score**2 + freedom))

    together = float(np.cov(gap, x)[0, 1]) if x.std() > 0 else 0.0
    return Fit(
        left=float(np.abs(left).mean()),
        slope=effect(1),
        repeated=effect(2) if both else Effect(0.0, 0.0, 0.0),
        upper=float(gap.var(ddof=1)) / together if together else math.inf,
        noise=variance / max(float(x.var()), 1e-12),
        quarters=tuple(float(gap[quarter].mean()) for quarter in np.array_split(tokens.order[::-1], 4)),
    )


def _drawn(batch: Batch) -> list[Sample]:
    """Samples that were not greedy: of the others nothing about sampling can be told from the tokens."""
    return [sample for sample in batch if not sample.sampling.greedy]


def find_temperature(batch: Batch) -> Outcome:
    """What the records tell of temperatures, else the slope of centred log-probs, by recorded temperature."""
    if told := _told_temperature(batch):
        return [told], batch
    groups: dict[float, list[Sample]] = defaultdict(list)
    for sample in _drawn(batch):
        groups[sample.temperature].append(sample)
    all_tokens = [(recorded, samples, batch.tokens_of(samples)) for recorded, samples in sorted(groups.items())]
    judged = [group for group in all_tokens if len(group[2]) >= ENOUGH_TOKENS]
    if not judged:
        return [too_few(f"{len(batch.tokens)}, {ENOUGH_TOKENS} needed", "temperature")], batch
    found: list[Item] = []
    for recorded, samples, tokens in judged:
        slope, upper, kind = fit(tokens).slope, fit(tokens).upper, fit(tokens).temperature(recorded)
        if kind is None:
            continue
        low, high = sorted(1 / max(1 + bound, 1e-3) for bound in (slope.size, upper))
        sides: dict[str, tuple[Side, str]] = {
            "trainer_without": ("training", f"the training side is at temperature 1, the rollout side at {recorded:g}"),
            "rollout_raw": ("rollout", f"the rollout side is at temperature 1, the training side at {recorded:g}"),
            "other": ("both", f"the training temperature is {low:.3g} to {high:.3g} times the rollout's"),
        }
        side, what = sides[kind]
        evidence = (
            f"Centred training log-probs follow the rollout's with slope {1 + slope.size:.3f} instead of 1 "
            f"({abs(slope.z_score):.0f} standard errors, {slope.share:.0%} of the gap explained, {len(tokens)} "
            f"tokens): {what} (recorded: {recorded:g})."
        )
        figures = {"slope": 1 + slope.size, "temperature_ratio_low": low, "temperature_ratio_high": high}
        figures |= {"standard_errors": abs(slope.z_score), "explained": slope.share}
        about = {"tokens": len(tokens), "statistics": figures}
        found.append(batch.finding("temperature", side, evidence, TEMPERATURE_FIXES[kind], samples, **about))
    return found, batch


def _told_temperature(batch: Batch) -> Finding | None:
    """Log-probs from before the temperature (vLLM's raw ones), which are not of what tokens were drawn from, whatever
    the trainer does; else a temperature that the training side tells, and that is another one."""
    drawn = [(sample, sample.trainer_temperature or sample.temperature) for sample in _drawn(batch)]
    chosen = [sample for sample, _ in drawn if sample.log_probs_of == "raw" and sample.temperature != 1.0]
    raw = bool(chosen)
    other = [sample for sample, theirs in drawn if not math.isclose(theirs, sample.temperature, rel_tol=1e-6)]
    if not (chosen := chosen or other):
        return None
    recorded, theirs, tokens = chosen[0].temperature, chosen[0].trainer_temperature, batch.tokens_of(chosen)
    if theirs is None and len(tokens) >= ENOUGH_TOKENS and fit(tokens).temperature(recorded) is None:
        theirs = 1.0
    evidence = (
        f"{len(chosen)} of {len(batch)} samples were drawn at temperature {recorded:g}. Their rollout log-probs are of "
        f"temperature {'1 (log_probs_of raw)' if raw else f'{recorded:g}'}, the trainer's of "
        f"{'one that is not told' if theirs is None else f'{theirs:g}'}."
    )
    fix = TEMPERATURE_FIXES["raw" if raw else "other"]
    fix += f" {TEMPERATURE_FIXES['trainer_without']}" if raw and theirs == 1.0 else ""
    side: Side = "both" if theirs == 1.0 or not raw else "rollout"
    return batch.finding("temperature", side, evidence, fix, chosen, confidence="certain")


def find_penalty(batch: Batch) -> Outcome:
    """An offset on tokens that occurred before, beyond what their log-prob explains."""
    found: list[Item] = []
    for penalised in (True, False):
        group = [sample for sample in _drawn(batch) if sample.sampling.penalised == penalised]
        tokens = batch.tokens_of(group)
        repeated = int(tokens.occurred.sum())
        if not group:
            continue
        if min(repeated, len(tokens) - repeated) < MIN_REPEATED or len(tokens) < ENOUGH_TOKENS:
            few = f"{repeated} of {len(tokens)} occurred before, {MIN_REPEATED} needed of either kind"
            found.append(too_few(f"{few} and {ENOUGH_TOKENS} in all", "penalty"))
            continue
        left, effect = fit(tokens).left, fit(tokens).repeated
        temperature = fit(tokens).temperature(group[0].temperature) is not None
        # A wrong temperature is not linear in the log-prob, and repeats are likelier.
        share = REPEATED_SHARE / 2 if penalised and not temperature else REPEATED_SHARE
        if abs(effect.z_score) < REPEATED_Z_SCORE or effect.share < share or left > FAR_ABS_MEAN:
            continue
        less = effect.size > 0
        if not less and (temperature or effect.share < 2 * share):
            continue
        again, new = (float(tokens.gap[tokens.occurred == flag].mean()) for flag in (True, False))
        evidence = (
            f"Tokens that occurred before are {abs(effect.size):.3g} nats {'less' if less else 'more'} likely on the "
            f"rollout side than the rest would suggest ({abs(effect.z_score):.0f} standard errors; {repeated} such "
            f"tokens, mean gap {again:+.3g} against {new:+.3g}): "
            f"{'the request had a penalty' if penalised else 'although the record has no penalty'}."
        )
        told = {"offset": effect.size, "standard_errors": effect.z_score, "explained": effect.share}
        side: Side = "rollout" if less else "training"
        occurred = tokens.where(tokens.occurred)
        found.append(batch.finding_at("penalty", side, evidence, PENALTY_FIX, occurred, statistics=told))
    return found, batch


def after_filters(sample: Sample) -> bool:
    """Its log-probs are renormalised over what its filters kept, by what the record tells (vLLM's processed ones)."""
    return sample.sampling.filtered and sample.log_probs_of == "filtered"


def find_truncation(batch: Batch) -> Outcome:
    """Filters that are recorded, and those that show: a renormalised side is off by −log(mass kept), always one way.

    Where the training side replays the sampling mask, comparisons go on with the behaviour log-probs.
    """
    found: list[Item] = []
    replayed: dict[int, dict[str, Any]] = {}
    plain: list[tuple[Sample, float]] = []  # the training side follows the log-probs of the whole vocabulary
    groups: dict[tuple[bool, bool], list[Sample]] = {(True, False): [], (True, True): [], (False, False): []}
    for sample in batch:
        cut = sample.behaviour_log_probs
        if cut is None or len(cut) != len(sample):
            if not sample.sampling.greedy:
                groups[sample.sampling.filtered, after_filters(sample)].append(sample)
            continue
        both = sample.usable & np.isfinite(cut)
        if both.any():
            ours, theirs = sample.rollout_log_probs[both], sample.train_log_probs[both]
            if np.abs(theirs - cut[both]).mean() < np.abs(theirs - ours).mean():
                replayed[sample.index] = {"rollout_log_probs": cut}
            elif (bias := float((cut[both] - ours).mean())) > NO_BIAS:
                plain.append((sample, bias))
    if plain:
        bias = float(np.mean([bias for _, bias in plain]))
        why = f"the training side follows the whole vocabulary's log-probs, {bias:.3g} nats below the behaviour ones."
        group = [sample for sample, _ in plain]
        found.append(_truncation_finding(batch, group, "behaviour", "training", why, bias=bias))
    for (filtered, told), group in groups.items():
        tokens = batch.tokens_of(group)
        seen = _renormalised(batch, group, tokens) if len(tokens) >= ENOUGH_TOKENS else None
        if seen is not None:
            found.append(seen)
        elif group and filtered and not told:
            why = (
                "their log-probs are over the whole vocabulary and no kept ids are recorded. The true behaviour "
                "log-prob is higher by −log(mass kept), which no weight corrects."
            )
            found.append(_truncation_finding(batch, group, "recorded", "rollout", why))
        elif group and len(tokens) < ENOUGH_TOKENS and batch.has_training:
            found.append(too_few(f"{len(tokens)}, {ENOUGH_TOKENS} needed", "truncation"))
    return found, batch.with_values(replayed)


def _renormalised(batch: Batch, group: list[Sample], tokens: Tokens) -> Finding | None:
    """One side renormalised over less than the other.

    Tokens are drawn from the rollout side, so the mean of e^d is the training side's mass on what could be drawn: 1
    whatever the two policies are, less where a filter renormalised the rollout's log-probs.
    """
    quarters = fit(tokens).quarters
    ours, other, sign = ("rollout", "training", 1) if quarters[0] < 0 else ("training", "rollout", -1)
    gap = sign * tokens.gap
    weights = np.expm1(np.clip(gap, -20.0, 20.0))
    missing = -float(weights.mean())
    z_score = missing / max(float(weights.std(ddof=1)) / math.sqrt(len(gap)), 1e-12)
    if max(sign * mean for mean in quarters) >= 0 or missing <= MISSING_MASS or z_score <= RENORMALISED_Z_SCORE:
        return None
    one_sided = -float(gap.sum() / np.abs(gap).sum())  # 1 where every gap is negative
    if one_sided <= ONE_SIDED or (gap[gap != 0] < 0).mean() <= NEGATIVE:
        return None
    evidence = (
        f"{ours} log-probs are above the {other} ones by {-gap.mean():.3g} nats on average and nearly always "
        f"({one_sided:.0%} one-sided, {z_score:.0f} standard errors, {len(gap)} tokens): {missing:.2%} of the mass "
        f"lies outside what the {ours} side renormalised over."
    )
    told = {"missing_mass": missing, "one_sided": one_sided, "standard_errors": z_score}
    kind = "renormalised" if ours == "rollout" else "behaviour"
    return _truncation_finding(batch, group, kind, ours, evidence, **told)


def _truncation_finding(
    batch: Batch, group: list[Sample], kind: str, side: Side, why: str, **statistics: float
) -> Finding:
    filters = ", ".join(group[0].sampling.filters) or "no filter"
    certain = kind == "recorded" or after_filters(group[0])
    about = {"statistics": statistics, "confidence": "certain" if certain else "likely"}
    recorded = group[0].asked and group[0].sampling.model_fields_set - {"temperature"}
    told = "by their records" if recorded else "as nothing tells of one"
    evidence = f"{len(group)} of {len(batch)} samples were drawn with {filters}, {told}: {why}"
    return batch.finding("truncation", side, evidence, TRUNCATION_FIXES[kind], group, **about)


def find_sampling(batch: Batch) -> Outcome:
    """Tokens drawn from a narrower or flatter distribution than the log-probs tell, by the trainer's entropies H.

    Drawn from what the rollout log-probs tell, each token has E ρ (−log p − H) = 0, where p and H are the trainer's and
    ρ = p / π: at any temperature, length and mismatch. slime, miles, verl and prime-rl take H at the temperature of
    their log-probs; where the two do not belong together, nothing is decided.
    """
    samples = [
        sample
        for sample in _drawn(batch)
        if sample.entropy is not None and sample.behaviour_log_probs is None and not sample.sampling.filtered
        if sample.usable.any()
    ]
    tokens = batch.tokens_of(samples)
    if len(tokens) < ENOUGH_TOKENS:
        return [], batch
    entropy = np.concatenate([np.asarray(sample.entropy)[sample.usable] for sample in samples])
    tokens, entropy = tokens.where(np.isfinite(entropy)), entropy[np.isfinite(entropy)]
    log_p, ratio = np.minimum(tokens.training, 0.0), np.exp(np.minimum(tokens.gap, MAX_LOG_RATIO))
    surprise = -log_p - entropy
    mean = float((ratio * surprise).mean())
    left = ratio * surprise - mean
    of_samples = np.bincount(tokens.sample, left)  # Σ (value − mean) of each: neither one long sample nor few decide
    z_score = mean * len(tokens) / math.sqrt(max((of_samples**2).sum(), (left**2).sum(), 1e-30))
    if abs(mean) < MIN_ENTROPY_GAP_NATS or abs(z_score) < ENTROPY_Z_SCORE:
        return [], batch
    recorded, p, others = samples[0].temperature, np.exp(log_p), -np.expm1(log_p)
    least = -p * log_p - others * np.log(np.maximum(others, 1e-300))  # the entropy of two ids with p and 1 − p
    above = (entropy > least + others * MAX_LOG_VOCABULARY)[(p > 0.9) & (others > 1e-4)]
    untold = recorded < 1.0 and mean < 0 and len(above) < MIN_NEARLY_CERTAIN  # entropies at temperature 1 look alike
    if untold or max((entropy < 0.99 * least - 1e-3).mean(), above.mean() if len(above) else 0.0) > MAX_MISFITS:
        reason = "the entropies do not belong to the distributions that the trainer's log-probs are of"
        return [Undecided(faults=("truncation",), reason=reason)], batch
    times = 1 / (1 - mean / float((ratio * surprise**2).mean()))  # to first order
    if mean > 0:
        name, fix, what = "temperature", TEMPERATURE_FIXES["other"], "flatter distribution than the log-probs tell:"
    else:
        name, fix, what = "truncation", TRUNCATION_FIXES["recorded"], "narrower distribution: by a filter, or"
    evidence = (
        f"Over {len(tokens)} sampled tokens the mean −log p is {mean:+.3g} nats from the trainer's entropies "
        f"({z_score:+.0f} standard errors). So tokens were drawn from a {what} a temperature of about {times:.2g} "
        f"times the recorded {recorded:g}."
    )
    fix = f"Send every sampling parameter with the request; a model's generation_config may set others. {fix}"
    told = {"entropy_gap": mean, "standard_errors": z_score}
    return [batch.finding(name, "rollout", evidence, fix, samples, tokens=len(tokens), statistics=told)], batch
