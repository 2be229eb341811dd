"""The registered loss and the wrapped driver against verl's own: loss, gradient, weights, masks and metrics."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import actor, batch, correction, loss_and_gradient
from verl import DataProto
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import get_policy_loss_fn

TOLERANCE = 1e-6
SEEDS = range(6)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
REINFORCE = {"loss_type": "reinforce"}


def by(level: str, threshold: Any, **more: Any) -> dict[str, Any]:
    return {"rollout_is": level, "rollout_is_threshold": threshold, **more}


def without(criterion: str, threshold: Any) -> dict[str, Any]:
    return {"rollout_rs": criterion, "rollout_rs_threshold": threshold}


NORMALISED = {"rollout_is_batch_normalize": True}
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "token truncate": by("token", 1.2),
    "sequence truncate": by("sequence", 1.3),
    "token normalised": by("token", 1.2, **NORMALISED),
    "token IcePop": by("token", "0.8_1.3"),
    "sequence IcePop": by("sequence", "0.6_1.5"),
    "token k2": without("token_k2", 0.05),
    "sequence sum k1": without("seq_sum_k1", "0.6_1.4"),
    "sequence max k2": without("seq_max_k2", 0.2),
    "two criteria": without("token_k2,seq_mean_k3", "0.1,0.08"),
    "token truncate and mean k3": {**by("token", 1.2), **without("seq_mean_k3", 0.06)},
}


def same(mine: tuple[float, torch.Tensor, Any], theirs: tuple[float, torch.Tensor, Any]) -> None:
    assert mine[0] == pytest.approx(theirs[0], rel=TOLERANCE, abs=TOLERANCE)
    torch.testing.assert_close(mine[1], theirs[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [{}, REINFORCE], ids=["ppo", "reinforce"])
@pytest.mark.parametrize("sizes", [{}, {"dp_size": 2, "batch_num_tokens": 57, "global_batch_size": 12}])
def test_bypass_equals_verl(case: str, kind: dict[str, Any], sizes: dict[str, Any]) -> None:
    config = actor(correction(bypass_mode=True, **kind, **CASES[case]))
    config.global_batch_info.update(sizes)
    rejected = False
    for seed in SEEDS:
        data, aggregation = batch(seed), AGGREGATIONS[seed % len(AGGREGATIONS)]
        arguments: dict[str, Any] = {"old_log_prob": data["rollout_log_probs"], "loss_agg_mode": aggregation}
        arguments |= {"config": config, "rollout_is_weights": None}
        theirs = loss_and_gradient(get_policy_loss_fn("bypass_mode"), data, **arguments)
        mine = loss_and_gradient(get_policy_loss_fn("mismatch"), data, **arguments)
        same(mine, theirs)
        assert mine[1].abs().sum() > 0
        for name in {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"} & theirs[2].keys():
            assert mine[2][name] == pytest.approx(theirs[2][name], rel=1e-5, abs=1e-6), name
        rejected = rejected or mine[2].get("rollout_corr/rollout_is_masked_fraction", 0) > 0
    assert rejected == ("rollout_rs" in CASES[case] or ("IcePop" in case and bool(kind)))  # the settings bite


DPPO = {"dppo_tv": "token:tv:0.05@away", "dppo_kl": "token:binary_kl:0.05@away"}  # δ is verl's clip_ratio
OBJECTIVES = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "reinforce", "sapo": "sapo", **DPPO}
WAYS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "weighted": {"rollout_is": "token"},
    "bypass": {"bypass_mode": True},
}


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("mode", OBJECTIVES)
@pytest.mark.parametrize("way", WAYS)
def test_objectives_in_the_block_equal_verl_s_loss_modes(mode: str, way: str, aggregation: str) -> None:
    """Weights and mask as a driver made them. verl's SAPO takes seq-mean-token-mean whatever is asked for, its DPPO the
    rollout for π_old, and only vanilla has a dual clip."""
    ours, settings = {"objective": OBJECTIVES[mode]}, WAYS[way]
    clips: dict[str, Any] = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.04, "clip_ratio_c": 1.4}
    if mode == "sapo":
        aggregation, clips = "seq-mean-token-mean", {"tau_pos": 0.7, "tau_neg": 1.4}
    if mode in DPPO:
        ours = {"tis": {"level": "token", "upper_bound": 1.2}, "rs": {"criteria": [DPPO[mode]]}}
        ours, settings = {**ours, "denominator": "original"}, {"bypass_mode": True, **REINFORCE}
        clips = {"clip_ratio": 0.05, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2}
    config, clipped = actor(correction(mismatch=ours, **settings), **clips), 0.0
    for seed in SEEDS:
        data = batch(seed)
        weights = torch.exp(data["old_log_probs"] - data["rollout_log_probs"]).clamp(max=1.3) * data["response_mask"]
        data["response_mask"][0] = 0  # a rejected sequence
        bypasses = "bypass_mode" in settings
        arguments: dict[str, Any] = {
            "old_log_prob": data["rollout_log_probs" if bypasses else "old_log_probs"],
            "rollout_is_weights": weights if way == "weighted" and not bypasses else None,
            "loss_agg_mode": aggregation,
            "config": config,
        }
        theirs = loss_and_gradient(get_policy_loss_fn(mode), data, **arguments)
        mine = loss_and_gradient(get_policy_loss_fn("mismatch"), data, **arguments)
        same(mine, theirs)
        assert mine[1].abs().sum() > 0
        for name in (theirs[2].keys() & mine[2].keys()) if mode in ("vanilla", "gspo", "cispo") else ():
            assert mine[2][name] == pytest.approx(theirs[2][name], rel=1e-5, abs=1e-6), name
        clipped += mine[2].get("actor/pg_clipfrac", 0.0) + mine[2].get("rollout_corr/rollout_rs_masked_fraction", 0.0)
    assert clipped > 0 or mode in ("gpg", "sapo")


# The driver -----------------------------------------------------------------------------------------------------------


def driver(data: dict[str, torch.Tensor], settings: dict[str, Any]) -> tuple[DataProto, dict[str, float]]:
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    tensors = {name: data[name].clone() for name in names}
    return rollout_corr_helper.compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors), settings)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_mask_equal_verls_and_so_does_the_loss_after_them(case: str) -> None:
    settings = correction(**CASES[case])
    for seed in SEEDS:
        data = batch(seed)
        (theirs, their_metrics), (mine, my_metrics) = (
            driver(data, block) for block in (settings, {**settings, "mismatch": {"metrics": "basic"}})
        )
        assert torch.equal(mine.batch["response_mask"], theirs.batch["response_mask"])
        assert mine.batch["response_mask"].dtype == theirs.batch["response_mask"].dtype
        expected, weights = (one.batch.get("rollout_is_weights", None) for one in (theirs, mine))
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
        data["response_mask"] = theirs.batch["response_mask"]
        given: dict[str, Any] = {"old_log_prob": data["old_log_probs"], "loss_agg_mode": "token-mean"}
        mismatch, vanilla = (get_policy_loss_fn(name) for name in ("mismatch", "vanilla"))
        ours = actor({**settings, "mismatch": {"dry_run": False}})
        my_loss = loss_and_gradient(mismatch, data, config=ours, rollout_is_weights=weights, **given)
        same(my_loss, loss_and_gradient(vanilla, data, config=actor(settings), rollout_is_weights=expected, **given))
