"""Faults of a sampler's state: keys and values of older weights, updates that round away, and cloned responses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import GREEDY_BELOW
from mismatch_plugin.data.served import ServedKV
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.served import MOST_NAMES, few
from mismatch_plugin.diagnose.detectors.weights import (
    CLEAR_RATIO,
    LARGEST_P,
    MIN_SAMPLES,
    PAIRS_FURTHER,
    PRECISION,
    Scored,
    mann_whitney,
    score,
)
from mismatch_plugin.diagnose.findings import Finding, first_place

CACHE_FIX = (
    "Flush the KV cache with every update: flush_cache true in its last request, under a pause that retracts or aborts "
    "(SGLang refuses the flush under an in-place pause while requests run)."
)
CLONES_FIX = (
    "Give each sample of a group a seed of its own (sampling_seed) where inference is deterministic; else look for "
    "replies or records that are there twice."
)
ROUNDED_FIX = (
    "Nothing, where the trainer's master weights are float32: later updates bring the rest, and until then it is part "
    "of the mismatch. Else keep masters in float32; a server in float16 has eight times finer steps."
)
FEW_ELEMENTS = 0.05
"""Gaussian weights of a median of .011 in bfloat16: steps of 1e-6 change so many, and what is delivered has a cosine of
.12 with what was intended; steps of 1e-5 change .29, with a cosine of .37."""
LIKELY_AGAIN = np.log(1e-9)
"""Nats. Two independent draws are one and the same response of at most this log-prob with a chance of at most 1e-9."""


def find_stale_cache(batch: Batch) -> Outcome:
    """Samples that took keys and values out of a cache that older weights had filled."""
    found: list[tuple[Sample, list[ServedKV]]] = []
    for sample in batch:
        kept = sample.served.kv if sample.served is not None and sample.mask.any() else None
        if old := [span for span in kept or () if span.cached]:
            found.append((sample, old))
    if not found:
        return [], batch
    samples = [sample for sample, _ in found]
    tokens = sum(span.cached for _, old in found for span in old)
    prints = dict.fromkeys(span.fingerprint or "a half done update" for _, old in found for span in old)
    first = samples[0]
    assert first.served is not None
    evidence = (
        f"{len(found)} of {len(batch)} samples of {few(s.served.worker for s in samples if s.served)} took "
        f"keys and values of older weights out of the cache: {tokens} tokens of {', '.join([*prints][:MOST_NAMES])}, "
        f"under responses of {first.served.weights[-1].fingerprint}."
    )
    told = {"first": first_place(first, first.mask), "confidence": "certain", "statistics": {"kv_tokens": tokens}}
    return [batch.finding("stale_cache", "rollout", evidence, CACHE_FIX, samples, **told)], batch


def find_cached_further(batch: Batch) -> Outcome:
    """Without the plugin's word: samples whose prompts came out of the cache lie clearly further off than the others of
    one version and temperature."""
    cached, fresh = list[Scored](), list[Scored]()
    for item in score(batch):
        if (tokens := item.sample.cached_tokens) is not None:
            (cached if tokens else fresh).append(item)
    if min(len(cached), len(fresh)) < MIN_SAMPLES:
        return [], batch
    far, near = (np.array([item.relative for item in items]) for items in (cached, fresh))
    ranks, ratio = mann_whitney(far, near), float(np.median(far) / np.median(near))
    if ranks.p > LARGEST_P or ranks.area < PAIRS_FURTHER or ratio < CLEAR_RATIO or np.median(far) < PRECISION:
        return [], batch
    samples = [item.sample for item in cached]
    evidence = (
        f"{len(cached)} samples with a cached prompt lie {ratio:.2g} times as far from the training side as "
        f"{len(fresh)} without, under the same versions and temperature (in {ranks.area:.0%} of pairs, "
        f"p = {ranks.p:.1g}): as if older weights had filled the cache."
    )
    about = {"of_samples": len(cached) + len(fresh), "statistics": {"ratio": ratio, "area": ranks.area, "p": ranks.p}}
    fix = f"{CACHE_FIX} The SGLang plugin of this package tells which weights made each cached token."
    return [batch.finding("stale_cache", "rollout", evidence, fix, samples, confidence="possible", **about)], batch


def find_rounded_updates(batch: Batch) -> Outcome:
    """The last update changed all matrices and few elements: bfloat16 rounded away the steps of the others. A note. By
    the servers' word, else by both checkpoints."""
    found = [
        (sample, update.changed_elements)
        for sample in batch
        if (served := sample.served) is not None and served.dtype == "bfloat16" and served.quantization is None
        if (update := served.update) is not None and update.changed_elements is not None
        if update.changed_matrices == update.matrices and update.changed_elements < FEW_ELEMENTS
    ]
    wider = any(sample.served is not None and sample.served.dtype != "bfloat16" for sample in batch)
    change = None if batch.between is None or wider else batch.between.delivered
    if found:
        samples, least = [sample for sample, _ in found], min(share for _, share in found)
        evidence = (
            f"The last update of {few(s.served.worker for s in samples if s.served)} changed {least:.2%} of the "
            f"elements: bfloat16 rounded away the others' steps. Below {FEW_ELEMENTS:.0%} the change that serves has a "
            f"cosine of about .12 or less with the one that was trained."
        )
    elif change is not None and change.changed < FEW_ELEMENTS:
        samples, least = batch.samples, change.changed
        evidence = (
            f"Between both checkpoints {least:.2%} of the matrices' elements change in bfloat16, which rounds the "
            f"others away: what it delivers has a cosine of {change.cosine:.2f} with the change that was trained, and "
            f"{change.norm_ratio:.2g} times its norm."
        )
    else:
        return [], batch
    told = {"first": first_place(samples[0], samples[0].mask), "statistics": {"changed_elements": least}}
    finding = batch.finding("update_lost_in_precision", "rollout", evidence, ROUNDED_FIX, samples, **told)
    return [finding.model_copy(update={"severity": "note"})], batch


def find_cloned_groups(batch: Batch) -> Outcome:
    """Responses of one group that are the same, and too unlikely for two draws."""
    groups: dict[Hashable, list[Sample]] = defaultdict(list)
    for sample in batch:
        asked, values = sample.sampling, sample.rollout_log_probs
        told = len(values) == len(sample) and (sample.log_probs_of == "tempered" or sample.temperature == 1.0)
        drawn = sample.temperature >= GREEDY_BELOW and not asked.greedy and not asked.filtered
        if drawn and told and values[sample.loss_mask].sum() < LIKELY_AGAIN:  # false for NaN
            prompt = sample.prompt_ids.tobytes()
            groups[sample.step, sample.group, prompt, sample.response_ids.tobytes()].append(sample)
    clones = [same for same in groups.values() if len(same) > 1]
    return ([_cloned(batch, clones)] if clones else []), batch


def _cloned(batch: Batch, clones: Sequence[Sequence[Sample]]) -> Finding:
    samples = sorted((sample for same in clones for sample in same), key=lambda sample: sample.index)
    most = max(clones, key=len)
    evidence = (
        f"{len(samples)} of {len(batch)} samples repeat another response to their prompt token by token, up to "
        f"{len(most)} times in one group (sample {most[0].index}), which sampling does with a chance below 1e-9: their "
        f"group's advantages count them as {len(most)} draws."
    )
    told = {"first": first_place(samples[0], samples[0].mask), "confidence": "certain"}
    return batch.finding("cloned_group", "rollout", evidence, CLONES_FIX, samples, **told)
