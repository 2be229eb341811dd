"""Objectives against slime's and NeMo-RL's own functions, loss and gradient, on random batches.

slime's `compute_gspo_kl` (miles has the same) and NeMo-RL's `sequence_level_importance_ratios` differentiate through
the sequence's mean: token k gets 1/n of the sum of what all its n tokens get here, where each has its own (verl's form,
the paper's GSPO-token). So gradients are equal where advantage and weight are constant in a sequence and nothing of it
is rejected; elsewhere theirs is the mean of ours (`test_elsewhere_…`). NeMo-RL's dual clip under `disable_ppo_ratio`
compares c with log π_θ, which is no ratio: here a dual clip next to objective reinforce is refused. Both exponentiate
unclamped; here log r is clamped to ±20.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from tests.hooks.contracts import nemo_rl
from tests.hooks.contracts.slime_source import function, host_root

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}
SEEDS = range(6)
LENGTHS = (5, 1, 9, 4)
CLIPS = {"gspo": (0.05, 0.08), "cispo": (1.0, 0.1), "cispo with a lower bound": (0.1, 0.2)}


def batch(seed: int, constant: bool = True) -> tuple[Tensor, mp.PackedSequences]:
    """log π_θ and old log-probs with a gap in each long response; advantages constant in a sequence or not."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    old = -noise(1.0).abs() - 0.5
    index = torch.tensor([n for n, length in enumerate(LENGTHS) for _ in range(length)])
    packed = mp.PackedSequences(
        loss_mask=(torch.rand(total, generator=generator) < 0.8) | (index == 1),
        lengths=LENGTHS,
        old_log_probs=old,
        rollout_log_probs=old + noise(0.3),
        advantages=noise(1.0)[:4][index] if constant else noise(1.0),
    )
    return old + noise(0.15), packed


def loss_and_gradient(loss: Callable[[Tensor], Tensor], log_probs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = log_probs.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def ours(config: mp.MismatchConfig, packed: mp.PackedSequences) -> Callable[[Tensor], Tensor]:
    return lambda log_probs: mp.policy_loss(log_probs, packed, config).loss


# slime ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="slime", scope="module")
def _slime() -> dict[str, Any]:
    """slime's functions, executed alone and eagerly."""
    path = host_root("slime") / "slime/utils/ppo_utils.py"
    names: dict[str, Any] = {"torch": torch}
    for name in ("compute_gspo_kl", "compute_policy_loss", "compute_cispo_loss"):
        node = function(path, name)
        node.decorator_list = []
        exec(compile(ast.Module([node], []), str(path), "exec"), names)
    return names


def slimes(
    slime: dict[str, Any],
    name: str,
    packed: mp.PackedSequences,
    clip: tuple[float, float],
    weights: Tensor | float = 1.0,
) -> Callable[[Tensor], Tensor]:
    """As policy_loss_function puts them together; reduced by its mean of every sample, then of the samples."""
    masks = [mask.double() for mask in packed.unpack(packed.loss_mask)]
    assert packed.old_log_probs is not None and packed.advantages is not None
    old, advantages = packed.old_log_probs, packed.advantages

    def loss(log_probs: Tensor) -> Tensor:
        rows = packed.unpack(log_probs)
        if name == "gspo":
            kl = slime["compute_gspo_kl"](rows, packed.unpack(old), rows, masks)
            losses, _ = slime["compute_policy_loss"](kl, advantages, *clip)
        else:
            losses, _ = slime["compute_cispo_loss"](old - log_probs, log_probs, advantages, *clip)
        means = [
            (x * m).sum() / m.sum().clamp(min=1) for x, m in zip(packed.unpack(losses * weights), masks, strict=True)
        ]
        return torch.stack(means).sum() / sum(bool(mask.any()) for mask in masks)

    return loss


def config_of(name: str, **fields: Any) -> mp.MismatchConfig:
    low, high = CLIPS[name]
    given = {"objective": name.split()[0], "aggregation": "seq-mean-token-mean"}
    return mp.MismatchConfig.model_validate(given | fields | {"ppo": {"eps_clip_low": low, "eps_clip_high": high}})


@pytest.mark.parametrize("name", CLIPS)
def test_equals_slime(slime: dict[str, Any], name: str) -> None:
    clipped = 0.0
    for seed in SEEDS:
        log_probs, packed = batch(seed, constant=name == "gspo")
        mine = loss_and_gradient(ours(config_of(name), packed), log_probs)
        torch.testing.assert_close(
            mine, loss_and_gradient(slimes(slime, name, packed, CLIPS[name]), log_probs), **TOLERANCE
        )
        statistics = mp.policy_loss(log_probs, packed, config_of(name)).statistics
        clipped += statistics.metrics()["rollout_corr/pg_clipfrac"]
    assert 0.1 < clipped < 0.9 * len(SEEDS)


def test_equals_slime_under_weights_of_a_sequence(slime: dict[str, Any]) -> None:
    config = config_of("gspo", use_tis=True, tis={"level": "sequence", "mode": "clip", "upper_bound": 1.5})
    for seed in SEEDS:
        log_probs, packed = batch(seed)
        weights = mp.correct(packed, config).weights
        assert len(set(weights[packed.loss_mask].tolist())) > 1
        mine = loss_and_gradient(ours(config, packed), log_probs)
        theirs = loss_and_gradient(slimes(slime, "gspo", packed, CLIPS["gspo"], weights), log_probs)
        torch.testing.assert_close(mine, theirs, **TOLERANCE)


@pytest.mark.parametrize("differs", ["advantages", "weights"])
def test_elsewhere_slimes_gradient_is_the_mean_of_ours(slime: dict[str, Any], differs: str) -> None:
    """A difference: the same loss, and another gradient at a token."""
    config = config_of("gspo", use_tis=differs == "weights")
    for seed in SEEDS:
        log_probs, packed = batch(seed, constant=differs == "weights")
        weights = mp.correct(packed, config).weights
        loss, gradient = loss_and_gradient(ours(config, packed), log_probs)
        value, theirs = loss_and_gradient(slimes(slime, "gspo", packed, CLIPS["gspo"], weights), log_probs)
        torch.testing.assert_close(loss, value, **TOLERANCE)
        assert (gradient - theirs).abs().max() > 1e-3
        for mine, other, mask in zip(*(packed.unpack(x) for x in (gradient, theirs, packed.loss_mask)), strict=True):
            if mask.any():
                torch.testing.assert_close(other[mask], mine[mask].mean().expand(int(mask.sum())), **TOLERANCE)


# NeMo-RL --------------------------------------------------------------------------------------------------------------

_IS = {"use_importance_sampling_correction": True}
NEMO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # NeMo-RL's settings, ours
    "gspo": ({"sequence_level_importance_ratios": True, "token_level_loss": False}, {"objective": "gspo"}),
    "gspo, dual clip": (
        {"sequence_level_importance_ratios": True, "token_level_loss": False, "ratio_clip_c": 1.05},
        {"objective": "gspo", "dual": 1.05},
    ),
    "gspo under weights": (
        {"sequence_level_importance_ratios": True, "token_level_loss": False, **_IS},
        {"objective": "gspo", "use_tis": True, "tis": {"level": "sequence", "upper_bound": torch.inf}},
    ),
    "cispo": ({"use_cispo": True, "token_level_loss": True}, {"objective": "cispo", "aggregation": "token-mean"}),
    "reinforce": ({"disable_ppo_ratio": True, "token_level_loss": False}, {"objective": "reinforce"}),
    "reinforce under weights": (
        {"disable_ppo_ratio": True, "token_level_loss": True, **_IS},
        {"objective": "reinforce", "aggregation": "token-mean", "use_tis": True, "tis": {"upper_bound": torch.inf}},
    ),
}


