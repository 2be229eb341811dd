"""slime's adapter without slime: hand-made batches in its layout against `policy_loss` in one process.

The host's part (reductions, scaling, its PPO loss) is a few lines from its contract; process groups are
megatron-core's.
"""

from __future__ import annotations

import importlib.util
import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.hooks import slime
from mismatch_plugin.hooks.slime.batch import owned_ranges, pack_local
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.hooks.contracts.slime_cases import NARROW, TERMS, WEIGHTED_KL, custom, drawn, hooked, ours, product, weights
from tests.hooks.contracts.slime_compare import HAND_LAYOUTS, compare
from tests.hooks.contracts.slime_data import ACCEPTED_MEAN, STEPS, arguments, owned, samples, schedule, step_samples
from tests.hooks.contracts.slime_worker import Model, Runs, run_by_hand

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

_NORMALISED = weights("sequence", "clip", batch_normalize=True)
_REJECTED = {"rs": {"criteria": ["sequence_mean:ratio:0.85:1.12"], "veto_threshold": 0.3}}
HOOK, WHOLE = hooked("slime"), custom("slime")
_MASKED = ours(2, weights("token", "mask"), **_REJECTED, **WEIGHTED_KL)
_SHARED = ours(2, weights("sequence", "mask"), **_REJECTED)
OTHERS: dict[str, dict[str, Any]] = {
    # A rollout of several samples has one mean; they may lie in different micro-batches.
    "rollouts of two samples": {"changes": {**HOOK, **_SHARED, **TERMS}, "shared": True},
    "rollouts of two samples, normalised": {"changes": {**WHOLE, **ours(2, _NORMALISED)}, "shared": True},
    # The host skipped the old log-probs pass on an exactly on-policy step.
    "no old log-probs": {"changes": {**HOOK, **ours(2, weights("geometric", "clip")), **TERMS}, "old": False},
    "no old log-probs, normalised": {"changes": {**HOOK, **ours(2, _NORMALISED)}, "old": False},
    # The TIS hook alone, as a user sets it who adds one flag.
    "no hooks around the step": {"changes": {**HOOK, **ours(2, weights("token", "mask"))}, "hooks": False},
    "metrics off": {"changes": {**HOOK, **ours(2, weights("token", "clip"), metrics="off")}, "hooks": False},
    "KL with importance weights": {"changes": {**WHOLE, **_MASKED, **TERMS}},
    "dry run": {"changes": {**WHOLE, **ours(3, weights("token", "mask"), dry_run=True)}},
    "dual clip": {"changes": {**WHOLE, **ours(1), "eps_clip_c": 1.05, "eps_clip": 0.1}},
    "gspo, 0": {"changes": {**WHOLE, **ours(0), **NARROW, "advantage_estimator": "gspo"}},
    "cispo, 1": {"changes": {**WHOLE, **ours(1), **NARROW, "advantage_estimator": "cispo"}},
    "gspo, 2": {"changes": {**WHOLE, **ours(2), **NARROW, "advantage_estimator": "gspo"}},
    "reinforce by hand": {"changes": {**WHOLE, **ours(0, objective="reinforce")}},
    "distance to the sampler": {"changes": {**WHOLE, **ours(2, terms={"rollout_kl_coef": 0.1})}},
}
CASES = {name: {"changes": changes} for name, changes in product("slime").items()} | OTHERS
DRAWN = drawn(CASES, HAND_LAYOUTS)
BY_HAND = Runs(run_by_hand, "slime", CASES, HAND_LAYOUTS, DRAWN)


@pytest.mark.parametrize(("layout", "name"), DRAWN)
def test_loss_gradient_and_metrics_equal_one_process(layout: str, name: str):
    compare(BY_HAND(layout, name), BY_HAND.case(layout, name), slime, by_logits=False)


# A reducer of the user's own ------------------------------------------------------------------------------------------

_NARROW = {"criteria": ["sequence_mean:ratio:0.97:1.03"]}
_REDUCED: dict[str, Any] = {
    "0": ours(0, rs=_NARROW),
    "2, by tokens": ours(2, weights("token", "mask"), rs={"criteria": ["token:k2:0.05"]}),
    "2, by sequences": ours(2, weights("sequence", "clip"), rs=_NARROW),
    "2, dry run": ours(2, weights("token", "mask"), dry_run=True),
    "2, nothing rejected": ours(2, weights("token", "clip")),
}


