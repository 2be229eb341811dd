"""What servers with our SGLang plugin told of the tokens: no statistics, one record is enough."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import GREEDY_BELOW
from mismatch_plugin.data.served import LastUpdate, Served, ServedWeights
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.distribution import PENALTY_FIX, TEMPERATURE_FIXES, TRUNCATION_FIXES
from mismatch_plugin.diagnose.findings import FaultName, Finding, called, first_place

MOST_NAMES = 4
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
FIELDS = (
    "dtype", "head_dtype", "kv_cache_dtype", "quantization", "speculative", "deterministic", "on_policy_target",
    "sglang",
)  # fmt: skip
"""Of `Served`: what moves log-probs, and should be equal on all workers."""

Worker = tuple[str, int | None]
Key = tuple[Worker, str | None]
"""A worker, and the label of its tokens."""


class Piece(NamedTuple):
    """Tokens of one response that train, sampled under one label from one state of the weights.

    label: None where the record has no versions. first, tokens: position of the first one, and how many they are.
    last: no later weights made tokens of this response: `update` is the one that brought these.
    """

    sample: Sample
    served: Served
    label: str | None
    weights: ServedWeights
    first: int
    tokens: int
    last: bool

    @property
    def key(self) -> Key:
        return self.served.worker, self.label

    @property
    def update(self) -> LastUpdate | None:
        """The update that brought these weights; None where there was none, or it is not told."""
        return self.served.update if self.last else None

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
        for label, begin, stop in labels:
            start = max(begin, weights.start)
            at = np.flatnonzero(sample.mask[start : max(min(stop, weights.end), start)])
            if len(at):
                last = weights is served.weights[-1]
                yield Piece(sample, served, label, weights, start + int(at[0]), len(at), last)


def few(workers: Iterable[tuple[str | None, int | None]]) -> str:
    """The first of these names, and how many more there are."""
    names = [called(worker) for worker in dict.fromkeys(workers)]
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def note(batch: Batch) -> str | None:
    """One sentence on who told what; None without the plugin."""
    told = [sample.served for sample in batch if sample.served is not None]
    if not told:
        return None
    found = {weights.fingerprint: None for served in told for weights in served.weights if weights.fingerprint}
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


_Told = Sequence[tuple[Sample, Served]]


def find_settings(batch: Batch) -> Outcome:
    """The temperature applied, filters, shifts and precision, of samples with a token that trains."""
    told = [(sample, served) for sample in batch if (served := sample.served) is not None and sample.mask.any()]
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
    items = (
        _temperature(batch, told),
        _unrecorded(batch, "truncation", "filters", cut, TRUNCATION_FIXES["recorded"]),
        _unrecorded(batch, "penalty", "shifts", moved, PENALTY_FIX),
        _differ(batch, told),
    )
    return [item for item in items if item is not None], batch


def _temperature(batch: Batch, told: _Told) -> Finding | None:
    """Log-probs at another temperature than the one asked for."""
    wrong: list[Sample] = []
    reasons: dict[tuple[str, str], str] = {}
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
        reasons.setdefault((f"asked for {asked:g}, log-probs are {at} ({why})", called(served.worker)), fix)
    shown = "; ".join(f"{what} on {who}" for what, who in [*reasons][:3])
    evidence = (
        f"{len(wrong)} of {len(batch)} samples have log-probs of another temperature than was asked for: {shown}."
    )
    return _finding(batch, "temperature", evidence, " ".join(dict.fromkeys(reasons.values())), wrong)


def _unrecorded(
    batch: Batch, fault: FaultName, field: Literal["filters", "shifts"], chosen: _Told, fix: str
) -> Finding | None:
    """A filter, penalty or bias that the record does not tell: a default of the server or the model."""
    values = ", ".join(dict.fromkeys(value for _, served in chosen for value in getattr(served, field)))
    effect = "tokens were drawn from a cut distribution" if field == "filters" else "it is part of their log-probs"
    evidence = (
        f"{few(served.worker for _, served in chosen)} applied {values} to {len(chosen)} of {len(batch)} samples whose "
        f"records tell nothing of it: {effect}."
    )
    first = DEFAULTS_FIX if any(sample.asked for sample, _ in chosen) else RECORD_FIX
    return _finding(batch, fault, evidence, f"{first} {fix}", [sample for sample, _ in chosen])


def _differ(batch: Batch, told: _Told) -> Finding | None:
    """Workers of other precision, quantisation, decoding or version."""
    said: list[str] = []
    odd: dict[int, Sample] = {}
    for field in FIELDS:
        of: dict[Any, dict[Any, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        for sample, served in told:
            of[getattr(served, field)][served.worker].append(sample)
        if len(of) < 2:
            continue
        said.append(f"{field} is " + ", ".join(f"{value} on {few(by)}" for value, by in of.items()))
        for by in minority(of) or of.values():
            odd |= {sample.index: sample for samples in by.values() for sample in samples}
    samples = [odd[index] for index in sorted(odd)]
    return _finding(batch, "server_differs", f"Servers differ: {'; '.join(said)}.", DIFFERS_FIX, samples)


def minority(of: dict[Any, dict[Any, Any]]) -> list[dict[Any, Any]]:
    """All groups but the one of the most workers; none where two have as many. of: value → worker → anything."""
    most = max(map(len, of.values()))
    fewer = [by for by in of.values() if len(by) < most]
    return fewer if len(of) - len(fewer) == 1 else []


def _finding(batch: Batch, fault: FaultName, evidence: str, fix: str, samples: Sequence[Sample]) -> Finding | None:
    if not samples:
        return None
    first = first_place(samples[0], samples[0].mask)
    return batch.finding(fault, "rollout", evidence, fix, samples, first=first, confidence="certain")
