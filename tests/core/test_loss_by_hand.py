"""`policy_loss` worked out by hand: aggregations, denominators, objectives, clips, KL; all else: the differential."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.objectives import score_function_kl
from tests.core.worked import config, logs

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf
LN2 = math.log(2)


def log(*probabilities: float) -> Tensor:
    return logs([list(probabilities)])[0]


def gradient(loss: Tensor, leaf: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return found.tolist()


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


# Algorithm 2. π_old / π_rollout: A 1, 3 · B .6, masked, .1 · C .2. π_θ = 1.1 π_old everywhere (inside the clip).
OLD = [[0.2, 0.6], [0.3, NAN, 0.05], [0.1]]
ROLLOUT = [[0.2, 0.2], [0.5, NAN, 0.5], [0.5]]
MASKS = [[1, 1], [1, 0, 1], [1]]
ADVANTAGES = [1.0, -2.0, 5.0]
RS = {"criteria": ["token:ratio:0.5:4"]}  # rejects B's last token (ρ = .1) and C (.2)
# w = min(ρ, 2): 1, 2 | .6, –, (.1) | (.2). −A r w of the accepted tokens, the gradient too (d r / d log π = r):
# A −1.1·1 = −1.1, −1.1·2 = −2.2 | B 2·1.1·.6 = 1.32. Together −1.98.
PER_TOKEN = [[-1.1, -2.2], [1.32, 0, 0], [0]]
AGGREGATIONS = {  # (aggregation, denominator, length_norm): share of each sequence's tokens, denominator, loss
    ("token-mean", "accepted", None): ([1, 1, 1], 3, -0.66),
    ("token-mean", "original", None): ([1, 1, 1], 5, -0.396),
    # accepted: A −3.3/2, B 1.32/1, two sequences left. original: B is divided by its 2 tokens, C counts as a zero.
    ("seq-mean-token-mean", "accepted", None): ([1 / 2, 1, 0], 2, (-1.65 + 1.32) / 2),
    ("seq-mean-token-mean", "original", None): ([1 / 2, 1 / 2, 1], 3, (-1.65 + 0.66) / 3),
    ("seq-mean-token-sum", "accepted", None): ([1, 1, 1], 2, -0.99),
    ("seq-mean-token-sum", "original", None): ([1, 1, 1], 3, -0.66),
    ("seq-mean-token-sum", "accepted", 4.0): ([0.25, 0.25, 0.25], 2, -0.2475),
    ("seq-mean-token-sum", "original", 4.0): ([0.25, 0.25, 0.25], 3, -0.165),
}


@pytest.mark.parametrize(("aggregation", "denominator", "length_norm"), AGGREGATIONS)
def test_aggregations_and_denominators(aggregation: str, denominator: str, length_norm: float | None) -> None:
    shares, count, loss = AGGREGATIONS[aggregation, denominator, length_norm]
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs(ROLLOUT), loss_masks=MASKS, old_log_probs=logs(OLD), advantages=ADVANTAGES
    )
    log_probs = (torch.cat(logs(OLD)) + math.log(1.1)).requires_grad_()
    settings = {"aggregation": aggregation, "denominator": denominator, "length_norm": length_norm}
    result = mp.policy_loss(log_probs, packed, config(use_tis=True, rs=RS, **settings))
    expected = [share * value for share, row in zip(shares, PER_TOKEN, strict=True) for value in row]
    assert result.correction.keep.tolist() == [1, 1, 1, 0, 0, 0]
    assert result.denominator.dtype == torch.int64 and int(result.denominator) == count
    assert result.loss_sum.item() == close(sum(expected))
    assert result.loss.item() == close(loss)
    assert gradient(result.loss_sum, log_probs) == close(expected)
    assert gradient(result.loss, log_probs) == close([value / count for value in expected])
    assert result.statistics.metrics()["rollout_corr/pg_loss"] == close(loss)


# Objectives -----------------------------------------------------------------------------------------------------------


def outcome(
    settings: mp.MismatchConfig, theta: Tensor, **fields: Any
) -> tuple[list[float], list[float], dict[str, float]]:
    """(loss of each token, gradient of their sum, metrics without their prefix) of one sequence."""
    leaf = theta.clone().requires_grad_()
    masks = fields.pop("loss_masks", [[1] * len(theta)])
    rows: dict[str, Any] = {name: [torch.as_tensor(value, dtype=torch.float64)] for name, value in fields.items()}
    packed = mp.PackedSequences.from_lists(loss_masks=masks, **rows)
    token = token_loss(leaf, packed, settings)
    metrics = mp.policy_loss(leaf, packed, settings).statistics.metrics()
    short = {key.split("/")[1]: value for key, value in metrics.items()}
    return token.policy.tolist(), gradient(token.policy.sum(), leaf), short


# Three tokens and one under the mask, where both sides are NaN: r = 4, 1, 1/2, their geometric mean s = 2^(1/3) = 1.26.
THETA = log(0.4, 0.3, NAN, 0.1)
GIVEN: dict[str, Any] = {
    "old_log_probs": log(0.1, 0.3, NAN, 0.2),
    "advantages": [1.0, -1.0, NAN, 2.0],
    "loss_masks": [[1, 1, 0, 1]],
}
S = 2.0 ** (1 / 3)
E04 = math.exp(0.4)
EPS = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
LOGS = (math.log(0.4), math.log(0.3), math.log(0.1))
OBJECTIVES: dict[str, tuple[dict[str, Any], list[float], list[float], dict[str, float]]] = {
    # settings: loss and gradient of the three tokens, metrics
    "ppo": ({"ppo": EPS}, [-1.2, 1, -1], [0, 1, -1], {"pg_clipfrac": 1 / 3, "pg_clipfrac_high_side": 1 / 3}),
    "ppo, dual": ({"ppo": {"dual_clip": 1.5}}, [-1.2, 1, -1], [0, 1, -1], {"pg_clipfrac_lower": 0}),
    # s is clipped at 1.2 where A > 0, and not where A < 0; the gradient of s_t is s at its own token.
    "gspo": (
        {"objective": "gspo", "ppo": EPS},
        [-1.2, S, -2.4],
        [0, S, 0],
        {"pg_clipfrac": 2 / 3, "pg_clipfrac_high_side": 2 / 3, "ppo_kl": -LN2 / 3},
    ),
    "gspo, wide": ({"objective": "gspo", "ppo": EPS | {"eps_clip_high": 0.3}}, [-S, S, -2 * S], [-S, S, -2 * S], {}),
    # The dual clip, too, is on s: at most 1.1 where A < 0.
    "gspo, dual": (
        {"objective": "gspo", "ppo": EPS | {"dual_clip": 1.1}},
        [-1.2, 1.1, -2.4],
        [0, 0, 0],
        {"pg_clipfrac_lower": 1 / 3},
    ),
    # −sg(clip(r)) A log π_θ: what is clipped keeps its gradient. Its own ε: low 1 (nothing is below), high .2.
    "cispo": (
        {"objective": "cispo"},
        [-1.2 * LOGS[0], LOGS[1], -LOGS[2]],
        [-1.2, 1, -1],
        {"pg_clipfrac": 1 / 3, "pg_clipfrac_high_side": 1 / 3, "pg_clipfrac_lower": 0, "ppo_kl": -LN2 / 3},
    ),
    "cispo, bounded": (
        {"objective": "cispo", "ppo": {"eps_clip_low": 0.2}},
        [-1.2 * LOGS[0], LOGS[1], -1.6 * LOGS[2]],
        [-1.2, 1, -1.6],
        {"pg_clipfrac_high_side": 1 / 3, "pg_clipfrac_low_side": 1 / 3},
    ),
    # −(4/τ) σ(τ (r − 1)) A, τ 1 where A > 0, else 1.05; its slope is 4 σ (1 − σ) r: PPO has none at r = 4.
    "sapo": (
        {"objective": "sapo"},
        [-4 / (1 + math.exp(-3.0)), 2 / 1.05, -8 / (1 + math.exp(0.5))],
        [-16 * math.exp(-3.0) / (1 + math.exp(-3.0)) ** 2, 1, -4 * math.exp(0.5) / (1 + math.exp(0.5)) ** 2],
        {},
    ),
    # exp(mean of log r, each clipped at .4 on the side of its sign: .4, 0, −ln 2); each other token its own share.
    "gmpo": (
        {"objective": "gmpo"},
        [-((E04 / 2) ** (1 / 3)), (E04 / 2) ** (1 / 3), -2 * (E04 / 2) ** (1 / 3)],
        [0, (E04 / 2) ** (1 / 3), -2 * (E04 / 2) ** (1 / 3)],
        {},
    ),
    "reinforce": ({"objective": "reinforce"}, [-LOGS[0], LOGS[1], -2 * LOGS[2]], [-1, 1, -2], {}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives(name: str) -> None:
    settings, losses, slopes, expected = OBJECTIVES[name]
    found, gradients, metrics = outcome(config(**settings), THETA, **GIVEN)
    assert found == close([*losses[:2], 0, losses[2]])
    assert gradients == close([*slopes[:2], 0, slopes[2]])
    assert {key: metrics[key] for key in expected} == close(expected)
    assert name != "reinforce" or not {"pg_clipfrac", "ppo_kl"} & metrics.keys()


# Terms ----------------------------------------------------------------------------------------------------------------

DIFFERENCES = [LN2, -LN2, -5.0, 30.0]
KL = {  # kl_type: value and derivative by log π_θ at d = ln 2, −ln 2, −5, 30 (clamped to 20)
    "k1": [(LN2, 1), (-LN2, 1), (-5, 1), (20, 0)],
    "k2": [(LN2**2 / 2, LN2), (LN2**2 / 2, -LN2), (12.5, -5), (200, 0)],
    # e^−d − 1 + d; derivative 1 − e^−d
    "k3": [(0.5 - 1 + LN2, 0.5), (2 - 1 - LN2, -1), (math.exp(5) - 6, 1 - math.exp(5)), (math.exp(-20) + 19, 0)],
    # the same, at most 10
    "low_var_kl": [(0.5 - 1 + LN2, 0.5), (2 - 1 - LN2, -1), (10, 0), (10, 0)],
}


@pytest.mark.parametrize("kind", KL)
def test_kl_terms(kind: str) -> None:
    current = torch.tensor([-1.0, -1.0, -6.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = current.detach() - torch.tensor(DIFFERENCES, dtype=torch.float64)
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1] * 4], old_log_probs=[current.detach()], ref_log_probs=[reference], advantages=[0.0]
    )
    result = mp.policy_loss(current, packed, config(terms={"kl_coef": 0.5, "kl_type": kind}))
    values, slopes = zip(*KL[kind], strict=True)
    assert result.terms["kl"].item() == close(0.5 * sum(values))
    assert gradient(result.terms["kl"], current) == close([0.5 * slope for slope in slopes])
    assert result.loss.item() == close(0.5 * sum(values) / 4)
    assert result.statistics.metrics()["rollout_corr/ref_kl"] == close(sum(values) / 4)


def test_the_gradient_passes_through_the_sampling_probability() -> None:
    """exp(log π_θ − sg(log π_sampler)) · k(d) and its slope ratio · (k + k'); the last d is beyond the bound of 2."""
    for kind, slopes in (("k1", (1.0, 1.0)), ("k2", (0.5, -0.7)), ("k3", (1 - math.exp(-0.5), 1 - math.exp(0.7)))):
        current = torch.full((3,), -0.9, dtype=torch.float64, requires_grad=True)
        ref, ratio = torch.tensor([-1.4, -0.2, -3.9], dtype=torch.float64), math.exp(0.4)
        found = score_function_kl(current, torch.full_like(ref, -1.3), ref, kind, 2.0, 10.0)
        values = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.expm1(-d) + d}[kind]
        assert found.tolist() == close([ratio * values(d) for d in (0.5, -0.7, 2.0)])
        expected = [ratio * (values(d) + slope) for d, slope in zip((0.5, -0.7), slopes, strict=True)]
        assert gradient(found.sum(), current) == close([*expected, 0.0])


