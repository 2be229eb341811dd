"""What servers with our SGLang plugin told of the tokens, and cloned responses: no statistics, one record is enough."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import GREEDY_BELOW
from mismatch_plugin.data.served import LastUpdate, Served, ServedKV, ServedWeights
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.distribution import PENALTY_FIX, TEMPERATURE_FIXES, TRUNCATION_FIXES
from mismatch_plugin.diagnose.findings import Item, called

MOST_NAMES = 4
FIELDS = (
    "dtype", "head_dtype", "kv_cache_dtype", "quantization", "speculative", "deterministic", "on_policy_target",
    "sglang",
)  # fmt: skip
"""Of `Served`: what moves log-probs, and should be equal on all workers."""
FEW_ELEMENTS = 0.05
"""Gaussian weights of a median of .011 in bfloat16: steps of 1e-6 change so many, and what is delivered has a cosine of
.12 with what was intended; steps of 1e-5 change .29, with a cosine of .37."""
LIKELY_AGAIN = math.log(1e-9)
"""Nats. Two independent draws are one and the same response of at most this log-prob with a chance of at most 1e-9."""

GREEDY_FIX = (
    "Sample with top_k ≠ 1: SGLang computes the log-probs of a batch of greedy requests at temperature 1, those of a "
    "mixed one at the temperature asked for. Where greedy is meant, ask for temperature 1."
)
DEFAULTS_FIX = (
    "Send every sampling parameter with the request: what it leaves out comes from the model's generation_config or "
    "the server's preferred_sampling_params."
)
RECORD_FIX = "Record what was asked for (`sampling`, with a record)."
DIFFERS_FIX = "Start all servers of a run with the same arguments and the same SGLang; or --accept server_differs."
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
Key = tuple[tuple[str, int | None], str | None]
"""A worker, and the label of its tokens."""


class Piece(NamedTuple):
    """Tokens of one response that train, sampled under one label from one state of the weights.

    label: None where the record has no versions. first, tokens: position of the first one, and how many they are.
    update: the one that brought these weights; None where there was none, or it is not told.
    """

    sample: Sample
    served: Served
    label: str | None
    weights: ServedWeights
    first: int
    tokens: int
    update: LastUpdate | None

    @property
    def key(self) -> Key:
        return self.served.worker, self.label

    @property
    def idle(self) -> LastUpdate | None:
        """The update, where it changed nothing."""
        return None if self.update is None or self.update.changed else self.update


def pieces_of(sample: Sample) -> Iterator[Piece]:
    """The tokens of a response that train, in order."""
    served, versions = sample.served, sample.weight_versions
    if served is None:
        return
    labels = [(span.version, span.start, span.end) for span in versions] or [(None, 0, len(sample))]
    for weights in served.weights:
        update = served.update if weights is served.weights[-1] else None  # later ones made tokens of this response
        for label, begin, stop in labels:
            start = max(begin, weights.start)
            at = np.flatnonzero(sample.mask[start : max(min(stop, weights.end), start)])
            if len(at):
                yield Piece(sample, served, label, weights, start + int(at[0]), len(at), update)


def few(workers: Iterable[tuple[str | None, int | None]]) -> str:
    """The first of these names, and how many more there are."""
    names = [called(worker) for worker in dict.fromkeys(workers)]
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def note(batch: Batch) -> str | None:
    """One sentence on who told what; None without the plugin."""
    told = [sample.served for sample in batch if sample.served is not None]
    if not told:
        return None
    found = dict.fromkeys(weights.fingerprint for served in told for weights in served.weights if weights.fingerprint)
    which = f"weights {', '.join([*found][:MOST_NAMES])}" + (", …" if len(found) > MOST_NAMES else "")
    sent = ", which are what the trainer sent" if weights_agree(batch) else ""
    return (
        f"the SGLang plugin told of {len(told)} of {len(batch)} samples: "
        f"{few(served.worker for served in told)}; {which if found else 'no fingerprint of weights'}{sent}."
    )


def weights_agree(batch: Batch) -> bool:
    """All tokens that train were sampled from the very weights that the trainer sent, by the fingerprints of both."""

    def agrees(sample: Sample) -> bool:
        sent, pieces = sample.trainer_fingerprint, [*pieces_of(sample)]
        whole = sum(piece.tokens for piece in pieces) == int(sample.mask.sum())
        return sent is not None and whole and all(piece.weights.fingerprint == sent for piece in pieces)

    trained = [sample for sample in batch if sample.mask.any()]
    return bool(trained) and all(map(agrees, trained))


Told = Sequence[tuple[Sample, Served]]


def _told(batch: Batch) -> Told:
    """Samples with a token that trains of servers that told of it."""
    return [(sample, served) for sample in batch if (served := sample.served) is not None and sample.mask.any()]


def find_settings(batch: Batch) -> Outcome:
    """The temperature applied, filters, shifts and precision."""
    told, found = _told(batch), []
    cut = [
        (sample, served)
        for sample, served in told
        if served.filters and not (sample.sampling.greedy or sample.sampling.filtered)
        if sample.behaviour_log_probs is None
    ]
    moved = [
        (sample, served)
        for sample, served in told
        if served.shifts and not (sample.sampling.penalised or sample.sampling.min_new_tokens)
    ]
    cuts, moves = "tokens were drawn from a cut distribution", "it is part of their log-probs"
    for fault, field, chosen, effect, fix in (
        ("truncation", "filters", cut, cuts, TRUNCATION_FIXES["recorded"]),
        ("penalty", "shifts", moved, moves, PENALTY_FIX),
    ):
        if chosen:  # a default of the server or the model
            values = ", ".join(dict.fromkeys(value for _, served in chosen for value in getattr(served, field)))
            evidence = (
                f"{few(served.worker for _, served in chosen)} applied {values} to {len(chosen)} of {len(batch)} "
                f"samples whose records tell nothing of it: {effect}."
            )
            fix = f"{DEFAULTS_FIX if any(sample.asked for sample, _ in chosen) else RECORD_FIX} {fix}"
            samples = [sample for sample, _ in chosen]
            found.append(batch.finding(fault, "rollout", evidence, fix, samples, confidence="certain"))
    return [*_temperature(batch, told), *found, *_differ(batch, told)], batch


def _temperature(batch: Batch, told: Told) -> list[Item]:
    """Log-probs at another temperature than the one asked for."""
    wrong: list[Sample] = []
    reasons: dict[str, str] = {}
    for sample, served in told:
        asked, top_k = sample.temperature, sample.sampling.top_k
        raw = served.log_probs_of == "raw"
        got = 1.0 if raw else served.temperature
        same = asked == 1.0 if got is None else math.isclose(got, asked, rel_tol=1e-6)
        if not sample.asked or asked < GREEDY_BELOW or same:
            continue
        wrong.append(sample)
        at = "at more than one temperature" if got is None else f"at {got:g}"
        if raw:
            why, fix = "the server returns those before temperature", TEMPERATURE_FIXES["rollout_raw"]
        elif top_k == 1:
            mixed = "batches that were all greedy and others" if got is None else "a batch that was all greedy"
            why, fix = f"top_k 1 in {mixed}", GREEDY_FIX
        else:
            why, fix = "the server applied its own", TEMPERATURE_FIXES["other"]
        reasons.setdefault(f"asked for {asked:g}, log-probs are {at} ({why}) on {called(served.worker)}", fix)
    if not wrong:
        return []
    evidence = (
        f"{len(wrong)} of {len(batch)} samples have log-probs of another temperature than was asked for: "
        f"{'; '.join([*reasons][:3])}."
    )
    fix = " ".join(dict.fromkeys(reasons.values()))
    return [batch.finding("temperature", "rollout", evidence, fix, wrong, confidence="certain")]


def _differ(batch: Batch, told: Told) -> list[Item]:
    """Workers of other precision, quantisation, decoding or version."""
    said: list[str] = []
    odd: dict[int, Sample] = {}
    for field in FIELDS:
        of: dict[Any, dict[Any, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        for sample, served in told:
            of[getattr(served, field)][served.worker].append(sample)
        if len(of) > 1:
            said.append(f"{field} is " + ", ".join(f"{value} on {few(by)}" for value, by in of.items()))
            for by in minority(of) or of.values():
                odd |= {sample.index: sample for samples in by.values() for sample in samples}
    if not odd:
        return []
    evidence, samples = f"Servers differ: {'; '.join(said)}.", [odd[index] for index in sorted(odd)]
    return [batch.finding("server_differs", "rollout", evidence, DIFFERS_FIX, samples, confidence="certain")]


def minority(of: dict[Any, dict[Any, Any]]) -> list[dict[Any, Any]]:
    """All groups but the one of the most workers; none where two have as many. of: value → worker → anything."""
    most = max(map(len, of.values()))
    fewer = [by for by in of.values() if len(by) < most]
    return fewer if len(of) - len(fewer) == 1 else []


def find_stale_cache(batch: Batch) -> Outcome:
    """Samples that took keys and values out of a cache that older weights had filled."""
    found: list[tuple[Sample, Served, list[ServedKV]]] = []
    for sample, served in _told(batch):
        if old := [span for span in served.kv or () if span.cached]:
            found.append((sample, served, old))
    if not found:
        return [], batch
    tokens = sum(span.cached for *_, old in found for span in old)
    prints = dict.fromkeys(span.fingerprint or "a half done update" for *_, old in found for span in old)
    evidence = (
        f"{len(found)} of {len(batch)} samples of {few(served.worker for _, served, _ in found)} took keys and values "
        f"of older weights out of the cache: {tokens} tokens of {', '.join([*prints][:MOST_NAMES])}, under responses "
        f"of {found[0][1].weights[-1].fingerprint}."
    )
    about = {"confidence": "certain", "statistics": {"kv_tokens": tokens}}
    samples = [sample for sample, *_ in found]
    return [batch.finding("stale_cache", "rollout", evidence, CACHE_FIX, samples, **about)], batch


def find_rounded_updates(batch: Batch) -> Outcome:
    """The last update changed all matrices and few elements: bfloat16 rounded away the steps of the others. A note. By
    the servers' word, else by both checkpoints."""
    found = [
        (sample, served, update.changed_elements)
        for sample, served in _told(batch)
        if served.dtype == "bfloat16" and served.quantization is None
        if (update := served.update) is not None and update.changed_elements is not None
        if update.changed_matrices == update.matrices and update.changed_elements < FEW_ELEMENTS
    ]
    wider = any(sample.served is not None and sample.served.dtype != "bfloat16" for sample in batch)
    change = None if batch.between is None or wider else batch.between.delivered
    if found:
        samples, least = [sample for sample, *_ in found], min(share for *_, share in found)
        evidence = (
            f"The last update of {few(served.worker for _, served, _ in found)} changed {least:.2%} of the elements: "
            f"bfloat16 rounded away the others' steps. Below {FEW_ELEMENTS:.0%} the change that serves has a cosine of "
            f"about .12 or less with the one that was trained."
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
    about = {"statistics": {"changed_elements": least}, "severity": "note"}
    return [batch.finding("update_lost_in_precision", "rollout", evidence, ROUNDED_FIX, samples, **about)], batch


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
    if not clones:
        return [], batch
    samples = sorted((sample for same in clones for sample in same), key=lambda sample: sample.index)
    most = max(clones, key=len)
    evidence = (
        f"{len(samples)} of {len(batch)} samples repeat another response to their prompt token by token, up to "
        f"{len(most)} times in one group (sample {most[0].index}), which sampling does with a chance below 1e-9: their "
        f"group's advantages count them as {len(most)} draws."
    )
    return [batch.finding("cloned_group", "rollout", evidence, CLONES_FIX, samples, confidence="certain")], batch
