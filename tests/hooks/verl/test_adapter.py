"""The adapter for verl without verl: its settings, its refusals, the padded layout. `make test-verl` runs it live."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from examples.benchmarks.counting import count
from mismatch_plugin.hooks.base import wrap_once
from mismatch_plugin.hooks.verl import (
    begin_tracking,
    compute_advantage,
    correct_rollout_batch,
    log_step,
    pack_trained,
    settings,
)
from mismatch_plugin.hooks.verl import verl_token_loss as token_loss
from mismatch_plugin.hooks.verl.config import check_tree
from mismatch_plugin.report.log import read_steps

REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
MASK = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])


def block(mismatch: dict[str, Any] | None = None, **correction: Any) -> dict[str, Any]:
    """A rollout_correction block as verl's YAML file gives it, with ours in it."""
    own = {"rollout_is": None, "rollout_rs": None, "rollout_rs_threshold": None, "rollout_is_threshold": 2.0}
    own |= {"rollout_is_batch_normalize": False, "bypass_mode": False, "loss_type": "ppo_clip"}
    return {**own, **correction} | ({} if mismatch is None else {"mismatch": mismatch})


def tree(correction: dict[str, Any], loss_mode: str = "vanilla", seen: Any = None, **rollout: Any) -> dict[str, Any]:
    policy_loss = {"loss_mode": loss_mode} | ({} if seen is None else {"rollout_correction": seen})
    actor = {"policy_loss": policy_loss, "clip_ratio": 0.2, "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean"}
    return {
        "algorithm": {"rollout_correction": correction},
        "actor_rollout_ref": {"actor": actor, "rollout": {"calculate_log_probs": True, **rollout}},
    }


