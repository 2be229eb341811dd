"""How far apart the two sides are: not a fault, but the figure that a reader wants."""

from __future__ import annotations

import math

import numpy as np

from mismatch_plugin.check.batch import Batch, Tokens
from mismatch_plugin.check.findings import Mismatch

CLAMP = 20.0


def mismatch(batch: Batch) -> Mismatch | None:
    """Over all tokens that train and have a number on both sides; None if there is none."""
    return mismatch_of(batch.tokens)


def mismatch_of(tokens: Tokens) -> Mismatch | None:
    """The same for given tokens. Formulas: `findings.Mismatch`."""
    count = len(tokens)
    if count == 0:
        return None
    gap = np.clip(tokens.gap, -CLAMP, CLAMP)
    absolute = np.abs(tokens.gap)
    ratio = np.exp(gap)
    quantiles = [float(value) for value in np.quantile(absolute, [0.5, 0.9, 0.99])]
    varies = count > 1 and np.ptp(tokens.rollout) > 0 and np.ptp(tokens.train) > 0
    return Mismatch(
        tokens=count,
        samples=len(np.unique(tokens.sample)),
        kl=-float(gap.mean()),
        k3_kl=float((np.expm1(gap) - gap).mean()),
        abs_mean=float(absolute.mean()),
        abs_p50=quantiles[0],
        abs_p90=quantiles[1],
        abs_p99=quantiles[2],
        abs_max=float(absolute.max()),
        correlation=float(np.corrcoef(tokens.rollout, tokens.train)[0, 1]) if varies else math.nan,
        effective_sample_size=float(ratio.sum() ** 2 / (count * (ratio**2).sum())),
    )
