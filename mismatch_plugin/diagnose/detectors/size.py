"""The size of a gap that no fault explains: few tokens far off (MoE routers), weights of low precision, or too much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats, Ints
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.level import k3
from mismatch_plugin.diagnose.detectors.profile import scaled
from mismatch_plugin.diagnose.findings import FaultName, Finding, place_of
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS, FAR_ABS_MEAN, FAR_K3, NOISE_FORMS, SMALL_K3

SURE = 2.0
"""Standard errors above its bar from which a size is called far."""
APART, TIMES = 0.3, 20.0
"""Few tokens far off: by so many nats, and so many times the median |gap| at their log-prob."""
FEW, MIN_FEW, MAJORITY = 0.05, 6, 0.5
"""Share of such tokens at most, their number at least, and the share of k3 that they make."""
UPWARDS, SPREAD_OF_COUNTS, POSITION_DEVIATIONS, ONE_ID = 0.85, 1.6, 4.0, 0.4
"""Routers flip anywhere. At most: share of tokens that are likelier on the training side (tokens were drawn from the
rollout side, so most are less likely on any other), variance over mean of the counts by sample, standard errors of the
mean place in the response, share of the commonest id."""
HUGE, NEARLY_ALL = 1.0, 0.8
"""Few tokens that follow a pattern are named where they are so many nats apart and make nearly all of k3."""
BETWEEN_SAMPLES = 3.0
"""90th over 10th percentile of the samples' mean relative gap: above it they are not of one kind (measured: int8 1.7,
two servers of different weights 11 to 42)."""
FLAT = 1.6
"""Largest over smallest logit noise in five classes of log-prob (measured: int8 to int4 1.2 to 1.5; real optimizer
steps from 1.9 on)."""
CLASSES = (0.05, 0.5, 1.0, 2.0, 4.0, math.inf)
MIN_CLASS = 20

ROUTING_FIX = (
    "Of a MoE model: replay the rollout's routing in the trainer (return_routed_experts, routing replay), or cut such "
    "tokens: preset token_icepop, or a veto. Of a dense model: look at these tokens."
)
QUANTISED_FIX = (
    "If a side is quantised: export the weights quantised as the trainer's are (fp8 scales: xtuner #2044, k3 8.7e-3 to "
    "3.7e-4), with scales of the same blocks, and give the KV cache the same dtype; or correct for it by weights."
)
FAR_FIX = (
    "Find the cause before any correction: score the same ids by both engines with the same weights (learning rate 0); "
    "check weight updates (checksums), prompt ids, chat template, position ids and attention mask of packed sequences."
)


@dataclass(frozen=True, eq=False)
class Gaps:
    """Tokens that are not near certain, [T]. typical: median |gap| at their log-prob."""

    batch: Batch
    gap: Floats
    depth: Floats
    typical: Floats
    relative: Floats
    sample: Ints
    position: Ints

    @classmethod
    def of(cls, batch: Batch) -> Gaps:
        measured = scaled(batch, typical=0.5)
        told = measured.informative
        tokens, size, typical = measured.tokens.where(told), measured.size[told], measured.ordinary[told]
        return cls(
            batch,
            tokens.gap,
            -tokens.rollout,
            typical,
            size / np.maximum(typical, 1e-9),
            tokens.sample,
            tokens.position,
        )

    @cached_property
    def k3(self) -> Floats:
        """Of each."""
        return k3(self.gap)

    @cached_property
    def homogeneous(self) -> bool:
        """All samples are about equally far apart, few wild tokens aside."""
        counts = np.bincount(self.sample)
        means = np.bincount(self.sample, np.minimum(self.relative, 4.0))[counts >= 8] / counts[counts >= 8]
        low, high = np.quantile(means, [0.1, 0.9]) if len(means) else (1.0, 1.0)
        return bool(high <= BETWEEN_SAMPLES * low)

    def far(self, nats: float) -> Bools:
        """By so many nats and so many times what is typical; a third of the median at least is typical anywhere."""
        typical = np.maximum(self.typical, float(np.median(np.abs(self.gap))) / 3)
        return np.abs(self.gap) > np.maximum(nats, TIMES * typical)


def find_size(batch: Batch) -> Outcome:
    """At most one of `moe_routing`, `quantised` and `far_apart`: what the gap looks like, where no fault explains it.

    The first two are notes while the size is one that sound pairs have, and faults (`far_apart`, for low precision)
    above. The batch stays as it is.
    """
    if len(batch.tokens) < ENOUGH_TOKENS:
        return [], batch
    far = is_far(batch)
    gaps = Gaps.of(batch)
    found = None
    if len(gaps.gap) >= ENOUGH_TOKENS:
        found = _few(gaps, far) or (None if far else _quantised(gaps))
    if found is None and far:
        found = _far(gaps)
    return [found] if found else [], batch


def is_far(batch: Batch) -> bool:
    """k3 or mean |gap| is above its bar by `SURE` standard errors, of samples where there are 8, else of tokens."""
    tokens = batch.tokens
    index = np.cumsum(np.diff(tokens.sample, prepend=-1) != 0) - 1  # sample after sample
    if index[-1] < 7:
        index = np.arange(len(tokens))
    counts = np.bincount(index)
    for values, bar in ((k3(tokens.gap), FAR_K3), (np.abs(tokens.gap), FAR_ABS_MEAN)):
        mean = float(values.mean())
        left = np.bincount(index, values - mean)  # of Σ values − mean · Σ counts, the ratio's linearisation
        error = math.sqrt(float((left**2).sum()) * len(counts) / max(len(counts) - 1, 1)) / counts.sum()
        if mean - SURE * error > bar:
            return True
    return False


def _few(gaps: Gaps, far: bool) -> Finding | None:
    """Few tokens make most of the mismatch: anywhere (routers) or by a pattern."""
    chosen = gaps.far(APART)
    if not (chosen.sum() >= MIN_FEW and chosen.mean() <= FEW and gaps.homogeneous):
        return None
    share = float(gaps.k3[chosen].sum() / gaps.k3.sum())
    pattern = _pattern(gaps, chosen)
    if share < MAJORITY:
        return None
    if pattern is None:
        return _few_finding(gaps, chosen, "moe_routing", "in any place, sample and id", far)
    huge = gaps.far(HUGE)
    if huge.sum() < MIN_FEW or gaps.k3[huge].sum() < NEARLY_ALL * gaps.k3.sum():
        return None
    return _few_finding(gaps, huge, "far_apart", pattern, True)


def _pattern(gaps: Gaps, chosen: Bools) -> str | None:
    """What these tokens have in common beyond chance, or None."""
    count, samples = int(chosen.sum()), len(gaps.batch)
    lengths = np.array([len(sample) for sample in gaps.batch])[gaps.sample]
    place = (gaps.position + 0.5) / lengths
    deviations = (place[chosen].mean() - place.mean()) / max(float(place.std()), 1e-9) * math.sqrt(count)
    ids = [
        int(gaps.batch.samples[at].response_ids[position])
        for at, position in zip(gaps.sample[chosen], gaps.position[chosen], strict=True)
    ]
    names, often = np.unique(ids, return_counts=True)
    up = float((gaps.gap[chosen] > 0).mean())
    all_of = np.bincount(gaps.sample, minlength=samples)
    expected = all_of[all_of > 0] * chosen.mean()
    spread = float(
        ((np.bincount(gaps.sample[chosen], minlength=samples)[all_of > 0] - expected) ** 2 / expected).mean()
    )
    if often.max() > ONE_ID * count:
        return f"{often.max()} of them are id {names[np.argmax(often)]}"
    if up > UPWARDS:
        return f"{up:.0%} of them likelier on the training side"
    if spread > SPREAD_OF_COUNTS:
        return "most of them in few samples"
    if abs(deviations) > POSITION_DEVIATIONS:
        return f"mostly {'late' if deviations > 0 else 'early'} in responses"
    return None


def _few_finding(gaps: Gaps, chosen: Bools, name: FaultName, where: str, far: bool) -> Finding:
    sizes, rest = np.abs(gaps.gap[chosen]), np.abs(gaps.gap[~chosen])
    share = float(gaps.k3[chosen].sum() / gaps.k3.sum())
    like = "as where the two engines route a token to different experts (MoE)"
    acts = "something acts on these tokens alone (banned or biased ids, special tokens, a mask)"
    return _finding(
        gaps,
        chosen,
        name,
        f"{len(sizes)} of {len(chosen)} tokens ({chosen.mean():.2%}; near certain ones aside) are {sizes.min():.2g} to "
        f"{sizes.max():.2g} nats apart and make {share:.0%} of k3, the others {np.median(rest):.2g} (median): {where}, "
        f"{like if name == 'moe_routing' else acts}.",
        ROUTING_FIX if name == "moe_routing" else FAR_FIX,
        {
            "tokens": len(sizes),
            "fraction": float(chosen.mean()),
            "share_of_k3": share,
            "median": float(np.median(rest)),
        },
        far,
        sure=name == "moe_routing",
    )


def _quantised(gaps: Gaps) -> Finding | None:
    """Noise of one size in all logits: |d| / (1 − p) is the same for likely and unlikely tokens.

    Independent noise σ on every logit gives a token of probability p the gap σ · √((1 − p)² + Σ_{j≠i} p_j²), about
    σ (1 − p) to σ √2 (1 − p).
    """
    noise = _logit_noise(gaps)
    level = float(gaps.k3.sum()) / len(gaps.batch.tokens)
    if noise is None or level <= SMALL_K3 or not gaps.homogeneous or _other_weights(gaps.batch):
        return None
    typical = float(np.median(noise))
    form = next(name for bar, name in NOISE_FORMS if typical <= bar)
    if typical <= NOISE_FORMS[0][0] or max(noise) > FLAT * min(noise):
        return None
    return _finding(
        gaps,
        np.ones(len(gaps.gap), dtype=bool),
        "quantised",
        f"The gap is that of noise of one size in all logits, {typical:.2g} nats for likely and unlikely tokens alike "
        f"({min(noise):.2g} to {max(noise):.2g}), in all samples and positions: more than bf16 makes, {form}. It fits "
        f"weights or a KV cache of lower precision on one side, and weights that differ a little in all layers.",
        QUANTISED_FIX,
        {"logit_noise": typical, "k3": level},
        False,
        sure=False,
    )


def _logit_noise(gaps: Gaps) -> list[float] | None:
    """Median |d| / (1 − p) over .6745, by class of log-prob; None with fewer than three classes."""
    noise = np.abs(gaps.gap) / -np.expm1(-np.maximum(gaps.depth, 1e-6)) / 0.6745
    parts = [noise[(gaps.depth >= low) & (gaps.depth < high)] for low, high in pairwise(CLASSES)]
    found = [float(np.median(part)) for part in parts if len(part) >= MIN_CLASS]
    return found if len(found) >= 3 else None


def _other_weights(batch: Batch) -> bool:
    """Some tokens were sampled by other weights than the trainer's, by what both sides tell: that explains noise."""
    return any(
        sample.trainer_version is not None and span.version != sample.trainer_version
        for sample in batch
        for span in sample.weight_versions
    )


