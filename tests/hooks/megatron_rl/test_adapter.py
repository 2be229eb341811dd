"""Megatron-LM RL: the drop-in loss against Megatron's own and against `policy_loss`, its layouts and its traps."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from examples.benchmarks.counting import OperationCounter
from tests.hooks.contracts.megatron_rl_batches import (
    ALGORITHMS,
    CLIP,
    LAYOUTS,
    LENGTHS,
    STARTS,
    make_config,
    one_bin,
    random_tensors,
    rows,
    run_loss,
    whole_sequences,
)
from tests.host_source import function, host_source

SETTINGS = [("0", "", ""), ("1", "", ""), ("2", "token", "mask"), ("2", "sequence", "clip"), ("3", "geometric", "mask")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("algorithm", "level", "mode"), SETTINGS)
def test_every_setting_equals_policy_loss(layout: str, algorithm: str, level: str, mode: str) -> None:
    """Over sequences cut out one by one, with Megatron's own KL and entropy terms, and the metrics."""
    settings: dict[str, Any] = {"rs": {"criteria": ["sequence_max:k2:0.3"], "veto_threshold": 0.2}}
    if algorithm in "23":
        settings["tis"] = {"level": level, "mode": mode, "upper_bound": 1.3, "batch_normalize": mode == "clip"}
    config = make_config(**ALGORITHMS[algorithm], **settings)
    data, place = LAYOUTS[layout]()
    terms, gradient, statistics = run_loss(config, data, place)

    current, mask, where = data["current"].clone().requires_grad_(), data["mask"], whole_sequences(data, place)

    def cut(values: Tensor) -> list[Tensor]:
        return [values[row, part] for row, part in where]

    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=cut(data["rollout"]),
        loss_masks=[row.long() for row in cut(mask)],
        old_log_probs=cut(data["old"]),
        ref_log_probs=cut(data["ref"]),
        advantages=list(data["advantages"]),
    )
    reference = mp.policy_loss(torch.cat(cut(current)), packed, config)
    entropy = (-current.exp() * current * mask).sum()
    total = reference.loss_sum + reference.terms["kl"] - CLIP.entropy_weight * entropy
    total.backward()
    assert current.grad is not None
    assert reference.correction.keep.sum() < mask.sum()  # something is rejected
    torch.testing.assert_close((terms.loss * mask).sum(), total.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, current.grad, rtol=1e-11, atol=1e-13)
    mine, theirs = statistics.metrics(), reference.statistics.metrics()
    assert mine == pytest.approx({name: theirs[name] for name in mine}, rel=1e-10, abs=1e-12)
    assert {"rollout_corr/pg_loss", "rollout_corr/ref_kl"} <= mine.keys()
    if algorithm == "3":  # Megatron's clip fractions are of the weights' bounds
        ratios, trained = (data["current"] - data["rollout"]).exp(), mask != 0
        above, below = (ratios > config.tis.upper) & trained, (ratios < config.tis.lower) & trained
        assert torch.equal(terms.truncated_from_above, above) and torch.equal(terms.truncated_from_below, below)
        assert (above | below).any()


@pytest.fixture(scope="module")
def megatron_s_loss() -> Callable[..., tuple[Tensor, ...]]:
    names: dict[str, Any] = {"torch": torch}
    module = ast.Module([function(host_source("Megatron-LM") / "megatron/rl/rl_utils.py", "calculate_grpo_loss")], [])
    exec(compile(module, "rl_utils.py", "exec"), names)
    return names["calculate_grpo_loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bound", [None, 1.1, math.inf])
def test_megatron_s_own_loss_where_semantics_agree(layout: str, bound: float | None, megatron_s_loss: Any) -> None:
    """Algorithm 0, and algorithm 2 at token level, truncated above or (inf) not at all."""
    data, place = LAYOUTS[layout]()
    config = make_config() if bound is None else make_config(use_tis=True, tis={"upper_bound": bound})
    mine, gradient, _ = run_loss(config, data, place)
    current = data["current"].clone().requires_grad_()
    expected = megatron_s_loss(
        current_logprobs=current,
        old_logprobs=data["old"],
        ref_logprobs=data["ref"],
        advantages=data["advantages"],
        clamp_eps_lower=CLIP.eps_lower,
        clamp_eps_upper=CLIP.eps_upper,
        kl_beta=CLIP.kl_beta,
        entropy_weight=CLIP.entropy_weight,
        inference_logprobs=None if bound is None else data["rollout"],
        is_truncation_coef=None if bound == math.inf else bound,
        **place,
    )
    (expected[0] * data["mask"]).sum().backward()
    for name, a, b in zip(mine._fields, mine, expected, strict=True):
        assert a.shape == b.shape, name
        torch.testing.assert_close(a * data["mask"], b * data["mask"], rtol=1e-12, atol=1e-13, msg=name)
    assert current.grad is not None
    torch.testing.assert_close(gradient, current.grad, rtol=1e-11, atol=1e-13)


