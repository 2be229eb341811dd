"""`policy_loss` worked out by hand: aggregations, denominators, the clip, KL; all else in `test_loss_differential`."""

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
    log_probs = torch.zeros(2)
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[[-1.0, -1.0]], old_log_probs=[[-1.0, -1.0]], loss_masks=[[1, 1]], advantages=[1.0]
    )
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
