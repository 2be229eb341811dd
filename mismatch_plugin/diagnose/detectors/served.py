"""What servers with our SGLang plugin told of the tokens, and cloned responses: no statistics, one record is enough."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import GREEDY_BELOW
from mismatch_plugin.data.served import LastUpdate, Served, ServedWeights
from mismatch_plugin.data.versions import INITIAL_VERSION, version_number
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.checkpoints import OLD_FIX, delivered
from mismatch_plugin.diagnose.detectors.distribution import PENALTY_FIX, TEMPERATURE_FIXES, TRUNCATION_FIXES
from mismatch_plugin.diagnose.result import FaultName, Finding, Item, Place, called

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

GREEDY_FIX = "Sample with top_k ≠ 1, or at temperature 1: SGLang has log-probs of greedy batches at temperature 1."
DEFAULTS_FIX = "Send every sampling parameter with the request: a generation_config or the server may set others."
RECORD_SAMPLING = "Record what was asked for (`sampling`, with a record)."
DIFFERS_FIX = "Start all servers of a run with the same arguments and the same SGLang; or --accept server_differs."
CACHE_FIX = (
    "Flush the KV cache with every update: flush_cache true in its last request, under a pause that retracts or aborts "
    "(under an in-place pause SGLang refuses it)."
)
CLONES_FIX = "Give each sample of a group its own sampling_seed; else look for records that are there twice."
ROUNDED_FIX = "Nothing, where master weights are float32: later updates bring the rest. Else keep them in float32."
NOT_UPDATED_FIX = (
    f"{OLD_FIX} A step that changes nothing (learning rate 0, as a warm-up may begin) is --accept weights_not_updated."
)
FIRST_SYNC_FIX = (
    f"Nothing, where this is the first sync of a run, which sends the loaded weights again. Else: {OLD_FIX}"
)
PARTLY_FIX = (
    "Compare the names that are sent with those that the server knows. Where layers are frozen or only adapters train, "
    "it is meant: --accept weights_partly_updated."
)
HALF_FIX = "Pause generation while weights are sent (mode retract), until every bucket of every rank has arrived."
LABEL_FIX = "Send a weight_version of its own with every update: staleness and a comparison of servers go by it."
OTHER_FIX = "Compare what is sent with what serves: names, dtype, the step, updates that another job sends."
BEHIND_FIX = (
    "Send the present weights to {which} again and read what each update returned. Compare POST /weights_checker "
    '{{"action": "checksum"}} over all servers and workers, each asked directly; all should compute in one precision.'
)
Told = Sequence[tuple[Sample, Served]]
Key = tuple[tuple[str, int | None], str | None]
"""A worker, and the label of its tokens."""


def few(workers: Iterable[tuple[str | None, int | None]]) -> str:
    """The first of these names, and how many more there are."""
    names = [called(worker) for worker in dict.fromkeys(workers)]
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _told(batch: Batch) -> Told:
    """Samples with a token that trains of servers that told of it."""
    return [(sample, served) for sample in batch if (served := sample.served) is not None and sample.mask.any()]


def note(batch: Batch) -> list[str]:
    """One sentence on who told what; nothing without the plugin."""
    told = [sample.served for sample in batch if sample.served is not None]
    if not told:
        return []
    found = dict.fromkeys(weights.fingerprint for served in told for weights in served.weights if weights.fingerprint)
    which = f"weights {', '.join([*found][:MOST_NAMES])}" + (", …" if len(found) > MOST_NAMES else "")
    sent = ", which are what the trainer sent" if weights_agree(batch) else ""
    workers = few(served.worker for served in told)
    which = which if found else "no fingerprint of weights"
    return [f"the SGLang plugin told of {len(told)} of {len(batch)} samples: {workers}; {which}{sent}."]


# Settings, caches, precision, clones ----------------------------------------------------------------------------------


def find_settings(batch: Batch) -> Outcome:
    """The temperature applied, filters, shifts and precision."""
    told, found = _told(batch), list[Item]()
    filtered, shifted = dict[int, Sequence[str]](), dict[int, Sequence[str]]()  # by sample, what was applied untold
    for sample, served in told:
        asked = sample.sampling
        if not (asked.greedy or asked.filtered or sample.behaviour_log_probs is not None):
            filtered[sample.index] = served.filters
        if not (asked.penalised or asked.min_new_tokens):
            shifted[sample.index] = served.shifts
    recorded = TRUNCATION_FIXES["recorded"]
    for fault, applied, fix in (("truncation", filtered, recorded), ("penalty", shifted, PENALTY_FIX)):
        samples = [batch.samples[index] for index, values in applied.items() if values]
        if samples:  # a default of the server or the model
            values = ", ".join(dict.fromkeys(value for values in applied.values() for value in values))
            evidence = (
                f"{few(sample.worker for sample in samples)} applied {values} to {len(samples)} of {len(batch)} "
                f"samples whose records tell nothing of it."
            )
            fix = f"{DEFAULTS_FIX if any(sample.asked for sample in samples) else RECORD_SAMPLING} {fix}"
            found.append(batch.finding(fault, "rollout", evidence, fix, samples, confidence="certain"))
    return [*_temperature(batch, told), *found, *_differ(batch, told)], batch


def _temperature(batch: Batch, told: Told) -> list[Item]:
    """Log-probs at another temperature than the one asked for."""
    wrong: list[Sample] = []
    reasons: dict[str, str] = {}
    for sample, served in told:
        asked, raw = sample.temperature, served.log_probs_of == "raw"
        got = 1.0 if raw else served.temperature
        same = asked == 1.0 if got is None else math.isclose(got, asked, rel_tol=1e-6)
        if not sample.asked or asked < GREEDY_BELOW or same:
            continue
        wrong.append(sample)
        fix = GREEDY_FIX if sample.sampling.top_k == 1 else TEMPERATURE_FIXES["other"]
        at = "1 in batches that were all greedy" if got is None else f"{got:g}"
        said = f"asked for {asked:g}, log-probs are at {at} on {called(served.worker)}"
        reasons.setdefault(said, TEMPERATURE_FIXES["rollout_raw"] if raw else fix)
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
    for field in FIELDS:
        of: dict[Any, list[Any]] = defaultdict(list)
        for _, served in told:
            of[getattr(served, field)].append(served.worker)
        if len(of) > 1:
            said.append(f"{field} is " + ", ".join(f"{value} on {few(workers)}" for value, workers in of.items()))
    if not said:
        return []
    evidence, samples = f"Servers differ: {'; '.join(said)}.", [sample for sample, _ in told]
    return [batch.finding("server_differs", "rollout", evidence, DIFFERS_FIX, samples, confidence="certain")]


def find_stale_cache(batch: Batch) -> Outcome:
    """Samples that took keys and values out of a cache that older weights had filled."""
    pairs = ((sample, [span for span in served.kv or () if span.cached]) for sample, served in _told(batch))
    found = [(sample, old) for sample, old in pairs if old]
    if not found:
        return [], batch
    tokens, samples = sum(span.cached for _, old in found for span in old), [sample for sample, _ in found]
    prints = dict.fromkeys(span.fingerprint or "a half done update" for _, old in found for span in old)
    evidence = (
        f"{len(found)} of {len(batch)} samples of {few(sample.worker for sample in samples)} took keys and values of "
        f"older weights out of the cache: {tokens} tokens of {', '.join([*prints][:MOST_NAMES])}."
    )
    about = {"confidence": "certain", "statistics": {"kv_tokens": tokens}}
    return [batch.finding("stale_cache", "rollout", evidence, CACHE_FIX, samples, **about)], batch


def find_rounded_updates(batch: Batch) -> Outcome:
    """The last update changed all matrices and few elements: bfloat16 rounded away the others' steps. A note. By the
    servers' word, else by both checkpoints."""
    found = [
        (sample, update.changed_elements)
        for sample, served in _told(batch)
        if served.dtype == "bfloat16" and served.quantization is None
        if (update := served.update) is not None and update.changed_elements is not None
        if update.changed_matrices == update.matrices and update.changed_elements < FEW_ELEMENTS
    ]
    if found:
        samples, least = [sample for sample, _ in found], min(share for _, share in found)
        evidence = (
            f"The last update of {few(sample.worker for sample in samples)} changed {least:.2%} of the elements: "
            f"bfloat16 rounded away the others' steps. Below {FEW_ELEMENTS:.0%} the change that serves has a cosine of "
            f"about .12 or less with the one that was trained."
        )
    else:
        wider = any(sample.served is not None and sample.served.dtype != "bfloat16" for sample in batch)
        change = None if batch.now is None or batch.start is None else delivered(batch.now, batch.start)
        if change is None or wider or change.changed >= FEW_ELEMENTS:
            return [], batch
        samples, least = batch.samples, change.changed
        evidence = (
            f"Between both checkpoints {least:.2%} of the matrices' elements change in bfloat16, which rounds the "
            f"others away: what it delivers has a cosine of {change.cosine:.2f} with the change that was trained."
        )
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


