"""Another prompt on the training side: the gap is largest where the response begins and decays along it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.detectors.distance import Scaled, scaled
from mismatch_plugin.diagnose.detectors.identity import PROMPT_FIX
from mismatch_plugin.diagnose.findings import Finding, first_place

EARLY = 16
"""Tokens of a response that are early, at most; a third of a shorter one. Late ones are its second half."""
MIN_EACH, MIN_SAMPLES = 3, 6
"""Telling tokens of either kind in a sample; samples that have them."""
SOFT = 0.05
"""Added to both sides of a ratio, in units of the ordinary gap: samples where both are tiny tell nothing."""
DECAY, CLEAR_DECAY, STANDARD_ERRORS, OF_SOME = 1.25, 1.4, 4.5, 3.5
"""Early over late gap, and by how many standard errors: of all samples, of some that are far apart next to the others.

Measured: engine noise, int8 and weights some steps on .67 to 1.09; another template 1.66, a system prompt 1.31 to 1.5,
BOS 1.9 to 2.2, lost prompt tokens 1.4 to 9."""
SMALLEST = 0.02
"""Nats. A prompt that moves the first tokens by less is no one's problem."""
JUMP = 0.7
"""Between the logs of two samples' relative gaps, neighbours in size: what lies above are samples of another kind."""


class _Decay(NamedTuple):
    """samples: those judged. ratio: geometric mean over samples of early over late gap, each in units of what is
    ordinary at these log-probs. early, late: mean |gap| in nats, near certain tokens aside."""

    samples: Ints
    ratio: float
    deviations: float
    early: float
    late: float


def find_wrong_prompt(batch: Batch) -> Outcome:
    """Paired within samples. Its tokens are compared with what is usual in the batch at their log-prob, since first
    tokens are often less certain than later ones. The batch stays as it is."""
    relative, level = _relative(scaled(batch), batch.samples)
    judged = np.flatnonzero(np.isfinite(relative).all(0))
    for chosen, needed in ((judged, STANDARD_ERRORS), (_outlying(judged, relative), OF_SOME)):
        found = _decay(chosen, relative, level)
        if found and found.ratio > DECAY and found.deviations > needed and found.early > SMALLEST:
            return [_finding(batch, found)], batch
    return [], batch


def _relative(measured: Scaled, samples: tuple[Sample, ...]) -> tuple[Floats, Floats]:
    """[2, N] of early and late tokens: log of the gap in units of what is ordinary, NaN where there are too few; and
    the mean gap in nats."""
    told = measured.informative
    tokens, size, ordinary = measured.tokens.where(told), measured.size[told], measured.ordinary[told]
    length = np.array([len(sample) for sample in samples])[tokens.sample]
    end = np.minimum(EARLY, length // 3)
    early, late = tokens.position < end, tokens.position >= np.maximum(2 * end, length // 2)

    def sums(values: Floats) -> Any:
        return np.stack([np.bincount(tokens.sample[at], values[at], len(samples)) for at in (early, late)])

    counts, gaps, usual = sums(np.ones(len(size))), sums(size), sums(ordinary)
    enough = (counts >= MIN_EACH) & (usual > 0)
    relative = np.log(np.divide(gaps, usual, where=enough, out=np.full(gaps.shape, np.nan)) + SOFT)
    return relative, gaps / np.maximum(counts, 1)


def _outlying(judged: Ints, relative: Floats) -> Ints:
    """Samples above the largest jump in size: a wrong template may concern some only. By early and late together, so
    that the choice favours neither."""
    order = judged[np.argsort(relative[:, judged].mean(0), kind="stable")]
    jumps = np.diff(relative[:, order].mean(0))
    return order[int(np.argmax(jumps)) + 1 :] if len(jumps) and jumps.max() > JUMP else order[:0]


def _decay(chosen: Ints, relative: Floats, level: Floats) -> _Decay | None:
    if len(chosen) < MIN_SAMPLES:
        return None
    change = relative[0, chosen] - relative[1, chosen]
    error = float(change.std(ddof=1)) / math.sqrt(len(chosen))
    early, late = level[:, chosen].mean(1).tolist()
    return _Decay(np.sort(chosen), math.exp(change.mean()), float(change.mean()) / max(error, 1e-12), early, late)


def _finding(batch: Batch, found: _Decay) -> Finding:
    samples = [batch.samples[index] for index in found.samples]
    told = [sample.trained_prompt_ids is not None for sample in samples]  # differing ones are `prompt_ids`
    cause, fix, sure = "the two sides were given different prompts", PROMPT_FIX, found.ratio > CLEAR_DECAY
    if all(told):
        cause = "yet prompt ids are equal: the server may have used a KV cache of older weights"
        fix = (
            "Flush the prefix cache with every weight update (flush_cache), and compare prompt ids with what was sent."
        )
        sure = False
    else:
        fix = (
            f"Compare prompt_ids of both sides: BOS, system prompt, generation prompt or thinking tags, tools, prompts "
            f"cut at different ends. {fix}"
        )
    return batch.finding(
        "wrong_prompt",
        "both",
        f"The gap decays along responses: mean |gap| {found.early:.3g} nats in their first tokens (up to {EARLY}), "
        f"{found.late:.3g} in their second half, {found.ratio:.2f} times what the tokens' log-probs explain "
        f"({found.deviations:.0f} standard errors over {len(samples)} samples; near certain tokens aside): {cause}.",
        fix,
        samples,
        of_samples=len(batch),
        first=first_place(samples[0], samples[0].usable),
        statistics={
            "decay": found.ratio,
            "standard_errors": found.deviations,
            "early": found.early,
            "late": found.late,
        },
        confidence="likely" if sure else "possible",
    )
