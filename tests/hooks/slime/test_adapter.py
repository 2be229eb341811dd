"""slime's and miles's adapters without them: hand-made batches in their layout against `policy_loss` in one process.

The host's part is its PPO loss and a sum over trained tokens; process groups are megatron-core's.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.hooks import slime
from mismatch_plugin.hooks.slime.adapter import pack_local
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.distributed.launch import launch
from tests.hooks.contracts.slime_data import (
    NARROW,
    STEPS,
    TERMS,
    Model,
    arguments,
    batch_of,
    custom,
    held_by,
    hooked,
    initialize,
    ours,
    samples,
    schedule,
    stepped,
    sum_here,
    weights,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning"),
]
HOOK, WHOLE, STEP = hooked("slime"), custom("slime"), stepped("slime")

# Every layout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """changes: of the host's arguments. old: whether the host made old log-probs. padded: length of miles's batches."""

    changes: dict[str, Any]
    old: bool = True
    host: str = "slime"
    padded: int | None = None
    cp: int = 1


NORMALISED = weights("sequence", "clip", batch_normalize=True)
REJECTS = {"criteria": ["sequence_mean:ratio:0.85:1.12", "token:k2:0.3"], "veto_threshold": 0.3}
KL_WEIGHED = {"kl_importance_weighted": True}
CASES = {
    "0 hook": Case({**HOOK, **ours(0, rs=REJECTS)}),
    "0 whole, gspo": Case({**WHOLE, **ours(0, rs=REJECTS), **NARROW, "advantage_estimator": "gspo"}),
    "1 whole, terms": Case({**WHOLE, **ours(1, rs=REJECTS), **TERMS}),
    "2 hook, sequence": Case({**HOOK, **ours(2, NORMALISED, rs=REJECTS)}),
    "2 hook, no old log-probs": Case({**HOOK, **ours(2, NORMALISED)}, old=False),
    "2 whole, geometric": Case({**WHOLE, **ours(2, weights("geometric", "mask"), terms=KL_WEIGHED), **TERMS}),
    "2 whole, distance": Case({**WHOLE, **ours(2, NORMALISED, terms={"rollout_kl_coef": 0.1})}),
    "3 whole, sequence": Case({**WHOLE, **ours(3, NORMALISED)}),
    "3 whole, turn": Case({**WHOLE, **ours(3, weights("turn", "clip", batch_normalize=True), rs=REJECTS)}),
    "3 whole, prefix": Case({**WHOLE, **ours(3, weights("prefix", "mask"))}),
    # in chunks of 40, longer than every sample, in the place of its own length
    "miles, padded": Case(
        {**hooked("miles"), **ours(2, weights("sequence", "clip")), "qkv_format": "bshd"}, host="miles", padded=40
    ),
}
LAYOUTS = {"cp2 dp2": (2, 4), "cp4": (4, 4)}  # cp, processes


def host_loss(args: Namespace, leaf: Tensor, batch: dict[str, Any]) -> Tensor:
    """[T] PPO-clip as the hosts compute it."""
    old, advantages = torch.cat(batch["log_probs"]), torch.cat(batch["advantages"])
    ratio = (leaf - old).exp()
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages)


STARTS = torch.tensor([0, *(sample.response for sample in samples())]).cumsum(0).tolist()


def placed(ids: list[int], at: list[list[int]], rows: Sequence[Tensor | None], into: Tensor) -> None:
    """Write what a rank has of these samples into a tensor [all responses]."""
    for i, here, row in zip(ids, at, rows, strict=True):
        into[torch.tensor(here, dtype=torch.int64) + STARTS[i]] = 0.0 if row is None else row


def run(case: Case) -> list[dict[str, Any]]:
    """Of each step what this rank has: the gradient of its tokens, NaN elsewhere, sums of its reports, metrics."""
    state = initialize(case.cp)
    args, hooks = arguments(case.host, **case.changes), importlib.import_module(f"mismatch_plugin.hooks.{case.host}")
    hooks.ADAPTER.__init__()
    hooks.ADAPTER.groups = slime.ADAPTER.find_groups()
    hooks.ADAPTER.log = lambda args, metrics: None
    cp_rank, steps = state.get_context_parallel_rank(), []
    mine = schedule(state.get_data_parallel_rank(), state.get_data_parallel_world_size())
    ids = [i for step in mine for batch in step for i in batch]
    if case.host == "slime":
        data = batch_of(ids, case.cp, cp_rank) | ({} if case.old else {"log_probs": None})
        data["micro_batch_indices"] = [[ids.index(i) for i in batch] for step in mine for batch in step]
        hooks.rollout_data_postprocess(args, 0, {**data, "num_microbatches": [len(step) for step in mine]})
    for number, batches in enumerate(mine):
        model, gradient, report = Model(), torch.full((STARTS[-1],), math.nan), dict[str, float]()
        if case.host == "slime":
            hooks.before_train_step(args, 0, number, [model], None, None)
        for chosen in batches:
            batch, at = batch_of(chosen, case.cp, cp_rank, case.padded), held_by(chosen, case.cp, cp_rank, case.padded)
            parts = [samples()[i].log_probs[here].clone().requires_grad_() for i, here in zip(chosen, at, strict=True)]
            entropy = [samples()[i].entropy[here] for i, here in zip(chosen, at, strict=True)]
            reduce = sum_here(chosen, at)
            if not case.old:
                batch["log_probs"] = [part.detach() for part in parts]  # as the hosts do
            if args.loss_type == "custom_loss":
                loss, told = hooks.ADAPTER.loss(args, batch, parts, entropy, reduce)
            else:
                lists = ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "max_seq_lens")
                given = {"train_log_probs": batch["log_probs"], **{name: batch[name] for name in lists}}
                pg_loss = host_loss(args, torch.cat(parts), batch)
                weighed, masks, metrics = hooks.tis_function(args=args, pg_loss=pg_loss, parallel_state=None, **given)
                assert masks is given["loss_masks"]
                loss, told = reduce(weighed), {name: reduce(values) for name, values in metrics.items()}
            loss.backward()
            placed(chosen, at, [part.grad for part in parts], gradient)
            report = {name: report.get(name, 0.0) + float(value) for name, value in told.items()}
        model.config.finalize_model_grads_func([model])
        steps.append({"gradient": gradient * model.scale, "report": report, "metrics": hooks.ADAPTER.run.metrics})
    return steps


@cache
def found_in(layout: str) -> dict[str, list[Any]]:
    cp, processes = LAYOUTS[layout]
    cases = [Case(**{**vars(case), "cp": cp}) for case in CASES.values()]
    return dict(zip(CASES, launch(run, cases, processes, timeout=240.0), strict=True))


@cache
def expected(name: str, step: int) -> tuple[Tensor, dict[str, float], dict[str, float]]:
    """(gradient, sums under the hosts' names, metrics) of one process."""
    case = CASES[name]
    args = arguments(case.host, **case.changes)
    adapter = importlib.import_module(f"mismatch_plugin.hooks.{case.host}")
    config = adapter.settings(args).model_copy(update={"aggregation": "token-mean"})
    ids = sorted(i for batch in schedule(0, 1)[step] for i in batch)
    batch, parts = batch_of(ids), [samples()[i].log_probs.clone().requires_grad_() for i in ids]
    old = batch["log_probs"] if case.old else None
    rows: Any = {key: batch[key] for key in ("rollout_log_probs", "loss_masks", "ref_log_probs", "advantages")}
    packed = mp.PackedSequences.from_lists(**rows, old_log_probs=old, entropy=[samples()[i].entropy for i in ids])
    result = mp.policy_loss(torch.cat(parts), packed, config)
    terms = sum(result.terms.values()) if args.loss_type == "custom_loss" else 0.0
    (result.loss_sum + terms).backward()
    at, gradient = held_by(ids), torch.full((STARTS[-1],), math.nan)
    placed(ids, at, [part.grad for part in parts], gradient)
    correction, reduce = result.correction, sum_here(ids, at)
    report = {"tis": reduce(correction.tokens.log_ratio.exp())}
    if config.weighted and not (config.normalizes and (not case.old or config.use_rollout_log_probs)):
        report["tis_weight"] = reduce(correction.applied)
    if config.rejects:
        report["tis_rejected"] = reduce(1.0 - correction.keep)
    return gradient, {key: float(value) for key, value in report.items()}, result.statistics.metrics()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradient_and_metrics_equal_one_process(layout: str, name: str) -> None:
    """What else is reported is compared with slime's own in test_host."""
    ranks = found_in(layout)[name]
    for step in range(STEPS):
        gradient, report, metrics = expected(name, step)
        parts = torch.stack([rank[step]["gradient"] for rank in ranks])
        assert torch.equal((~parts.isnan()).sum(0), (~gradient.isnan()).long()), "each token on one rank"
        torch.testing.assert_close(parts.nansum(0), gradient.nan_to_num(), rtol=2e-5, atol=2e-6)
        for key, value in report.items():
            told = sum(rank[step]["report"][key] for rank in ranks)
            assert told == pytest.approx(value, rel=5e-5, abs=5e-5), key
        for rank in ranks if CASES[name].host == "slime" else ():
            shared = metrics.keys() & rank[step]["metrics"].keys()
            assert len(shared) > 30
            for key in shared:
                assert rank[step]["metrics"][key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5), key


def test_packing_refuses_what_does_not_cover_this_rank_s_tokens() -> None:
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
def _fresh_adapter() -> None:
    slime.ADAPTER.__init__()
    slime.ADAPTER.log = lambda args, metrics: None


def whole_loss(args: Namespace, log_probs: Tensor, entropy: Tensor | None = None, **rows: Tensor) -> Any:
    """Our whole loss on the first sample; rows in place of its own."""
    batch = batch_of([0]) | {name: [values] for name, values in rows.items()}
    return slime.ADAPTER.loss(args, batch, [log_probs], None if entropy is None else [entropy], torch.sum)


def test_the_entropy_bonus_has_its_gradient_and_without_a_coefficient_is_only_reported() -> None:
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
def test_the_unbiased_kl_has_the_gradient_of_both_factors(kind: str, bypass: bool) -> None:
    """Of r·k(d) it is r·k + r·k'(d), r = π_θ/anchor; the policy loss has none, for its advantages are 0."""
    sample = samples()[0]
    ref = sample.rows["ref_log_probs"].index_fill(0, torch.tensor([1]), -30.0)  # r·k is beyond 10 there
    changes = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind, "use_unbiased_kl": True}
    mine, theirs = (sample.log_probs.clone().requires_grad_() for _ in range(2))
    args = arguments(**WHOLE, **ours(1 if bypass else 2), **changes)
    loss, report = whole_loss(args, mine, advantages=torch.zeros(sample.response), ref_log_probs=ref)
    d, r = theirs - ref, (theirs - sample.rows["rollout_log_probs" if bypass else "log_probs"]).exp()
    kl = r * {"k1": d, "k2": d * d / 2}.get(kind, torch.expm1(-d) + d)
    assert kl[1] > 10.0
    total = ((kl.clamp(max=10.0) if kind == "low_var_kl" else kl) * sample.rows["loss_masks"]).sum()
    (gradient,), (wanted,) = torch.autograd.grad(loss, mine), torch.autograd.grad(0.3 * total, theirs)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert float(report["kl_loss"]) == pytest.approx(float(total), rel=1e-5)


