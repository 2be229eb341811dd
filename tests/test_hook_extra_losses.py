"""MoE load balancing, router z-loss and MTP beside the policy loss: each keeps the weight it has without the other.

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

from tests.distributed.hook_worker import Layout, Outcome, Run, run_layout, run_plainly
from tests.distributed.launch import launch
from tests.test_hook_megatron import data

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")

MOE = {"experts": 4, "moe_aux_loss": 0.3, "moe_z_loss": 0.05}
MTP = {"mtp_layers": 1, "mtp_scale": 0.7}
MEAN = {"calculate_per_token_loss": False}
LAYOUTS: dict[int, list[Layout]] = {
    1: [
        Layout("moe", settings=MOE),
        Layout("mtp", settings=MTP),
        Layout("moe without per-token", settings={**MOE, **MEAN}),
    ],
    2: [
        Layout("moe tp2+sp", tp=2, settings={**MOE, "sequence_parallel": True}),
        Layout("moe pp2", pp=2, settings=MOE),
        Layout("moe cp2", cp=2, settings=MOE),
        Layout("moe dp2", settings=MOE),
        Layout("moe dp2 without per-token", settings={**MOE, **MEAN}),
        Layout("moe cp2 without per-token", cp=2, settings={**MOE, **MEAN}),
        Layout("mtp tp2", tp=2, settings=MTP),
        Layout("mtp pp2", pp=2, settings=MTP),
        Layout("mtp cp2", cp=2, settings=MTP),
        Layout("mtp dp2", settings=MTP),
    ],
}
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
    layouts = [replace(layout, samples=data("rope"), runs=RUNS + ALONE) for layout in LAYOUTS[world]]
    return {layout.name: ranks for layout, ranks in zip(layouts, launch(run_layout, layouts, world), strict=True)}


@pytest.mark.parametrize(("world", "index"), [(w, i) for w in LAYOUTS for i in range(len(LAYOUTS[w]))])
def test_each_loss_keeps_its_weight(world: int, index: int) -> None:
    layout = LAYOUTS[world][index]
    ranks = outcomes(world)[layout.name]
    assert not any(rank[i].error for rank in ranks for i in range(len(RUNS))), [rank[0].error for rank in ranks]
    for number, run in enumerate(RUNS):
        policy = policy_gradients(layout.settings.get("experts", 0))[number].gradients
        alone = ranks[0][len(RUNS) + number].gradients
        together = ranks[0][number].gradients
        assert together.keys() == alone.keys() >= policy.keys()
        assert max(float(gradient.norm()) for gradient in alone.values()) > 1e-4
        for name, gradient in together.items():
            expected = alone[name] + policy.get(name, torch.zeros_like(gradient))
            scale = max(float(expected.abs().max()), 1e-3)
            assert float((gradient - expected).abs().max()) <= 1e-5 * scale, (name, run)
