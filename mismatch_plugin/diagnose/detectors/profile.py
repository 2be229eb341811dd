"""How large the gap ordinarily is at a token's log-prob: what a token's own gap is measured by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mismatch_plugin.data.arrays import Bools, Floats
from mismatch_plugin.diagnose.batch import Batch, Tokens
from mismatch_plugin.diagnose.detectors.distance import CLIP

CERTAIN = 0.05
"""Tokens that the rollout side gives a log-prob above −this say nothing: any two policies agree on them."""
BINS = 10


class Scaled(NamedTuple):
    """[T] usable tokens. size: |gap|, at most CLIP. ordinary: what is usual at this log-prob. informative: not near
    certain on both sides."""

    tokens: Tokens
    size: Floats
    ordinary: Floats
    informative: Bools


def scaled(batch: Batch, typical: float | None = None) -> Scaled:
    """ordinary: the mean |gap| of the tokens in the same tenth by rollout log-prob; its quantile `typical` if given,
    then new tokens and those that occurred before apart (a penalty moves one kind only)."""
    tokens = batch.tokens
    size = np.minimum(np.abs(tokens.gap), CLIP)
    depth = -tokens.rollout
    ordinary = np.zeros(len(size))
    order = tokens.order_down
    again = tokens.occurred[order]
    for at in (order[again], order[~again]) if typical is not None else (order,):
        for part in np.array_split(at, BINS):
            if len(part):
                ordinary[part] = size[part].mean() if typical is None else np.quantile(size[part], typical)
    return Scaled(tokens, size, ordinary, np.maximum(depth, -tokens.training) > CERTAIN)