_WAYS = {"hook": HOOK, "whole": WHOLE}
_REDUCER = {"custom_pg_loss_reducer_function_path": ACCEPTED_MEAN}
_BY_REDUCER = {
    (name, way): {"changes": {**paths, **changes, **_REDUCER}}
    for name, changes in _REDUCED.items()
    for way, paths in _WAYS.items()
}
REDUCED = Runs(run_by_hand, "slime", _BY_REDUCER, HAND_LAYOUTS)


@pytest.mark.parametrize("layout", ["one", "cp4"])
@pytest.mark.parametrize("name", _REDUCED)
@pytest.mark.parametrize("way", _WAYS)
def test_a_custom_reducer_sees_what_is_rejected(layout: str, name: str, way: str):
    """Its count is that of accepted tokens: Σ w · PPO-clip over what is kept / how many are kept, a micro-batch."""
    config = slime.settings(arguments(**HOOK, **_REDUCED[name]))
    rejected = 0
    for step in range(STEPS):
        log_probs = {i: samples()[i].log_probs.clone().requires_grad_() for i in step_samples(step)}
        loss = torch.zeros(())
        for ids in schedule(0, 1)[step]:
            rows = {key: [samples()[i].rows[key] for i in ids] for key in samples()[0].rows}
            old, advantages = torch.cat(rows["log_probs"]), torch.cat(rows["advantages"])
            packed = mp.PackedSequences.from_lists(
                train_log_probs=rows["log_probs"],
                rollout_log_probs=rows["rollout_log_probs"],
                loss_masks=rows["loss_masks"],
            )
            correction = mp.correct(packed, config)
            ratio = (torch.cat([log_probs[i] for i in ids]) - old).exp()
            clipped = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
            kept = correction.weights * correction.keep * clipped
            loss = loss + kept.sum() / correction.keep.sum().clamp(min=1) / len(log_probs)
            rejected += int(torch.cat(rows["loss_masks"]).sum() - correction.keep.sum())
        wanted = torch.cat(torch.autograd.grad(loss, list(log_probs.values())))
        for rank in REDUCED(layout, (name, way)):
            torch.testing.assert_close(rank[step].gradient, wanted, rtol=2e-5, atol=2e-6)
            assert rank[step].loss == pytest.approx(float(loss.detach()), rel=2e-5)
    assert (rejected > 0) == ("nothing" not in name and "dry" not in name)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
@pytest.mark.parametrize("padded", [None, 40])
def test_ranges_are_those_of_the_tokens_predicted_here(cp: int, padded: int | None):
    for total in range(2, 26):
        for response in range(1, total):
            for rank in range(cp):
                ranges = owned_ranges(total, response, cp, rank, padded)
                mine = [position for start, stop in ranges for position in range(start, stop)]
                assert mine == owned(total, total - response, cp, rank, padded)


def test_packing_refuses_what_does_not_cover_this_rank_s_tokens():
    batch = {"loss_masks": [torch.ones(5)], "total_lengths": [7], "response_lengths": [5]}
    with pytest.raises(ValueError, match=r"rollout_log_probs of sample 0 has shape \(4,\), but this rank holds 5"):
        pack_local(Namespace(), batch, ParallelGroups(), rollout_log_probs=[torch.zeros(4)])
    with pytest.raises(ValueError, match=r"loss_masks of sample 0 .* must cover the whole response"):
        pack_local(Namespace(), batch | {"loss_masks": [torch.zeros(4)]}, ParallelGroups())


# One process, hooks called directly -----------------------------------------------------------------------------------


def call_tis(args: Namespace, rollout: list[Tensor] | None = None, number: int = 0, **values: Any) -> Any:
    """The hook on one sample; `values` in place of the sample's own."""
    sample = samples()[number]
    own = {
        "pg_loss": torch.ones(sample.response, requires_grad=True),
        "train_log_probs": [sample.rows["log_probs"]],
        "loss_masks": [sample.rows["loss_masks"]],
        "total_lengths": [sample.total],
        "response_lengths": [sample.response],
    }
    return slime.tis_function(args=args, rollout_log_probs=rollout, **{**own, **values})


@pytest.fixture(autouse=True)
def _fresh_adapter():
    slime.ADAPTER.__init__()
    slime.ADAPTER.log = lambda args, metrics: None


def whole_loss(args: Namespace, log_probs: Tensor, entropy: Tensor | None = None, **rows: Tensor) -> Any:
    """Our whole loss on the first sample; rows in place of its own."""
    sample = samples()[0]
    batch: dict[str, Any] = {name: [values] for name, values in {**sample.rows, **rows}.items()}
    batch |= {"total_lengths": [sample.total], "response_lengths": [sample.response]}
    return slime.ADAPTER.loss(args, batch, [log_probs], None if entropy is None else [entropy], torch.sum)


