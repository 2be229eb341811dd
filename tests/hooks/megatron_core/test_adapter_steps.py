"""What an optimizer step may hold next to plain data, through the real megatron-core, and what is refused.

Missing log-probs, nothing accepted, invalid values on one rank, forward passes alone, interleaved pipelines, megatron's
mean over micro-batches.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.data.versions import spans_of
from mismatch_plugin.hooks.megatron_core import MegatronLoss
from mismatch_plugin.parallel.groups import ParallelGroups
from mismatch_plugin.report.log import read_steps, write_step
from tests.distributed.hook_worker import Layout, Outcome, Run, run_layout, run_plainly
from tests.distributed.launch import launch
from tests.hooks.megatron_core.test_adapter import compare, data

needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

DECOUPLED = {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 1.3}}
NORMALIZED = {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 1.3, "batch_normalize": True}}
BYPASS = {"use_rollout_log_probs": True}
REINFORCE = {**DECOUPLED, **BYPASS}
BY_MICRO_BATCH = {"batch_normalize_scope": "micro_batch"}
CRITERIA = {"criteria": ["sequence_mean:ratio:0.9:1.11", "token:ratio:0.6:1.7"]}
ALL_REJECTED = {"criteria": ["token:ratio:50:60"]}
MEAN = {"calculate_per_token_loss": False}
FOUR_LAYERS = {"layers": 4}
INTERLEAVED = {**FOUR_LAYERS, "virtual_stages": 2}


def without_old(count: int) -> tuple[Any, ...]:
    return tuple(sample.replace(train_log_probs=[]) for sample in data("rope")[:count])


def runs() -> dict[str, Run]:
    return {
        "ppo": Run({}, 4),
        "decoupled, rejection": Run({**DECOUPLED, "rs": CRITERIA, "denominator": "accepted"}, 4, "bshd"),
        "normalized, entropy": Run({**NORMALIZED, "terms": {"entropy_coef": 0.05}}, 4),
        "bypass, rejection": Run({**BYPASS, "rs": CRITERIA, "denominator": "original"}, 4),
        "reinforce by sequence": Run({**REINFORCE, "aggregation": "seq-mean-token-sum"}, 4),
        "ppo, old absent": Run({"rs": CRITERIA, "denominator": "original"}, 4, samples=without_old(8)),
        "normalized by micro-batch": Run({**NORMALIZED, "tis": {**NORMALIZED["tis"], **BY_MICRO_BATCH}}),
        "temperature": Run({**REINFORCE, "terms": {"entropy_coef": 0.05}}, 4, temperature=0.7),
        "everything rejected": Run({**DECOUPLED, "rs": ALL_REJECTED, "denominator": "accepted"}, 4),
        "everything rejected, terms": Run(
            {**DECOUPLED, "rs": ALL_REJECTED, "denominator": "accepted", "terms": {"kl_coef": 0.1, "kl_type": "k3"}}, 4
        ),
    }


def per_token_runs() -> dict[str, Run]:
    """Those that need `calculate_per_token_loss`."""
    return {
        "normalized, old absent": Run({**NORMALIZED, "metrics": "full"}, 4, samples=without_old(8)),
        "reinforce normalized": Run({**NORMALIZED, **BYPASS}, 4),
        "reinforce, rejection": Run({**REINFORCE, "rs": CRITERIA, "denominator": "accepted"}, 4),
    }


RUNS = {**runs(), **per_token_runs()} if importlib.util.find_spec("megatron") else {}
LAYOUTS = [
    Layout("one"),
    Layout("one, mean", settings=MEAN),
    Layout("dp2, mean", dp=2, settings=MEAN),
    Layout("cp2, mean", cp=2, settings=MEAN),
    Layout("pp2, mean", pp=2, settings=MEAN),
    Layout("tp2, mean", tp=2, settings=MEAN),
    Layout("dp2", dp=2),
    Layout("pp2", pp=2),
    Layout("pp2 interleaved", pp=2, settings=INTERLEAVED),
    Layout("pp2 interleaved, mean", pp=2, settings={**INTERLEAVED, **MEAN}),
]


def runs_of(layout: Layout) -> dict[str, Run]:
    """All but those that need what the layout lacks: the one scope that depends on the split needs the reference's."""
    left_out = set()
    if not layout.settings.get("calculate_per_token_loss", True):
        left_out |= per_token_runs().keys()
    if "dp2" in layout.name or "interleaved" in layout.name:
        left_out.add("normalized by micro-batch")
    return {name: run for name, run in RUNS.items() if name not in left_out}