STEP_SCOPE = weights("sequence", "clip", batch_normalize=True, batch_normalize_scope="step")
BUDGET = {"criteria": ["token:k2:1e-30:share=0.3"]}
HOOK_NEEDS: list[tuple[dict[str, Any], bool, str]] = [
    (ours(2), False, "rollout_log_probs is missing: algorithm 2"),
    (ours(2, STEP_SCOPE), True, r"custom-megatron-before-train-step-hook-path mismatch_plugin\.hooks\.slime"),
    (ours(0, rs=BUDGET), True, r"a budget of rs.criteria needs the plugin's .*before-train-step-hook-path"),
]


@pytest.mark.parametrize(("changes", "sampled", "sentence"), HOOK_NEEDS)
def test_what_the_hook_alone_cannot_have_is_refused(changes: dict[str, Any], sampled: bool, sentence: str) -> None:
    rollout = [samples()[0].rows["rollout_log_probs"]] if sampled else None
    with pytest.raises(ValueError, match=sentence):
        call_tis(arguments(**HOOK, **changes), rollout)


def test_normalisation_deferred_to_the_step_s_end_is_refused_next_to_other_gradients() -> None:
    args = arguments(**WHOLE, **ours(3, NORMALISED), entropy_coef=0.01)
    with pytest.raises(ValueError, match="must be their only source, but there is also: an entropy term"):
        slime.before_train_step(args, 0, 0, [Model()], None, None)