@pytest.mark.parametrize("name", NEMO)
def test_equals_nemo_rl(name: str) -> None:
    root = host_root("NeMo-RL")
    assert (root / nemo_rl.LOSSES).is_file()
    host, mine = (dict(settings) for settings in NEMO[name])
    low, high = 0.04, 0.06
    oracle = nemo_rl.own_loss(
        Path(root), {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": low, "ratio_clip_max": high, **host}
    )
    ppo = {} if mine["objective"] == "reinforce" else {"eps_clip_low": low, "eps_clip_high": high}
    ppo |= {"dual_clip": mine.pop("dual")} if "dual" in mine else {}
    config = mp.MismatchConfig.model_validate({"aggregation": "seq-mean-token-mean", **mine, "ppo": ppo})
    for seed in SEEDS:
        log_probs, packed = batch(seed)
        assert packed.old_log_probs is not None
        mask = packed.to_padded(packed.loss_mask)
        square = {
            "advantages": packed.advantages, "prev_logprobs": packed.old_log_probs,
            "generation_logprobs": packed.rollout_log_probs,
        }  # fmt: skip
        first = torch.zeros(len(LENGTHS), 1, dtype=torch.float64)  # never read: NeMo-RL's log-probs begin at the second
        data = {k: torch.cat([first, packed.to_padded(v)], 1) for k, v in square.items() if v is not None}
        data["token_mask"] = torch.cat([first, mask.double()], 1)
        data["sample_mask"] = torch.ones(len(LENGTHS), dtype=torch.float64)
        totals = {"global_valid_toks": mask.sum(), "global_valid_seqs": mask.any(1).sum()}

        def theirs(leaf: Tensor) -> Tensor:
            padded = packed.to_padded(leaf)  # noqa: B023
            return oracle(data=data, **totals, **{nemo_rl.LOSS_INPUT: padded})[0]  # noqa: B023

        torch.testing.assert_close(
            loss_and_gradient(ours(config, packed), log_probs), loss_and_gradient(theirs, log_probs), **TOLERANCE
        )


def test_what_the_loss_clips_is_seen_by_hosts() -> None:
    """`TokenLoss.log_r` is what hosts report ratios of: s under gspo, none under reinforce."""
    log_probs, packed = batch(0)
    token = token_loss(log_probs, packed, config_of("gspo"))
    assert token.log_r is not None and packed.old_log_probs is not None
    gap = torch.where(packed.loss_mask, log_probs - packed.old_log_probs, 0.0)
    for row, found, mask in zip(*(packed.unpack(x) for x in (gap, token.log_r, packed.loss_mask)), strict=True):
        expected = row.sum() / mask.sum().clamp(min=1) * mask
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert token_loss(log_probs, packed, mp.MismatchConfig(objective="reinforce")).log_r is None
