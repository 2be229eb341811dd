"""What whole distributions tell: the logits of a checkpoint at the sampled tokens, next to both sides' log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.alignment import SHIFT_FIX
from mismatch_plugin.diagnose.detectors.distance import CLIP, Comparison, average, between, compare
from mismatch_plugin.diagnose.detectors.distribution import (
    PENALTY_FIX,
    TEMPERATURE_FIXES,
    TRUNCATION_FIXES,
    after_filters,
    filter_text,
)
from mismatch_plugin.diagnose.findings import SIDES, FaultName, Finding, LogProbSide, Side, place_of, too_few
from mismatch_plugin.diagnose.normal import ENOUGH_TOKENS

MAX_BYTES, MAX_SAMPLES, MAX_TOKENS = 256 * 2**20, 256, 4000
"""A part of the tokens is enough; so many logits are kept in memory."""
BETTER, BETTER_Z_SCORE, MIN_GAIN_NATS = 0.6, 6.0, 0.002
"""Another distribution fits clearly better: share of the distance that may be left, standard errors, nats."""
MIN_TEMPERATURE_CHANGE = 0.02
PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_KS = (1, 2, 3, 5, 8, 10, 20, 30, 40, 50, 64, 100, 200, 1000)
EXPECTED_OUTSIDE, LEAK = 15.0, 0.1
"""Tokens that must be expected outside a filter before their absence means anything (by chance once in e^15); the share
of them that may be outside: the engine's boundary is not the checkpoint's to the last digit."""


@dataclass(frozen=True, eq=False)
class Rows:
    """T sampled tokens with the logits they were drawn from.

    tokens: sample and position of each. logits [T, V]: raw. drawn_from [T, V]: after the recorded penalties.
    temperature [T]: recorded, 1 where greedy. late [T]: log-prob of the token under the logits one position too late
    (those that have seen it), NaN at a response's end.
    """

    batch: Batch
    tokens: list[tuple[Sample, int]]
    logits: Tensor
    drawn_from: Tensor
    ids: Tensor
    temperature: Tensor
    rollout: Floats
    training: Floats
    late: Floats

    def log_probs(self, logits: Tensor, scale: float = 1.0) -> Floats:
        """[T] of the sampled tokens at `scale` times the recorded temperature."""
        return _picked(logits / (self.temperature * scale)[:, None], self.ids)

    def finding(
        self,
        fault: FaultName,
        side: Side,
        evidence: str,
        fix: str,
        fits: Comparison | None = None,
        **statistics: float,
    ) -> Finding:
        """About all these tokens. fits: the distance to what is recorded and to what the evidence names."""
        if fits is not None:
            statistics |= {"distance_as_recorded": fits.own, "distance_fitted": fits.other}
            evidence += (
                f": mean |gap| to the checkpoint (no token above {CLIP:g} nats) {fits.own:.3g} as recorded, "
                f"{fits.other:.3g} so."
            )
        samples = [*{sample.index: sample for sample, _ in self.tokens}.values()]
        about = {"tokens": len(self.tokens), "first": place_of(*self.tokens[0]), "statistics": statistics}
        return self.batch.finding(fault, side, evidence, fix, samples, **about)


def penalise(logits: Tensor, previous: Ints, sampling: SamplingParameters) -> Tensor:
    """[V] logits after SGLang's penalties, which act on the tokens that were generated before.

    repetition: positive logits are divided, negative ones multiplied; frequency: minus the count times it; presence:
    minus it once. Checked against SGLang 0.5.23.
    """
    if not len(previous) or not sampling.penalised:
        return logits
    ids, counts = torch.as_tensor(previous).unique(return_counts=True)
    changed = logits.clone()
    values = changed[ids] - counts * sampling.frequency_penalty - sampling.presence_penalty
    penalty = sampling.repetition_penalty
    changed[ids] = torch.where(values > 0, values / penalty, values * penalty)
    return changed


def _penalised(logits: Tensor, tokens: Sequence[tuple[Sample, int]], by: SamplingParameters | None = None) -> Tensor:
    """[T, V]: each row penalised for what came before its token, as recorded or by other parameters."""
    rows = zip(logits, tokens, strict=True)
    return torch.stack([penalise(row, sample.response_ids[:at], by or sample.sampling) for row, (sample, at) in rows])


def _picked(logits: Tensor, ids: Tensor) -> Floats:
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0].double().numpy()


@torch.no_grad()
def gather_rows(batch: Batch) -> Rows | None:
    """Tokens with both sides, from all over a batch that has logits; None if there is none."""
    samples = [sample for sample in batch if sample.usable.any()]
    samples = samples[:: max(1, math.ceil(len(samples) / MAX_SAMPLES))]
    if batch.now is None or not samples:
        return None
    tokens: list[tuple[Sample, int]] = []
    parts: list[Tensor] = []
    late: list[Floats] = []
    share = 0
    for index, sample in enumerate(samples):
        logits = batch.now.logits(sample, sample.index).float()
        share = share or max(1, math.ceil(min(MAX_TOKENS, MAX_BYTES // (4 * logits.shape[-1])) / len(samples)))
        usable = np.flatnonzero(sample.usable)
        step = max(1, math.ceil(len(usable) / share))
        at = usable[index % step :: step]
        ids = torch.as_tensor(sample.response_ids, dtype=torch.long)
        seen = _picked(logits[1:] / sample.log_prob_temperature, ids[:-1])
        tokens += [(sample, int(position)) for position in at]
        parts.append(logits[at])
        late.append(np.append(seen, np.nan)[at])
    raw = torch.cat(parts)
    return Rows(
        batch=batch,
        tokens=tokens,
        logits=raw,
        drawn_from=_penalised(raw, tokens) if any(sample.sampling.penalised for sample, _ in tokens) else raw,
        ids=torch.tensor([int(sample.response_ids[at]) for sample, at in tokens]),
        temperature=torch.tensor([sample.log_prob_temperature for sample, _ in tokens]),
        rollout=np.array([sample.rollout_log_probs[at] for sample, at in tokens]),
        training=np.array([sample.train_log_probs[at] for sample, at in tokens]),
        late=np.concatenate(late),
    )


def find_in_distributions(batch: Batch) -> Outcome:
    """Judge both sides by the distributions of a checkpoint, if there is one; the batch stays as it is."""
    if batch.now is None:
        return [], batch
    rows = gather_rows(batch)
    if rows is None or len(rows.tokens) < ENOUGH_TOKENS:
        few = f"{0 if rows is None else len(rows.tokens)} with logits, {ENOUGH_TOKENS} needed"
        return [too_few(few, "temperature", "truncation", "penalty")], batch
    late = _compare(rows.training, rows.log_probs(rows.logits), rows.late)
    if not batch.from_checkpoint and late.clearly_better(0.5, BETTER_Z_SCORE, 0.1):
        evidence = "The training side's log-probs are of logits one position too late, which have seen the token"
        return [rows.finding("shift_by_one", "training", evidence, SHIFT_FIX, late)], batch
    judged = SIDES[:1] if batch.from_checkpoint else SIDES
    if any(after_filters(sample) for sample, _ in rows.tokens):
        judged = judged[1:]  # the rollout side's are of another distribution than the logits'
    temperatures = [one for side in judged if (one := _fitted_temperature(rows, side))]
    return [*temperatures, *_fitted_penalty(rows), *([] if temperatures else _cut(rows))], batch


def _compare(side: Floats, recorded: Floats, other: Floats) -> Comparison:
    return compare(between(side, recorded), between(side, other))


def _fitted_temperature(rows: Rows, side: LogProbSide) -> Finding | None:
    """The factor on the recorded temperature that fits best, by a grid that is made finer four times."""
    values, logits = (rows.rollout, rows.drawn_from) if side == "rollout" else (rows.training, rows.logits)
    low, high, scale = 0.3, 3.3, 1.0
    for points in (17, 9, 9, 9, 9):
        scales = np.geomspace(low, high, points)
        best = int(np.argmin([average(between(values, rows.log_probs(logits, one))) for one in scales]))
        low, scale, high = scales[max(best - 1, 0)], float(scales[best]), scales[min(best + 1, points - 1)]
    fits = _compare(values, rows.log_probs(logits), rows.log_probs(logits, scale))
    if not fits.clearly_better(BETTER, BETTER_Z_SCORE, MIN_GAIN_NATS) or abs(math.log(scale)) < MIN_TEMPERATURE_CHANGE:
        return None
    base = float(rows.temperature.double().mean())
    fitted = base * scale
    kind = "other" if abs(fitted - 1) >= 0.03 else "rollout_raw" if side == "rollout" else "trainer_without"
    evidence = f"The {side} side's log-probs are those of temperature {fitted:.3g}, not of the recorded {base:g}"
    told = {"temperature": fitted, "recorded": base}
    return rows.finding("temperature", side, evidence, TEMPERATURE_FIXES[kind], fits, **told)


def _fitted_penalty(rows: Rows) -> list[Finding]:
    """A repetition penalty in the rollout log-probs that no record tells; recorded ones show next to the trainer's."""
    if any(sample.sampling.penalised for sample, _ in rows.tokens):
        return []
    settings = [SamplingParameters(repetition_penalty=penalty) for penalty in PENALTIES]
    fitted = [rows.log_probs(_penalised(rows.logits, rows.tokens, setting)) for setting in settings]
    best = int(np.argmin([average(between(rows.rollout, values)) for values in fitted]))
    fits = _compare(rows.rollout, rows.log_probs(rows.drawn_from), fitted[best])
    if not fits.clearly_better(BETTER, BETTER_Z_SCORE, MIN_GAIN_NATS):
        return []
    evidence = f"Rollout log-probs contain a repetition penalty of about {PENALTIES[best]:g} that no record tells"
    return [rows.finding("penalty", "rollout", evidence, PENALTY_FIX, fits, penalty=PENALTIES[best])]


