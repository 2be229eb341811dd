"""How far apart two lists of log-probs are, robustly, whether another fits better, and what is usual at a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Tokens

CLIP = 3.0
"""A single token counts for at most so much, in nats."""
CERTAIN = 0.02
"""Tokens whose probability is nearer to 1 tell nothing of the logits."""
CERTAIN_NATS, BINS = 0.05, 10
"""Tokens that both sides give a log-prob above −CERTAIN_NATS say nothing: any two policies agree on them."""


def between(a: Floats, b: Floats, chosen: Bools | bool = True) -> Floats:
    """|a − b| of two arrays of one shape, clipped; NaN where one has no number, or where it is not chosen."""
    valid = np.isfinite(a) & np.isfinite(b) & chosen
    return np.minimum(np.abs(np.subtract(a, b, where=valid, out=np.full(valid.shape, np.nan))), CLIP)


def distances(sample: Sample, training: Floats | None = None) -> Floats:
    """Of a sample's rollout log-probs to its training ones or to any list, over the shorter length.

    Exact zeros are left out: certain tokens fit everywhere, and fills nowhere.
    """
    theirs = sample.train_log_probs if training is None else training
    shared = min(len(sample.rollout_log_probs), len(theirs), len(sample))
    ours, theirs = sample.rollout_log_probs[:shared], theirs[:shared]
    return between(ours, theirs, sample.mask[:shared] & (ours != 0.0) & (theirs != 0.0))


def told(values: Floats) -> int:
    """How many are numbers."""
    return int(np.isfinite(values).sum())


def average(values: Floats) -> float:
    """Of the numbers among them; inf if there is none."""
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.inf


class Comparison(NamedTuple):
    """Two candidates over the tokens that both can judge. deviations: (own − other) in standard errors of the paired
    differences."""

    own: float
    other: float
    deviations: float
    tokens: int

    def clearly_better(self, factor: float, standard_errors: float, minimum: float) -> bool:
        """The other fits better: below `factor` times the own distance, far outside chance, by `minimum` nats."""
        return self.other < factor * self.own and self.deviations > standard_errors and self.own - self.other > minimum


def compare(own: Floats, other: Floats) -> Comparison:
    """Paired, token by token, over the shorter length."""
    shared = min(len(own), len(other))
    valid = np.isfinite(own[:shared]) & np.isfinite(other[:shared])
    a, b = own[:shared][valid], other[:shared][valid]
    if len(a) < 2:
        return Comparison(math.inf, math.inf, 0.0, len(a))
    error = float((a - b).std(ddof=1)) / math.sqrt(len(a))
    return Comparison(float(a.mean()), float(b.mean()), float((a - b).mean()) / max(error, 1e-12), len(a))


def logit_gap(sample: Sample, ours: Floats, theirs: Floats) -> Floats:
    """[n] T (ours − theirs) / (1 − p), p the smaller of the two probabilities; NaN where it tells nothing.

    To first order a change of the logits moves log p by (1 − p) of it over T, so that this measures the change itself:
    the tokens of sure and of unsure responses are then equally far apart.
    """
    temperature = sample.log_prob_temperature
    with np.errstate(invalid="ignore", over="ignore"):
        left = -np.expm1(np.minimum(ours, theirs))
        chosen = sample.usable & np.isfinite(ours) & np.isfinite(theirs) & (left > CERTAIN)
        return np.where(chosen, temperature * np.clip(ours - theirs, -CLIP, CLIP) / np.where(chosen, left, 1.0), np.nan)


def telling(tokens: Tokens) -> Bools:
    """[T] not near certain on both sides."""
    return np.minimum(tokens.rollout, tokens.training) < -CERTAIN_NATS


def ordinary(tokens: Tokens, values: Floats, typical: Callable[[Floats], Any], kinds: Sequence[Bools] = ()) -> Floats:
    """[T] what `typical` is of the values of tokens of the same kind in the same tenth by rollout log-prob."""
    found = np.zeros(len(values))
    for chosen in kinds or [np.ones(len(values), dtype=bool)]:
        for part in np.array_split(tokens.order_down[chosen[tokens.order_down]], BINS):
            if len(part):
                found[part] = typical(values[part])
    return found


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's, without care for ties; NaN for fewer than 3 values or a constant."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def mann_whitney(a: Floats, b: Floats) -> tuple[float, float]:
    """Are the values of `a` larger than those of `b`? The share of pairs in which they are, ties counting half, and the
    one-sided p by the normal approximation (H. B. Mann, D. R. Whitney, 1947)."""
    ordered = np.sort(b)
    below, upto = (np.searchsorted(ordered, a, side=side) for side in ("left", "right"))
    area = float((below + upto).sum()) / 2 / (len(a) * len(b))
    _, ties = np.unique(np.concatenate([a, b]), return_counts=True)
    n = len(a) + len(b)
    variance = (n + 1 - float((ties**3 - ties).sum()) / (n * (n - 1))) / (12 * len(a) * len(b))
    deviations = (area - 0.5) / math.sqrt(variance) if variance > 0 else 0.0
    return area, math.erfc(deviations / math.sqrt(2)) / 2


def z_score(values: Sequence[float] | Floats) -> float:
    """Of their sum, in standard errors over samples; 0 of a single one."""
    error = math.sqrt(len(values)) * float(np.std(values, ddof=1)) if len(values) > 1 else math.inf
    return float(np.sum(values)) / max(error, 1e-12)
