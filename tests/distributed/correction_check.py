"""Parts of a step put together and compared with one process, and how far its data are from every decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.metrics.full import HISTOGRAM_BINS, HISTOGRAM_EDGE, HISTOGRAM_SCALE, PROBABILITY_EDGES
from mismatch_plugin.core.rejection import token_statistic
from tests.distributed.correction_cases import VETO, Outcome, Settings, make
from tests.distributed.correction_worker import Part

TOLERANCE = 1e-12


def together(parts: Sequence[Part]) -> Outcome:
    """What the ranks of a step have, put back into the whole by position; each token lies on one rank."""
    places = torch.cat([part.places for part in parts])
    assert torch.equal(places.sort().values, torch.arange(places.numel())), "a token is missing, or is there twice"
    tokens = torch.empty(4, places.numel(), dtype=torch.float64)
    tokens[:, places] = torch.cat([part.tokens for part in parts], 1)
    weights, keep, gradient, terms_gradient = tokens.unbind(0)
    loss, terms, denominator, terms_denominator = (sum(values) for values in zip(*(p.sums for p in parts), strict=True))
    factor = parts[0].factor
    assert len({(part.factor, part.digest) for part in parts}) == 1, "the ranks differ in what a step shares"
    divisor, terms_divisor = max(denominator, 1.0), max(terms_denominator, 1.0)
    assert parts[0].metrics is not None
    return Outcome(
        loss / divisor / factor + terms / terms_divisor,
        (int(denominator), int(terms_denominator)),
        gradient / divisor / factor + terms_gradient / terms_divisor,
        weights / factor,
        keep,
        parts[0].metrics,
    )


def differences(actual: Outcome, whole: Outcome) -> list[str]:
    """Names of what is not equal."""
    found = [] if math.isclose(actual.loss, whole.loss, rel_tol=TOLERANCE) else ["loss"]
    found += [] if actual.denominators == whole.denominators else ["denominators"]
    for name in ("gradient", "weights", "keep"):
        one, other = getattr(actual, name), getattr(whole, name)
        rounding = 1e-15 * float(other.abs().max()) if other.numel() else 0.0  # where two terms' gradients cancel
        found += [] if torch.allclose(one, other, rtol=TOLERANCE, atol=rounding) else [name]
    assert actual.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        # A deviation is the root of a difference: its square is what has digits, of those of the mean's square.
        power = 2 if name.endswith("_std") else 1
        size = max(1.0, whole.metrics.get(name.replace("_std", "_mean"), 0.0)) if power == 2 else 1.0
        if not math.isclose(actual.metrics[name] ** power, value**power, rel_tol=TOLERANCE, abs_tol=1e-15 * size**2):
            found.append(f"{name}: {actual.metrics[name]!r} instead of {value!r}")
    return found


@cache
def _trained(batch: str, name: str) -> list[Tensor]:
    rows = make(batch).rows
    return [row[mask] for row, mask in zip(rows[name], rows["loss_mask"], strict=True) if mask.any()]


def distances(batch: str, settings: Settings) -> list[float]:
    """From each quantity that is compared with something to what it is compared with."""
    config, rollout = settings.config(), _trained(batch, "rollout_log_probs")
    train = _trained(batch, "log_probs" if config.use_rollout_log_probs else "old_log_probs")
    log_ratio = [a - b for a, b in zip(train, rollout, strict=True)]
    flat, ratio = torch.cat(log_ratio), torch.cat([row.exp() for row in log_ratio])
    sums = torch.stack([row.sum() for row in log_ratio])
    pairs: list[tuple[Tensor, float]] = [(values, bound) for values in (sums, flat) for bound in (20.0, -20.0)]
    products, counts = _products(batch, log_ratio, _level(config))
    mean_ratio = torch.stack([row.exp().mean() for row in products])
    for bound in (config.tis.lower, config.tis.upper, *config.tis.positive):
        log_bound = math.log(bound) * torch.cat(counts) ** config.tis.bound_growth
        pairs += [(torch.cat(products) - log_bound, 0.0), (mean_ratio, bound)]
    judged = _trained(batch, "log_probs") if config.rejects_on_current_policy else train
    pairs.append((torch.cat([a - b for a, b in zip(judged, rollout, strict=True)]), math.log(VETO)))
    pairs.append((torch.stack([row.mean() for row in _trained(batch, "advantages") if row.any()]), 0.0))
    for criterion in config.criteria:
        rows = [token_statistic(criterion.statistic, a - b, a, b) for a, b in zip(judged, rollout, strict=True)]
        reduced = {
            "token": torch.cat(rows),
            "sequence_sum": torch.stack([row.sum() for row in rows]),
            "sequence_mean": torch.stack([row.mean() for row in rows]),
            "sequence_max": torch.stack([row.max() for row in rows]),
        }[criterion.aggregate]
        pairs += [(reduced, bound) for bound in criterion.log_bounds if bound is not None]
    pairs += [(torch.cat(rollout).exp(), edge) for edge in PROBABILITY_EDGES]
    anchor = torch.cat(rollout if config.use_rollout_log_probs else _trained(batch, "old_log_probs"))
    step = torch.cat(_trained(batch, "log_probs")) - anchor
    if settings.objective == "gspo":
        step = torch.stack([row.mean() for row in step.split([len(row) for row in rollout])])
    pairs += [(step.exp(), bound) for bound in (*(config.ratio_bounds or ()), 3.0)]
    distances = [float((values - bound).abs().min()) for values, bound in pairs]
    width = 2 * HISTOGRAM_EDGE / HISTOGRAM_BINS
    place = (flat / HISTOGRAM_SCALE).asinh() / width
    assert ratio.isfinite().all()
    return [*distances, float((place - place.round()).abs().min()) * width]


def _products(batch: str, log_ratio: list[Tensor], level: str) -> tuple[list[Tensor], list[Tensor]]:
    """The aggregated log-ratio of every token's unit, and how many tokens that is of, a row a sequence."""
    masks = [mask for mask in make(batch).rows["loss_mask"] if mask.any()]
    sums, counts = [], []
    for row, mask in zip(log_ratio, masks, strict=True):
        turn = (mask & ~torch.cat([mask.new_zeros(1), mask[:-1]])).cumsum(0)[mask]
        place = torch.arange(len(row))
        together = {
            "token": place[:, None] == place,
            "turn": turn[:, None] == turn,
            "prefix": place[:, None] >= place,
        }.get(level, torch.ones(len(row), len(row), dtype=torch.bool))
        sums.append(together.double() @ row / (len(row) if level == "geometric" else 1))
        counts.append(together.double().sum(1))
    return sums, counts


def _level(config: mp.MismatchConfig) -> str:
    return "token" if config.tis.level == "none" else config.tis.level
