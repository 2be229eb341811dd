"""Experts of a MoE model: did the trainer compute with those that the rollout engine computed with?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats, Ints
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, Outcome
from mismatch_plugin.diagnose.findings import Confidence, Finding

REPLAYED = 0.999
"""Share of choices that agree where a trainer replays them: all but what a kernel may reorder."""
OWN_CHOICE = 0.8
"""The same where a checkpoint's own routers chose in float32: published pairs differ in some 10 % of choices."""
SHIFTED = 0.95
"""Agreement with the neighbouring position, of routes that are one position off."""
REPLAY_FIX = (
    "Replay the rollout's routes at their own positions: row t is of token t, and the last token has none. Where a "
    "request was retracted and computed again, keep the routes of the run whose log-probs are kept."
)
FILLED_FIX = (
    "Look where routes are padded, cut at a pipeline stage, or missing: such rows replay one expert several times over."
)


class Agreement(NamedTuple):
    """Of one sample, over the rows that made its tokens. layers: [L] share of choices that agree. before, after: of all
    layers with the trainer's row one earlier and one later. filled: share of rows that name an expert twice."""

    sample: Sample
    layers: Floats
    before: float
    after: float
    filled: float


def find_replay(batch: Batch) -> Outcome:
    """Routes of both sides, where records hold them: the samples in which they differ."""
    compared = [found for sample in batch if (found := _compare(sample)) is not None]
    bar = OWN_CHOICE if batch.from_checkpoint else REPLAYED
    wrong = [one for one in compared if one.layers.mean() < bar]
    if not wrong:
        return [], batch
    return [_finding(batch, wrong, len(compared), bar)], batch


def _compare(sample: Sample) -> Agreement | None:
    rollout, training = sample.routed_experts, sample.trained_experts
    if rollout is None or training is None or rollout.shape != training.shape or not sample.mask.any():
        return None
    rows = len(sample.prompt_ids) - 1 + np.flatnonzero(sample.mask)  # row t computes the logits of token t + 1
    rows = rows[rows >= 0]
    earlier, later = rows[rows > 0], rows[rows < len(training) - 1]
    if not len(rows):
        return None
    layers = _agree(rollout[rows], training[rows]).mean(axis=0)
    before = _agree(rollout[earlier], training[earlier - 1]).mean() if len(earlier) else 0.0
    after = _agree(rollout[later], training[later + 1]).mean() if len(later) else 0.0
    filled = max(float(_twice(side[rows]).mean()) for side in (rollout, training))
    return Agreement(sample, layers, float(before), float(after), filled)


def _agree(ours: Ints, theirs: Ints) -> Floats:
    """[T, L] share of the experts that the other side has too: the smaller share, where an expert is there twice."""
    same = ours[..., :, None] == theirs[..., None, :]
    return np.minimum(same.any(axis=-1).mean(axis=-1), same.any(axis=-2).mean(axis=-1))


def _twice(experts: Ints) -> Bools:
    """[T, L] rows that name an expert twice, which no router does."""
    ordered = np.sort(experts, axis=-1)
    return (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)


def _finding(batch: Batch, wrong: list[Agreement], compared: int, bar: float) -> Finding:
    layers = np.mean([one.layers for one in wrong], axis=0)
    neighbour = max(("before", "after"), key=lambda side: np.mean([getattr(one, side) for one in wrong]))
    shifted = float(np.mean([getattr(one, neighbour) for one in wrong]))
    filled = float(np.mean([one.filled for one in wrong]))
    worst = int(np.argmin(layers))
    evidence = (
        f"In {len(wrong)} of {compared} samples with routes of both sides {layers.mean():.1%} of the experts agree "
        f"(layer {worst}: {layers[worst]:.1%}); {bar:.1%} or more was expected."
    )
    fix = REPLAY_FIX
    if shifted >= SHIFTED and shifted > layers.mean():
        where = "earlier" if neighbour == "before" else "later"
        evidence += f" With the trainer's row one position {where} {shifted:.1%} agree: they are shifted by one."
    elif filled > 0.0:
        evidence += f" {filled:.1%} of the rows name an expert twice: they are filled in, no router chose them."
        fix = FILLED_FIX
    confidence: Confidence = "likely" if batch.from_checkpoint else "certain"
    statistics = {"agreement": float(layers.mean()), "worst_layer": worst, "shifted": shifted, "filled": filled}
    samples = [one.sample for one in wrong]
    about = {"of_samples": compared, "statistics": statistics, "confidence": confidence}
    return batch.finding("replay_off", "both", evidence, fix, samples, **about)