@cache
def reference(layers: int) -> dict[str, Outcome]:
    layout = Layout("plain", settings={"layers": layers}, samples=data("rope"), runs=tuple(RUNS.values()))
    return dict(zip(RUNS, launch(run_plainly, [layout], 1)[0][0], strict=True))


@cache
def outcomes(world: int) -> dict[str, list[list[Outcome]]]:
    layouts = [replace(x, runs=tuple(runs_of(x).values()), samples=data("rope")) for x in LAYOUTS if x.world == world]
    return {x.name: ranks for x, ranks in zip(layouts, launch(run_layout, layouts, world), strict=True)}


@needs_megatron
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_step_gives_the_same(layout: Layout) -> None:
    ranks = outcomes(layout.world)[layout.name]
    for number, (name, _) in enumerate(runs_of(layout).items()):
        expected = reference(layout.settings.get("layers", 2))[name]
        compare([rank[number] for rank in ranks], expected, 1e-7, f"{layout.name}: {name}")


@needs_megatron
def test_a_step_without_accepted_tokens_is_a_zero_gradient_and_a_metric() -> None:
    outcome = reference(2)["everything rejected"]
    assert all(float(gradient.abs().max()) == 0 for gradient in outcome.gradients.values())
    assert outcome.metrics["rollout_corr/accepted_token_fraction"] == 0
    with_terms = reference(2)["everything rejected, terms"]
    assert max(float(gradient.abs().max()) for gradient in with_terms.gradients.values()) > 1e-4


PARTS = [Layout("tp2", tp=2), Layout("pp2", pp=2), Layout("cp2", cp=2), Layout("dp2", dp=2)]


