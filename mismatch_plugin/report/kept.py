"""Which share of the tokens a setting keeps, in closed form, where every token's log-ratio is l ~ N(−KL, 2 KL).

That is Gaussian noise with E ρ = 1, independent from token to token: the mildest noise that has this KL. Real gaps have
heavier tails and drift together inside a response, so that real shares are lower: `inspect` predicts from the data.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from mismatch_plugin.config import Criterion, MismatchConfig

LENGTHS = (100, 1000, 10_000)
"""Trained tokens of a response at which the table of presets says to which KL it keeps SHARE."""
SHARE = 0.9
LARGEST_KL = 0.1
"""Above it something other than noise is at work, whatever is kept."""
_GRID = tuple(LARGEST_KL * 10 ** (-step / 16) for step in range(128, -1, -1))  # from 1e-9 upwards
_NORMAL = NormalDist()


def expected_kept(config: MismatchConfig, kl: float, length: int) -> float | None:
    """Share of the tokens that rejection, veto and mask mode leave in the loss.

    kl: nats a token. length: trained tokens of every response. Criteria count as independent of each other. None where
    one is of a statistic (tv, binary_kl) whose distribution the KL does not give, or hangs on the advantage.
    """
    tis, share = config.tis, 1.0
    if config.dry_run:
        return 1.0
    if config.weighted and tis.mode == "mask":
        sums = {"token": 1.0, "sequence": float(length), "geometric": 1.0 / length}.get(tis.level)
        if sums is None:
            return None
        share *= _within(_log(tis.lower), _log(tis.upper), kl, sums)
    if config.rs.veto_threshold is not None:
        share *= _within(math.log(config.rs.veto_threshold), math.inf, kl, 1.0) ** length
    for criterion in config.criteria:
        kept = _criterion(criterion, kl, length)
        if kept is None:
            return None
        share *= kept
    return share


def largest_kl(config: MismatchConfig, length: int, share: float = SHARE) -> float | None:
    """The KL, at most LARGEST_KL, up to which `expected_kept` is at least `share`. None as there."""
    low = _GRID[0]
    for high in _GRID:
        kept = expected_kept(config, high, length)
        if kept is None:
            return None
        if kept < share:  # not monotone: one bound above alone lets the longest responses through
            break
        low = high
    else:
        return LARGEST_KL
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (expected_kept(config, middle, length) or 0.0) >= share else (low, middle)
    return low


def keeps(config: MismatchConfig) -> str:
    """`all`, or to which KL SHARE of the tokens is kept, by length."""
    if not config.rejects or config.dry_run:
        return "all"
    found = [largest_kl(config, length) for length in LENGTHS]
    if any(kl is None for kl in found):
        return "depends on probabilities or advantages"
    shown = ["0.1 and more" if kl == LARGEST_KL else _digits(kl or 0.0) for kl in found]
    if len(set(shown)) == 1:
        return f"KL to {shown[0]}"
    return "KL to " + ", ".join(f"{kl} at {length:,}" for kl, length in zip(shown, LENGTHS, strict=True)) + " tokens"


def _digits(kl: float) -> str:
    """Two digits, rounded down: the share holds at what is shown."""
    unit = 10.0 ** (math.floor(math.log10(kl)) - 1)
    return f"{math.floor(kl / unit * (1 + 1e-9)) * unit:.2g}"


def _criterion(criterion: Criterion, kl: float, length: int) -> float | None:
    if criterion.conditional or criterion.budget:
        return None
    lower, upper = criterion.log_bounds
    low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
    aggregate, statistic = criterion.aggregate, criterion.statistic
    if criterion.in_log_space and aggregate != "sequence_max":
        return _within(low, high, kl, {"token": 1.0, "sequence_sum": float(length)}.get(aggregate, 1.0 / length))
    if statistic == "k3" and aggregate in ("sequence_sum", "sequence_mean"):
        # E k3 = KL and E k3² = e^2KL − 1 − 2 KL + KL² exactly; the mean of many is close to a gamma variable.
        mean, variance = kl, (math.expm1(2 * kl) - 2 * kl) / length
        scale = length if aggregate == "sequence_sum" else 1.0
        return _gamma(high / scale, mean, variance) - _gamma(low / scale, mean, variance)
    interval = _interval(statistic, high) if lower is None or criterion.in_log_space else None
    if interval is None or aggregate not in ("token", "sequence_max"):
        return None
    kept = _within(*interval, kl, 1.0)
    if aggregate == "token":
        return kept
    low_end = _within(-math.inf, low, kl, 1.0) ** length if low > -math.inf else 0.0
    return kept**length - low_end


def _interval(statistic: str, bound: float) -> tuple[float, float] | None:
    """Log-ratios of which the statistic is at most `bound`."""
    if statistic in ("ratio", "k1"):
        return -math.inf, bound
    if statistic == "k2":
        return -math.sqrt(2 * bound), math.sqrt(2 * bound)
    if statistic == "k3":
        return _solve(bound, -bound - 1.0, 0.0), _solve(bound, math.log1p(bound) + math.sqrt(2 * bound), 0.0)
    return None


def _solve(bound: float, outside: float, inside: float) -> float:
    """The l between `outside` and `inside` at which e^l − 1 − l is `bound`."""
    for _ in range(100):
        middle = (outside + inside) / 2
        outside, inside = (middle, inside) if math.expm1(middle) - middle > bound else (outside, middle)
    return inside


def _within(low: float, high: float, kl: float, tokens: float) -> float:
    """P(low ≤ x ≤ high) of x ~ N(−KL, 2 KL) summed over `tokens`; a mean over n tokens has n KL · (1/n) and 1/n of the
    variance: tokens = 1/n, and the mean stays −KL."""
    mean = -kl * max(tokens, 1.0)
    deviation = math.sqrt(2 * kl * tokens)
    return _NORMAL.cdf((high - mean) / deviation) - _NORMAL.cdf((low - mean) / deviation)


def _gamma(x: float, mean: float, variance: float) -> float:
    """P(gamma variable ≤ x), by Wilson and Hilferty's cube root."""
    if x <= 0:
        return 0.0
    c = variance / mean**2 / 9
    return _NORMAL.cdf(((x / mean) ** (1 / 3) - (1 - c)) / math.sqrt(c))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