# Weights: those that did not move, or in part, or are others ----------------------------------------------------------


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
    def idle(self) -> bool:
        """Its update, not the first one, changed nothing, and was not sent a second time under the version it had."""
        again = self.label not in (None, INITIAL_VERSION) and self.label == self.weights.since
        return self.update is not None and not self.update.changed and self.update.number > 1 and not again

    def moved(self, since: str | None) -> bool:
        """The label is a later one than `since`. An earlier one came before the weights: they were named late, or the
        trainer started anew."""
        if self.label is None or since is None or self.label == since:
            return False
        label, first = version_number(self.label), version_number(since)
        return label is None or first is None or label > first

    @property
    def not_as_sent(self) -> bool:
        """The trainer sent other weights as this version (its 5 is the servers' step-5; rollouts may be older than it).
        What a server quantises is not what was sent."""
        sent, trainer = self.sample.trainer_fingerprint, self.sample.trainer_version
        if None in (sent, self.weights.fingerprint, trainer, self.label):
            return False
        if self.served.quantization is not None or self.served.kv_heads_repeated:
            return False
        number = version_number(trainer)
        same = trainer == self.label or (number is not None and number == version_number(self.label))
        return same and sent != self.weights.fingerprint


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


def weights_agree(batch: Batch) -> bool:
    """All tokens that train were sampled from the very weights that the trainer sent, by the fingerprints of both."""

    def agrees(sample: Sample) -> bool:
        sent, pieces = sample.trainer_fingerprint, [*pieces_of(sample)]
        whole = sum(piece.tokens for piece in pieces) == int(sample.mask.sum())
        return sent is not None and whole and all(piece.weights.fingerprint == sent for piece in pieces)

    trained = [sample for sample in batch if sample.mask.any()]
    return bool(trained) and all(map(agrees, trained))