@cache
def broken_step() -> dict[str, list[list[Outcome]]]:
    """A step whose sample s3 has NaN at position 4, then a sound one, then forward only, then one in which half of the
    samples have no weight versions: those of one micro-batch, or of one rank under data parallelism.
    """
    samples = data("rope")
    values = samples[3].rollout_log_probs.copy()
    values[samples[3].loss_mask.nonzero()[0][-1]] = float("nan")
    broken = (*samples[:3], samples[3].replace(behaviour_log_probs=values), *samples[4:])
    config = {**DECOUPLED, "metrics": "full"}
    steps = (Run(config, 2, samples=broken), Run(config, 2), Run(config, 2, forward_only=True))

    def mixed(layout: Layout) -> Run:
        has = [i % 2 == 0 if layout.name == "dp2" else i < len(samples) // 2 for i in range(len(samples))]
        rows = zip(samples, has, strict=True)
        told = (sample.replace(weight_versions=spans_of([7] * len(sample) * here)) for sample, here in rows)
        return Run(config, 2, samples=tuple(told))

    layouts = [replace(x, samples=samples, runs=(*steps, mixed(x))) for x in PARTS]
    return {x.name: ranks for x, ranks in zip(PARTS, launch(run_layout, layouts, 2), strict=True)}


@cache
def gated_steps() -> dict[str, list[list[Outcome]]]:
    """The same step without a gate, with one just below its k3_kl, and with one just above it."""
    config = {**DECOUPLED, "metrics": "full"}
    alone = launch(run_layout, [Layout("one", samples=data("rope"), runs=(Run(config),))], 1)[0][0][0]
    k3_kl = alone.metrics["rollout_corr/k3_kl"]
    below, above = {**config, "gate_kl": k3_kl * 0.999}, {**config, "gate_kl": k3_kl * 1.001}
    runs = Run(config, 2), Run(below, 2), Run(above, 2)
    layouts = [replace(x, samples=data("rope"), runs=runs) for x in PARTS]
    return {x.name: ranks for x, ranks in zip(PARTS, launch(run_layout, layouts, 2), strict=True)}


@needs_megatron
@pytest.mark.parametrize("name", [layout.name for layout in PARTS])
def test_a_failed_gate_is_raised_on_every_rank_and_a_passed_one_changes_nothing(name: str) -> None:
    """Whole steps of two micro-batches: it is the merged figure that is judged."""
    for plain, failed, passed in gated_steps()[name]:
        assert failed.error.startswith("GateError: k3_kl ") and "--mismatch-gate-kl" in failed.error
        assert passed.error == "" and passed.metrics == plain.metrics


@needs_megatron
@pytest.mark.parametrize("name", [layout.name for layout in PARTS])
def test_an_invalid_log_prob_is_raised_on_every_rank(name: str) -> None:
    """Otherwise one rank stops and the others wait for it for ever."""
    ranks = broken_step()[name]
    position = data("rope")[3].loss_mask.nonzero()[0][-1]
    errors = [rank[0].error for rank in ranks]
    assert all(error.startswith("InvalidLogProbError") for error in errors), errors
    assert any(f"position {position}" in error and "s3" in error for error in errors), errors
    assert not any(rank[1].error for rank in ranks)  # and the next step is sound


@needs_megatron
@pytest.mark.parametrize("name", [layout.name for layout in PARTS])
def test_batches_with_different_fields_are_refused_on_every_rank(name: str) -> None:
    """Before the step, on the stages without the loss, too."""
    (error,) = {rank[3].error for rank in broken_step()[name]}
    here = f"on rank {1 if name == 'pp2' else 0}: micro-batch 0 has weight_versions, micro-batch 1 does not"
    assert ("rank 0 has weight_versions, rank 1 has no weight_versions" if name == "dp2" else here) in error


@needs_megatron
@pytest.mark.parametrize("name", [layout.name for layout in PARTS])
def test_a_forward_pass_alone_gives_the_metrics_of_the_step(name: str) -> None:
    for rank in broken_step()[name]:
        assert rank[2].metrics == pytest.approx(rank[1].metrics, rel=1e-12, nan_ok=True)
    assert any(rank[2].metrics for rank in broken_step()[name])


@needs_megatron
def test_without_start_the_loss_says_so() -> None:
    run = Run({}, start=False)
    (outcome,) = launch(run_layout, [Layout("one", samples=data("rope"), runs=(run,))], 1)[0][0]
    assert "call start(batches) before the schedule" in outcome.error


@needs_megatron
def test_missing_old_log_probs_are_refused_where_the_accepted_tokens_are_needed() -> None:
    terms = {"terms": {"entropy_coef": 0.1}}
    accepted = Run({"rs": CRITERIA, "denominator": "accepted", **terms}, samples=without_old(8))
    normalized = Run({**NORMALIZED, **terms}, samples=without_old(8))
    both = [replace(layout, samples=data("rope"), runs=(accepted, normalized)) for layout in PARTS]
    for layout, ranks in zip(both, launch(run_layout, both, 2), strict=True):
        for rank in ranks:  # of every pipeline stage: one that went on would wait for the other for ever
            assert "old_log_probs is missing in a micro-batch" in rank[0].error, layout.name
            # With old log-probs the factor is known before the step; without, it comes after it.
            assert "there is also: an entropy term" in rank[1].error, layout.name


@needs_megatron
def test_one_rank_writes_the_metrics_of_a_step(tmp_path: Path) -> None:
    layouts = [
        replace(x, samples=data("rope"), runs=(Run({"report_dir": str(tmp_path / x.name)}, 2),) * 2) for x in PARTS
    ]
    for layout, ranks in zip(layouts, launch(run_layout, layouts, 2), strict=True):
        expected = next(rank[0].metrics for rank in ranks if rank[0].metrics)
        steps = list(read_steps(tmp_path / layout.name))
        assert [step.pop("step") for step in steps] == [1, 2], layout.name
        assert steps[0] == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_folder_with_other_settings_is_refused_before_training(tmp_path: Path) -> None:
    write_step(tmp_path, mp.MismatchConfig(), {"loss": 1.0})
    config = mp.MismatchConfig(use_tis=True, report_dir=str(tmp_path))
    with pytest.raises(ValueError, match="with use_tis False, now True: give this run another folder"):
        MegatronLoss(config, SimpleNamespace(**MODEL), ParallelGroups())


MODEL = {"calculate_per_token_loss": True, "finalize_model_grads_func": None}
MOE = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}
ACCEPTED = {"rs": CRITERIA, "denominator": "accepted"}
CURRENT = {"rs": {**CRITERIA, "policy": "current"}, "denominator": "accepted"}


