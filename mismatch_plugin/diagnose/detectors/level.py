"""How far apart the two sides are."""

from __future__ import annotations

import math

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.findings import Mismatch

CLAMP = 20.0


def k3(gap: Floats) -> Floats:
    """e^d − 1 − d, d clamped to ±20."""
    clamped = np.clip(gap, -CLAMP, CLAMP)
    return np.expm1(clamped) - clamped


def mismatch(batch: Batch) -> Mismatch | None:
    """Over all tokens that train and have a number on both sides; None if there is none. Formulas: `Mismatch`."""
    tokens = batch.tokens
    if not len(tokens):
        return None
    gap = np.clip(tokens.gap, -CLAMP, CLAMP)
    absolute, ratio = np.abs(tokens.gap), np.exp(gap)
    p50, p90, p99 = (float(value) for value in np.quantile(absolute, [0.5, 0.9, 0.99]))
    varies = np.ptp(tokens.rollout) > 0 and np.ptp(tokens.training) > 0
    return Mismatch(
        tokens=len(tokens),
        samples=len(np.unique(tokens.sample)),
        kl=-float(gap.mean()),
        k3_kl=float(k3(gap).mean()),
        abs_mean=float(absolute.mean()),
        abs_p50=p50,
        abs_p90=p90,
        abs_p99=p99,
        abs_max=float(absolute.max()),
        correlation=float(np.corrcoef(tokens.rollout, tokens.training)[0, 1]) if varies else math.nan,
        effective_sample_size=float(ratio.sum() ** 2 / (len(tokens) * (ratio**2).sum())),
    )


def equal_sides(batch: Batch) -> str | None:
    """A remark where the two sides are equal to the last bit: what that is good for, and what else it may be."""
    tokens = batch.tokens
    told = tokens.rollout != 0.0
    equal = int((tokens.gap[told] == 0.0).sum())
    if not equal or equal < int(told.sum()):
        return None
    return (
        f"both sides are equal to the last bit on all {len(tokens)} tokens: either the kernels of the two engines are "
        f"aligned, and work, or one list was given as both sides (rollout log-probs copied into the trainer's); where "
        f"kernels are not meant to be aligned, it is the latter, and nothing was compared"
    )
