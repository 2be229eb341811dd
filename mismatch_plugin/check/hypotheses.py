"""Which distribution explains a side's log-probs, or where tokens were drawn from, best: as recorded, or another?"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from mismatch_plugin.check.batch import Batch, Floats
from mismatch_plugin.check.distance import Comparison, Distances, compare
from mismatch_plugin.check.distribution import PENALTY_FIX, TEMPERATURE_FIXES, greedy
from mismatch_plugin.check.filters import FIXES, filter_text
from mismatch_plugin.check.findings import FaultName, Finding, Side, Undecided
from mismatch_plugin.check.identity import SHIFT_FIX
from mismatch_plugin.check.vocabulary import MIN_TOKENS, Logits, Rows, gather_rows

FACTOR, STANDARD_ERRORS, MINIMUM_GAIN = 0.6, 6.0, 0.002
TEMPERATURE_TOLERANCE = 0.02
SCALES = np.geomspace(0.3, 3.3, 49)
PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_KS = (1, 2, 3, 5, 8, 10, 20, 30, 40, 50, 64, 100, 200, 1000)
EXPECTED_OUTSIDE = 15.0
"""Tokens that must be expected outside a filter before their absence means anything: by chance once in e^15."""
LEAK = 0.1
"""Of the expected ones may be outside: the engine's boundary is not the checkpoint's to the last digit."""


class Examination:
    """The step of `run.check_batch` that looks at whole distributions.

    from_checkpoint: the training side's log-probs were themselves computed from these logits.
    """

    def __init__(self, logits_of: Logits, *, from_checkpoint: bool) -> None:
        self.logits_of, self.from_checkpoint = logits_of, from_checkpoint

    def __call__(self, batch: Batch) -> tuple[list[Finding | Undecided], Batch]:
        """Judge both sides by the distributions; the batch stays as it is."""
        rows = gather_rows(batch, self.logits_of)
        if rows is None or len(rows) < MIN_TOKENS:
            count = 0 if rows is None else len(rows)
            reason = f"not enough tokens to tell: {count} with logits, {MIN_TOKENS} needed"
            return [Undecided(faults=("temperature", "truncation", "penalty"), reason=reason)], batch
        return examine(batch, rows, self.from_checkpoint), batch


def examine(batch: Batch, rows: Rows, from_checkpoint: bool) -> list[Finding | Undecided]:
    """Everything that the rows tell, on both sides."""
    found: list[Finding | Undecided] = []
    sides: tuple[Side, ...] = ("rollout",) if from_checkpoint else ("rollout", "training")
    if not from_checkpoint:
        late = _late(batch, rows)
        if late is not None:
            return [late]
    for side in sides:
        temperature = _temperature(batch, rows, side)
        if temperature is not None:
            found.append(temperature)
    penalty = _penalty(batch, rows)
    if penalty is not None:
        found.append(penalty)
    if not any(isinstance(item, Finding) and item.fault == "temperature" for item in found):
        found += _truncation(batch, rows)
    return found


def _distances(ours: Floats, theirs: Floats) -> Distances:
    valid = np.isfinite(ours) & np.isfinite(theirs)
    return Distances(np.where(valid, np.minimum(np.abs(ours - theirs), 3.0), 0.0), valid)


def _better(side: Floats, recorded: Floats, other: Floats) -> Comparison | None:
    found = compare(_distances(side, recorded), _distances(side, other))
    return found if found.clearly_better(FACTOR, STANDARD_ERRORS, MINIMUM_GAIN) else None


def _late(batch: Batch, rows: Rows) -> Finding | None:
    found = compare(_distances(rows.train, rows.log_probs(logits=rows.logits)), _distances(rows.train, rows.late))
    if not found.clearly_better(0.5, STANDARD_ERRORS, 0.1):
        return None
    return _finding(
        batch,
        rows,
        "shift_by_one",
        "training",
        f"The training side's log-probs are those of logits one position too late, which have already seen the token: "
        f"mean |difference| to the checkpoint {found.own:.3g} as recorded, {found.other:.3g} there.",
        {"distance_as_recorded": found.own, "distance_one_late": found.other},
        SHIFT_FIX,
    )


def _temperature(batch: Batch, rows: Rows, side: Side) -> Finding | None:
    """The factor on the recorded temperature that fits best: a grid, then golden steps around its best point."""
    values = rows.rollout if side == "rollout" else rows.train
    logits = rows.drawn_from if side == "rollout" else rows.logits
    recorded = rows.log_probs(logits=logits)

    def distance(scale: float) -> float:
        return _distances(values, rows.log_probs(scale, logits=logits)).mean

    coarse = [distance(scale) for scale in SCALES]
    best = int(np.argmin(coarse))
    low, high = SCALES[max(best - 1, 0)], SCALES[min(best + 1, len(SCALES) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(12):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if distance(a) < distance(b) else (a, high)
    scale = (low + high) / 2
    found = _better(values, recorded, rows.log_probs(scale, logits=logits))
    if found is None or abs(math.log(scale)) < TEMPERATURE_TOLERANCE:
        return None
    base = float(rows.temperature.double().mean())
    fitted = base * scale
    at_one = abs(fitted - 1) < 0.03
    kind = ("rollout_raw" if side == "rollout" else "trainer_without") if at_one else "other"
    return _finding(
        batch,
        rows,
        "temperature",
        side,
        f"The {side} side's log-probs are those of temperature {fitted:.3g}, not of the recorded {base:g}: mean "
        f"|difference| to the checkpoint {found.own:.3g} at the recorded one, {found.other:.3g} at {fitted:.3g}.",
        {"temperature": fitted, "recorded": base, "distance_as_recorded": found.own, "distance_fitted": found.other},
        TEMPERATURE_FIXES[kind],
    )


def _penalty(batch: Batch, rows: Rows) -> Finding | None:
    """A repetition penalty in the rollout log-probs that no record tells; recorded ones show next to the trainer's."""
    if any(sample.record.sampling.penalised for sample in rows.samples):
        return None
    plain = rows.log_probs()
    fits = [(penalty, rows.log_probs(logits=rows.penalised(penalty))) for penalty in PENALTIES]
    penalty, best = min(fits, key=lambda item: _distances(rows.rollout, item[1]).mean)
    found = _better(rows.rollout, plain, best)
    if found is None:
        return None
    return _finding(
        batch,
        rows,
        "penalty",
        "rollout",
        f"Rollout log-probs contain a repetition penalty of about {penalty:g} that no record tells: mean |difference| "
        f"to the checkpoint {found.own:.3g} without, {found.other:.3g} with it.",
        {"penalty": penalty, "distance_without": found.own, "distance_with": found.other},
        PENALTY_FIX,
    )