def test_the_entropy_bonus_has_its_gradient_and_without_a_coefficient_is_only_reported():
    """0 times it would be NaN in the loss, and a backward pass over the vocabulary for nothing."""
    sample = samples()[0]
    entropy, log_probs = sample.entropy.clone().requires_grad_(), sample.log_probs.clone().requires_grad_()
    loss, _ = whole_loss(arguments(**WHOLE, **ours(2), entropy_coef=0.01), log_probs, entropy)
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, -0.01 * sample.rows["loss_masks"].float())
    entropy = torch.full_like(sample.entropy, math.nan).requires_grad_()
    loss, report = whole_loss(arguments(**WHOLE, **ours(2)), log_probs, entropy)
    loss.backward()
    assert loss.isfinite() and entropy.grad is None and log_probs.grad is not None
    assert report["entropy_loss"].isnan()


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_unbiased_kl_has_the_gradient_of_both_factors(kind: str, bypass: bool):
    """Of r·k(d) it is r·k + r·k'(d), r = π_θ/anchor; the policy loss has none, for its advantages are 0."""
    sample = samples()[0]
    ref = sample.rows["ref_log_probs"].index_fill(0, torch.tensor([1]), -30.0)  # r·k is beyond 10 there
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind, "use_unbiased_kl": True}
    args = arguments(**WHOLE, **ours(1 if bypass else 2), **changes)
    log_probs = sample.log_probs.clone().requires_grad_()
    loss, report = whole_loss(args, log_probs, advantages=torch.zeros(sample.response), ref_log_probs=ref)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    anchor = sample.rows["rollout_log_probs" if bypass else "log_probs"]
    d, r = sample.log_probs - ref, (sample.log_probs - anchor).exp()
    k3 = (torch.expm1(-d) + d, 1.0 - (-d).exp())
    value, slope = {"k1": (d, torch.ones_like(d)), "k2": (d * d / 2, d), "k3": k3, "low_var_kl": k3}[kind]
    product, wanted = r * value, r * (value + slope)
    assert product[1] > 10.0
    if kind == "low_var_kl":
        wanted = torch.where(product > 10.0, 0.0, wanted)
        product = product.clamp(max=10.0)
    mask = sample.rows["loss_masks"]
    torch.testing.assert_close(gradient, 0.3 * wanted * mask, rtol=1e-5, atol=1e-6)
    assert float(report["kl_loss"]) == pytest.approx(float((product * mask).sum()), rel=1e-5)


STEP_SCOPE = weights("sequence", "clip", batch_normalize=True, batch_normalize_scope="step")
BUDGET = {"criteria": ["token:k2:1e-30:share=0.3"]}
HOOK_NEEDS: list[tuple[dict[str, Any], bool, str]] = [
    (ours(2), False, "rollout_log_probs is missing: algorithm 2"),
    (ours(2, STEP_SCOPE), True, r"custom-megatron-before-train-step-hook-path mismatch_plugin\.hooks\.slime"),
    (ours(0, rs=BUDGET), True, r"a budget of rs.criteria reads the step before.*before-train-step-hook-path"),
]


@pytest.mark.parametrize(("changes", "sampled", "sentence"), HOOK_NEEDS)
def test_what_the_hook_alone_cannot_have_is_refused(changes: dict[str, Any], sampled: bool, sentence: str):
    rollout = [samples()[0].rows["rollout_log_probs"]] if sampled else None
    with pytest.raises(ValueError, match=sentence):
        call_tis(arguments(**HOOK, **changes), rollout)


@pytest.mark.parametrize(
    ("more", "experts", "named"), [({"entropy_coef": 0.01}, 0, "an entropy term"), ({}, 4, "MoE aux")]
)
def test_normalisation_deferred_to_the_step_s_end_is_refused_next_to_other_gradients(
    more: Any, experts: int, named: str
):
    model = Model()
    if experts:
        model.config.num_moe_experts, model.config.moe_aux_loss_coeff = experts, 0.01
    args = arguments(**WHOLE, **ours(3, _NORMALISED), **more)
    with pytest.raises(ValueError, match=f"policy term must be their only source, but there is also: {named}"):
        slime.before_train_step(args, 0, 0, [model], None, None)


def test_a_rollout_without_log_probs_is_refused_before_its_steps():
    data = {"num_microbatches": [1], "micro_batch_indices": [[0]], "rollout_log_probs": None}
    with pytest.raises(ValueError, match=r"the rollout batch has no rollout_log_probs.*return_logprob"):
        slime.rollout_data_postprocess(arguments(**HOOK, **ours(2)), 0, data)


