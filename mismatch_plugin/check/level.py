"""How far apart the two sides are: not a fault, but the figure that a reader wants."""

from __future__ import annotations

import math

import numpy as np

from mismatch_plugin.check.batch import Batch
from mismatch_plugin.check.findings import Mismatch

CLAMP = 20.0


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
        k3_kl=float((np.expm1(gap) - gap).mean()),
        abs_mean=float(absolute.mean()),
        abs_p50=p50,
        abs_p90=p90,
        abs_p99=p99,
        abs_max=float(absolute.max()),
        correlation=float(np.corrcoef(tokens.rollout, tokens.training)[0, 1]) if varies else math.nan,
        effective_sample_size=float(ratio.sum() ** 2 / (len(tokens) * (ratio**2).sum())),
    )
