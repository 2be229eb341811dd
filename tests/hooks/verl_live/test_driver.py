"""Decoupled mode on verl's driver: its own function, wrapped, on verl's own DataProto."""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import actor, batch, correction, loss_and_gradient
from verl import DataProto  # pyright: ignore[reportAttributeAccessIssue]
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.tracking import Tracking

from mismatch_plugin.hooks.verl import settings as config_of
from mismatch_plugin.report.log import read_steps
from mismatch_plugin.report.state import merged_metrics

TOLERANCE = 1e-6
SEEDS = range(6)
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.2},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.3},
    "token normalised": {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
    "sequence normalised": {"rollout_is": "sequence", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
    "IcePop": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    "token k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.6"},
    "token k2": {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.05},
    "sequence k3 and weights": {
        "rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.06,
    },
    "sequence max k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.2},
    "sequence sum k1 and weights": {
        "rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.6_1.4",
    },
}  # fmt: skip


def driver(data: dict[str, torch.Tensor], settings: dict[str, Any]) -> tuple[DataProto, dict[str, float]]:
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    tensors = {name: data[name].clone() for name in names}
    return rollout_corr_helper.compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors), settings)


def weights_of(result: DataProto) -> torch.Tensor | None:
    return result.batch.get("rollout_is_weights", None)


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "-") for name in CASES])
def test_weights_and_mask_equal_verls(case: str) -> None:
    settings = correction(**CASES[case])
    for seed in SEEDS:
        data = batch(seed)
        theirs, their_metrics = driver(data, settings)
        mine, my_metrics = driver(data, {**settings, "mismatch": {"metrics": "basic"}})
        assert torch.equal(mine.batch["response_mask"], theirs.batch["response_mask"])
        assert mine.batch["response_mask"].dtype == theirs.batch["response_mask"].dtype
        expected, weights = weights_of(theirs), weights_of(mine)
        assert (expected is None) == (weights is None)
        if weights is not None and expected is not None:
            # A difference: here a rejected token's weight is 0, verl leaves it to the mask.
            expected = expected * theirs.batch["response_mask"]
            torch.testing.assert_close(weights, expected, rtol=TOLERANCE, atol=TOLERANCE)
        for name in ("kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "chi2_token", "chi2_seq"):
            key = f"rollout_corr/{name}"
            assert my_metrics[key] == pytest.approx(their_metrics[key], rel=TOLERANCE, abs=TOLERANCE), name
        # A difference: the guide's exponential of the mean, where verl's code has the mean of exponentials.
        ratio = math.exp(their_metrics["rollout_corr/log_ppl_diff"])
        assert my_metrics["rollout_corr/ppl_ratio"] == pytest.approx(ratio, rel=TOLERANCE)
        assert their_metrics["rollout_corr/ppl_ratio"] > ratio  # Jensen


@pytest.mark.parametrize("case", ["token", "sequence k3 and weights", "IcePop"])
def test_loss_after_the_driver_equals_verls(case: str) -> None:
    """verl's driver and vanilla loss against ours, one after the other."""
    settings = correction(**CASES[case])
    for seed in SEEDS:
        outcomes = []
        for block, loss in ((settings, "vanilla"), ({**settings, "mismatch": {"dry_run": False}}, "mismatch")):
            data = batch(seed)
            result, _ = driver(data, block)
            data["response_mask"] = result.batch["response_mask"]
            outcomes.append(
                loss_and_gradient(
                    get_policy_loss_fn(loss),
                    data,
                    old_log_prob=data["old_log_probs"],
                    loss_agg_mode="token-mean",
                    config=actor(block),
                    rollout_is_weights=weights_of(result),
                )
            )
        assert outcomes[1][0] == pytest.approx(outcomes[0][0], rel=TOLERANCE)
        torch.testing.assert_close(outcomes[1][1], outcomes[0][1], rtol=TOLERANCE, atol=TOLERANCE)


def test_without_our_block_verls_own_function_runs() -> None:
    _, metrics = driver(batch(0), correction(rollout_is="token"))
    assert "rollout_corr/accepted_token_fraction" not in metrics


def test_a_step_that_verl_logs_is_a_line_of_the_report_folder(tmp_path: Path) -> None:
    """verl's own Tracking, with the configuration as its trainers hand it over."""
    ours = {"metrics": "full", "report_dir": str(tmp_path)}
    settings = correction(rollout_is="token", mismatch=ours)
    tree = {
        "algorithm": {"rollout_correction": settings},
        "actor_rollout_ref": {"actor": {"policy_loss": {}}, "rollout": {"calculate_log_probs": True}},
    }
    tracking = Tracking("project", "run", default_backend=["console"], config=tree)
    tracking.log(data={"val/reward": 1.0}, step=0)
    _, metrics = driver(batch(0), settings)
    tracking.log(data={**metrics, "critic/rewards/mean": 0.5}, step=7)
    (step,) = read_steps(tmp_path)
    assert step == {"step": 7.0, "critic/rewards/mean": 0.5, **{name: float(value) for name, value in metrics.items()}}
    config = config_of(settings)
    assert merged_metrics(tmp_path / "metrics.jsonl", config, 1) == pytest.approx(metrics, rel=1e-9, nan_ok=True)
