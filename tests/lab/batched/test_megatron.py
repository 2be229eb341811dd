"""Both labs train alike: megatron-core's GPTModel, schedule, optimizer and hook against the batched program."""

from __future__ import annotations

import importlib.util
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mismatch_plugin.config import MismatchConfig, preset
from mismatch_plugin.lab.batched.model import OUTPUT, Weights, forward, response_log_probs
from mismatch_plugin.lab.batched.trainer import Runs
from mismatch_plugin.lab.batched.warm import warm_weights
from mismatch_plugin.lab.experiments import variant_config
from mismatch_plugin.lab.run import run_one
from mismatch_plugin.lab.settings import LabSettings
from tests.lab.batched.problem import SHAPE, random_ids, run_of, small, weights_of

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.filterwarnings("ignore"),
]

TRUNCATED = {"use_tis": True, "metrics": "full"}
CONFIGS = {
    "0": variant_config("0"),
    "0 with dual clip": MismatchConfig.build({"ppo": {"dual_clip": 1.1}, "metrics": "full"}),
    "1": variant_config("1"),
    "2 token": variant_config("2:token"),
    "2 sequence": variant_config("2:sequence"),
    "2 IcePop": preset("token_icepop").replace(metrics="full"),
    "2 geometric rejection": preset("decoupled_geo_rs_token_tis").replace(
        rs={"criteria": [{"aggregate": "sequence_mean", "lower_bound": 0.9, "upper_bound": 1.1}]}, metrics="full"
    ),
    "3 token": variant_config("3:token"),
    "3 sequence": variant_config("3:sequence"),
    "batch normalisation": MismatchConfig.build({**TRUNCATED, "tis": {"batch_normalize": True}}),
    "rejected, divided by accepted": MismatchConfig.build(
        {"denominator": "accepted", "rs": {"criteria": [{"upper_bound": 1.2}]}, "metrics": "full"}
    ),
    "rejected by age": MismatchConfig.build({"rs": {"max_staleness": 5}, "metrics": "full"}),
}
SETTINGS = {
    "int3": small(rollout_dtype="int3"),
    "stale": small(staleness=4, steps=8),
    "ends": small(task="reverse", rollout_dtype="int2"),
}


@pytest.fixture(scope="module")
def warm() -> dict[str, Weights]:
    """By setting, of seeds 0 and 1."""
    of_task = {task: warm_weights(small(task=task), [0, 1]) for task in ("reverse6", "reverse")}
    return {name: of_task[settings.task] for name, settings in SETTINGS.items()}


class Followed(NamedTuple):
    """records[i][j]: of the last step of variant i, seed j. noisy: elements that rounding errors alone may move."""

    runs: Runs
    records: list[list[list[dict[str, Any]]]]
    noisy: Weights


def _batched(settings: LabSettings, warm: Weights) -> Followed:
    """A run of every configuration in the batched lab.

    AdamW's step is lr · m / (√v + 1e-8): as long as an element's gradients are of the size of rounding errors, so is
    not its step.
    """
    runs = Runs(settings, [0, 1], list(CONFIGS.values()), warm)
    largest = {name: torch.zeros_like(weight) for name, weight in runs.weights.items()}
    noisy = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in runs.weights.items()}
    records = []
    for block in runs.steps():
        records.append(block)
        for name, weight in runs.weights.items():
            if weight.grad is not None:
                largest[name] = largest[name].maximum(weight.grad.abs())
                noisy[name] |= (largest[name] > 0) & (largest[name] < 1e-6)
    return Followed(runs, records, noisy)


def _megatron(settings: LabSettings, config: MismatchConfig, weights: Weights) -> tuple[Weights, list[dict[str, Any]]]:
    """(weights at the end, records) of a run of the megatron-core lab."""
    from mismatch_plugin.lab.trainer import Run

    records: list[dict[str, Any]] = []
    run = Run(settings, config, weights, records.append, None)
    assert run.all_steps()
    return run.policy.weights(), records


@pytest.fixture(scope="module")
def batched(warm: dict[str, Weights]) -> dict[str, Followed]:
    """By setting."""
    return {name: _batched(settings, warm[name]) for name, settings in SETTINGS.items()}


