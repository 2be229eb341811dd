"""Which distribution explains a side's log-probs, or where tokens were drawn from, best: as recorded, or another?"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.distance import CLIP, Comparison, between, compare
from mismatch_plugin.diagnose.detectors.distribution import PENALTY_FIX, TEMPERATURE_FIXES
from mismatch_plugin.diagnose.detectors.filters import FIXES, after_filters, filter_text
from mismatch_plugin.diagnose.detectors.pairing import SHIFT_FIX
from mismatch_plugin.diagnose.detectors.vocabulary import Rows, gather_rows
from mismatch_plugin.diagnose.findings import SIDES, FaultName, Finding, LogProbSide, place_of, too_few
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS

FACTOR, STANDARD_ERRORS, MINIMUM_GAIN = 0.6, 6.0, 0.002
TEMPERATURE_TOLERANCE = 0.02
SCALES = np.geomspace(0.3, 3.3, 49)
PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_KS = (1, 2, 3, 5, 8, 10, 20, 30, 40, 50, 64, 100, 200, 1000)
TO_CHECKPOINT = f"mean |gap| to the checkpoint (no token above {CLIP:g} nats)"
EXPECTED_OUTSIDE = 15.0
"""Tokens that must be expected outside a filter before their absence means anything: by chance once in e^15."""
LEAK = 0.1
"""Of the expected ones may be outside: the engine's boundary is not the checkpoint's to the last digit."""


def find_in_distributions(batch: Batch) -> Outcome:
    """Judge both sides by the distributions of a checkpoint, if there is one; the batch stays as it is."""
    if batch.logits is None:
        return [], batch
    rows = gather_rows(batch)
    if rows is None or len(rows) < ENOUGH_TOKENS:
        few = f"{0 if rows is None else len(rows)} with logits, {ENOUGH_TOKENS} needed"
        return [too_few(few, "temperature", "truncation", "penalty")], batch
    if not batch.from_checkpoint and (late := _late(batch, rows)):
        return [late], batch
    judged = SIDES[:1] if batch.from_checkpoint else SIDES
    if any(after_filters(sample) for sample, _ in rows.tokens):
        judged = judged[1:]  # the rollout side's are of another distribution than the logits'
    temperatures = [found for side in judged if (found := _temperature(batch, rows, side))]
    penalty = _penalty(batch, rows)
    filters = [] if temperatures else _truncation(batch, rows)
    return [*temperatures, *([penalty] if penalty else []), *filters], batch


def _compare(side: Floats, recorded: Floats, other: Floats) -> Comparison:
    return compare(between(side, recorded), between(side, other))


def _better(side: Floats, recorded: Floats, other: Floats) -> Comparison | None:
    found = _compare(side, recorded, other)
    return found if found.clearly_better(FACTOR, STANDARD_ERRORS, MINIMUM_GAIN) else None


def _late(batch: Batch, rows: Rows) -> Finding | None:
    found = _compare(rows.training, rows.log_probs(logits=rows.logits), rows.late)
    if not found.clearly_better(0.5, STANDARD_ERRORS, 0.1):
        return None
    return _finding(
        batch,
        rows,
        "shift_by_one",
        "training",
        f"The training side's log-probs are those of logits one position too late, which have already seen the token: "
        f"{TO_CHECKPOINT} {found.own:.3g} as recorded, {found.other:.3g} there.",
        SHIFT_FIX,
        statistics={"distance_as_recorded": found.own, "distance_one_late": found.other},
    )


def _temperature(batch: Batch, rows: Rows, side: LogProbSide) -> Finding | None:
    """The factor on the recorded temperature that fits best: a grid, then golden steps around its best point."""
    values, logits = (rows.rollout, rows.drawn_from) if side == "rollout" else (rows.training, rows.logits)

    def distance(scale: float) -> float:
        return between(values, rows.log_probs(scale, logits)).mean

    best = int(np.argmin([distance(scale) for scale in SCALES]))
    low, high = SCALES[max(best - 1, 0)], SCALES[min(best + 1, len(SCALES) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(12):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if distance(a) < distance(b) else (a, high)
    scale = (low + high) / 2
    found = _better(values, rows.log_probs(logits=logits), rows.log_probs(scale, logits))
    if found is None or abs(math.log(scale)) < TEMPERATURE_TOLERANCE:
        return None
    base = float(rows.temperature.double().mean())
    fitted = base * scale
    kind = "other" if abs(fitted - 1) >= 0.03 else "rollout_raw" if side == "rollout" else "trainer_without"
    return _finding(
        batch,
        rows,
        "temperature",
        side,
        f"The {side} side's log-probs are those of temperature {fitted:.3g}, not of the recorded {base:g}: "
        f"{TO_CHECKPOINT} {found.own:.3g} at the recorded one, {found.other:.3g} at {fitted:.3g}.",
        TEMPERATURE_FIXES[kind],
        statistics={
            "temperature": fitted,
            "recorded": base,
            "distance_as_recorded": found.own,
            "distance_fitted": found.other,
        },
    )


def _penalty(batch: Batch, rows: Rows) -> Finding | None:
    """A repetition penalty in the rollout log-probs that no record tells; recorded ones show next to the trainer's."""
    if any(sample.sampling.penalised for sample, _ in rows.tokens):
        return None
    fits = [(penalty, rows.log_probs(logits=rows.penalised(penalty))) for penalty in PENALTIES]
    penalty, best = min(fits, key=lambda item: between(rows.rollout, item[1]).mean)
    found = _better(rows.rollout, rows.log_probs(), best)
    if found is None:
        return None
    return _finding(
        batch,
        rows,
        "penalty",
        "rollout",
        f"Rollout log-probs contain a repetition penalty of about {penalty:g} that no record tells: "
        f"{TO_CHECKPOINT} {found.own:.3g} without, {found.other:.3g} with it.",
        PENALTY_FIX,
        statistics={"penalty": penalty, "distance_without": found.own, "distance_with": found.other},
    )