def test_a_bad_log_prob_fails_the_step_and_names_its_place_and_without_hooks_makes_the_loss_nan():
    sample = samples()[0]
    place = int(sample.rows["loss_masks"].nonzero()[1])
    bad = sample.rows["rollout_log_probs"].index_fill(0, torch.tensor([place]), 3.0)
    args, model = arguments(**HOOK, **ours(2)), Model()
    slime.before_train_step(args, 0, 0, [model], None, None)
    assert call_tis(args, [bad])[0].isfinite().all()  # the step fails as a whole, before the optimizer
    with pytest.raises(ValueError, match=f"sequence 0, position {place} is above 0 .value 3"):
        model.config.finalize_model_grads_func([model])
    slime.ADAPTER.__init__()
    assert call_tis(args, [bad])[0].isnan().all()
    neutral = arguments(**HOOK, **ours(2, rollout_log_prob_policy="neutral"))
    assert call_tis(neutral, [bad])[0].isfinite().all()


def test_a_host_s_inf_under_the_mask_stays_out():
    sample = samples()[1]
    padding = sample.rows["loss_masks"] == 0
    assert padding.any()
    loss = torch.where(padding, math.inf, torch.ones(sample.response)).requires_grad_()
    rollout = torch.where(padding, -math.inf, sample.rows["rollout_log_probs"])
    weighted, masks, _ = call_tis(arguments(**HOOK, **ours(2)), [rollout], 1, pg_loss=loss)
    assert weighted[padding].eq(0).all() and weighted.isfinite().all()
    assert masks[0] is sample.rows["loss_masks"]


def test_normalising_without_hooks_around_the_step_is_the_micro_batch_s_mean():
    sample = samples()[0]
    loss, _, _ = call_tis(arguments(**HOOK, **ours(2, _NORMALISED)), [sample.rows["rollout_log_probs"]])
    assert loss.sum().item() == pytest.approx(float(sample.rows["loss_masks"].sum()), rel=1e-5)  # one sequence: mean 1


def test_a_recomputed_loss_counts_once_and_metrics_are_logged_with_the_host_s_step(tmp_path: Path):
    logged = []
    slime.ADAPTER.log = lambda args, metrics: logged.append(metrics)
    args = arguments(**HOOK, **ours(2, report_dir=str(tmp_path)))
    sample, model = samples()[0], Model()
    data: dict[str, Any] = {"rollout_log_probs": [sample.rows["rollout_log_probs"]], "num_microbatches": [1, 1, 1]}
    slime.rollout_data_postprocess(args, 5, data | {"micro_batch_indices": [[0]] * 3})
    slime.before_train_step(args, 5, 2, [model], None, None)
    masks = [sample.rows["loss_masks"]]
    for _ in range(2):  # as slime's --recompute-loss-function does in the backward pass
        call_tis(args, data["rollout_log_probs"], loss_masks=masks)
    model.config.finalize_model_grads_func([model])
    assert logged[0]["train/step"] == 5 * 3 + 2
    assert logged[0]["train/rollout_corr/tokens"] == int(sample.rows["loss_masks"].sum())
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line.pop("step") == 17
    assert line == {name.removeprefix("train/"): v for name, v in logged[0].items() if name != "train/step"}


def test_a_critic_s_steps_are_left_alone():
    model = Model()
    before = model.config.finalize_model_grads_func
    slime.before_train_step(arguments(**ours(2), loss_type="value_loss"), 0, 0, [model], None, None)
    assert model.config.finalize_model_grads_func is before


@pytest.mark.parametrize("algorithm", [0, 1])
def test_a_budget_goes_from_step_to_step(algorithm: int):
    """The first step has the bound as written, which rejects all; the next keep what the share leaves."""
    args = arguments(**(WHOLE if algorithm else HOOK), **ours(algorithm, rs=BUDGET))
    sample, kept = samples()[0], []
    for step in range(3):
        model = Model()
        slime.before_train_step(args, step, 0, [model], None, None)
        if algorithm:
            whole_loss(args, sample.log_probs)
        else:
            call_tis(args, [sample.rows["rollout_log_probs"]])
        model.config.finalize_model_grads_func([model])
        kept.append(slime.ADAPTER.run.metrics["rollout_corr/accepted_token_fraction"])
    assert kept[0] == 0.0 and 0.7 <= kept[1] < 1.0 and kept[2] == kept[1]