def _cut(rows: Rows) -> list[Finding]:
    """No token outside a nucleus or the k likeliest, where many were to be expected, whatever the records say.

    Of several filters the recorded one is named, else the one whose outside was expected to hold most of the missing.
    Samples with another filter than the first one's are left out.
    """
    chosen = [
        at
        for at, (sample, _) in enumerate(rows.tokens)
        if sample.behaviour_log_probs is None and not sample.sampling.greedy and not after_filters(sample)
        if sample.sampling.filters == rows.tokens[0][0].sampling.filters
    ]
    if not chosen:
        return []
    names = [name for name in rows.__dataclass_fields__ if name not in ("batch", "tokens")]
    rows = Rows(rows.batch, [rows.tokens[at] for at in chosen], *(getattr(rows, name)[chosen] for name in names))
    probabilities = (rows.drawn_from / rows.temperature[:, None]).softmax(-1)
    place = (probabilities > probabilities.gather(-1, rows.ids[:, None])).sum(-1)
    mass = probabilities.sort(-1, descending=True).values
    before, ranks = mass.cumsum(-1) - mass, torch.arange(mass.shape[-1]).expand_as(mass)
    sampling, filters = rows.tokens[0][0].sampling, []
    if sampling.filtered:  # SGLang cuts by top-k, top-p, min-p in this order
        kept = (before < sampling.top_p) & (ranks < (sampling.top_k if sampling.top_k > 0 else mass.shape[-1]))
        filters.append((filter_text(sampling), kept & (mass >= sampling.min_p * mass[:, :1])))
    filters += [(f"top_p={bound:g}", before < bound) for bound in NUCLEI]
    filters += [(f"top_k={bound}", ranks < bound) for bound in TOP_KS if bound < mass.shape[-1]]
    cuts = []
    for name, kept in filters:
        held, outside = (mass * kept).sum(-1), int((~kept.gather(-1, place[:, None])).sum())
        expected = float((1 - held).sum())
        if expected >= EXPECTED_OUTSIDE and outside <= LEAK * expected:
            cuts.append((expected - outside, name, expected, outside, held.clamp(min=1e-9).log().double().numpy()))
    if not cuts:
        return []
    recorded = [cut for cut in cuts if cut[1] == filter_text(sampling)]
    _, name, expected, outside, log_kept = recorded[0] if recorded else max(cuts, key=lambda cut: cut[0])
    full, bias = rows.log_probs(rows.drawn_from), -float(log_kept.mean())
    renormalised = _compare(rows.rollout, full, full - log_kept).clearly_better(0.75, BETTER_Z_SCORE, MIN_GAIN_NATS)
    form = "renormalised over what is kept" if renormalised else "over the whole vocabulary"
    evidence = (
        f"{outside} of {len(rows.tokens)} sampled tokens lie outside {name}, where {expected:.0f} were to be expected: "
        f"they were drawn from a cut distribution (recorded: {filter_text(sampling)}), and rollout log-probs are "
        f"{form}; {1 - math.exp(-bias):.2%} of the mass is cut, {bias:.3g} nats/token."
    )
    fix = TRUNCATION_FIXES["renormalised" if renormalised else "recorded"]
    return [rows.finding("truncation", "rollout", evidence, fix, outside=outside, expected=expected, bias=bias)]