def test_a_bad_log_prob_without_hooks_around_the_step_makes_the_loss_nan() -> None:
    """With them every rank raises before the optimizer steps: test_step."""
    sample = samples()[0]
    place = int(sample.rows["loss_masks"].nonzero()[1])
    bad = sample.rows["rollout_log_probs"].index_fill(0, torch.tensor([place]), 3.0)
    assert call_tis(arguments(**HOOK, **ours(2)), [bad])[0].isnan().all()
    neutral = arguments(**HOOK, **ours(2, rollout_log_prob_policy="neutral"))
    assert call_tis(neutral, [bad])[0].isfinite().all()


@pytest.mark.parametrize(
    "needs",
    [
        {"gate_kl": 1e-3},
        {"rs": {"criteria": ["token:k3:0.5:share=0.1"]}},
        {"tis": NORMALISED | {"batch_normalize_scope": "step"}},
    ],
    ids=str,
)
def test_what_needs_the_whole_step_is_refused_where_no_step_was_begun(needs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs the whole step, and the hooks around it were not called"):
        call_tis(arguments(**HOOK, **STEP, **ours(2, **needs)), [samples()[0].rows["rollout_log_probs"]])


def test_a_host_s_inf_under_the_mask_stays_out() -> None:
    sample = samples()[1]
    padding = sample.rows["loss_masks"] == 0
    assert padding.any()
    loss = torch.where(padding, math.inf, torch.ones(sample.response)).requires_grad_()
    rollout = torch.where(padding, -math.inf, sample.rows["rollout_log_probs"])
    weighted, _, _ = call_tis(arguments(**HOOK, **ours(2)), [rollout], 1, pg_loss=loss)
    assert weighted[padding].eq(0).all() and weighted.isfinite().all()


def test_a_recomputed_loss_counts_once_and_metrics_are_logged_with_the_host_s_step(tmp_path: Path) -> None:
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
    other = arguments(**HOOK, **ours(0, report_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="give this run another folder"):
        slime.before_train_step(other, 6, 0, [Model()], None, None)


def test_a_critic_s_steps_are_left_alone() -> None:
    model, args = Model(), arguments(**ours(2), loss_type="value_loss")
    before = model.config.finalize_model_grads_func
    slime.rollout_data_postprocess(args, 0, {})
    slime.before_train_step(args, 0, 0, [model], None, None)
    assert model.config.finalize_model_grads_func is before


def test_a_budget_goes_from_step_to_step() -> None:
    """The first step has the bound as written, which rejects all; the next keep what the share leaves."""
    args, kept = arguments(**HOOK, **STEP, **ours(0, rs=BUDGET)), []
    for step in range(3):
        model = Model()
        slime.before_train_step(args, step, 0, [model], None, None)
        call_tis(args, [samples()[0].rows["rollout_log_probs"]])
        model.config.finalize_model_grads_func([model])
        kept.append(slime.ADAPTER.run.metrics["rollout_corr/accepted_token_fraction"])
    assert kept[0] == 0.0 and 0.7 <= kept[1] < 1.0 and kept[2] == kept[1]