# Layouts --------------------------------------------------------------------------------------------------------------


def test_an_empty_bin_is_a_zero_loss_on_the_graph_and_advantages_fit_the_sequences() -> None:
    data = random_tensors((1, 8), 0)
    data["mask"].zero_()
    config = make_config(use_tis=True, tis={"level": "sequence"}, rs={"veto_threshold": 0.1})
    terms, gradient, statistics = run_loss(config, data, {"seq_starts": [], "seq_lengths": []})
    assert terms.loss.requires_grad and not terms.loss.any() and not gradient.any()
    assert statistics.metrics()["rollout_corr/sequences"] == 0
    data, place = rows()
    data["advantages"] = data["advantages"][:2]
    with pytest.raises(ValueError, match="advantages has 2 values for 3 sequences"):
        run_loss(make_config(), data, place)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_under_the_mask_leaks(layout: str, algorithm: str) -> None:
    config = make_config(**ALGORITHMS[algorithm], rs={"criteria": ["sequence_sum:ratio:9"]})
    data, place = LAYOUTS[layout]()
    clean, gradient, _ = run_loss(config, data, place)
    for name, garbage in (("old", math.nan), ("rollout", math.inf), ("current", -math.inf), ("ref", math.nan)):
        data[name] = torch.where(data["mask"] == 0, garbage, data[name])
    dirty, dirty_gradient, _ = run_loss(config, data, place)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a * data["mask"], torch.nan_to_num(b * data["mask"], nan=7.0))
    assert torch.equal(gradient, dirty_gradient)


# Traps ----------------------------------------------------------------------------------------------------------------


def test_slots_that_the_engine_did_not_report_have_ratio_1() -> None:
    """A bin has 0.0 there: a sequence's product is that of what was reported."""
    config = make_config(use_tis=True, tis={"level": "sequence", "upper_bound": 50.0})
    data, place = one_bin()
    filled = {**data, "rollout": data["rollout"].clone()}
    slot = int(data["mask"][0, :5].nonzero()[0])
    data["old"][0, slot] = filled["old"][0, slot] = -4.0
    data["rollout"][0, slot], filled["rollout"][0, slot] = 0.0, -4.0
    (a, gradient_a, _), (b, gradient_b, _) = run_loss(config, data, place), run_loss(config, filled, place)
    assert torch.equal(a.loss, b.loss) and torch.equal(gradient_a, gradient_b)
    poisoned, _, _ = run_loss(config, {**data, "rollout": data["rollout"].clone().fill_(-1.0)}, place)
    assert not torch.equal(a.loss, poisoned.loss)


def test_a_sequence_of_which_nothing_was_reported_is_an_error_and_single_slots_may_be_dropped() -> None:
    """Its log-probs are missing: ratio 1 for all of it would hide that."""
    data, place = one_bin()
    start, length = STARTS[1], LENGTHS[1]
    data["rollout"][0, start : start + length - 1] = 0.0
    statistics = run_loss(make_config(use_tis=True), data, place)[2]
    trained = int(data["mask"][0, start : start + length - 1].sum())
    assert statistics.sum_of("invalid_nan") == trained > 0
    with pytest.raises(mp.InvalidLogProbError, match="sequence 1, position"):
        statistics.metrics()
    data, place = one_bin()
    data["mask"][0, 1], data["rollout"][0, 1] = 1.0, 0.0
    terms, _, statistics = run_loss(make_config(use_tis=True, rollout_log_prob_policy="drop-token"), data, place)
    assert statistics.metrics()["rollout_corr/invalid_nan"] == 1
    kept = terms.loss[0, 1] - CLIP.kl_beta * terms.kl_term[0, 1] + CLIP.entropy_weight * terms.entropy_term[0, 1]
    assert float(kept.detach().abs()) < 1e-12


def test_half_precision_is_widened_and_rows_are_not_synced() -> None:
    data, place = rows(torch.bfloat16)
    config = make_config(use_tis=True, tis={"level": "sequence"}, rs={"criteria": ["sequence_mean:ratio:1.1"]})
    run_loss(config, data, place)  # constants are made once
    terms, gradient, _ = run_loss(config, data, place)
    assert {value.dtype for value in terms} == {torch.float32, torch.bool}
    assert gradient.dtype == torch.bfloat16
    wide = {name: value.float() for name, value in data.items()}
    with OperationCounter() as counter:
        found = run_loss(config, wide, place)[0]
    assert torch.equal(terms.loss, found.loss) and counter.syncs == []
