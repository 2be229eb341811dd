"""Another prompt on the training side: the gap is largest where the response begins and decays along it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.check.batch import Batch, Floats, Ints, Outcome, Sample
from mismatch_plugin.check.findings import Finding
from mismatch_plugin.check.identity import PROMPT_FIX
from mismatch_plugin.check.profile import Scaled, scaled

EARLY = 16
"""Tokens of a response that are early, at most; a third of a shorter one. Late ones are its second half."""
MIN_EACH, MIN_SAMPLES = 3, 6
"""Telling tokens of either kind in a sample; samples that have them."""
SOFT = 0.05
"""Added to both sides of a ratio, in units of the ordinary gap: samples where both are tiny tell nothing."""
DECAY, CLEAR_DECAY, PART_DECAY, STANDARD_ERRORS = 1.25, 1.4, 2.0, 4.5
"""Early over late gap. Measured: engine noise, int8 and weights some steps on .67 to 1.09; another template 1.66, a
system prompt 1.31 to 1.5, BOS 1.9 to 2.2, lost prompt tokens 1.4 to 9."""
SMALLEST = 0.02
"""Nats. A prompt that moves the first tokens by less is no one's problem."""
PARTS = (1.0, 0.25, 0.1)
"""Of the samples, by the size of their gap: a wrong template may concern some only."""


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
    measured = scaled(batch.samples)
    for part in PARTS:
        found = _decay(measured, batch.samples, part)
        if found is None:
            break
        if found.ratio > (DECAY if part == 1.0 else PART_DECAY) and found.deviations > STANDARD_ERRORS:
            return ([_finding(batch, found)] if found.early > SMALLEST else []), batch
    return [], batch


def _decay(measured: Scaled, samples: tuple[Sample, ...], part: float) -> _Decay | None:
    told = measured.informative
    tokens, size, ordinary = measured.tokens.where(told), measured.size[told], measured.ordinary[told]
    length = np.array([sample.tokens for sample in samples])[tokens.sample]
    end = np.minimum(EARLY, length // 3)
    early, late = tokens.position < end, tokens.position >= np.maximum(2 * end, length // 2)

    def sums(values: Floats) -> Any:
        return np.stack([np.bincount(tokens.sample[at], values[at], len(samples)) for at in (early, late)])

    counts, gaps, usual = sums(np.ones(len(size))), sums(size), sums(ordinary)
    judged = np.flatnonzero((counts >= MIN_EACH).all(0) & (usual > 0).all(0))
    relative = np.log(gaps[:, judged] / usual[:, judged] + SOFT)
    # By early and late together, so that the choice itself favours neither.
    chosen = np.argsort(-relative.sum(0), kind="stable")[: math.ceil(part * len(judged))]
    if len(chosen) < MIN_SAMPLES:
        return None
    change = relative[0, chosen] - relative[1, chosen]
    error = float(change.std(ddof=1)) / math.sqrt(len(chosen))
    level = gaps[:, judged[chosen]].sum(1) / counts[:, judged[chosen]].sum(1)
    return _Decay(
        np.sort(judged[chosen]), math.exp(change.mean()), float(change.mean()) / max(error, 1e-12), *level.tolist()
    )


def _finding(batch: Batch, found: _Decay) -> Finding:
    samples = [batch.samples[index] for index in found.samples]
    told = [sample.told.prompt_ids is not None for sample in samples]  # differing ones are `prompt_ids`
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
        first=samples[0].first(samples[0].usable),
        statistics={
            "decay": found.ratio,
            "standard_errors": found.deviations,
            "early": found.early,
            "late": found.late,
        },
        confidence="likely" if sure else "possible",
    )
