"""What `policy_loss` asks for and says, and the KL penalty of NeMo-RL and slime. The loss: `test_loss_differential`."""

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
from tests.core.worked import config

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


def gradient(loss: Tensor, leaf: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return found.tolist()


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


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


def test_weights_made_elsewhere_are_not_read_where_nothing_trains() -> None:
    packed = mp.PackedSequences.from_lists(loss_masks=[[1, 0]], old_log_probs=[[-1.0, -1.0]], advantages=[2.0])
    log_probs = torch.tensor([-0.9, -0.9], requires_grad=True)
    token = token_loss(log_probs, packed, config(use_tis=True), weights=torch.tensor([0.5, math.nan]))
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
    with pytest.raises(ValueError, match="advantages is missing: criterion token_k2_negative hangs on"):
        mp.correct(packed.replace(advantages=None), config(rs={"criteria": ["token:k2:1@negative"]}))
    with pytest.raises(ValueError, match=r"old_log_probs is missing.*train_log_probs is its other spelling"):
        mp.correct(packed.replace(old_log_probs=None), config())
    preset: Any = "token_is"
    with pytest.raises(TypeError, match="pass a MismatchConfig, such as"):
        mp.policy_loss(log_probs, packed, preset)
    with pytest.raises(TypeError, match="a str: pass a MismatchConfig"):
        mp.correct(packed, preset)


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
