"""The registered loss against verl's own, loss and gradient, for every setting that verl has."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import actor, batch, correction, loss_and_gradient
from verl.trainer.ppo.core_algos import get_policy_loss_fn

import mismatch_plugin as mp

TOLERANCE = 1e-6
SEEDS = range(6)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

BYPASS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, weights for the metrics only": {"rollout_is": "token", "rollout_is_threshold": 1.5},
    "ppo, token k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.6"},
    "ppo, token k2": {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.05},
    "ppo, token k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.05},
    "ppo, sequence sum k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.6_1.4"},
    "ppo, sequence sum k2": {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 0.3},
    "ppo, sequence sum k3": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.3},
    "ppo, sequence mean k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.1"},
    "ppo, sequence mean k2": {"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.06},
    "ppo, sequence mean k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.06},
    "ppo, sequence max k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.2},
    "ppo, sequence max k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.2},
    "ppo, two criteria": {"rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": "0.1,0.08"},
    "reinforce, no weights": {"loss_type": "reinforce"},
    "reinforce, token truncate": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2},
    "reinforce, sequence truncate": {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 1.3},
    "reinforce, IcePop": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    "reinforce, sequence IcePop": {
        "loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": "0.6_1.5",
    },
    "reinforce, token normalised": {
        "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2,
        "rollout_is_batch_normalize": True,
    },
    "reinforce, sequence normalised": {
        "loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 1.3,
        "rollout_is_batch_normalize": True,
    },
    "reinforce, token truncate and token k1": {
        "loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2,
        "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.6",
    },
    "reinforce, sequence truncate and geometric": {
        "loss_type": "reinforce", "rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1,
    },
}  # fmt: skip


def same(mine: tuple[float, torch.Tensor, Any], theirs: tuple[float, torch.Tensor, Any]) -> None:
    assert mine[0] == pytest.approx(theirs[0], rel=TOLERANCE, abs=TOLERANCE)
    torch.testing.assert_close(mine[1], theirs[1], rtol=TOLERANCE, atol=TOLERANCE)


def with_batch_sizes(config: Any, sizes: dict[str, Any]) -> Any:
    config.global_batch_info.update(sizes)
    return config


@pytest.mark.parametrize("case", BYPASS, ids=[name.replace(" ", "-") for name in BYPASS])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "sizes", [{}, {"dp_size": 2, "batch_num_tokens": 57, "global_batch_size": 12}], ids=["local", "global"]
)
def test_bypass_equals_verl(case: str, aggregation: str, sizes: dict[str, Any]) -> None:
    config = with_batch_sizes(actor(correction(bypass_mode=True, **BYPASS[case])), sizes)
    rejected = False
    for seed in SEEDS:
        data = batch(seed)
        arguments = {
            "old_log_prob": data["rollout_log_probs"], "loss_agg_mode": aggregation, "config": config,
            "rollout_is_weights": None,
        }  # fmt: skip
        theirs = loss_and_gradient(get_policy_loss_fn("bypass_mode"), data, **arguments)
        mine = loss_and_gradient(get_policy_loss_fn("mismatch"), data, **arguments)
        same(mine, theirs)
        assert mine[1].abs().sum() > 0
        for name in ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
            if name in theirs[2]:
                assert mine[2][name] == pytest.approx(theirs[2][name], rel=1e-5, abs=1e-6), name
        rejected = rejected or mine[2].get("rollout_corr/rollout_is_masked_fraction", 0) > 0
    assert rejected == ("rollout_rs" in BYPASS[case] or "IcePop" in case)  # the settings bite


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_decoupled_equals_vanilla(aggregation: str, weighted: bool) -> None:
    """Weights and mask as a driver made them."""
    settings: dict[str, Any] = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.4}
    config = actor(correction(rollout_is="token" if weighted else None), **settings)
    dual = 0.0
    for seed in SEEDS:
        data = batch(seed)
        weights = torch.exp(data["old_log_probs"] - data["rollout_log_probs"]).clamp(max=1.3) * data["response_mask"]
        data["response_mask"][0] = 0  # a rejected sequence
        arguments = {
            "old_log_prob": data["old_log_probs"], "loss_agg_mode": aggregation, "config": config,
            "rollout_is_weights": weights if weighted else None,
        }  # fmt: skip
        theirs = loss_and_gradient(get_policy_loss_fn("vanilla"), data, **arguments)
        mine = loss_and_gradient(get_policy_loss_fn("mismatch"), data, **arguments)
        same(mine, theirs)
        assert mine[2] == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in theirs[2].items()}
        dual += mine[2]["actor/pg_clipfrac_lower"]
    assert dual > 0  # the dual clip was at work


OBJECTIVES = {"gspo": "gspo", "cispo": "cispo", "gpg": "reinforce"}
WAYS: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "weighted": {"rollout_is": "token"},
    "bypass": {"bypass_mode": True},
}


def test_sapo_in_the_block_equals_verl_s() -> None:
    """Under seq-mean-token-mean, which verl's takes whatever is asked for; nothing of it is called clipped."""
    config = actor(correction(mismatch={"objective": "sapo"}), tau_pos=0.7, tau_neg=1.4)
    for seed in SEEDS:
        arguments = {"old_log_prob": batch(seed)["old_log_probs"], "loss_agg_mode": "seq-mean-token-mean"}
        theirs, mine = (
            loss_and_gradient(get_policy_loss_fn(mode), batch(seed), config=config, **arguments)
            for mode in ("sapo", "mismatch")
        )
        same(mine, theirs)
        assert mine[1].abs().sum() > 0 and mine[2]["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("mode", OBJECTIVES)
@pytest.mark.parametrize("way", WAYS)
def test_objectives_in_the_block_equal_verl_s_loss_modes(mode: str, way: str, aggregation: str) -> None:
    """With verl's clip and without its dual clip, which these have not."""
    ours: dict[str, Any] = {"objective": OBJECTIVES[mode]}
    config = actor(correction(mismatch=ours, **WAYS[way]), clip_ratio_low=0.05, clip_ratio_high=0.04, clip_ratio_c=1.01)
    clipped = 0.0
    for seed in SEEDS:
        data = batch(seed)
        weights = torch.exp(data["old_log_probs"] - data["rollout_log_probs"]).clamp(max=1.3) * data["response_mask"]
        data["response_mask"][0] = 0  # a rejected sequence
        arguments = {
            "old_log_prob": data["rollout_log_probs" if way == "bypass" else "old_log_probs"],
            "rollout_is_weights": weights if way == "weighted" else None,
            "loss_agg_mode": aggregation,
            "config": config,
        }
        theirs = loss_and_gradient(get_policy_loss_fn(mode), data, **arguments)
        mine = loss_and_gradient(get_policy_loss_fn("mismatch"), data, **arguments)
        same(mine, theirs)
        assert mine[1].abs().sum() > 0
        clipped += mine[2].get("actor/pg_clipfrac", 1.0)
    assert clipped > 0


DPPO = {"dppo_tv": ("token:tv:0.05@away", 0.05), "dppo_kl": ("token:binary_kl:0.01@away", 0.01)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", DPPO)
def test_the_presets_of_dppo_are_verl_s_losses_with_the_rollout_as_old_policy(name: str, aggregation: str) -> None:
    """δ is verl's clip_ratio, and the truncation its clip_ratio_c, whose YAML has 3, its code 20."""
    criterion, delta = DPPO[name]
    shape = mp.preset(name)
    block = {"tis": {"level": "token", "upper_bound": 1.2}, "denominator": "original", "rs": {"criteria": [criterion]}}
    assert (shape.tis.level, shape.denominator, shape.tis.upper_bound) == ("token", "original", 20.0)
    assert [rule.name for rule in shape.criteria] == [mp.MismatchConfig(rs=block["rs"]).criteria[0].name]
    config = actor(
        correction(bypass_mode=True, loss_type="reinforce", mismatch=block),
        clip_ratio=delta, clip_ratio_low=delta, clip_ratio_high=delta, clip_ratio_c=1.2,
    )  # fmt: skip
    rejected = 0.0
    for seed in SEEDS:
        data = batch(seed)
        arguments = {"old_log_prob": data["rollout_log_probs"], "loss_agg_mode": aggregation, "config": config}
        theirs = loss_and_gradient(get_policy_loss_fn(name), data, **arguments)
        same(loss_and_gradient(get_policy_loss_fn("mismatch"), data, **arguments), theirs)
        rejected += theirs[2]["actor/pg_clipfrac"]
    assert 0 < rejected < len(SEEDS)


def test_where_verl_averages_over_rejected_weights_ours_does_not() -> None:
    """A difference: verl's mean of IcePop weights counts the zeroed ones, here it runs over the accepted."""
    settings = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.8_1.3"}
    plain = actor(correction(bypass_mode=True, **settings))
    normalised = actor(correction(bypass_mode=True, rollout_is_batch_normalize=True, **settings))
    data = batch(0)
    arguments = {"old_log_prob": data["rollout_log_probs"], "loss_agg_mode": "token-mean", "rollout_is_weights": None}
    for name, counted in (("bypass_mode", "all"), ("mismatch", "accepted")):
        loss, _, _ = loss_and_gradient(get_policy_loss_fn(name), data, config=plain, **arguments)
        divided, _, _ = loss_and_gradient(get_policy_loss_fn(name), data, config=normalised, **arguments)
        ratio = (data["log_prob"] - data["rollout_log_probs"]).exp()
        inside = (ratio >= 0.8) & (ratio <= 1.3) & data["response_mask"].bool()
        units = inside.sum() if counted == "accepted" else data["response_mask"].sum()
        assert loss / divided == pytest.approx(float(ratio[inside].sum() / units), rel=1e-6)


def test_everything_rejected_is_a_zero_loss_where_verl_divides_by_nothing() -> None:
    settings = correction(bypass_mode=True, rollout_rs="token_k2", rollout_rs_threshold=1e-12)
    config, data = actor(settings), batch(1)
    arguments = {"old_log_prob": data["rollout_log_probs"], "loss_agg_mode": "token-mean", "rollout_is_weights": None}
    loss, gradient, _ = loss_and_gradient(get_policy_loss_fn("mismatch"), data, config=config, **arguments)
    assert loss == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))
    theirs, _, _ = loss_and_gradient(get_policy_loss_fn("bypass_mode"), data, config=config, **arguments)
    assert theirs != theirs
