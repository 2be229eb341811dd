"""Parts of a step put together and compared with one process, and how far its data are from every decision."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.distributed.correction_cases import Outcome
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
