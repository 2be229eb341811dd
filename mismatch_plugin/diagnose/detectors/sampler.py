"""Faults of a sampler's state: keys and values of older weights, weights of its launch, updates that round away, and
groups of which each response is the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import GREEDY_BELOW
from mismatch_plugin.data.served import ServedKV
from mismatch_plugin.data.versions import INITIAL_VERSION, version_number
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.served import MOST_NAMES, Piece, few, pieces_of
from mismatch_plugin.diagnose.findings import Finding, first_place

CACHE_FIX = (
    "Flush the KV cache with every update: flush_cache true in its last request, under a pause that retracts or aborts "
    "(SGLang refuses the flush under an in-place pause while requests run)."
)
LAUNCH_FIX = (
    "Send the weights to each server after its start and before it gets requests, also when it starts again in the "
    "middle of a run; leave these samples out."
)
CLONES_FIX = (
    "Give each sample of a group a seed of its own (sampling_seed) where inference is deterministic; else look for "
    "replies or records that are there twice."
)
LIKELY_AGAIN = np.log(1e-9)
"""Nats. Two independent draws are one and the same response of at most this log-prob with a chance of at most 1e-9."""


def find_stale_cache(batch: Batch) -> Outcome:
    """Samples computed with keys and values of weights that made none of their tokens."""
    found: list[tuple[Sample, list[ServedKV]]] = []
    for sample in batch:
        if (served := sample.served) is not None and served.kv and sample.mask.any():
            own = {span.fingerprint for span in served.weights}
            if old := [span for span in served.kv if span.fingerprint not in own]:
                found.append((sample, old))
    if not found:
        return [], batch
    samples = [sample for sample, _ in found]
    tokens = sum(span.tokens for _, old in found for span in old)
    prints = dict.fromkeys(span.fingerprint or "a half done update" for _, old in found for span in old)
    first = samples[0]
    assert first.served is not None
    evidence = (
        f"{len(found)} of {len(batch)} samples of {few(s.served.worker for s in samples if s.served)} were computed "
        f"with keys and values of older weights: {tokens} tokens of {', '.join([*prints][:MOST_NAMES])}, under "
        f"responses of {first.served.weights[-1].fingerprint}."
    )
    told = {"first": first_place(first, first.mask), "confidence": "certain", "statistics": {"kv_tokens": tokens}}
    return [batch.finding("stale_cache", "rollout", evidence, CACHE_FIX, samples, **told)], batch


def find_launch_weights(batch: Batch) -> Outcome:
    """Samples of a server that had no update since its launch, while the trainer sent more than may be missed."""

    def is_behind(piece: Piece) -> bool:
        version, sent = version_number(piece.sample.trainer_version), piece.sample.trainer_fingerprint
        untouched = piece.served.update is None and piece.weights.since in (None, INITIAL_VERSION)
        as_sent = sent is not None and sent == piece.weights.fingerprint
        late = version is not None and version > batch.max_staleness
        return piece.label == INITIAL_VERSION and untouched and late and not as_sent

    pieces = [piece for sample in batch for piece in pieces_of(sample) if is_behind(piece)]
    if not pieces:
        return [], batch
    samples = [*{piece.sample.index: piece.sample for piece in pieces}.values()]
    evidence = (
        f"{len(samples)} of {len(batch)} samples are of the weights that {few(p.served.worker for p in pieces)} was "
        f"launched with (fingerprint {pieces[0].weights.fingerprint}), and the trainer is at "
        f"{samples[0].trainer_version}: it started again, or no update ever reached it."
    )
    told = {"first": first_place(samples[0], samples[0].mask), "confidence": "certain"}
    return [batch.finding("weights_not_updated", "rollout", evidence, LAUNCH_FIX, samples, **told)], batch


def find_cloned_groups(batch: Batch) -> Outcome:
    """Responses of one group that are the same, and too unlikely for two draws."""
    groups: dict[Hashable, list[Sample]] = defaultdict(list)
    for sample in batch:
        asked, of = sample.sampling, sample.log_probs_of == "tempered" or sample.temperature == 1.0
        drawn = sample.temperature > GREEDY_BELOW and not asked.greedy and not asked.filtered and of
        values = sample.rollout_log_probs
        if drawn and len(values) == len(sample) and values.sum() < LIKELY_AGAIN:  # false for NaN
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
