"""How far apart the two sides are, and what a gap that no fault explains looks like: routers, low precision, none."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from mismatch_plugin.core import rejection
from mismatch_plugin.data.arrays import Bools, Floats
from mismatch_plugin.data.versions import version_number
from mismatch_plugin.diagnose.batch import CLIP, Batch, Outcome, Tokens, ordinary, rank_correlation, telling
from mismatch_plugin.diagnose.normal import (
    BF16_NOISE,
    ENOUGH_TOKENS,
    FAR_ABS_MEAN,
    FAR_K3,
    LOOSE,
    SMALL_K3,
    largest_published,
    size_class,
)
from mismatch_plugin.diagnose.result import Finding, Mismatch
from mismatch_plugin.limits import SAFETY_BOUND

OUTLIER_NATS, OUTLIER_TIMES = 0.3, 20.0
"""Few tokens far off: by so many nats, and so many times the median |gap| at their log-prob."""
FEW_TOKENS, MIN_OUTLIERS, MAJORITY = 0.05, 6, 0.5
"""Share of such tokens at most, their number at least, and the share of k3 that they make."""
UPWARDS, SPREAD_OF_COUNTS, POSITION_DEVIATIONS, ONE_ID = 0.85, 1.6, 4.0, 0.4
"""Routers flip anywhere. At most: share of tokens that are likelier on the training side (tokens were drawn from the
rollout side, so most are less likely on any other), variance over mean of the counts by sample, standard errors of the
mean place in the response, share of the commonest id."""
FEW_SAMPLES, UNRELATED = 0.25, 0.3
"""Samples above a bar are named where they are at most this share of all. Below a rank correlation of UNRELATED their
two sides do not speak of the same tokens (other weights with a k3 of 1 gave .55 to .8, of 3 to 6 .2 to .4)."""
BETWEEN_SAMPLES = 3.0
"""90th over 10th percentile of the samples' mean relative gap: above it they are not of one kind (measured: int8 1.7,
two servers of different weights 11 to 42)."""
EVEN = 1.6
"""Largest over smallest logit noise in five classes of log-prob (measured: int8 to int4 1.2 to 1.5; real optimizer
steps from 1.9 on)."""
CLASSES, MIN_CLASS = (0.05, 0.5, 1.0, 2.0, 4.0, math.inf), 20

ROUTING_FIX = (
    "Of a MoE model: replay the rollout's routing in the trainer (return_routed_experts, routing replay), or cut such "
    "tokens: preset token_icepop, or a veto. Of a dense model: look at these tokens."
)
QUANTISED_FIX = (
    "If a side is quantised: export the weights quantised as the trainer's are, with scales of the same blocks (fp8: "
    "xtuner #2044, k3 8.7e-3 to 3.7e-4), and the KV cache in the same dtype. Else look for old weights, a matrix "
    "transposed or mapped to another, LoRA, dropout, the RoPE base."
)
EVEN_CAUSES = (
    "Even noise comes from old weights, a matrix transposed or mapped to another (K and V, gate and up), LoRA left out "
    "or scaled otherwise, dropout, another RoPE base, or low precision."
)
NEXT_FIX = (
    "Inspect again with --checkpoint NOW --reference-checkpoint START (present weights, and those that the run began "
    "with). Score the same ids by both engines with the same weights; compare prompt ids, chat template, position ids "
    "and the attention mask of packed sequences. If a side is quantised, say so: --engine fp8 (or its format)."
)


def k3(gap: Floats) -> Floats:
    """[T] of each token."""
    return rejection.k3(torch.from_numpy(gap)).numpy()


def mismatch(batch: Batch) -> Mismatch | None:
    """Over all tokens that train and have a number on both sides; None if there is none. Formulas: `Mismatch`."""
    tokens = batch.tokens
    if not len(tokens):
        return None
    gap = np.clip(tokens.gap, -SAFETY_BOUND, SAFETY_BOUND)
    absolute, ratio = np.abs(tokens.gap), np.exp(gap)
    p50, p90, p99 = (float(value) for value in np.quantile(absolute, [0.5, 0.9, 0.99]))
    varies = np.ptp(tokens.rollout) > 0 and np.ptp(tokens.training) > 0
    return Mismatch(
        tokens=len(tokens),
        samples=len(np.unique(tokens.sample)),
        kl=-float(gap.mean()),
        k3_kl=float(k3(gap).mean()),
        abs_mean=float(absolute.mean()),
        abs_p50=p50,
        abs_p90=p90,
        abs_p99=p99,
        abs_max=float(absolute.max()),
        correlation=float(np.corrcoef(tokens.rollout, tokens.training)[0, 1]) if varies else math.nan,
        effective_sample_size=float(ratio.sum() ** 2 / (len(tokens) * (ratio**2).sum())),
    )


@dataclass(frozen=True, eq=False)
class Gaps:
    """Tokens that are not near certain, [T]. typical: median |gap| at their log-prob."""

    batch: Batch
    tokens: Tokens
    typical: Floats

    @classmethod
    def of(cls, batch: Batch) -> Gaps:
        tokens, told = batch.tokens, telling(batch.tokens)
        size = np.minimum(np.abs(tokens.gap), CLIP)
        kinds = (tokens.occurred, ~tokens.occurred)  # a penalty moves one of them
        typical = ordinary(tokens, size, np.median, kinds)[told]
        return cls(batch, tokens.where(told), typical)

    @cached_property
    def k3(self) -> Floats:
        """Of each."""
        return k3(self.tokens.gap)

    @cached_property
    def homogeneous(self) -> bool:
        """All samples are about equally far apart, few wild tokens aside."""
        relative = np.minimum(np.abs(self.tokens.gap), CLIP) / np.maximum(self.typical, 1e-9)
        counts = np.bincount(self.tokens.sample)
        means = np.bincount(self.tokens.sample, np.minimum(relative, 4.0))[counts >= 8] / counts[counts >= 8]
        low, high = np.quantile(means, [0.1, 0.9]) if len(means) else (1.0, 1.0)
        return bool(high <= BETWEEN_SAMPLES * low)

    @cached_property
    def noise(self) -> list[float]:
        """Median |d| / (1 − p) over .6745, by class of log-prob; empty with fewer than three classes.

        Independent noise σ on every logit gives a token of probability p the gap σ · √((1 − p)² + Σ_{j≠i} p_j²), about
        σ (1 − p) to σ √2 (1 − p): even noise, the same in all classes.
        """
        depth = -self.tokens.rollout
        noise = np.abs(self.tokens.gap) / -np.expm1(-np.maximum(depth, 1e-6)) / 0.6745
        parts = [noise[(depth >= low) & (depth < high)] for low, high in pairwise(CLASSES)]
        found = [float(np.median(part)) for part in parts if len(part) >= MIN_CLASS]
        return found if len(found) >= 3 else []

    @property
    def even(self) -> bool:
        """The gap is noise of one size in all logits."""
        return bool(self.noise) and max(self.noise) <= EVEN * min(self.noise)


def find_size(batch: Batch) -> Outcome:
    """At most one of `moe_routing`, `quantised` and `unexplained`, where no fault explains the gap.

    A mean |gap| or k3 above what any sound pair has is a fault, whoever holds it. Below, routers are a note, and even
    noise is one up to the size that published pairs of such precision have. The batch stays as it is.
    """
    judged = _of_newest(batch)
    level = mismatch(judged)
    if level is None or level.tokens < ENOUGH_TOKENS:
        return [], batch
    gaps, far = Gaps.of(judged), size_class(level) == "far"
    found = None
    if len(gaps.tokens) >= ENOUGH_TOKENS:
        found = _few_tokens(gaps, far) or (None if far else _even_noise(gaps, level))
    if found is None and far:
        found = _far(gaps, level)
    return [found] if found else [], batch


def _versions_of_steps(batch: Batch) -> dict[tuple[int | None, str | None], set[str]]:
    """(step, trainer's version) → labels of its samples."""
    seen: dict[tuple[int | None, str | None], set[str]] = defaultdict(set)
    for sample in batch:
        seen[sample.step, sample.trainer_version].update(span.version for span in sample.weight_versions)
    return seen


def _of_newest(batch: Batch) -> Batch:
    """Without the tokens of older weights than others of their step by their labels: that explains their gap, and
    `mixed_versions` names it."""
    seen = _versions_of_steps(batch)
    masks: dict[int, dict[str, Bools]] = {}
    for sample in batch:
        versions = seen[sample.step, sample.trainer_version]
        newest = max(versions, key=lambda version: version_number(version) or 0, default="")
        newest = sample.trainer_version if sample.trainer_version in versions else newest
        if len(versions) > 1:
            mask = sample.mask.copy()
            for span in sample.weight_versions:
                mask[span.start : span.end] &= span.version == newest
            masks[sample.index] = {"loss_mask": mask}
    return batch.with_values(masks)


def _few_tokens(gaps: Gaps, far: bool) -> Finding | None:
    """Few tokens anywhere make most of the mismatch: routers."""
    size = np.abs(gaps.tokens.gap)
    typical = np.maximum(gaps.typical, float(np.median(size)) / 3)  # a third of the median is typical anywhere
    chosen = size > np.maximum(OUTLIER_NATS, OUTLIER_TIMES * typical)
    if not (chosen.sum() >= MIN_OUTLIERS and chosen.mean() <= FEW_TOKENS and gaps.homogeneous):
        return None
    share = float(gaps.k3[chosen].sum() / gaps.k3.sum())
    if share < MAJORITY or _has_pattern(gaps, chosen):
        return None
    sizes, rest = size[chosen], float(np.median(size[~chosen]))
    evidence = (
        f"{len(sizes)} of {len(chosen)} tokens ({chosen.mean():.2%}; near certain ones aside) make {share:.0%} of k3. "
        f"They are {sizes.min():.2g} to {sizes.max():.2g} nats apart, the others {rest:.2g} (median). They lie in any "
        f"place, sample and id, as where routers of a MoE model choose other experts."
    )
    told = {"tokens": len(sizes), "fraction": float(chosen.mean()), "share_of_k3": share, "median": rest}
    about = {"statistics": told, "severity": "fault" if far else "note"}
    return gaps.batch.finding_at("moe_routing", "both", evidence, ROUTING_FIX, gaps.tokens.where(chosen), **about)


def _has_pattern(gaps: Gaps, chosen: Bools) -> bool:
    """These tokens have something in common beyond chance: an id, a sign, few samples, or a place in the response."""
    tokens, some, samples = gaps.tokens, gaps.tokens.where(chosen), gaps.batch.samples
    ids = [int(samples[at].response_ids[position]) for at, position in zip(some.sample, some.position, strict=True)]
    place = (tokens.position + 0.5) / np.array([len(sample) for sample in samples])[tokens.sample]
    deviations = (place[chosen].mean() - place.mean()) / max(float(place.std()), 1e-9) * math.sqrt(len(some))
    all_of, of_samples = (np.bincount(one.sample, minlength=len(samples)) for one in (tokens, some))
    expected = all_of[all_of > 0] * chosen.mean()
    spread = float(((of_samples[all_of > 0] - expected) ** 2 / expected).mean())
    often, upwards = np.unique(ids, return_counts=True)[1].max(), (some.gap > 0).mean()
    alike = often > ONE_ID * len(some) or upwards > UPWARDS
    return bool(alike or spread > SPREAD_OF_COUNTS or abs(deviations) > POSITION_DEVIATIONS)


def _even_noise(gaps: Gaps, level: Mismatch) -> Finding | None:
    """Noise of one size in all logits, larger than bf16 makes, that no label explains by older weights."""
    of_steps = _versions_of_steps(gaps.batch)
    told_old = any(len({*versions, trainer} - {None}) > 1 for (_, trainer), versions in of_steps.items())
    if level.k3_kl <= SMALL_K3 or not gaps.homogeneous or not gaps.even or told_old:
        return None
    typical, quantised = float(np.median(gaps.noise)), gaps.batch.quantised
    most_abs, most_k3 = largest_published(quantised is not False)
    loose = 1.0 if quantised is None else LOOSE  # of an unknown pair the size alone must be one that was published
    inside = level.abs_mean <= loose * most_abs and level.k3_kl <= loose * most_k3
    if typical <= BF16_NOISE or (inside and quantised is False):
        return None
    who = "pairs with a quantised side" if quantised is not False else "pairs in 16 bits"
    evidence = (
        f"The gap is even noise of {typical:.2g} nats in all logits, likely and unlikely tokens alike "
        f"({min(gaps.noise):.2g} to {max(gaps.noise):.2g}), in all samples: more than bf16 makes. Mean |gap| "
        f"{level.abs_mean:.3g} and k3 {level.k3_kl:.3g} are {'within' if inside else 'not both within'} what {who} "
        f"have ({loose * most_abs:.3g} and {loose * most_k3:.3g})."
    )
    about = {"statistics": {"logit_noise": typical, "k3": level.k3_kl}, "confidence": "possible"}
    if inside:
        about["severity"] = "note"
        return gaps.batch.finding_at("quantised", "both", evidence, QUANTISED_FIX, gaps.tokens, **about)
    evidence += f" {EVEN_CAUSES}"
    return gaps.batch.finding_at("unexplained", "both", evidence, NEXT_FIX, gaps.tokens, **about)


def _far(gaps: Gaps, level: Mismatch) -> Finding:
    """Above what any sound pair has: who holds it, and what that fits."""
    tokens, of_token = gaps.batch.tokens, k3(gaps.batch.tokens.gap)
    numbers, places, counts = np.unique(tokens.sample, return_inverse=True, return_counts=True)
    of_sample = np.bincount(places, of_token) / counts
    above = (of_sample > FAR_K3) | (np.bincount(places, np.abs(tokens.gap)) / counts > FAR_ABS_MEAN)
    few, inside, typical = numbers[above], above[places], float(np.median(of_sample))
    sides = [("k3", level.k3_kl, FAR_K3), ("mean |gap|", level.abs_mean, FAR_ABS_MEAN)]
    said = [f"{what} {value:.3g} is {'above' if value > bar else 'within'} {bar:g}" for what, value, bar in sides]
    evidence = (
        f"In nats/token, {said[0]} and {said[1]}, the most that sound pairs of engines have. {len(few)} of "
        f"{len(numbers)} samples are above and hold {of_token[inside].sum() / of_token.sum():.0%} of k3; the median "
        f"one has k3 {typical:.2g}."
    )
    if len(few) > FEW_SAMPLES * len(numbers):
        chosen = tokens
        if gaps.even:
            evidence += f" It is even noise of {np.median(gaps.noise):.2g} nats in all logits. {EVEN_CAUSES}"
    else:
        chosen = tokens.where(inside)
        follow = rank_correlation(tokens.rollout[inside], tokens.training[inside])
        fits = "another sample's values, another text or another prompt" if follow < UNRELATED else "other weights"
        evidence += (
            f" They are sample {', '.join(map(str, few[:8]))}{', …' * (len(few) > 8)}: there the two sides have a rank "
            f"correlation of {follow:.2f}, which fits {fits}."
        )
    told = {"abs_mean": level.abs_mean, "k3": level.k3_kl, "median_sample_k3": typical, "samples_above": len(few)}
    about = {"statistics": told, "confidence": "possible"}
    return gaps.batch.finding_at("unexplained", "both", evidence, NEXT_FIX, chosen, **about)