# What goes in ---------------------------------------------------------------------------------------------------------


def test_weights_made_elsewhere_are_not_read_where_nothing_trains() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=[[1, 0]], old_log_probs=[[-1.0, -1.0]], advantages=[2.0])
    log_probs = torch.tensor([-0.9, -0.9], requires_grad=True)
    token = token_loss(log_probs, packed, config(use_tis=True), weights=torch.tensor([0.5, NAN]))
    assert token.policy.tolist() == pytest.approx([-0.5 * 2.0 * math.exp(0.1), 0.0])
    assert all(map(math.isfinite, gradient(token.policy.sum(), log_probs)))


def test_missing_inputs_are_named() -> None:
    log_probs = torch.zeros(2)
    rows = {"rollout_log_probs": [[-1.0, -1.0]], "old_log_probs": [[-1.0, -1.0]], "loss_masks": [[1, 1]]}
    packed = mp.PackedSequences.from_lists(**rows, advantages=[1.0])
    without = packed.replace(rollout_log_probs=None)
    for batch, settings, said in (
        (without, {"use_tis": True}, "rollout_log_probs is missing"),
        (without, {"terms": {"rollout_kl_coef": 1.0}}, "rollout_log_probs is missing"),
        (packed.replace(advantages=None), {}, "advantages is missing"),
        (packed, {"terms": {"entropy_coef": 0.1}}, "entropy is missing"),
        (packed, {"terms": {"kl_coef": 0.1}}, "ref_log_probs is missing"),
    ):
        with pytest.raises(ValueError, match=said):
            mp.policy_loss(log_probs, batch, config(**settings))
    for settings, said in (
        ({"use_tis": True, "tis": {"upper_bound_positive": 3.0}}, "advantages is missing: bounds for A ≥ 0 hangs on"),
        ({"rs": {"criteria": ["token:k2:1@negative"]}}, "advantages is missing: criterion token_k2_negative hangs on"),
    ):
        with pytest.raises(ValueError, match=said):
            mp.correct(packed.replace(advantages=None), config(**settings))
    with pytest.raises(ValueError, match=r"old_log_probs is missing.*train_log_probs is its other spelling"):
        mp.correct(packed.replace(old_log_probs=None), config())
    for wrong in ("token_is", {"use_tis": True}, None):
        given: Any = wrong
        with pytest.raises(TypeError, match="pass a MismatchConfig, such as"):
            mp.policy_loss(log_probs, packed, given)
        with pytest.raises(TypeError, match=f"a {type(wrong).__name__}: pass a MismatchConfig"):
            mp.correct(packed, given)


def test_without_old_log_probs_nothing_clips_and_that_is_said() -> None:
    rows: dict[str, Any] = {"rollout_log_probs": [[-1.0]], "loss_masks": [[1]], "advantages": [1.0]}
    packed, theta = mp.PackedSequences.from_lists(**rows), torch.tensor([-1.0])
    for settings in ({}, {"use_tis": True}):
        with pytest.warns(UserWarning, match="old_log_probs is missing, so π_old is π_θ and nothing clips:"):
            mp.policy_loss(theta, packed, config(**settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in ({"use_rollout_log_probs": True}, {"objective": "reinforce"}):
            mp.policy_loss(theta, packed, config(**settings))
        mp.policy_loss(theta, packed.replace(old_log_probs=theta), config())