def padded(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(MASK.shape, generator=generator, dtype=torch.float64)

    rollout = -noise(1.0).abs() - 0.05
    data = {"rollout": rollout, "current": rollout + noise(0.4), "advantages": noise(1.0)}
    # Whatever stands under the mask must not matter.
    return {name: value.masked_fill(MASK == 0, torch.nan) for name, value in data.items()}


def test_a_mistake_is_found_before_training_starts() -> None:
    ours = block({"metrics": "basic"}, **REINFORCE)
    whole = tree(ours, "mismatch", ours)
    config = check_tree(whole)
    assert config is not None and config.algorithm == 3
    assert settings(whole["actor_rollout_ref"]["actor"]) == config  # what a worker holds of it
    with pytest.raises(ValueError, match="the workers do not see"):
        settings(tree(ours, "mismatch")["actor_rollout_ref"]["actor"])
    assert check_tree(tree(block(**REINFORCE))) is None  # nothing of ours: verl's own affair
    for wrong, sentence in (
        (tree(ours), "loss_mode=mismatch and +actor_rollout_ref.actor.policy_loss.rollout_correction="),
        (tree(ours, "mismatch"), "is not algorithm.rollout_correction: add +actor_rollout_ref"),
        (tree(ours, "mismatch", block()), "is not algorithm.rollout_correction"),
        (tree(ours, "mismatch", ours, calculate_log_probs=False), "calculate_log_probs=true"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            check_tree(wrong)


# The loss and the driver ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_log_probs_that_are_missing_or_not_finite() -> None:
    data = padded()
    arguments = (data["rollout"], data["current"], data["advantages"], MASK.bool())
    weighted = settings(block(rollout_is="token"))
    with pytest.raises(ValueError, match="calculate_log_probs=true"):  # decoupled, and no weights from the driver
        token_loss(*arguments, weighted)
    assert not token_loss(*arguments, weighted, torch.zeros(MASK.shape))[0].any()
    data["rollout"][1, 3] = torch.nan
    with pytest.raises(mp.InvalidLogProbError, match="sequence 1, position 3"):
        token_loss(*arguments, settings(block(bypass_mode=True)))
    config = settings(block({"rollout_log_prob_policy": "neutral"}, bypass_mode=True))
    losses, mask, metrics = token_loss(*arguments, config)
    assert losses[1, 3] == -data["advantages"][1, 3] and mask[1, 3] == 1  # ratio 1
    assert metrics["rollout_corr/invalid_nan"] == 1

    # A training log-prob that is not finite leaves no trace.
    data["rollout"][1, 3], data["current"][1, 3] = -1.0, -torch.inf
    log_prob = data["current"].requires_grad_()
    for denominator in ("auto", "original"):
        ours = {"rollout_log_prob_policy": "drop-token", "denominator": denominator}
        config = settings(block(ours, rollout_is="token", **REINFORCE))
        losses, mask, metrics = token_loss(data["rollout"], log_prob, data["advantages"], MASK.bool(), config)
        (gradient,) = torch.autograd.grad((losses * mask).sum(), log_prob)
        assert torch.isfinite(losses).all() and torch.isfinite(gradient).all() and gradient[1, 3] == 0
        assert metrics["rollout_corr/invalid_train_not_finite"] == 1 and mask[1, 3] == (denominator == "original")


def rollout_batch(data: dict[str, torch.Tensor]) -> Any:
    batch = {"old_log_probs": data["current"], "rollout_log_probs": data["rollout"], "response_mask": MASK.clone()}
    return SimpleNamespace(batch=batch)


def wide_batch(rows: int) -> Any:
    """Rows of 30 of which about two thirds train, some of them not at all; what is padded is NaN."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, 31, (rows, 1), generator=generator)
    mask = ((torch.arange(30) < lengths) & (torch.rand(rows, 30, generator=generator) < 0.9)).long()
    rollout = -torch.rand(rows, 30, generator=generator, dtype=torch.float64).masked_fill(mask == 0, torch.nan)
    old = (rollout + 0.3 * torch.randn(rows, 30, generator=generator, dtype=torch.float64)).clamp(max=0.0)
    return SimpleNamespace(batch={"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask})


@pytest.mark.parametrize(
    "ours",
    [
        block({"metrics": "off"}),
        block({"metrics": "basic"}, rollout_is="sequence", rollout_is_batch_normalize=True),
        block({"use_tis": True, "tis": {"mode": "mask"}, "metrics": "full"}),
        block({"use_tis": True, "tis": {"level": "geometric", "mode": "mask", "upper_bound": 1.1}}),
        block({"rs": {"criteria": ["sequence_mean:ratio:0.95:1.05"]}, "denominator": "original"}),
    ],
)
def test_the_driver_leaves_padding_behind_gives_what_padded_rows_give_and_syncs_once(ours: dict[str, Any]) -> None:
    batch, config = wide_batch(16), settings(ours)
    data, mask = dict(batch.batch), batch.batch["response_mask"].clone()
    packed = pack_trained(data)
    assert packed.loss_mask.numel() < 0.7 * mask.numel()
    assert torch.equal(packed.to_padded(packed.loss_mask) != 0, mask != 0)
    del data["response_mask"]
    expected = mp.correct(mp.PackedSequences.from_padded(**data, loss_masks=mask), config)
    _, metrics = correct_rollout_batch(batch, config)
    assert metrics == pytest.approx(expected.statistics.metrics(), rel=1e-12, abs=1e-12)
    keep = expected.keep.view(mask.shape)
    stays = config.denominator == "original" or not config.rejects
    assert torch.equal(batch.batch["response_mask"], mask if stays else keep.long())
    if "rollout_is_weights" in batch.batch:
        weights = (expected.weights * expected.keep).view(mask.shape)
        torch.testing.assert_close(batch.batch["rollout_is_weights"], weights, rtol=1e-12, atol=0)
    assert ("rollout_is_weights" in batch.batch) == (config.weighted or config.denominator == "original")

    few, many = (count(partial(correct_rollout_batch, wide_batch(rows), config)) for rows in (4, 64))
    assert len(few.syncs) <= 1 and few.syncs == many.syncs and few.kernels == many.kernels


@pytest.mark.parametrize("ours", [{}, {"dry_run": True}])
def test_a_driver_that_rejects_everything_or_tries_it_leaves_the_mask(ours: dict[str, Any]) -> None:
    config = settings(block({"rs": {"criteria": ["token:k2:1e-12"]}, **ours}))
    batch, metrics = correct_rollout_batch(rollout_batch(padded()), config)
    assert torch.equal(batch.batch["response_mask"], MASK)
    assert ("rollout_is_weights" in batch.batch) == (not ours)
    assert ours or not batch.batch["rollout_is_weights"].any()
    assert metrics["rollout_corr/rollout_rs_token_k2_masked_fraction"] == 1.0
    assert ours or metrics["rollout_corr/all_rejected"] == 1.0


def test_advantages_after_a_rejection_are_group_advantages_of_the_accepted() -> None:
    batch, rewards = rollout_batch(padded()), torch.zeros(4, 6, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 0.5, 0.2])
    batch.batch["token_level_rewards"] = rewards
    batch.non_tensor_batch, batch.meta_info = {"uid": ["a", "a", "a", "b"]}, {}
    config = settings(block({"rs": {"criteria": ["sequence_mean:k2:0.025"], "group": "exclude"}}))
    batch, metrics = correct_rollout_batch(batch, config)
    kept = batch.batch["response_mask"].any(-1)
    expected = mp.group_advantages(rewards.sum(-1), torch.tensor([0, 0, 0, 1]), kept)
    found = compute_advantage(lambda *_: pytest.fail("verl's own"), batch, "grpo").batch
    torch.testing.assert_close(found["advantages"], expected[:, None] * found["response_mask"])
    assert expected.any() and 0 < kept.sum() < 3 and "rollout_corr/rollout_rs_group_changed_fraction" in metrics
    assert compute_advantage(lambda *_: "verl's own", batch, "grpo") == "verl's own"  # unmarked again


def test_batches_that_the_driver_refuses() -> None:
    data, config = padded(), settings(block(rollout_is="token"))
    batch = rollout_batch(data)
    batch.batch["rollout_log_probs"] = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=r"rollout_log_probs has shape \(4, 5\), response_mask \(4, 6\)"):
        correct_rollout_batch(batch, config)
    data["rollout"][1, 3] = torch.nan
    with pytest.raises(mp.InvalidLogProbError, match="sequence 1, position 3 is missing or NaN"):
        correct_rollout_batch(rollout_batch(data), config)
    correct_rollout_batch(rollout_batch(data), settings(block({"metrics": "basic"})))  # here only metrics read it


def test_the_gate_stops_the_driver_before_it_changes_the_batch_and_the_loss_of_a_micro_batch() -> None:
    data = padded()
    k3_kl = correct_rollout_batch(rollout_batch(data), settings(block(rollout_is="token")))[1]["rollout_corr/k3_kl"]
    failing, passing = ({"gate_kl": factor * k3_kl} for factor in (0.99, 1.01))
    batch = rollout_batch(data)
    with pytest.raises(mp.GateError, match="--mismatch-gate-kl"):
        correct_rollout_batch(batch, settings(block(failing, rollout_is="token")))
    assert "rollout_is_weights" not in batch.batch
    correct_rollout_batch(batch, settings(block(passing, rollout_is="token")))
    arguments = (data["current"], data["advantages"], MASK.bool())
    # The workers of the decoupled mode have no rollout log-probs: the driver has judged.
    token_loss(data["current"], *arguments, settings(block(failing, rollout_is="token")), torch.ones(MASK.shape))
    with pytest.raises(mp.GateError):
        token_loss(data["rollout"], *arguments, settings(block({"gate_kl": 1e-9}, bypass_mode=True)))


class Tracking:
    """verl's tracker as its trainers use it."""

    def __init__(self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None):
        self.logged: list[int] = []

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        self.logged.append(step)


wrap_once(Tracking, "__init__", begin_tracking)
wrap_once(Tracking, "log", log_step)


def test_a_report_folder_gets_each_step_that_verl_logs(tmp_path: Path) -> None:
    ours = {"metrics": "full", "report_dir": str(tmp_path)}
    config = tree(block(ours, rollout_is="token"))
    tracker = Tracking("project", "run", ["console"], config=config)
    for step in (1, 2):
        _, metrics = correct_rollout_batch(rollout_batch(padded()), settings(config))
        tracker.log(data={**metrics, "actor/grad_norm": torch.tensor(0.25), "table": "text"}, step=step)
    assert tracker.logged == [1, 2]
    first, second = read_steps(tmp_path)
    assert (first["step"], second["step"], second["actor/grad_norm"]) == (1, 2, 0.25) and "table" not in first
    assert second["rollout_corr/k3_kl"] == metrics["rollout_corr/k3_kl"]
    # In bypass mode the workers' means arrive, and there is nothing of the driver's.
    correction = block({**ours, "report_dir": str(tmp_path / "b")}, bypass_mode=True)
    bypass = tree(correction, "mismatch", correction)
    Tracking("project", "run", "console", bypass).log({"actor/rollout_corr/kl": 0.5}, 1)
    assert list(read_steps(tmp_path / "b")) == [{"step": 1.0, "rollout_corr/kl": 0.5}]


def test_only_metrics_whose_average_means_something_are_handed_over() -> None:
    """verl takes the mean over micro-batches of whatever it gets."""
    data = padded()
    ours = {"metrics": "full", "tis": {"level": "geometric"}, "rs": {"criteria": ["token:k2:0.05"]}}
    config = settings(block(ours, **REINFORCE))
    _, _, metrics = token_loss(data["rollout"], data["current"], data["advantages"], MASK.bool(), config)
    assert not [
        name for name in metrics if re.search(r"_(max|min|std|deviation|size|p\d+|p99_9)$|ppl_ratio|/tokens", name)
    ]
    kept = ("rollout_is_mean", "rollout_rs_token_k2_masked_fraction", "rollout_rs_token_k2_mean", "all_rejected", "kl")
    assert {f"rollout_corr/{name}" for name in kept} <= metrics.keys()


def test_a_verl_that_cannot_be_registered_with_is_said_aloud(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl itself swallows what its entry points raise."""
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ModuleNotFoundError, match="verl"):
        importlib.import_module("mismatch_plugin.hooks.verl_plugin")
    assert "loss_mode mismatch will be unknown" in caplog.text
