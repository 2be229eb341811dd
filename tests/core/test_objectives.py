"""Objectives, the penalty on the distance to the sampler and the score-function KL by hand; weights made elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.objectives import score_function_kl
from mismatch_plugin.core.weights import bound_weight

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN = math.nan


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def settings(**fields: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig.model_validate(fields)


def outcome(
    config: mp.MismatchConfig, theta: torch.Tensor, **fields: Any
) -> tuple[list[float], list[float], dict[str, float]]:
    """(loss of each token, gradient of their sum, metrics without their prefix) of one sequence, all of it trained."""
    leaf = theta.clone().requires_grad_()
    masks = fields.pop("loss_masks", [[1] * len(theta)])
    rows: dict[str, Any] = {name: [torch.as_tensor(value, dtype=torch.float64)] for name, value in fields.items()}
    packed = mp.PackedSequences.from_lists(loss_masks=masks, **rows)
    token = token_loss(leaf, packed, config)
    (gradient,) = torch.autograd.grad(token.policy.sum(), leaf)
    metrics = mp.policy_loss(leaf, packed, config).statistics.metrics()
    return token.policy.tolist(), gradient.tolist(), {key.split("/")[1]: value for key, value in metrics.items()}


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


# Three tokens and one under the mask, where both sides are NaN: r = 4, 1, 1/2, their geometric mean s = 2^(1/3) = 1.26.
THETA, OLD, MASK = logs(0.4, 0.3, NAN, 0.1), logs(0.1, 0.3, NAN, 0.2), [[1, 1, 0, 1]]
ADVANTAGES = [1.0, -1.0, NAN, 2.0]
S = 2.0 ** (1 / 3)


def test_gspo() -> None:
    """s is clipped at 1.2 where A > 0, and not where A < 0; the gradient of s_t is s at its own token."""
    given = {"old_log_probs": OLD, "advantages": ADVANTAGES, "loss_masks": MASK}
    narrow = settings(objective="gspo", ppo={"eps_clip_low": 0.2, "eps_clip_high": 0.2})
    losses, gradient, metrics = outcome(narrow, THETA, **given)
    assert losses == close([-1.2, S, 0, -2.4])
    assert gradient == close([0, S, 0, 0])
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_high_side"]) == close((2 / 3, 2 / 3))
    assert metrics["ppo_kl"] == close(-math.log(2) / 3)
    losses, gradient, _ = outcome(narrow.replace(ppo={"eps_clip_high": 0.3}), THETA, **given)
    assert losses == gradient == close([-S, S, 0, -2 * S])
    # The dual clip, too, is on s: at most 1.1 where A < 0.
    losses, gradient, metrics = outcome(narrow.replace(ppo={"dual_clip": 1.1}), THETA, **given)
    assert losses[1] == close(1.1) and gradient[1] == 0 and metrics["pg_clipfrac_lower"] == close(1 / 3)


def test_the_objectives_own_epsilons() -> None:
    """gspo 3e-4 and 4e-4, cispo 1 (nothing is below) and 0.2."""
    given = {"old_log_probs": logs(0.5), "advantages": [1.0]}
    for r, expected in ((1.0003, 1.0003), (1.0005, 1.0004)):
        assert outcome(settings(objective="gspo"), logs(0.5 * r), **given)[0] == close([-expected])
    for r, expected in ((1e-3, 1e-3), (1.3, 1.2)):
        assert outcome(settings(objective="cispo"), logs(0.5 * r), **given)[1] == close([-expected])


def test_cispo() -> None:
    """−sg(clip(r)) A log π_θ: what is clipped keeps its gradient, whatever A's sign."""
    given = {"old_log_probs": OLD, "advantages": ADVANTAGES, "loss_masks": MASK}
    losses, gradient, metrics = outcome(settings(objective="cispo"), THETA, **given)
    assert gradient == close([-1.2, 1, 0, -2 * 0.5])
    assert losses == close([-1.2 * math.log(0.4), math.log(0.3), 0, -math.log(0.1)])
    assert metrics["pg_clipfrac"] == metrics["pg_clipfrac_high_side"] == close(1 / 3)
    assert metrics["ppo_kl"] == close(-math.log(2) / 3) and metrics["pg_clipfrac_lower"] == 0
    # With a lower bound r = 1/2 is clipped, and so is r = 4 where A < 0.
    bounded = settings(objective="cispo", ppo={"eps_clip_low": 0.2})
    _, gradient, metrics = outcome(bounded, THETA, **given | {"advantages": [-1.0, -1.0, NAN, 2.0]})
    assert gradient == close([1.2, 1, 0, -2 * 0.8])
    assert (metrics["pg_clipfrac_high_side"], metrics["pg_clipfrac_low_side"]) == close((1 / 3, 1 / 3))


