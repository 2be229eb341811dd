"""The score-function KL by hand, weights made elsewhere, and bounds that hold to the last bit."""

from __future__ import annotations

import math

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.objectives import score_function_kl
from mismatch_plugin.core.weights import bound_weight

# d = log π_θ − log π_ref → the estimator and its derivative.
ESTIMATORS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.expm1(-d) + d, lambda d: 1.0 - math.exp(-d)),
}


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("sampler", [None, -1.3])
def test_the_gradient_passes_through_the_sampling_probability(kind: str, sampler: float | None) -> None:
    value, slope = ESTIMATORS[kind]
    log_p, ref = -0.9, torch.tensor([-1.4, -0.2, -3.9], dtype=torch.float64)  # the last is beyond the bound of 2
    current = torch.full((3,), log_p, dtype=torch.float64, requires_grad=True)
    drawn = current if sampler is None else torch.full_like(ref, sampler)
    found = score_function_kl(current, drawn, ref, kind, 2.0, 10.0)
    (gradient,) = torch.autograd.grad(found.sum(), current)
    ratio = 1.0 if sampler is None else math.exp(log_p - sampler)
    near = [log_p - r for r in ref.tolist()[:2]]
    assert found.tolist() == pytest.approx([ratio * value(d) for d in near] + [ratio * value(2.0)])
    assert gradient.tolist() == pytest.approx([ratio * (value(d) + slope(d)) for d in near] + [0.0])


def test_the_output_clamp_ends_the_gradient() -> None:
    current = torch.tensor([-5.0], requires_grad=True)
    found = score_function_kl(current, current, torch.tensor([-0.1]), "k3", 20.0, 10.0)
    (gradient,) = torch.autograd.grad(found.sum(), current)
    assert (found.item(), gradient.item()) == (10.0, 0.0)


def test_weights_made_elsewhere_are_not_read_where_nothing_trains() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=[[1, 0]], old_log_probs=[[-1.0, -1.0]], advantages=[2.0])
    log_probs = torch.tensor([-0.9, -0.9], requires_grad=True)
    token = token_loss(log_probs, packed, mp.MismatchConfig(use_tis=True), weights=torch.tensor([0.5, math.nan]))
    token.policy.sum().backward()
    assert token.policy.tolist() == pytest.approx([-0.5 * 2.0 * math.exp(0.1), 0.0])
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()


def test_an_invalid_log_prob_that_is_an_error_shows_in_the_loss() -> None:
    """Until the step's reduction raises, nothing may look sound."""
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1, 1]], rollout_log_probs=[[-1.0, -1.0]], advantages=[1.0]
    ).replace(invalid=())
    config = mp.MismatchConfig(use_rollout_log_probs=True, use_tis=True, tis=mp.ImportanceSampling(level="sequence"))
    result = mp.policy_loss(torch.tensor([-0.9, math.nan], requires_grad=True), packed, config)
    assert result.loss.isnan()
    with pytest.raises(mp.InvalidLogProbError):
        result.statistics.metrics()
    left = mp.policy_loss(
        torch.tensor([-0.9, math.nan], requires_grad=True),
        packed,
        config.replace(rollout_log_prob_policy="drop-token"),
    )
    assert left.loss.isfinite()


def test_mask_mode_s_weights_never_leave_their_bounds() -> None:
    """exp(log hi) may round above hi."""
    generator = torch.Generator().manual_seed(0)
    for lower, upper in (1.0 + torch.rand((200, 2), generator=generator) * torch.tensor([-0.9, 9.0])).tolist():
        bounds = torch.tensor([lower, upper]).log()
        log_ratio = torch.stack([bounds, bounds.nextafter(bounds - 1), bounds.nextafter(bounds + 1)]).flatten()
        weights, _ = bound_weight(log_ratio, "mask", lower, upper)
        used = weights[weights != 0].double()
        # in float32, the bounds as float32
        low, high = torch.tensor(lower).double(), torch.tensor(upper).double()
        assert bool(((used >= low) & (used <= high)).all())
