"""What servers with our SGLang plugin told of their log-probs: the temperature applied, filters, shifts, precision."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import GREEDY_BELOW
from mismatch_plugin.data.served import Served
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.detectors.distribution import PENALTY_FIX, TEMPERATURE_FIXES, TRUNCATION_FIXES
from mismatch_plugin.diagnose.detectors.populations import called
from mismatch_plugin.diagnose.detectors.served_pieces import few
from mismatch_plugin.diagnose.findings import FaultName, Finding, Item, first_place

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


def find_settings(batch: Batch) -> list[Item]:
    """Of samples with a token that trains."""
    told = [(sample, served) for sample in batch if (served := sample.served) is not None and sample.mask.any()]
    rules = (_temperature, _filters, _shifts, _differ)
    return [item for rule in rules if (item := rule(batch, told)) is not None]


_Told = Sequence[tuple[Sample, Served]]


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
    if not wrong:
        return None
    shown = "; ".join(f"{what} on {who}" for what, who in [*reasons][:3])
    evidence = (
        f"{len(wrong)} of {len(batch)} samples have log-probs of another temperature than was asked for: {shown}."
    )
    return _finding(batch, "temperature", evidence, " ".join(dict.fromkeys(reasons.values())), wrong)


def _filters(batch: Batch, told: _Told) -> Finding | None:
    """A filter that the record does not tell: a default of the server or the model."""
    chosen = [
        (sample, served)
        for sample, served in told
        if served.filters and not (sample.sampling.greedy or sample.sampling.filtered)
        if sample.behaviour_log_probs is None
    ]
    return _unrecorded(batch, "truncation", "filters", chosen, TRUNCATION_FIXES["recorded"])


def _shifts(batch: Batch, told: _Told) -> Finding | None:
    """A penalty or bias that the record does not tell."""
    chosen = [
        (sample, served)
        for sample, served in told
        if served.shifts and not (sample.sampling.penalised or sample.sampling.min_new_tokens)
    ]
    return _unrecorded(batch, "penalty", "shifts", chosen, PENALTY_FIX)


def _unrecorded(
    batch: Batch, fault: FaultName, field: Literal["filters", "shifts"], chosen: _Told, fix: str
) -> Finding | None:
    if not chosen:
        return None
    values = ", ".join(dict.fromkeys(value for _, served in chosen for value in getattr(served, field)))
    names = few(served.worker for _, served in chosen)
    effect = "tokens were drawn from a cut distribution" if field == "filters" else "it is part of their log-probs"
    evidence = (
        f"{names} applied {values} to {len(chosen)} of {len(batch)} samples whose records tell nothing of it: {effect}."
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
        most = max(map(len, of.values()))
        fewer = [by for by in of.values() if len(by) < most]
        groups = fewer if len(of) - len(fewer) == 1 else [*of.values()]
        odd |= {sample.index: sample for by in groups for samples in by.values() for sample in samples}
    if not said:
        return None
    samples = [odd[index] for index in sorted(odd)]
    return _finding(batch, "server_differs", f"Servers differ: {'; '.join(said)}.", DIFFERS_FIX, samples)


def _finding(batch: Batch, fault: FaultName, evidence: str, fix: str, samples: Sequence[Sample]) -> Finding:
    first = first_place(samples[0], samples[0].mask)
    return batch.finding(fault, "rollout", evidence, fix, samples, first=first, confidence="certain")