def _far(gaps: Gaps) -> Finding:
    size, noise = np.abs(gaps.batch.tokens.gap), _logit_noise(gaps)
    k3_kl = float(gaps.k3.sum()) / len(size)
    fits = ""
    if noise and max(noise) <= FLAT * min(noise):
        form = next(name for bar, name in NOISE_FORMS if float(np.median(noise)) <= bar)
        fits = (
            f" It looks like noise in all logits ({np.median(noise):.2g} nats, {form}): other weights, low precision."
        )
    return _finding(
        gaps,
        np.abs(gaps.gap) > FAR_ABS_MEAN,
        "far_apart",
        f"Mean |gap| {size.mean():.3g} nats, k3 {k3_kl:.3g} over {len(size)} tokens: more than any sound pair of "
        f"engines is known to have (mean |gap| {FAR_ABS_MEAN}, k3 {FAR_K3}), and no known fault explains it.{fits}",
        FAR_FIX,
        {"abs_mean": float(size.mean()), "k3": k3_kl},
        True,
        sure=False,
    )


def _finding(
    gaps: Gaps,
    chosen: Bools,
    name: FaultName,
    evidence: str,
    fix: str,
    numbers: dict[str, float],
    far: bool,
    *,
    sure: bool,
) -> Finding:
    at = int(np.argmax(chosen))
    samples = [gaps.batch.samples[index] for index in np.unique(gaps.sample[chosen])] or list(gaps.batch.samples)
    found = gaps.batch.finding(
        name,
        "both",
        evidence,
        fix,
        samples,
        tokens=int(chosen.sum()),
        first=place_of(gaps.batch.samples[int(gaps.sample[at])], int(gaps.position[at])) if chosen.any() else None,
        statistics=numbers,
        confidence="likely" if sure else "possible",
    )
    return found if far else found.model_copy(update={"severity": "note"})