class _Cut(NamedTuple):
    """A filter, how many tokens were expected outside it and how many are, and mean −log(mass it keeps)."""

    name: str
    expected: float
    outside: int
    bias: float
    log_kept: Floats


def _truncation(batch: Batch, rows: Rows) -> list[Finding | Undecided]:
    """No token outside a nucleus or the k likeliest, where many were to be expected, whatever the records say."""
    chosen = [
        at
        for at, sample in enumerate(rows.samples)
        if sample.record.behaviour_log_probs is None and not greedy(sample.record.sampling)
    ]
    found: list[Finding | Undecided] = []
    for filtered in (True, False):
        part = [at for at in chosen if rows.samples[at].record.sampling.filtered == filtered]
        if not part:
            continue
        group = rows.where(part)
        cuts = [cut for cut in _cuts(group) if cut.outside <= LEAK * cut.expected]
        convincing = [cut for cut in cuts if cut.expected >= EXPECTED_OUTSIDE]
        if not convincing:
            continue
        recorded = convincing[0] if filtered and convincing[0] is cuts[0] else None
        cut = recorded or max(convincing, key=lambda item: item.expected - item.outside)
        found.append(_truncation_finding(batch, group, cut))
    return found


def _cuts(rows: Rows) -> list[_Cut]:
    mass, place = rows.sorted_mass()
    before = mass.cumsum(-1) - mass
    own_before = before.gather(-1, place[:, None])[:, 0]
    ranks = torch.arange(mass.shape[-1])
    sampling = rows.samples[0].record.sampling
    cuts = []
    if sampling.filtered:  # the recorded one first; SGLang's order is top-k, top-p, min-p, each on what is left
        kept = (before < sampling.top_p) & (ranks < (sampling.top_k if sampling.top_k > 0 else mass.shape[-1]))
        kept &= mass >= sampling.min_p * mass[:, :1]
        outside = ~kept.gather(-1, place[:, None])[:, 0]
        cuts.append(_cut(filter_text(sampling), mass, kept, outside))
    for bound in NUCLEI:
        kept = before < bound
        cuts.append(_cut(f"top_p={bound:g}", mass, kept, own_before >= bound))
    return cuts + [
        _cut(f"top_k={bound}", mass, (ranks < bound).expand_as(mass), place >= bound)
        for bound in TOP_KS
        if bound < mass.shape[-1]
    ]


def _cut(name: str, mass: torch.Tensor, kept: torch.Tensor, outside: torch.Tensor) -> _Cut:
    held = (mass * kept).sum(-1)
    log_kept = held.clamp(min=1e-9).log().double().numpy()
    return _Cut(name, float((1 - held).sum()), int(outside.sum()), -float(log_kept.mean()), log_kept)


def _truncation_finding(batch: Batch, rows: Rows, cut: _Cut) -> Finding:
    recorded = filter_text(rows.samples[0].record.sampling)
    full = rows.log_probs()
    cut_off = compare(_distances(rows.rollout, full), _distances(rows.rollout, full - cut.log_kept))
    renormalised = cut_off.clearly_better(0.75, STANDARD_ERRORS, MINIMUM_GAIN)
    form = "renormalised over what is kept" if renormalised else "over the whole vocabulary"
    return _finding(
        batch,
        rows,
        "truncation",
        "rollout",
        f"{cut.outside} of {len(rows)} sampled tokens lie outside {cut.name}, where {cut.expected:.0f} were to be "
        f"expected: they were drawn from a cut distribution (recorded: {recorded}), and rollout log-probs are {form}; "
        f"{1 - math.exp(-cut.bias):.2%} of the mass is cut, {cut.bias:.3g} nats a token.",
        {
            "outside": float(cut.outside),
            "expected_outside": cut.expected,
            "bias": cut.bias,
            "renormalised": float(renormalised),
        },
        FIXES["renormalised" if renormalised else "recorded"],
    )


def _finding(
    batch: Batch, rows: Rows, fault: FaultName, side: Side, evidence: str, statistics: dict[str, float], fix: str
) -> Finding:
    affected = {sample.index for sample in rows.samples}
    return Finding(
        fault=fault,
        side=side,
        evidence=evidence,
        statistics=statistics,
        samples=len(affected),
        of_samples=len(batch),
        tokens=len(rows),
        of_tokens=batch.token_count,
        first=rows.samples[0].place(rows.positions[0]),
        fix=fix,
    )
