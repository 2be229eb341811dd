"""top-p, top-k and min-p: what was drawn from a cut distribution needs log-probs of that one on both sides."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.diagnose.batch import Batch, Outcome, Tokens
from mismatch_plugin.diagnose.detectors.distribution import drawn, few_tokens
from mismatch_plugin.diagnose.detectors.regression import Support, fit, support
from mismatch_plugin.diagnose.findings import Finding, Item, first_place
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS

DEVIATIONS, ONE_SIDED, NEGATIVE, MISSING = 6.0, 0.4, 0.65, 0.003
"""A renormalised side: the other lacks mass, in standard errors and in all; gaps have one sign, by size and number."""
NO_BIAS = 1e-3
"""A filter that changes log-probs by less on average cut nothing."""

Kind = Literal["renormalised", "recorded", "not_replayed", "trainer"]
FIXES: dict[Kind, str] = {
    "renormalised": "Take log-probs over the whole vocabulary (SGLang's default), or keep the kept ids "
    "(return_sampling_mask) and mask the trainer's logits with them; or sample with top_p=1, top_k=-1, min_p=0.",
    "recorded": "Sample with top_p=1, top_k=-1, min_p=0, or request return_sampling_mask (with a finite top_k), use "
    "behaviour_log_probs as rollout log-probs and mask the trainer's logits with kept_ids.",
    "not_replayed": "Use behaviour_log_probs as rollout log-probs and mask the trainer's logits with kept_ids.",
    "trainer": "Only the trainer renormalises over kept tokens: use behaviour_log_probs as rollout log-probs.",
}


def find_truncation(batch: Batch) -> Outcome:
    """Filters that are recorded, and those that show: a renormalised side is off by −log(mass kept), always one way.

    Where the training side replays the sampling mask, comparisons go on with the behaviour log-probs.
    """
    recorded = {sample.index: sample.behaviour_log_probs for sample in batch}
    behaviour = {s.index: found for s in batch if (found := recorded[s.index]) is not None and len(found) == len(s)}
    found, replayed = _with_behaviour(batch, behaviour)
    rest = [sample for sample in drawn(batch) if sample.index not in behaviour]
    for filtered, told in ((True, False), (True, True), (False, False)):
        group = [sample for sample in rest if (sample.sampling.filtered, after_filters(sample)) == (filtered, told)]
        tokens = batch.tokens_of(group)
        # Log-probs after the filters are the behaviour policy's; whether the trainer replays the filters must be seen.
        kind: Kind | None = "recorded" if filtered and not told else None
        numbers: Support | None = None
        if not group:
            continue
        if len(tokens) >= ENOUGH_TOKENS:
            seen, numbers = _renormalised(tokens)
            kind = seen or kind
        elif kind is None and batch.has_training:
            found.append(few_tokens(len(tokens), "truncation"))
        if kind is not None:
            found.append(_finding(batch, group, kind, numbers))
    return found, batch.with_values(replayed)


def after_filters(sample: Sample) -> bool:
    """Its log-probs are renormalised over what its filters kept, by what the record tells (vLLM's processed ones)."""
    return sample.sampling.filtered and sample.log_probs_of == "filtered"


def _with_behaviour(batch: Batch, behaviour: dict[int, Floats]) -> tuple[list[Item], dict[int, dict[str, Any]]]:
    """Records that hold both log-probs: the training side must follow the behaviour ones."""
    replayed: dict[int, dict[str, Any]] = {}
    plain: list[Sample] = []
    biases: list[float] = []
    for index, values in behaviour.items():
        sample = batch.samples[index]
        both = sample.usable & np.isfinite(values)
        if not both.any():
            continue
        to_full = float(np.abs(sample.train_log_probs[both] - sample.rollout_log_probs[both]).mean())
        to_cut = float(np.abs(sample.train_log_probs[both] - values[both]).mean())
        bias = float((values[both] - sample.rollout_log_probs[both]).mean())
        if to_cut < to_full:
            replayed[index] = {"rollout_log_probs": values}
        elif bias > NO_BIAS:
            plain.append(sample)
            biases.append(bias)
    if not plain:
        return [], replayed
    numbers = Support(missing=1 - float(np.exp(-np.mean(biases))), deviations=0.0, one_sided=1.0, negative=1.0)
    return [_finding(batch, plain, "not_replayed", numbers)], replayed


def _renormalised(tokens: Tokens) -> tuple[Kind | None, Support]:
    quarters = fit(tokens).quarters
    candidates: tuple[tuple[Kind, Floats, bool], ...] = (
        ("renormalised", tokens.gap, max(quarters) < 0),
        ("trainer", -tokens.gap, min(quarters) > 0),
    )
    for kind, gap, same_sign in candidates:
        found = support(gap)
        significant = found.missing > MISSING and found.deviations < -DEVIATIONS
        if same_sign and significant and found.one_sided > ONE_SIDED and found.negative > NEGATIVE:
            return kind, found
    return None, support(tokens.gap)


def filter_text(sampling: SamplingParameters) -> str:
    """The filters as they are written in a request."""
    off = SamplingParameters()
    named = [name for name in ("top_p", "top_k", "min_p") if getattr(sampling, name) != getattr(off, name)]
    return ", ".join(f"{name}={getattr(sampling, name):g}" for name in named) or "no filter"


def _finding(batch: Batch, group: list[Sample], kind: Kind, numbers: Support | None) -> Finding:
    told = filter_text(group[0].sampling)
    if kind == "recorded" or numbers is None:
        evidence = (
            f"{len(group)} of {len(batch)} samples were drawn with {told}, but their log-probs are over the whole "
            f"vocabulary and no kept ids are recorded: the true behaviour log-prob is higher by −log(mass kept), which "
            f"no weight corrects."
        )
    elif kind == "not_replayed":
        evidence = (
            f"{len(group)} of {len(batch)} samples were drawn with {told}: the training side follows the log-probs "
            f"over the whole vocabulary, {-np.log1p(-numbers.missing):.3g} nats below the behaviour log-probs on "
            f"average."
        )
    else:
        tokens = batch.tokens_of(group)
        ours, other = ("rollout", "training") if kind == "renormalised" else ("training", "rollout")
        evidence = (
            f"{ours.capitalize()} log-probs are systematically above the {other} ones, by {abs(tokens.gap.mean()):.3g} "
            f"nats on average and nearly always ({numbers.one_sided:.0%} one-sided, {abs(numbers.deviations):.0f} "
            f"standard errors, {len(tokens)} tokens): {numbers.missing:.2%} of the mass lies outside what the {ours} "
            f"side renormalised over (recorded: {told})."
        )
        if after_filters(group[0]):
            evidence += (
                " The record says so of its log-probs (log_probs_of filtered); the trainer does not replay them."
            )
    return batch.finding(
        "truncation",
        "training" if kind in ("trainer", "not_replayed") else "rollout",
        evidence,
        FIXES[kind],
        group,
        first=first_place(group[0], group[0].usable),
        confidence="certain" if kind == "recorded" or after_filters(group[0]) else "likely",
        statistics={} if numbers is None else {"missing_mass": numbers.missing, "one_sided": numbers.one_sided},
    )