def find_served_weights(batch: Batch) -> Outcome:
    """Of tokens that train; each worker's faults by the rule that says most of it."""
    pieces = [piece for sample in batch for piece in pieces_of(sample)]
    found: list[Item] = []
    rest = pieces
    for rule in (_partly, _stale, _not_updated):
        items, explained = rule(batch, rest)
        found += items
        rest = [piece for piece in rest if piece.key not in explained]
    return [*found, *_half_done(batch, pieces), *_reused(batch, pieces), *_others(batch, rest)], batch


def _finding(batch: Batch, fault: FaultName, evidence: str, fix: str, pieces: Sequence[Piece], **more: Any) -> Finding:
    """About these tokens."""
    first = min(pieces, key=lambda piece: (piece.sample.index, piece.first))
    version = None if first.label is None else f"version {first.label}"
    place = Place(sample=first.sample.index, sample_id=first.sample.sample_id, position=first.first, rollout=version)
    samples = [*{piece.sample.index: piece.sample for piece in pieces}.values()]
    about = {"tokens": _count(pieces), "first": place, "confidence": "certain"} | more
    return batch.finding(fault, "rollout", evidence, fix, samples, **about)


def _count(pieces: Iterable[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)


def _names(pieces: Iterable[Piece]) -> str:
    return few(piece.served.worker for piece in pieces)


def _half_done(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """Tokens without a fingerprint, of a server that can take them: of a half done update."""
    able = {piece.served.worker for piece in pieces if piece.weights.fingerprint is not None or piece.served.update}
    half = [piece for piece in pieces if piece.weights.fingerprint is None and piece.served.worker in able]
    if not half:
        return []
    evidence = (
        f"{_count(half)} tokens of {_names(half)} were sampled while a weight update was half done, or the server "
        f"could not take a fingerprint (then its log says so)."
    )
    return [_finding(batch, "weights_partly_updated", evidence, HALF_FIX, half)]


def _partly(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """The last update changed some matrices and not the others."""
    wrong = [(p, u) for p in pieces if (u := p.update) is not None and u.changed and u.changed_matrices < u.matrices]
    if not wrong:
        return [], set()
    said = {
        piece.served.worker: f"{called(piece.served.worker)}: update {update.number} changed {update.changed_matrices} "
        f"of {update.matrices} matrices ({update.changed} of {update.tensors} tensors), not "
        f"{', '.join([*update.unchanged, '…'])}"
        for piece, update in wrong
    }
    evidence = f"The last update changed only a part of the weights. {'; '.join([*said.values()][:MOST_NAMES])}."
    told = [piece for piece, _ in wrong]
    found = _finding(batch, "weights_partly_updated", evidence, PARTLY_FIX, told, confidence="likely")
    return [found], {piece.key for piece in told}


def _stale(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """One label, and other weights on other workers, of those that hold weights in the same form."""
    of: dict[Hashable, dict[str, dict[Any, list[Piece]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for piece in pieces:
        if piece.label is not None and piece.weights.fingerprint is not None:
            told = piece.served
            # Servers that shard otherwise may repeat or split tensors; a resumed run counts versions anew.
            form = told.dtype, told.quantization, told.sglang, told.tp_size, told.pp_size, told.ep_size
            of[piece.label, piece.sample.step, form][piece.weights.fingerprint][told.worker].append(piece)
    odd: list[Piece] = []
    explained: set[Key] = set()
    evidence = ""
    for by in of.values():
        workers = [*chain(*by.values())]
        if len(by) < 2 or len(workers) > len({*workers}):
            continue  # of a worker with several weights under this label nothing tells which are the label's
        why = "Behind"
        chosen = [by_worker for by_worker in by.values() if any(map(_behind, chain(*by_worker.values())))]
        if len(chosen) in (0, len(by)):
            most = max(map(len, by.values()))
            fewer = [by_worker for by_worker in by.values() if len(by_worker) < most]
            why, chosen = "In the minority", fewer if len(by) - len(fewer) == 1 else []
        wrong = [piece for own in chosen or by.values() for piece in chain(*own.values())]
        if not odd:
            shown = "; ".join(f"{print_} on {few(by_worker)}" for print_, by_worker in by.items())
            which = f"{why}: {_names(wrong)}." if chosen else "Nothing here tells which of them are right."
            evidence = f"Under one label, {wrong[0].label!r}, servers hold other weights: {shown}. {which}"
        odd += wrong
        explained |= {piece.key for piece in wrong if chosen}
    if not odd:
        return [], set()
    # A trainer that names no version: the servers may have been asked before and after an update.
    unnamed = all(piece.label == INITIAL_VERSION for piece in odd)
    fix = BEHIND_FIX.format(which=_names(odd))
    found = _finding(batch, "stale_server", evidence, fix, odd, severity="note" if unnamed else "fault")
    return [found], set() if unnamed else explained


def _behind(piece: Piece) -> bool:
    """The label is not the one that its weights came with, its update brought nothing, or the trainer sent others."""
    return piece.moved(piece.weights.since) or piece.not_as_sent or piece.idle


def _not_updated(batch: Batch, pieces: Sequence[Piece]) -> tuple[list[Item], set[Key]]:
    """The label moved and the weights did not, or an update after the first one changed nothing."""
    of: dict[Hashable, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.weights.fingerprint is not None:
            of[piece.served.worker, piece.weights.fingerprint].append(piece)
    moved: list[tuple[Piece, str]] = []
    first_sync: list[tuple[Piece, str]] = []
    for group in of.values():
        labels = {piece.label for piece in group if piece.label is not None}
        earliest = min(labels, key=lambda label: (-1 if (n := version_number(label)) is None else n, label), default="")
        # Weights that come back later are told anew, so that each token's own `since` counts.
        sinces = [(piece, piece.weights.since or earliest) for piece in group]
        late = [(piece, since) for piece, since in sinces if since and piece.moved(since)]
        once = len(labels - {INITIAL_VERSION}) == 1 and all(since == INITIAL_VERSION for _, since in late)
        # Other weights than the loaded ones are those of a first update that changed something, or of a later one that
        # changed nothing. A later one that did may have come after the tokens of a response that it ended.
        updates = [update for piece in group if (update := piece.update) is not None]
        loaded = not any((update.changed > 0) == (update.number == 1) for update in updates)
        (first_sync if once and loaded else moved).extend(late)
    idle = [piece for piece in pieces if piece.idle]
    ids = {id(piece) for piece in (*(piece for piece, _ in moved), *idle)}
    wrong = [piece for piece in pieces if id(piece) in ids]
    found: list[Item] = []
    if wrong:
        evidence = f"{_said(moved)} " if moved else ""
        evidence += f"The last update of {_names(idle)} changed no tensor: every step of RL does." if idle else ""
        found.append(_finding(batch, "weights_not_updated", evidence.strip(), NOT_UPDATED_FIX, wrong))
    if first_sync:
        evidence, synced = f"{_said(first_sync)} They are those that it had loaded.", [piece for piece, _ in first_sync]
        found.append(_finding(batch, "weights_not_updated", evidence, FIRST_SYNC_FIX, synced, severity="note"))
    return found, {piece.key for piece in wrong}


def _said(moved: Sequence[tuple[Piece, str]]) -> str:
    piece, since = moved[0]
    return (
        f"{_count(one for one, _ in moved)} tokens of {_names(one for one, _ in moved)} came from the same weights "
        f"(fingerprint {piece.weights.fingerprint}) under {piece.label!r} as under {since!r}."
    )


def _reused(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """One worker, one label, several weights."""
    of: dict[Key, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        if piece.label is not None and piece.weights.fingerprint is not None:
            of[piece.key][piece.weights.fingerprint].append(piece)
    wrong = {key: by for key, by in of.items() if len(by) > 1}
    if not wrong:
        return []
    (worker, label), by = next(iter(wrong.items()))
    later = [piece for by in wrong.values() for group in [*by.values()][1:] for piece in group]
    evidence = (
        f"Weights changed under the same label: {called(worker)} sampled from {len(by)} different ones under {label!r} "
        f"({', '.join([*by][:MOST_NAMES])})."
    )
    unnamed = all(name == INITIAL_VERSION for _, name in wrong)  # a trainer that names no version
    return [_finding(batch, "label_reused", evidence, LABEL_FIX, later, severity="note" if unnamed else "fault")]


def _others(batch: Batch, pieces: Sequence[Piece]) -> list[Item]:
    """The last token that trains of each sample: other weights than those that the trainer sent as this version."""
    last = {piece.sample.index: piece for piece in pieces}
    wrong = [piece for piece in last.values() if piece.not_as_sent]
    if not wrong:
        return []
    evidence = (
        f"{_names(wrong)} sampled from weights {wrong[0].weights.fingerprint} under {wrong[0].label!r}, the trainer "
        f"sent {wrong[0].sample.trainer_fingerprint}: other weights serve than those that train."
    )
    return [_finding(batch, "other_weights", evidence, OTHER_FIX, wrong)]