def test_reinforce_under_weights_of_algorithm_2() -> None:
    """−w A log π_θ, w = min(π_old/π_rollout, 2): here 2 and 0.5. Nothing is clipped, nothing is said of a clip."""
    given = {"old_log_probs": logs(0.8, 0.2), "rollout_log_probs": logs(0.1, 0.4), "advantages": [1.0, -3.0]}
    losses, gradient, metrics = outcome(settings(use_tis=True, objective="reinforce"), logs(0.9, 0.1), **given)
    assert gradient == close([-2, 1.5])
    assert losses == close([-2 * math.log(0.9), 1.5 * math.log(0.1)])
    assert not {"pg_clipfrac", "ppo_kl"} & metrics.keys()


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "gmpo"])
def test_beyond_the_safety_bound_nothing_is_infinite(name: str) -> None:
    given = {"old_log_probs": torch.tensor([-1000.0, -1.0]), "advantages": [-1.0, -1.0]}
    config = settings(objective=name, ppo={"eps_clip_high": math.inf, "eps_clip_low": 0.5})
    losses, gradient, metrics = outcome(config, torch.tensor([-1.0, -1.0]), **given)
    assert all(map(math.isfinite, [*losses, *gradient, *metrics.values()]))
    assert abs(losses[0]) == pytest.approx(math.exp(20), rel=1e-5)


INVALID = {  # policy, algorithm 1, what is invalid: s of the two other tokens, r = 4 and 1/2, and gradients
    ("neutral", True, "rollout"): (S, [-S, -S, -S]),  # its anchor is π_θ itself: l = 0, and it counts
    ("drop-token", True, "rollout"): (S, [-S, 0, -S]),
    ("drop-sequence", True, "rollout"): (S, [0, 0, 0]),
    ("neutral", False, "rollout"): (S, [-S, -S, -S]),  # not used
    ("neutral", False, "old"): (2**0.5, [-(2**0.5), 0, -(2**0.5)]),  # does not enter: the mean runs over two tokens
    ("drop-token", False, "old"): (2**0.5, [-(2**0.5), 0, -(2**0.5)]),
}


@pytest.mark.parametrize(("policy", "bypass", "where"), INVALID)
def test_invalid_log_probs_in_gspos_mean(policy: str, bypass: bool, where: str) -> None:
    s, expected = INVALID[policy, bypass, where]
    rows = {"rollout": [0.1, 0.3, 0.2] if bypass else [0.4, 0.3, 0.1], "old": [0.1, 0.3, 0.2]}
    rows[where][1] = NAN
    config = settings(
        objective="gspo",
        use_rollout_log_probs=bypass,
        rollout_log_prob_policy=policy,
        ppo={"eps_clip_low": 0.5, "eps_clip_high": 0.5},
    )
    given = {"old_log_probs": logs(*rows["old"]), "rollout_log_probs": logs(*rows["rollout"])}
    _, gradient, metrics = outcome(config, logs(0.4, 0.3, 0.1), advantages=[1.0, 1.0, 1.0], **given)
    assert gradient == close(expected)
    entering = 2 if where == "old" else 3
    assert metrics["ppo_kl"] == close(-math.log(s) * entering / 3)


def test_what_is_rejected_still_counts_in_gspos_mean() -> None:
    """ρ = π_old/π_rollout is 1, 1, 8: the last token is rejected, s is that of all three."""
    config = settings(objective="gspo", rs={"criteria": ["token:ratio:0.5:2"]}, ppo={"eps_clip_high": 0.5})
    _, gradient, _ = outcome(
        config, logs(0.4, 0.3, 0.1), advantages=[1.0, 1.0, 1.0], old_log_probs=logs(0.1, 0.3, 0.2),
        rollout_log_probs=logs(0.1, 0.3, 0.025),
    )  # fmt: skip
    assert gradient == close([-S, -S, 0])


