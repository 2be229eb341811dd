"""Which share of the tokens a setting keeps, in closed form, where every token's log-ratio is l ~ N(−KL, 2 KL).

That is Gaussian noise with E ρ = 1, independent from token to token: the mildest noise that has this KL. Real gaps have
heavier tails and drift together inside a response, so that real shares are lower: `inspect` predicts from the data.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import UNITS, Unit

LENGTHS = (100, 1000, 10_000)
"""Trained tokens of a response at which the table of presets says to which KL it keeps SHARE."""
SHARE = 0.9
LARGEST_KL = 0.1
"""Above it something other than noise is at work, whatever is kept."""
_GRID = [float(f"{digits}e{power}") for power in range(-10, -2) for digits in range(10, 100)] + [LARGEST_KL]
_NORMAL = NormalDist()


def expected_kept(config: MismatchConfig, kl: float, length: int) -> float | None:
    """Share of the tokens that rejection, veto and mask mode leave in the loss.

    kl: nats a token. length: trained tokens of every response. Criteria count as independent of each other. None where
    one is of a statistic whose distribution is not computed here, or hangs on the advantage.
    """
    share, bounds = 1.0, list[tuple[Unit, float, float]]()
    if config.weighted and config.tis.mode == "mask":
        bounds.append((config.unit, _log(config.tis.lower), _log(config.tis.upper)))
    for criterion in config.criteria:
        lower, upper = criterion.log_bounds
        low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
        if criterion.condition != "any" or criterion.budget:
            return None
        if criterion.in_log_space:
            bounds.append((criterion.unit, low, high))
        elif (criterion.aggregate, criterion.statistic, lower) == ("sequence_mean", "k3", None):
            # E k3 = KL and E k3² = e^2KL − 1 − 2 KL + KL² exactly; the mean of many is close to a gamma variable.
            share *= _gamma(high, kl, (math.expm1(2 * kl) - 2 * kl) / length)
        elif (criterion.aggregate, criterion.statistic, lower) == ("sequence_max", "k2", None):
            share *= _within(-math.sqrt(2 * high), math.sqrt(2 * high), kl, 1.0) ** length
        else:
            return None
    tokens = {UNITS["token"]: 1.0, UNITS["sequence"]: length, UNITS["geometric"]: 1 / length}
    for unit, low, high in bounds:
        if unit not in tokens:
            return None
        share *= _within(low, high, kl, tokens[unit])
    if config.rs.veto_threshold is not None:
        share *= _within(math.log(config.rs.veto_threshold), math.inf, kl, 1.0) ** length
    return share


def largest_kl(config: MismatchConfig, length: int) -> float | None:
    """The KL of two digits, at most LARGEST_KL, up to which `expected_kept` is at least SHARE. None as there."""
    largest = 0.0
    for kl in _GRID:
        kept = expected_kept(config, kl, length)
        if kept is None:
            return None
        if kept < SHARE:  # not monotone: one bound above alone lets the longest responses through
            break
        largest = kl
    return largest


def keeps(config: MismatchConfig) -> str:
    """`all`, or to which KL SHARE of the tokens is kept, by length."""
    if not config.rejects:
        return "all"
    found = [largest_kl(config, length) for length in LENGTHS]
    if any(kl is None for kl in found):
        return "not computed"
    shown = ["0.1 and more" if kl == LARGEST_KL else f"{kl:g}" for kl in found]
    if len(set(shown)) == 1:
        return f"KL to {shown[0]}"
    return "KL to " + ", ".join(f"{kl} at {length:,}" for kl, length in zip(shown, LENGTHS, strict=True)) + " tokens"


def _within(low: float, high: float, kl: float, tokens: float) -> float:
    """P(low ≤ x ≤ high) of x ~ N(−KL, 2 KL) summed over `tokens`; a mean over n tokens has n KL · (1/n) and 1/n of the
    variance: tokens = 1/n, and the mean stays −KL."""
    mean = -kl * max(tokens, 1.0)
    deviation = math.sqrt(2 * kl * tokens)
    return _NORMAL.cdf((high - mean) / deviation) - _NORMAL.cdf((low - mean) / deviation)


def _gamma(x: float, mean: float, variance: float) -> float:
    """P(gamma variable ≤ x), by Wilson and Hilferty's cube root."""
    c = variance / mean**2 / 9
    return _NORMAL.cdf(((x / mean) ** (1 / 3) - (1 - c)) / math.sqrt(c))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
