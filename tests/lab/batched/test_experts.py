"""A router and its experts: by hand, as megatron-core computes them, and what the rollout engine changes of them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.lab.batched.model import Weights, forward, layer_names
from mismatch_plugin.lab.batched.rollout import ExpertFlips
from mismatch_plugin.lab.batched.trainer import Runs
from mismatch_plugin.lab.batched.warm import warm_weights
from mismatch_plugin.lab.experiments import variant_config
from mismatch_plugin.lab.settings import LabSettings
from tests.lab.batched.problem import SHAPE, random_ids, run_of, small, weights_of

EXPERTS = 3
MIXED = SHAPE._replace(experts=EXPERTS)
IDS = random_ids(2, 5, 7)


def _indifferent() -> Weights:
    """Weights whose router gives every expert 1 / EXPERTS."""
    weights = weights_of(0, 1, shape=MIXED)
    return {name: weight * ("router" not in name) for name, weight in weights.items()}


def _with_expert(weights: Weights, e: int) -> Weights:
    """A dense model's: that expert's MLP, times 1 / EXPERTS."""
    dense = {name: weight for name, weight in weights.items() if "mlp." not in name}
    for i in range(SHAPE.layers):
        [(fc1, fc2)], experts = layer_names(i).mlps, layer_names(i, EXPERTS).mlps
        dense |= {fc1: weights[experts[e][0]], fc2: weights[experts[e][1]] / EXPERTS}
    return dense


@pytest.mark.parametrize("e", range(EXPERTS))
def test_a_token_takes_one_expert_times_its_probability(e: int) -> None:
    weights = _indifferent()
    logits, _ = forward(MIXED, weights, IDS, reroute=lambda chosen: torch.full_like(chosen, e))
    torch.testing.assert_close(logits, forward(SHAPE, _with_expert(weights, e), IDS)[0])


def test_the_router_takes_the_expert_that_its_weights_prefer() -> None:
    weights, seen = weights_of(0, 1, shape=MIXED), []

    def watched(chosen: Tensor) -> Tensor:
        seen.append(chosen)
        return chosen

    free, _ = forward(MIXED, weights, IDS, reroute=watched)
    assert [len(chosen.unique()) for chosen in seen] == [EXPERTS] * SHAPE.layers  # tokens differ
    torch.testing.assert_close(forward(MIXED, weights, IDS)[0], free)
    name = layer_names(0, EXPERTS).router
    last = {**weights, name: weights[name].flip(1)}
    forward(MIXED, last, IDS, reroute=watched)
    assert torch.equal(seen[SHAPE.layers], EXPERTS - 1 - seen[0])


def test_flips_take_every_other_expert_alike_and_their_share_of_tokens() -> None:
    chosen = torch.arange(4).repeat(2, 10_000)
    always = ExpertFlips(1.0, 4, [0, 1])(chosen)
    assert not (always == chosen).any()
    counts = ((always - chosen) % 4).flatten().bincount(minlength=4)
    assert counts[0] == 0 and (counts[1:] / counts.sum() - 1 / 3).abs().max() < 0.01
    share = (ExpertFlips(0.25, 4, [0, 1])(chosen) != chosen).float().mean(1)
    assert (share - 0.25).abs().max() < 0.01


def test_variants_of_a_seed_share_flips_and_seeds_do_not() -> None:
    flips = ExpertFlips(0.5, 4, [7, 8])
    chosen = torch.zeros(4, 100, dtype=torch.long)  # two variants of two seeds
    first, second = flips(chosen), flips(chosen)
    assert torch.equal(first[:2], first[2:])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    alone = ExpertFlips(0.5, 4, [8])
    assert torch.equal(alone(chosen[:1])[0], first[1]) and torch.equal(alone(chosen[:1])[0], second[1])


def _runs(label: str, **changes: Any) -> Runs:
    settings = small(experts=EXPERTS, **changes)
    return Runs(settings, [0, 1], [variant_config(label)], warm_weights(settings, [0, 1]))


def test_flips_are_the_rollout_engine_s_alone() -> None:
    def first(flips: float) -> dict[str, Any]:
        records = list(_runs("0", expert_flips=flips).steps())
        return records[1][0][0]["metrics"]

    assert first(0.0)["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-5)
    assert first(0.5)["rollout_corr/kl"] > 1e-3
    # The trainer's two passes see the same experts, so that before its first step nothing has moved.
    assert first(0.5)["rollout_corr/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", ["0", "2:token:truncate"])
def test_megatron_trains_the_same_experts_alike(label: str) -> None:
    from mismatch_plugin.lab.trainer import Run

    settings = small(experts=EXPERTS, expert_flips=0.5)
    config: MismatchConfig = variant_config(label)
    warm = warm_weights(settings, [0, 1])
    runs = Runs(settings, [0, 1], [config], warm)
    blocks = list(runs.steps())
    records: list[dict[str, Any]] = []
    run = Run(settings.model_copy(update={"seed": 1}), config, run_of(warm, 1), records.append, None)
    assert run.all_steps()
    for block, other in zip(blocks[1:], records[1:], strict=True):
        mine = block[0][1]
        for name in ("reward", "loss", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (name, mine["step"])
    after = run.policy.weights()
    assert after.keys() == runs.weights.keys()
    for name, weight in after.items():
        moved = (weight - warm[name][1]).norm()
        assert (runs.weights[name][1] - weight).norm() <= 1e-2 * moved, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "transformers", "position": "rope", "experts": 4}, "dense Llama"),
        ({"experts": 1}, "at least 2 experts"),
        ({"expert_flips": 0.1}, "at least 2 experts"),
    ],
)
def test_settings_that_no_router_has_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_warm_weights_of_another_number_of_experts_are_others() -> None:
    assert small(experts=2).warm_up_key != small(experts=4).warm_up_key
    assert (
        small(experts=2).warm_up_key
        == LabSettings.model_validate({**small(experts=2).model_dump(), "expert_flips": 0.5}).warm_up_key
    )