@pytest.mark.parametrize(
    ("config", "model", "sentence"),
    [
        ({**NORMALIZED, "tis": {**NORMALIZED["tis"], "batch_normalize_scope": "rollout_batch"}}, {}, "use step"),
        ({}, {**MEAN, "mtp_num_layers": 1}, "switch calculate_per_token_loss on, or MTP off"),
        ({**NORMALIZED, **BYPASS, "terms": {"entropy_coef": 0.1}}, {}, "there is also: an entropy term"),
        ({**NORMALIZED, **BYPASS, "terms": {"rollout_kl_coef": 0.1}}, {}, "there is also: a penalty on the distance"),
        ({**NORMALIZED, **BYPASS}, MOE, "there is also: MoE aux loss"),
        ({**NORMALIZED, **BYPASS}, {"mtp_num_layers": 1}, "there is also: MTP"),
        ({**NORMALIZED, **BYPASS}, {"num_moe_experts": 4, "moe_z_loss_coeff": 0.1}, "there is also: MoE z-loss"),
        ({**BYPASS, **ACCEPTED}, MEAN, "calculate_per_token_loss is off"),
        ({**BYPASS, **ACCEPTED}, MOE, "MoE aux loss"),
        ({**REINFORCE, **ACCEPTED, "terms": {"kl_coef": 0.1}}, {}, "a KL term"),
        (CURRENT, MEAN, "--rs-policy current knows its accepted tokens only after the step"),
        ({**CURRENT, "terms": {"kl_coef": 0.1}}, {}, r"--rs-policy current knows .*\(a KL term"),
    ],
)
def test_what_cannot_be_exact_is_refused(config: dict[str, Any], model: dict[str, Any], sentence: str) -> None:
    typed = mp.MismatchConfig.model_validate(config, context={"by_hand": set()})
    with pytest.raises(ValueError, match=sentence):
        MegatronLoss(typed, SimpleNamespace(**{**MODEL, **model}), ParallelGroups())


def test_the_scale_of_expert_losses_needs_the_fed_tokens() -> None:
    hook = MegatronLoss(mp.MismatchConfig(), SimpleNamespace(**{**MODEL, **MOE}), ParallelGroups())
    log_probs = [torch.tensor([-1.0, -2.0])]
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=log_probs, loss_masks=[[1, 1]], advantages=[torch.tensor(1.0)], old_log_probs=log_probs
    )
    with pytest.raises(ValueError, match="pass MegatronBatch"):
        hook.start([packed])


def test_a_budget_goes_from_step_to_step() -> None:
    """The first step has the bound as written, which rejects all but the token that is equal; the next keep half."""
    config = mp.MismatchConfig.build({"rs": {"criteria": ["token:k2:1e-30:share=0.5"]}})
    model = SimpleNamespace(**MODEL | {"finalize_model_grads_func": lambda *_, **__: None})
    hook, chunk = MegatronLoss(config, model, ParallelGroups()), torch.nn.Linear(1, 1)
    old = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[old - torch.tensor([0.0, 0.1, 0.2, 0.3])],
        old_log_probs=[old],
        loss_masks=[[1] * 4],
        advantages=[torch.tensor(1.0)],
    )
    kept = []
    for _ in range(3):
        hook.start([packed])
        hook.from_log_probs(old.clone().requires_grad_(), packed)
        hook.finalize_model_grads([chunk])
        kept.append(hook.metrics()["rollout_corr/accepted_token_fraction"])
    assert kept == [0.25, 0.5, 0.5]
