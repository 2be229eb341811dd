"""MoE load balancing, router z-loss and MTP next to the policy loss: each keeps the weight it has without the other.

In every layout: gradients with the hook = policy gradients of a plain reference on a model without those losses + what
megatron's own loop gives for them alone, whatever rejection, denominators and aggregation do to the policy loss.
megatron's cross entropy under MTP and its division by the token count are float32, hence 1e-5.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from mismatch_plugin.data.sample import Sample
from tests.distributed.hook_worker import Layout, Outcome, Run, micro_batches, model_settings, run_layout, run_plainly
from tests.distributed.launch import launch
from tests.hooks.megatron_core.test_adapter import assert_gradients, data

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

MOE = {"experts": 4, "moe_aux_loss": 0.3, "moe_z_loss": 0.05}
MTP = {"mtp_layers": 1, "mtp_scale": 0.7}
MEAN = {"calculate_per_token_loss": False}
LAYOUTS = [
    Layout("moe", settings=MOE),
    Layout("mtp", settings=MTP),
    Layout("moe without per-token", settings={**MOE, **MEAN}),
    Layout("moe tp2+sp", tp=2, settings={**MOE, "sequence_parallel": True}),
    Layout("moe pp2", pp=2, settings=MOE),
    Layout("moe cp2", cp=2, settings=MOE),
    Layout("moe dp2", dp=2, settings=MOE),
    Layout("moe dp2 without per-token", dp=2, settings={**MOE, **MEAN}),
    Layout("moe cp2 without per-token", cp=2, settings={**MOE, **MEAN}),
    Layout("mtp tp2", tp=2, settings=MTP),
    Layout("mtp pp2", pp=2, settings=MTP),
    Layout("mtp cp2", cp=2, settings=MTP),
    Layout("mtp dp2", dp=2, settings=MTP),
]
CRITERIA = {"criteria": ["sequence_mean:ratio:0.9:1.11", "token:ratio:0.6:1.7"]}
DECOUPLED = {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 1.3, "batch_normalize": True}}
REINFORCE = {"use_tis": True, "use_rollout_log_probs": True, "tis": {"mode": "mask", "upper_bound": 1.3}}
CONFIGS: list[dict[str, Any]] = [
    {},
    {**DECOUPLED, "rs": CRITERIA, "denominator": "accepted", "terms": {"entropy_coef": 0.02}},
    {"use_rollout_log_probs": True, "rs": CRITERIA, "denominator": "original", "aggregation": "seq-mean-token-mean"},
    {**REINFORCE, "denominator": "original", "terms": {"kl_coef": 0.1, "kl_type": "k3"}},
]
RUNS = tuple(Run(c, m, f) for c, m, f in zip(CONFIGS, (1, 4, 4, 1), ("thd", "bshd", "thd", "bshd"), strict=True))
ALONE = tuple(replace(run, policy_loss=False) for run in RUNS)
NO_LOSS = {"moe_aux_loss": 0.0, "moe_z_loss": 0.0, "mtp_layers": 0, "calculate_per_token_loss": True}


@cache
def policy_gradients(experts: int) -> list[Outcome]:
    layout = Layout("plain", settings={**NO_LOSS, "experts": experts}, samples=data("rope"), runs=RUNS)
    return launch(run_plainly, [layout], 1)[0][0]


@cache
def outcomes(world: int) -> dict[str, list[list[Outcome]]]:
    layouts = [replace(layout, samples=data("rope"), runs=RUNS + ALONE) for layout in LAYOUTS if layout.world == world]
    return {layout.name: ranks for layout, ranks in zip(layouts, launch(run_layout, layouts, world), strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_loss_keeps_its_weight(layout: Layout) -> None:
    ranks = outcomes(layout.world)[layout.name]
    assert not any(rank[i].error for rank in ranks for i in range(len(RUNS))), [rank[0].error for rank in ranks]
    for number, run in enumerate(RUNS):
        policy = policy_gradients(layout.settings.get("experts", 0))[number].gradients
        alone = ranks[0][len(RUNS) + number].gradients
        assert alone.keys() >= policy.keys()
        assert max(float(gradient.norm()) for gradient in alone.values()) > 1e-4
        expected = {name: gradient + policy.get(name, 0.0) for name, gradient in alone.items()}
        assert_gradients(ranks[0][number].gradients, expected, 1e-5, run)


def even_samples() -> tuple[Sample, ...]:
    """Of one length that every layout cuts without padding, which the router would count, too."""
    return tuple(
        Sample(
            prompt_ids=[1, 2, 3, 4],
            response_ids=[*sample.response_ids.tolist(), *range(12)][:12],
            advantages=float(sample.advantages[0]) if sample.advantages is not None else None,
            **{name: [-2.0 - 0.1 * i for i in range(12)] for name in ("rollout_log_probs", "train_log_probs")},
        )
        for sample in data("rope")[:4]
    )


def test_expert_losses_weigh_the_same_in_every_layout() -> None:
    """One micro-batch without padding: what megatron alone makes weaker by the ranks that share a sequence is not."""
    run = (Run({**DECOUPLED}, 1, "bshd"),)
    settings = {**MOE, "moe_aux_loss": 3.0}
    one = Layout("one", settings=settings, samples=even_samples(), runs=run)
    others = [
        replace(one, name="tp2+sp", tp=2, settings={**settings, "sequence_parallel": True}),
        replace(one, name="cp2", cp=2),
        replace(one, name="pp2", pp=2),
        replace(one, name="cp2 mean", cp=2, settings={**settings, **MEAN}),
    ]
    expected = launch(run_layout, [one], 1)[0][0][0].gradients
    for layout, ranks in zip(others, launch(run_layout, others, 2), strict=True):
        assert not ranks[0][0].error, ranks[0][0].error
        assert_gradients(ranks[0][0].gradients, expected, 1e-6, layout)


def run_as_if(case: tuple[Layout, int]) -> str:
    """A batch through the model, its losses answered as if it had that many MTP layers: the error, or nothing."""
    from mismatch_plugin.hooks.megatron_core.model import logits_with_labels, mtp_arguments
    from mismatch_plugin.parallel.groups import ParallelGroups
    from tests import megatron_cpu as megatron

    layout, layers = case
    megatron.initialize_parallel()
    settings = model_settings(layout)
    model = megatron.build_model(settings)[0]
    (batch,) = micro_batches(layout, layout.runs[0], ParallelGroups.from_megatron(), settings, 0, 1)
    inputs = {"packed_seq_params": batch.padded_seq_params, **mtp_arguments(batch, torch.ones(()))}
    try:
        with logits_with_labels(model, layers):
            output = model(batch.tokens, batch.position_ids, None, **inputs)
    except RuntimeError as error:
        return str(error)
    assert output.shape[:2] == batch.tokens.shape and output.dim() == 3
    return ""


def test_another_number_of_losses_than_expected_is_refused() -> None:
    layout = Layout("mtp", settings=MTP, samples=data("rope"), runs=RUNS[:1])
    fitting, another = [rank[0] for rank in launch(run_as_if, [(layout, 1), (layout, 2)], 1)]
    assert not fitting
    assert "megatron computed 2 losses for 2 MTP layers and one head" in another


def test_experts_under_tensor_parallelism_need_sequence_parallelism() -> None:
    layout = Layout("tp2", tp=2, settings=MOE, samples=data("rope"), runs=RUNS[:1])
    for rank in launch(run_layout, [layout], 2)[0]:
        assert "need sequence_parallel" in rank[0].error
