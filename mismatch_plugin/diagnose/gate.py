"""The gate of `inspect --gate`: is the mismatch of this dump at most the bar, for CI and a first step at rate 0?"""

from __future__ import annotations

import math

from mismatch_plugin.core.gate import DEFAULT_GATE_KL
from mismatch_plugin.diagnose.result import Gate

FEW = 10_000
"""Below so many tokens the gate decides only where the standard error leaves no doubt."""
FEWEST = 100
"""Below so many it decides nothing: one token in some thousands can hold most of k3."""
SPREAD = 10.0
"""Assumed deviation of the tokens' k3 over its mean, where none is given: √2 for Gaussian noise, more with tails."""
SOURCE = (
    f"default {DEFAULT_GATE_KL:g}: dense engines of one precision on one set of weights are below, fp8 with unlike "
    "quantisation is above (8.7e-3, InternLM/xtuner#2044). slime's CI bounds the mean |Δ log p| by 0.1, which Gaussian "
    "noise reaches at k3 0.008"
)


def gate(k3_kl: float, tokens: int, bar: float | None = None, standard_error: float | None = None) -> Gate:
    """Whether k3_kl ≤ bar, both in nats a token. bar None: DEFAULT_GATE_KL.

    standard_error: of k3_kl, over samples where it can be had; absent, SPREAD · k3_kl / √tokens. With fewer than FEW
    tokens, `passed` is None (not decided, exit status 3) unless k3_kl is two standard errors away from the bar; with
    fewer than FEWEST, or where k3_kl is NaN, always.
    Raises: ValueError for a bar that is not above 0.
    """
    source = SOURCE if bar is None else "given by hand"
    bar = DEFAULT_GATE_KL if bar is None else bar
    if not bar > 0 or math.isinf(bar):
        raise ValueError(f"the bar of the gate is {bar:g}: give nats of k3 a token, a number above 0 such as 1e-3.")
    error = SPREAD * k3_kl / math.sqrt(max(tokens, 1)) if standard_error is None else standard_error
    clear = tokens >= FEWEST and (tokens >= FEW or abs(k3_kl - bar) > 2 * error)
    passed = k3_kl <= bar if clear and not math.isnan(k3_kl) else None
    return Gate(value=k3_kl, bar=bar, passed=passed, source=source)
