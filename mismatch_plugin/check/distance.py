"""How far apart two lists of log-probs are, robustly: what the alignment detectors compare."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mismatch_plugin.check.batch import Bools, Floats, Sample

CLIP = 3.0
"""A single token counts for at most so much, in nats."""


class Distances(NamedTuple):
    """[n] |rollout − training|, clipped, and which tokens have both."""

    values: Floats
    valid: Bools

    @property
    def mean(self) -> float:
        """Over the valid tokens; inf if there is none."""
        return float(self.values[self.valid].mean()) if self.valid.any() else math.inf

    @property
    def tokens(self) -> int:
        """How many are valid."""
        return int(self.valid.sum())


def distances(sample: Sample, train: Floats) -> Distances:
    """Of a sample's rollout log-probs to any list, over the shorter length.

    Exact zeros are left out: certain tokens fit everywhere, and fills nowhere.
    """
    shared = min(len(sample.rollout), len(train), sample.tokens)
    ours, theirs = sample.rollout[:shared], train[:shared]
    valid = sample.mask[:shared] & np.isfinite(ours) & np.isfinite(theirs) & (ours != 0.0) & (theirs != 0.0)
    values = np.zeros(shared)
    values[valid] = np.minimum(np.abs(ours[valid] - theirs[valid]), CLIP)
    return Distances(values, valid)


class Comparison(NamedTuple):
    """Two candidates over the tokens that both can judge."""

    own: float
    other: float
    deviations: float
    """(own − other) in standard errors of the paired differences."""
    tokens: int

    def clearly_better(self, factor: float, standard_errors: float, minimum: float) -> bool:
        """The other fits better: below `factor` times the own distance, far outside chance, by `minimum` nats."""
        return self.other < factor * self.own and self.deviations > standard_errors and self.own - self.other > minimum


def compare(own: Distances, other: Distances) -> Comparison:
    """Paired, token by token."""
    shared = min(len(own.values), len(other.values))
    valid = own.valid[:shared] & other.valid[:shared]
    count = int(valid.sum())
    if count < 2:
        return Comparison(math.inf, math.inf, 0.0, count)
    a, b = own.values[:shared][valid], other.values[:shared][valid]
    error = float((a - b).std(ddof=1)) / math.sqrt(count)
    gain = float((a - b).mean())
    return Comparison(float(a.mean()), float(b.mean()), gain / max(error, 1e-12), count)
