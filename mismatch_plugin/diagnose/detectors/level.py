"""How far apart the two sides are, and how that compares with what is published of sound pairs."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.findings import Mismatch

CLAMP = 20.0
ENOUGH_TOKENS = 100
"""Comparable tokens without which slopes, offsets and the size itself are not judged: then nothing is decided."""

SizeClass = Literal["exact", "small", "moderate", "large", "far"]
SMALL_K3, MODERATE_K3, FAR_K3 = 1e-3, 1e-2, 0.1
"""Upper ends of small, moderate and large, k3 in nats a token.

small: dense bf16 pairs (a tiny model, SGLang bf16 against a float32 trainer: 8e-4). moderate: KL of the literature
(.0004 to .01), fp8 whose export was quantised otherwise (xtuner #2044: 8.7e-3), int8. large: MoE without routing replay
(effective sample size .94 to .95, so k3 of about .03), weights some optimizer steps apart (here: up to .085).
"""
FAR_ABS_MEAN = 0.35
"""Mean |Δ log p| in nats: the largest published of a sound pair is .34 (MoE 30B-A3B bf16); .2 to .4 was found broken
elsewhere (OpenClaw #69)."""


def size_class(level: Mismatch) -> SizeClass:
    """exact: no token differs. far: above what any sound pair that is published has."""
    if level.abs_max == 0.0:
        return "exact"
    if level.k3_kl > FAR_K3 or level.abs_mean > FAR_ABS_MEAN:
        return "far"
    return "small" if level.k3_kl <= SMALL_K3 else "moderate" if level.k3_kl <= MODERATE_K3 else "large"


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