# Penalty on the distance to the sampler -------------------------------------------------------------------------------

PENALTIES = {  # kind, l: value, derivative
    ("k2", math.log(3)): (0.60347, 1.09861),
    ("k3", math.log(3)): (2 - math.log(3), 2.0),
    ("k2", -4.0): (8.0, -4.0),
    ("k2", -6.0): (18.0, -6.0),  # far tokens are pulled back as well
    ("k2", 30.0): (450.0, 30.0),
    ("k3", 3.0): (math.exp(3) - 4, math.exp(3) - 1),
    ("k3", -9.0): (math.exp(-9) + 8, math.exp(-9) - 1),
    ("k3", -30.0): (29.0, -1.0),
    ("k3", 25.0): (6 * math.exp(20) - 26, math.exp(20) - 1),  # the tangent at 20
    ("k3", 1000.0): (981 * math.exp(20) - 1001, math.exp(20) - 1),
}


@pytest.mark.parametrize(("kind", "gap"), PENALTIES)
@pytest.mark.parametrize("algorithm", range(4))
def test_the_distance_to_the_sampler(kind: str, gap: float, algorithm: int) -> None:
    """Two tokens, the second at distance 0; weights of ½ and a rejected token do not scale it."""
    value, slope = PENALTIES[kind, gap]
    config = settings(
        use_rollout_log_probs=bool(algorithm & 1),
        use_tis=bool(algorithm & 2),
        tis={"upper_bound": 0.5} if algorithm & 2 else {},
        rs={"criteria": ["token:k2:0.1"]},
        terms={"rollout_kl_coef": 0.3, "rollout_kl_type": kind},
    )
    start = torch.tensor([-1001.0, -1.0], dtype=torch.float64)
    leaf = (start + torch.tensor([gap, 0.0])).requires_grad_()
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1, 1]], rollout_log_probs=[start], old_log_probs=[leaf.detach().clone()], advantages=[0.0]
    )
    for on, share in (("all", 1.0), ("accepted", 0.0)):
        result = mp.policy_loss(leaf, packed, config.replace(terms={"rollout_kl_on": on}))
        assert result.correction.keep.tolist() == [0, 1]  # every l of `PENALTIES` has k2 above 0.1
        assert {name: term.item() for name, term in result.terms.items()} == {
            "rollout_kl": pytest.approx(0.3 * value * share, rel=1e-5)
        }
        assert int(result.terms_denominator) == 2
        (gradient,) = torch.autograd.grad(result.loss, leaf)
        assert gradient.tolist() == pytest.approx([0.3 * slope * share / 2, 0.0], rel=1e-5)
        metrics = result.statistics.metrics()
        assert metrics["rollout_corr/rollout_kl"] == pytest.approx(value / 2, rel=1e-5)


@pytest.mark.parametrize("policy", ["neutral", "drop-token", "drop-sequence", "error"])
@pytest.mark.parametrize("bypass", [False, True])
def test_an_invalid_log_prob_is_at_no_distance_to_the_sampler(policy: str, bypass: bool) -> None:
    """Also where π_old, which takes its place in the ratios, is not π_θ. In plain PPO it is used, so it is an error."""
    config = settings(use_rollout_log_probs=bypass, rollout_log_prob_policy=policy, terms={"rollout_kl_coef": 1.0})
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1, 1]], rollout_log_probs=[logs(0.2, NAN)], old_log_probs=[logs(0.2, 0.2)], advantages=[0.0]
    )
    leaf = logs(0.6, 0.8).requires_grad_()
    if policy == "error":
        with pytest.raises(mp.InvalidLogProbError, match="position 1"):
            mp.policy_loss(leaf, packed, config)
        return
    result = mp.policy_loss(leaf, packed, config)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert result.terms["rollout_kl"].item() == close(math.log(3) ** 2 / 2)
    assert gradient.tolist() == close([math.log(3) / 2, 0])


def test_the_distance_to_the_sampler_needs_one() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=[[1]], old_log_probs=[logs(0.2)], advantages=[0.0])
    with pytest.raises(ValueError, match="rollout_log_probs is missing"):
        mp.policy_loss(logs(0.2), packed, settings(terms={"rollout_kl_coef": 1.0}))


# KL through the sampling probability ----------------------------------------------------------------------------------

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