@pytest.mark.parametrize("label", CONFIGS)
@pytest.mark.parametrize("name", SETTINGS)
def test_rollout_batches_train_both_labs_alike(
    name: str, label: str, warm: dict[str, Weights], batched: dict[str, Followed]
) -> None:
    runs, blocks, noisy = batched[name]
    i, config = [*CONFIGS].index(label), CONFIGS[label]
    seed = i % 2
    start = run_of(warm[name], seed)
    weights, records = _megatron(SETTINGS[name].model_copy(update={"seed": seed}), config, start)
    n = len(runs.seeds) * i + seed
    for weight, megatron in weights.items():
        sound = ~noisy[weight][n]
        assert sound.float().mean() > 0.9
        torch.testing.assert_close(runs.weights[weight][n][sound], megatron[sound], atol=1e-5, rtol=0)
        assert (megatron - start[weight]).abs().max() > 1e-3  # it has moved
    for block, other in zip(blocks, records, strict=True):
        mine = block[i][seed]
        metrics = mine.pop("metrics", None)
        mine.pop("impossible_tokens", None)
        if metrics is not None:
            assert metrics == pytest.approx(other["metrics"], rel=1e-4, abs=1e-5)
        shared = {key: value for key, value in other.items() if key not in ("metrics", "seconds")}
        assert {key: value for key, value in mine.items() if key != "seconds"} == pytest.approx(
            shared, rel=1e-4, abs=1e-5
        )
    assert [len(record.get("metrics", {})) > 0 for record in records] == [False, *[True] * (len(records) - 1)]


def test_every_configuration_has_an_effect(batched: dict[str, Followed]) -> None:
    """Otherwise the comparison above would not see one that is ignored."""
    for name, without in (("int3", {"rejected by age"}), ("stale", set[str]()), ("ends", {"rejected by age"})):
        weights = batched[name].runs.weights[OUTPUT]
        final = {label: weights[2 * i].tolist() for i, label in enumerate(CONFIGS) if label not in without}
        for one, other in combinations(final, 2):
            assert final[one] != final[other], (one, other)


def test_logits_are_megatrons() -> None:
    from mismatch_plugin.lab import model as lab
    from mismatch_plugin.lab.parameters import load_parameters
    from mismatch_plugin.lab.policy import model_settings

    weights, ids = weights_of(0, 1), random_ids(2, 5, SHAPE.max_length)
    ids[:, 3:, 9:] = 13  # padding behind three responses of two sequences
    logits, _ = forward(SHAPE, weights, ids)
    by_prompt = response_log_probs(SHAPE, weights, ids[:, :, :8], ids[:, :, 8:])
    for n in range(2):
        lab.initialize_parallel()
        model = lab.build_model(model_settings(small()))
        load_parameters(model, run_of(weights, n))
        positions = torch.arange(SHAPE.max_length).expand_as(ids[n])
        with torch.no_grad():
            megatron = model[0](ids[n], positions, None)[..., : SHAPE.vocab]
        torch.testing.assert_close(logits[n], megatron, atol=1e-5, rtol=0)
        torch.testing.assert_close(by_prompt[n], megatron[:, 7:-1].log_softmax(-1), atol=1e-5, rtol=0)


def test_warm_weights_are_shared(tmp_path: Path) -> None:
    """Either lab makes the same ones, trained alone or together, and finds what the other has left."""
    from mismatch_plugin.lab.trainer import warm_up

    settings = small(warm_up_steps=8)
    five = settings.model_copy(update={"seed": 5})
    alone = warm_up(five, tmp_path / "megatron")
    together = warm_weights(settings, [4, 5, 6], tmp_path / "batched")
    assert all(torch.equal(together[name][1], weight) for name, weight in alone.items())
    keys = {settings.model_copy(update={"seed": seed}).warm_up_key for seed in (4, 5, 6)}
    assert {path.name for path in (tmp_path / "batched").iterdir()} == keys
    marked = {name: weight + 1 for name, weight in alone.items()}
    for folder in ("megatron", "batched"):
        assert (tmp_path / folder / five.warm_up_key).exists()
        torch.save(marked, tmp_path / folder / five.warm_up_key)
    found = warm_weights(settings, [6, 5], tmp_path / "megatron"), warm_up(five, tmp_path / "batched")
    for name, weight in marked.items():
        assert torch.equal(found[0][name][1], weight) and torch.equal(found[1][name], weight)
        assert torch.equal(found[0][name][0], together[name][2])


def test_a_run_of_the_batched_problem_in_a_folder(tmp_path: Path) -> None:
    outcome = run_one(small(warm_up_steps=4), variant_config("2:token"), tmp_path / "run")
    assert outcome["status"] == "finished" and outcome["step"] == 4
    assert 0 < outcome["held_out_exact"] < 1 and "held_out_reward" not in outcome


def test_every_mini_batch_has_its_share_of_every_group() -> None:
    """As in the batched lab: the first response to each prompt, then the second, …"""
    from mismatch_plugin.lab.trainer import Run

    settings = small()
    weights = run_of(warm_weights(settings.model_copy(update={"warm_up_steps": 0}), [0]), 0)
    run = Run(settings, variant_config("0"), weights, lambda record: None, None)
    run._keep(0)
    samples, _ = run._roll_out(0)
    parts = run._split(samples)
    assert parts == [samples[first::4] for first in range(4)] and [len(part) for part in parts] == [8] * 4
