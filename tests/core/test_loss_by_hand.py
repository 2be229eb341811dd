"""`policy_loss` worked out by hand: aggregations, denominators, clips, anchors, REINFORCE, entropy, KL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf
LN2 = math.log(2)


def config(**settings: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig.model_validate(settings)


def logs(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64).log() for row in rows]


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def gradient(loss: Tensor, leaf: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return found.tolist()


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-15)


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
    result = mp.policy_loss(
        log_probs,
        packed,
        config(
            use_tis=True,
            rs=RS,
            aggregation=aggregation,
            denominator=denominator,
            length_norm=length_norm,
        ),
    )
    expected = flat([[share * value for value in row] for share, row in zip(shares, PER_TOKEN, strict=True)])
    assert result.correction.keep.tolist() == [1, 1, 1, 0, 0, 0]
    assert result.denominator.dtype == torch.int64 and int(result.denominator) == count
    assert result.loss_sum.item() == close(sum(expected))
    assert result.loss.item() == close(loss)
    assert gradient(result.loss_sum, log_probs) == close(expected)
    assert gradient(result.loss, log_probs) == close([value / count for value in expected])
    assert result.statistics.metrics()["rollout_corr/pg_loss"] == close(loss)


def test_auto_denominator_is_accepted_and_icepop_is_mask_with_original() -> None:
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs(ROLLOUT), loss_masks=MASKS, old_log_probs=logs(OLD), advantages=ADVANTAGES
    )
    log_probs = torch.cat(logs(OLD)).requires_grad_()
    assert int(mp.policy_loss(log_probs, packed, config(use_tis=True, rs=RS)).denominator) == 3
    # Mask mode, [0.5, 2]: A keeps 1, B keeps .6: −(1) + 2·.6 = .2 over all five tokens.
    result = mp.policy_loss(log_probs, packed, config(use_tis=True, tis={"mode": "mask"}, denominator="original"))
    assert result.loss.item() == close(0.2 / 5)
    assert gradient(result.loss, log_probs) == close([-0.2, 0, 0.24, 0, 0, 0])


def test_a_dry_run_has_the_uncorrected_loss() -> None:
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs(ROLLOUT), loss_masks=MASKS, old_log_probs=logs(OLD), advantages=ADVANTAGES
    )
    log_probs = torch.cat(logs(OLD)).requires_grad_()
    result = mp.policy_loss(log_probs, packed, config(use_tis=True, rs=RS, dry_run=True))
    assert result.loss.item() == close((-1 - 1 + 2 + 2 - 5) / 5)  # w = 1, nothing rejected
    assert gradient(result.loss_sum, log_probs) == close([-1, -1, 2, 0, 2, -5])


E20 = math.exp(20)
CLIPS = [  # advantage, log r, loss without and with dual clip 3, gradient without and with; 1 − ε = .8, 1 + ε = 1.3
    (1.0, math.log(1.1), -1.1, -1.1, -1.1, -1.1),  # inside
    (1.0, math.log(1.5), -1.3, -1.3, 0.0, 0.0),  # above, good: −min(1.5, 1.3)
    (1.0, math.log(0.5), -0.5, -0.5, -0.5, -0.5),  # below, good: −min(.5, .8)
    (-2.0, math.log(0.5), 1.6, 1.6, 0.0, 0.0),  # below, bad: −min(−1, −1.6)
    (-2.0, math.log(1.5), 3.0, 3.0, 3.0, 3.0),  # above, bad: −min(−3, −2.6)
    (-2.0, math.log(4.0), 8.0, 6.0, 8.0, 0.0),  # dual clip: at most −3 A = 6
    (1.0, math.log(4.0), -1.3, -1.3, 0.0, 0.0),  # dual clip leaves A > 0 alone
    (0.0, math.log(4.0), 0.0, 0.0, 0.0, 0.0),
    (-1.0, 30.0, E20, 3.0, 0.0, 0.0),  # log r is clamped to ±20 before exp: no gradient beyond
    (1.0, -30.0, -math.exp(-20), -math.exp(-20), 0.0, 0.0),
]


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("case", CLIPS, ids=str)
def test_ppo_clip(case: tuple[float, ...], dual: bool) -> None:
    advantage, log_r, loss, dual_loss, grad, dual_grad = case
    ppo = {"eps_clip_low": 0.2, "eps_clip_high": 0.3} | ({"dual_clip": 3.0} if dual else {})
    start = -31.0 if log_r > 0 else -1.0
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1]], old_log_probs=[torch.tensor([start], dtype=torch.float64)], advantages=[[advantage]]
    )
    log_probs = torch.tensor([start + log_r], dtype=torch.float64, requires_grad=True)
    result = mp.policy_loss(log_probs, packed, config(ppo=ppo))
    assert result.loss.item() == pytest.approx(dual_loss if dual else loss, rel=1e-9)
    assert gradient(result.loss, log_probs) == pytest.approx([dual_grad if dual else grad], rel=1e-9)


def test_clip_metrics() -> None:
    # r: 1.5 with A > 0 (upper clip active), .5 with A < 0 (lower clip active), 1.5 with A < 0 and 1.1 (neither).
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1, 1, 0], [1, 1]],
        old_log_probs=logs([[0.2, 0.4, NAN], [0.2, 0.2]]),
        advantages=[[1.0, -1.0, NAN], [-1.0, 1.0]],
    )
    log_probs = torch.cat(logs([[0.3, 0.2, 0.9], [0.3, 0.22]])).requires_grad_()
    metrics = mp.policy_loss(log_probs, packed, config()).statistics.metrics()
    assert metrics["rollout_corr/pg_clipfrac"] == 2 / 4
    assert metrics["rollout_corr/pg_clipfrac_high_side"] == metrics["rollout_corr/pg_clipfrac_low_side"] == 1 / 4
    assert metrics["rollout_corr/pg_clipfrac_lower"] == 0.0
    assert metrics["rollout_corr/ppo_kl"] == close(-(math.log(1.5) - LN2 + math.log(1.5) + math.log(1.1)) / 4)
    # The dual clip cuts the third token only: A < 0 and r = 1.5 > 1.4.
    dual = mp.policy_loss(log_probs, packed, config(ppo={"dual_clip": 1.4})).statistics.metrics()
    assert dual["rollout_corr/pg_clipfrac_lower"] == 1 / 4 and dual["rollout_corr/pg_clipfrac"] == 2 / 4


def test_the_loss_of_a_dry_run_is_not_divided_by_a_factor_that_was_not_applied() -> None:
    # r = 1, A = 1, 0: −1/2 whatever the weights are; those (ρ = 1/2 truncated, mean 1/2) are only reported.
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs([[0.8, 0.8]]),
        old_log_probs=logs([[0.4, 0.4]]),
        loss_masks=[[1, 1]],
        advantages=[[1.0, 0.0]],
    )
    log_probs = torch.cat(logs([[0.4, 0.4]])).requires_grad_()
    settings = config(use_tis=True, tis={"batch_normalize": True}, dry_run=True)
    metrics = mp.policy_loss(log_probs, packed, settings).statistics.metrics()
    assert metrics["rollout_corr/pg_loss"] == close(-0.5)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == close(0.5)


#            π_θ .4, .6 · π_old (not used by algorithms 1 and 3) .1, .9 · π_rollout .2, .5: ratios 2 and 1.2
def two_tokens(**fields: Any) -> tuple[Tensor, mp.PackedSequences]:
    given: dict[str, Any] = {"advantages": [[1.0, -1.0]], **fields}
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs([[0.2, 0.5]]),
        loss_masks=[[1, 1]],
        old_log_probs=logs([[0.1, 0.9]]),
        **given,
    )
    return torch.cat(logs([[0.4, 0.6]])).requires_grad_(), packed


def test_algorithm_1_clips_against_the_rollout_and_has_no_weights() -> None:
    log_probs, packed = two_tokens()
    result = mp.policy_loss(log_probs, packed, config(use_rollout_log_probs=True, ppo={"eps_clip_low": 0.1}))
    # r = 2 is clipped to 1.2 for A = 1: −1.2; r = 1.2 for A = −1 is within [0.9, 1.2]: 1.2.
    assert result.correction.weights.tolist() == [1, 1]
    assert result.loss_sum.item() == close(0.0)
    assert gradient(result.loss_sum, log_probs) == close([0, 1.2])
    # The diagnostics' training side is π_θ: kl = −(ln 2 + ln 1.2)/2.
    assert result.statistics.metrics()["rollout_corr/kl"] == close(-(LN2 + math.log(1.2)) / 2)


def test_algorithm_0_ignores_the_rollout() -> None:
    log_probs, packed = two_tokens()
    result = mp.policy_loss(log_probs, packed, config(ppo={"eps_clip_high": 5.0}))
    # r = 4 and 2/3; for A = −1 the latter is clipped to .8.
    assert result.loss_sum.item() == close(-4 + 0.8)
    assert gradient(result.loss_sum, log_probs) == close([-4, 0])
    # The diagnostics compare π_old and π_rollout: .5 and 1.8.
    assert result.statistics.metrics()["rollout_corr/rollout_is_mean"] == close((0.5 + 1.8) / 2)


@pytest.mark.parametrize(
    ("level", "weights"), [("token", [1.5, 1.2]), ("sequence", [1.5, 1.5]), ("geometric", [1.5, 1.5])]
)
def test_reinforce(level: str, weights: list[float]) -> None:
    # ρ = π_θ/π_rollout = 2, 1.2; product 2.4, mean √2.4 = 1.55; hi = 1.5. −sg(w) A log π_θ: gradient −w A only.
    log_probs, packed = two_tokens()
    result = mp.policy_loss(
        log_probs, packed, config(use_rollout_log_probs=True, use_tis=True, tis={"level": level, "upper_bound": 1.5})
    )
    assert result.correction.weights.tolist() == close(weights)
    assert result.loss_sum.item() == close(-weights[0] * math.log(0.4) + weights[1] * math.log(0.6))
    assert gradient(result.loss_sum, log_probs) == close([-weights[0], weights[1]])


def test_reinforce_at_level_none() -> None:
    log_probs, packed = two_tokens()
    result = mp.policy_loss(
        log_probs,
        packed,
        config(
            use_rollout_log_probs=True,
            use_tis=True,
            tis={"level": "none"},
            rs={"criteria": ["token:ratio:0.5:1.5"]},
        ),
    )
    assert result.loss.item() == close(math.log(0.6))  # ρ = 2 is rejected
    assert gradient(result.loss, log_probs) == close([0, 1])


def test_absent_old_log_probs_are_the_current_ones() -> None:
    # Algorithm 2 on an exactly on-policy step: r = 1, w = π_θ/π_rollout = 2 and 1.2, detached.
    log_probs, _ = two_tokens()
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs([[0.2, 0.5]]), loss_masks=[[1, 1]], advantages=[[1.0, -1.0]]
    )
    result = mp.policy_loss(log_probs, packed, config(use_tis=True))
    assert result.loss_sum.item() == close(-2 + 1.2)
    assert gradient(result.loss_sum, log_probs) == close([-2, 1.2])


KL = {  # kl_type: value and derivative by log π_θ at d = ln 2, −ln 2, −5, 30 (clamped to 20)
    "k1": [(LN2, 1), (-LN2, 1), (-5, 1), (20, 0)],
    "k2": [(LN2**2 / 2, LN2), (LN2**2 / 2, -LN2), (12.5, -5), (200, 0)],
    # e^−d − 1 + d; derivative 1 − e^−d
    "k3": [(0.5 - 1 + LN2, 0.5), (2 - 1 - LN2, -1), (math.exp(5) - 6, 1 - math.exp(5)), (math.exp(-20) + 19, 0)],
    # the same, at most 10
    "low_var_kl": [(0.5 - 1 + LN2, 0.5), (2 - 1 - LN2, -1), (10, 0), (10, 0)],
}
DIFFERENCES = [LN2, -LN2, -5.0, 30.0]


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


TERMS = {  # (aggregation, length_norm): share of either sequence, denominator
    ("token-mean", None): ([1, 1], 3),
    ("seq-mean-token-mean", None): ([1 / 2, 1], 2),
    ("seq-mean-token-sum", None): ([1, 1], 2),
    ("seq-mean-token-sum", 4.0): ([1 / 4, 1 / 4], 2),
}


@pytest.mark.parametrize("denominator", ["accepted", "original"])
@pytest.mark.parametrize(("aggregation", "length_norm"), TERMS)
def test_terms_are_not_scaled_by_rejection_or_weights(
    aggregation: str, length_norm: float | None, denominator: str
) -> None:
    """Sequence A: ρ = 4 (rejected) and 1 and a masked token; B: ρ = 0.1, rejected. All entropy and KL stays."""
    shares, count = TERMS[aggregation, length_norm]
    current = torch.cat(logs([[0.8, 0.5, 0.5], [0.05]])).requires_grad_()
    entropy = torch.tensor([0.3, 0.7, NAN, 1.1], dtype=torch.float64, requires_grad=True)
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs([[0.2, 0.5, NAN], [0.5]]),
        loss_masks=[[1, 1, 0], [1]],
        advantages=[0.0, 0.0],
        entropy=[entropy[:3], entropy[3:]],
        ref_log_probs=logs([[0.4, 0.5, NAN], [0.1]]),
    )
    result = mp.policy_loss(
        current,
        packed,
        config(
            use_rollout_log_probs=True,
            use_tis=True,
            rs={"criteria": ["token:ratio:0.5:3"]},
            terms={"entropy_coef": 0.1, "kl_coef": 0.2, "kl_type": "k1"},
            aggregation=aggregation,
            length_norm=length_norm,
            denominator=denominator,
        ),
    )
    a, b = shares
    assert result.correction.keep.tolist() == [0, 1, 0, 0]
    # d = ln(.8/.4) = ln 2, 0 | ln(.05/.1) = −ln 2
    assert result.terms["entropy"].item() == close(-0.1 * (a * (0.3 + 0.7) + b * 1.1))
    assert result.terms["kl"].item() == close(0.2 * (a * LN2 - b * LN2))
    assert gradient(result.terms["entropy"], entropy) == close([-0.1 * a, -0.1 * a, 0, -0.1 * b])
    assert gradient(result.terms["kl"], current) == close([0.2 * a, 0.2 * a, 0, 0.2 * b])
    assert int(result.terms_denominator) == count
    assert result.loss.item() == close((-0.1 * (a + b * 1.1) + 0.2 * LN2 * (a - b)) / count)  # the policy term is 0
    assert result.statistics.metrics()["rollout_corr/entropy"] == close((0.3 + 0.7 + 1.1) / 3)


def test_importance_weighted_kl_takes_the_weight_and_no_rejection() -> None:
    # w = min(ρ, 2) = 2, 1 | 0.1; the criterion rejects B, its KL stays, with its weight.
    current = torch.cat(logs([[0.8, 0.5], [0.05]])).requires_grad_()
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=logs([[0.2, 0.5], [0.5]]),
        loss_masks=[[1, 1], [1]],
        advantages=[0.0, 0.0],
        ref_log_probs=logs([[0.4, 0.5], [0.1]]),
    )
    result = mp.policy_loss(
        current,
        packed,
        config(
            use_rollout_log_probs=True,
            use_tis=True,
            rs={"criteria": ["token:ratio:0.5:5"]},
            terms={"kl_coef": 1.0, "kl_type": "k1", "kl_importance_weighted": True},
        ),
    )
    assert result.terms["kl"].item() == close(2 * LN2 - 0.1 * LN2)
    assert gradient(result.terms["kl"], current) == close([2, 1, 0.1])  # no gradient through the weight


def test_missing_inputs_are_named() -> None:
    log_probs, packed = two_tokens()
    bare = mp.PackedSequences.from_lists(loss_masks=[[1, 1]], advantages=[1.0])
    with pytest.raises(ValueError, match="rollout_log_probs is missing"):
        mp.policy_loss(log_probs, bare, config(use_tis=True))
    with pytest.raises(ValueError, match="advantages is missing"):
        mp.policy_loss(log_probs, mp.PackedSequences.from_lists(loss_masks=[[1, 1]]), config())
    with pytest.raises(ValueError, match="entropy is missing"):
        mp.policy_loss(log_probs, packed, config(terms={"entropy_coef": 0.1}))
    with pytest.raises(ValueError, match="ref_log_probs is missing"):
        mp.policy_loss(log_probs, packed, config(terms={"kl_coef": 0.1}))
    with pytest.raises(ValueError, match=r"log_probs has shape \(3,\)"):
        mp.policy_loss(torch.zeros(3), packed, config())
    with pytest.raises(ValueError, match=r"old_log_probs is missing.*train_log_probs is its other spelling"):
        mp.correct(mp.PackedSequences.from_lists(rollout_log_probs=[[-1.0]], loss_masks=[[1]]), config())
    for wrong in ("token_is", {"use_tis": True}, None):
        given: Any = wrong
        with pytest.raises(TypeError, match="pass a MismatchConfig, such as"):
            mp.policy_loss(log_probs, packed, given)
        with pytest.raises(TypeError, match=f"a {type(wrong).__name__}: pass a MismatchConfig"):
            mp.correct(packed, given)