class _Cut(NamedTuple):
    """A filter, how many tokens were expected outside it and how many are, and log(mass that it keeps) [T]."""

    name: str
    expected: float
    outside: int
    log_kept: Floats


def _truncation(batch: Batch, rows: Rows) -> list[Finding]:
    """No token outside a nucleus or the k likeliest, where many were to be expected, whatever the records say."""
    found = []
    for filtered in (True, False):
        part = [
            at
            for at, (sample, _) in enumerate(rows.tokens)
            if sample.behaviour_log_probs is None
            and not sample.sampling.greedy
            and sample.sampling.filtered == filtered
            and not after_filters(sample)
        ]
        if not part:
            continue
        group = rows.where(part)
        cuts = [cut for cut in _cuts(group) if cut.outside <= LEAK * cut.expected]
        convincing = [cut for cut in cuts if cut.expected >= EXPECTED_OUTSIDE]
        if not convincing:
            continue
        recorded = filtered and convincing[0] is cuts[0]
        cut = convincing[0] if recorded else max(convincing, key=lambda item: item.expected - item.outside)
        found.append(_truncation_finding(batch, group, cut))
    return found


def _cuts(rows: Rows) -> list[_Cut]:
    mass, place = rows.sorted_mass()
    before = mass.cumsum(-1) - mass
    ranks = torch.arange(mass.shape[-1]).expand_as(mass)

    def cut(name: str, kept: Tensor) -> _Cut:
        held = (mass * kept).sum(-1)
        outside = ~kept.gather(-1, place[:, None])
        return _Cut(name, float((1 - held).sum()), int(outside.sum()), held.clamp(min=1e-9).log().double().numpy())

    cuts = []
    if (sampling := rows.sampling).filtered:  # the recorded one first; SGLang cuts by top-k, top-p, min-p in this order
        kept = (before < sampling.top_p) & (ranks < (sampling.top_k if sampling.top_k > 0 else mass.shape[-1]))
        cuts.append(cut(filter_text(sampling), kept & (mass >= sampling.min_p * mass[:, :1])))
    cuts += [cut(f"top_p={bound:g}", before < bound) for bound in NUCLEI]
    return cuts + [cut(f"top_k={bound}", ranks < bound) for bound in TOP_KS if bound < mass.shape[-1]]


def _truncation_finding(batch: Batch, rows: Rows, cut: _Cut) -> Finding:
    full, bias = rows.log_probs(), -float(cut.log_kept.mean())
    renormalised = _compare(rows.rollout, full, full - cut.log_kept).clearly_better(0.75, STANDARD_ERRORS, MINIMUM_GAIN)
    form = "renormalised over what is kept" if renormalised else "over the whole vocabulary"
    return _finding(
        batch,
        rows,
        "truncation",
        "rollout",
        f"{cut.outside} of {len(rows)} sampled tokens lie outside {cut.name}, where {cut.expected:.0f} were to be "
        f"expected: they were drawn from a cut distribution (recorded: {filter_text(rows.sampling)}), and rollout "
        f"log-probs are {form}; {1 - math.exp(-bias):.2%} of the mass is cut, {bias:.3g} nats a token.",
        FIXES["renormalised" if renormalised else "recorded"],
        statistics={
            "outside": cut.outside,
            "expected_outside": cut.expected,
            "bias": bias,
            "renormalised": renormalised,
        },
    )


def _finding(
    batch: Batch, rows: Rows, fault: FaultName, side: LogProbSide, evidence: str, fix: str, statistics: dict[str, float]
) -> Finding:
    samples = [*{sample.index: sample for sample, _ in rows.tokens}.values()]
    first, position = rows.tokens[0]
    place = place_of(first, position)
    return batch.finding(fault, side, evidence, fix, samples, tokens=len(rows), first=place, statistics=statistics)
