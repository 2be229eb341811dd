"""SAPO, GMPO, VESPO, TOPR against worked answers and the peers' own functions (`tests/fixtures/method_peers.py`).

GMPO of verl and TRL differentiates the mean of a response, here each token has its own share of it: equal under
seq-mean-token-mean where advantage and weight are constant in a response, as in GSPO.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from tests.fixtures import method_peers as peers
from tests.fixtures.rejection_peers import BATCHES, make

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

CASES: list[dict[str, Any]] = json.loads(peers.DATA.read_text(encoding="utf-8"))
LOW, HIGH = peers.CLIP["clip_ratio_low"], peers.CLIP["clip_ratio_high"]


def packed_of(batch: dict[str, torch.Tensor], advantages: str) -> tuple[torch.Tensor, mp.PackedSequences]:
    """log π_θ with gradient, and the padded batch; NaN where the mask is 0, which must not matter."""
    away = batch["mask"] == 0
    rollout, old, current = (batch[name].masked_fill(away, torch.nan) for name in ("rollout", "old", "current"))
    each = batch[advantages] if advantages == "advantages" else batch[advantages].masked_fill(away, torch.nan)
    packed = mp.PackedSequences.from_padded(
        loss_masks=batch["mask"], rollout_log_probs=rollout, old_log_probs=old, advantages=each
    )
    return current.requires_grad_(), packed


def one_response(ratios: list[float], advantage: float, config: mp.MismatchConfig) -> tuple[list[float], list[float]]:
    """(losses, gradient) of a response of these π_θ/π_old."""
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    packed = mp.PackedSequences.from_lists(loss_masks=[[1] * len(ratios)], old_log_probs=[old], advantages=[advantage])
    log_probs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    loss = token_loss(log_probs, packed, config).policy
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.tolist(), gradient.tolist()


def test_sapo_by_hand() -> None:
    """The weight of ∇log π where PPO has none: r = 2, A = 1 and r = ½, A = −1; at r = 1 it is 1."""
    sapo, ppo = mp.preset("sapo"), mp.MismatchConfig()
    for r, advantage, expected in ((2.0, 1.0, 1.5729), (0.5, -1.0, 0.46707)):
        assert one_response([r], advantage, sapo)[1] == pytest.approx([-advantage * expected], rel=1e-4)
        assert one_response([r], advantage, ppo)[1] == [0.0]
    for tau in (0.3, 3.0):
        config = sapo.replace(ppo={"tau_positive": tau})
        losses, gradient = one_response([1.0], 1.0, config)
        assert (losses, gradient) == (pytest.approx([-2.0 / tau]), pytest.approx([-1.0]))
    assert all(abs(value) < 1e-300 for value in one_response([1e6], 1.0, sapo)[1])


def test_gmpo_by_hand() -> None:
    """l = .1, .5, −.2 at ε .4: exp(mean) is e^(.3/3) where A = 1, e^(.4/3) where A = −1; what is clipped has no
    gradient, each other token its own share."""
    ratios = [1.1051709180756477, 1.6487212707001282, 0.8187307530779818]
    losses, gradient = one_response(ratios, 1.0, mp.preset("gmpo"))
    assert losses == pytest.approx([-1.10517] * 3, rel=1e-5)
    assert gradient == pytest.approx([-1.10517, 0.0, -1.10517], rel=1e-5)
    losses, gradient = one_response(ratios, -1.0, mp.preset("gmpo"))
    assert losses == gradient == pytest.approx([1.14263] * 3, rel=1e-5)


@pytest.mark.parametrize("number", range(BATCHES))
def test_sapo_equals_verl(number: int) -> None:
    """With weights of tokens and an advantage each; SkyRL's and TRL's functions are the same."""
    answer = CASES[number]["sapo"]
    taus = {"tau_positive": peers.CLIP["tau_pos"], "tau_negative": peers.CLIP["tau_neg"]}
    config = mp.preset("sapo").replace(use_tis=True, tis={"upper_bound": 1.2}, ppo=taus)
    log_probs, packed = packed_of(make(number), "token_advantages")
    result = mp.policy_loss(log_probs, packed, config)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert float(result.loss.detach()) == pytest.approx(answer["loss"], rel=1e-9)
    torch.testing.assert_close(gradient, torch.tensor(answer["gradient"], dtype=torch.float64), rtol=1e-9, atol=1e-11)
    metrics = result.statistics.metrics()
    assert [metrics["rollout_corr/pg_clipfrac"], metrics["rollout_corr/pg_clipfrac_lower"]] == answer["clipped"]


@pytest.mark.parametrize("number", range(BATCHES))
def test_gmpo_equals_verl(number: int) -> None:
    answer = CASES[number]["geo_mean"]
    config = mp.preset("gmpo").replace(ppo={"eps_clip_low": LOW, "eps_clip_high": HIGH})
    log_probs, packed = packed_of(make(number), "advantages")
    result = mp.policy_loss(log_probs, packed, config)
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    assert float(result.loss.detach()) == pytest.approx(answer["loss"], rel=1e-7)  # verl divides by n + 1e-8
    torch.testing.assert_close(gradient, torch.tensor(answer["gradient"], dtype=torch.float64), rtol=1e-6, atol=1e-9)
    metrics = result.statistics.metrics()
    assert 0 < metrics["rollout_corr/pg_clipfrac"] < 1
    # verl counts a ratio beyond either bound, whatever the side of A's sign; here what the clip changes.
    assert metrics["rollout_corr/pg_clipfrac"] < sum(answer["clipped"])


def weights(config: mp.MismatchConfig, ratios: list[float], advantages: list[float]) -> list[float]:
    """Of responses of one token each."""
    logs = torch.tensor(ratios, dtype=torch.float64).log()
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1]] * len(ratios), rollout_log_probs=[torch.full((1,), -40.0).double()] * len(ratios),
        advantages=advantages,
    )  # fmt: skip
    return mp.policy_loss(logs - 40.0, packed, config).correction.weights.tolist()


def test_topr_by_hand() -> None:
    """1 where A ≥ 0, else at most 1; sequence weights at 2 are ρ here."""
    ratios, advantages = [2.0, 0.5, 2.0, 0.5, 0.5], [1.0, 1.0, -1.0, -1.0, 0.0]
    assert weights(mp.preset("topr"), ratios, advantages) == pytest.approx([1, 1, 1, 0.5, 1])
    assert weights(mp.preset("pg_is"), ratios, advantages) == pytest.approx([2, 0.5, 2, 0.5, 0.5])


def test_gamma_by_hand() -> None:
    """(A ≥ 0, A < 0) at W = 2, ½, 1; bounded wherever W is, and 0 far away."""
    config = mp.preset("vespo")
    for ratio, expected in ((2.0, (0.19915, 1.08268)), (0.5, (1.12042, 0.33979)), (1.0, (1.0, 1.0))):
        assert weights(config, [ratio, ratio], [1.0, -1.0]) == pytest.approx(expected, rel=2e-5)
    every = [2.0**power for power in range(-40, 41)]
    for advantage in (1.0, -1.0):
        found = weights(config, every, [advantage] * len(every))
        assert max(found) < 1.25 and found[0] < 1e-12 and found[-1] == 0.0


@pytest.mark.parametrize("mode", ["clip", "mask"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric", "prefix"])
def test_the_sign_of_a_unit_is_that_of_its_summed_advantages(level: str, mode: str) -> None:
    """Two tokens of ρ = 2, two turns: A = 1, −3 adds up to −2. Bounds are 1.1 to 3 where A ≥ 0, else 0.1 to 1.5."""
    given = {"lower_bound": 0.1, "upper_bound": 1.5, "lower_bound_positive": 1.1, "upper_bound_positive": 3.0}
    config = mp.MismatchConfig.model_validate({"use_tis": True, "tis": {"level": level, "mode": mode, **given}})
    log_2 = torch.tensor([2.0, 7.0, 2.0], dtype=torch.float64).log()
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1, 0, 1]], rollout_log_probs=[log_2 * 0 - 3], old_log_probs=[log_2 - 3],
        advantages=[torch.tensor([1.0, float("nan"), -3.0])],
    )  # fmt: skip
    correction = mp.correct(packed, config)
    far = 1.5 if mode == "clip" else 0.0
    first = far if level in ("sequence", "geometric") else 2.0
    assert correction.weights.tolist() == pytest.approx([first, 0.0, far])
    assert correction.keep.tolist() == [float(first > 0), 0.0, float(far > 0)]
    metrics = correction.statistics.metrics()
    assert "rollout_corr/rollout_is_ratio_fraction_high" not in metrics


def test_what_weighs_by_sign_needs_advantages() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=[[1]], rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]])
    config = mp.MismatchConfig.model_validate({"use_tis": True, "tis": {"upper_bound_positive": 3.0}})
    with pytest.raises(ValueError, match="advantages is missing: bounds for A ≥ 0 hangs on it"):
        mp.correct(packed, config)


@pytest.mark.parametrize("number", range(BATCHES))
def test_gamma_equals_trl(number: int) -> None:
    log_probs, packed = packed_of(make(number), "advantages")
    correction = mp.policy_loss(log_probs, packed, mp.preset("vespo")).correction
    found = torch.stack([row[mask][0] for row, mask in zip(
        packed.unpack(correction.weights), packed.unpack(packed.loss_mask), strict=True
    )])  # fmt: skip
    assert found.tolist() == pytest.approx(CASES[number]["gamma"], rel=1e-9, abs=1e-11)
