"""The batched loop trains as megatron-core does: its GPTModel, schedule, optimizer and our hook, run by run."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.compare.experiments import PAD, Settings, get_task, seed_for, variant_config
from mismatch_plugin.compare.loop import ExpertFlips, Runs, exponential, generate, rollout_weights, warm_weights
from mismatch_plugin.compare.model import Weights
from tests.compare.synthetic import small
from tests.full import FULL

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.filterwarnings("ignore"),
]

TRUNCATED = {"use_tis": True, "metrics": "full"}
CONFIGS = {
    "0": variant_config("0"),
    "0 with dual clip": mp.MismatchConfig.build({"ppo": {"dual_clip": 1.1}, "metrics": "full"}),
    "1": variant_config("1"),
    "2 token": variant_config("2:token"),
    "2 sequence": variant_config("2:sequence"),
    "2 IcePop": mp.preset("token_icepop").replace(metrics="full"),
    "2 geometric rejection": mp.preset("decoupled_geo_rs_token_tis").replace(
        rs={"criteria": [{"aggregate": "sequence_mean", "lower_bound": 0.9, "upper_bound": 1.1}]}, metrics="full"
    ),
    "3 token": variant_config("3:token"),
    "3 sequence": variant_config("3:sequence"),
    "batch normalisation": mp.MismatchConfig.build({**TRUNCATED, "tis": {"batch_normalize": True}}),
    "rejected, divided by accepted": mp.MismatchConfig.build(
        {"denominator": "accepted", "rs": {"criteria": [{"upper_bound": 1.2}]}, "metrics": "full"}
    ),
    "rejected by age": mp.MismatchConfig.build({"rs": {"max_staleness": 5}, "metrics": "full"}),
}


SETTINGS = {
    "int3": small(rollout_dtype="int3"),
    "stale": small(staleness=4, steps=8),
    "ends": small(task="reverse", rollout_dtype="int2", temperature=0.9),
    "experts": small(experts=3, expert_flips=0.5),
}
THREE = ("int3", "stale", "ends")
CASES = [
    *((name, label) for at, label in enumerate(CONFIGS) for name in (THREE if FULL else [THREE[at % 3]])),
    *(("experts", label) for label in ("0", "2 token")),
]
"""In the quick suite every configuration in one of the three settings."""


class Followed(NamedTuple):
    """Runs of every configuration with seeds 0 and 1. noisy: elements that rounding errors alone may move."""

    start: Weights
    end: Weights
    records: list[list[dict[str, Any]]]
    noisy: dict[str, Tensor]


@pytest.fixture(scope="module")
def batched() -> dict[str, Followed]:
    """By setting.

    AdamW's step is lr · m / (√v + 1e-8): as long as an element's gradients are of the size of rounding errors, so is
    not its step.
    """
    found = {}
    for name, settings in SETTINGS.items():
        start = warm_weights(settings, [0, 1])
        runs = Runs(settings, [0, 1], list(CONFIGS.values()), start)
        largest = {name: torch.zeros_like(weight) for name, weight in runs.weights.items()}
        noisy = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in runs.weights.items()}
        records = []
        for block in runs.steps():
            records.append(block)
            for weight_name, weight in runs.weights.items():
                if weight.grad is not None:
                    largest[weight_name] = largest[weight_name].maximum(weight.grad.abs())
                    seen = largest[weight_name]
                    noisy[weight_name] |= (seen > 0) & (seen < 1e-6)
        found[name] = Followed(start, {name: w.detach() for name, w in runs.weights.items()}, records, noisy)
    return found


def build(settings: Settings, weights: Mapping[str, Tensor]) -> list[Any]:
    """megatron's model with these weights."""
    from tests import megatron_cpu as megatron

    megatron.initialize_parallel()
    task, sizes = get_task(settings.task), settings.model_dump(include={"layers", "hidden", "heads", "ffn", "experts"})
    model = megatron.build_model(
        megatron.ModelSettings(
            **sizes,
            kv_groups=settings.heads,
            vocab=task.vocab,
            max_length=len(weights["embedding.position_embeddings.weight"]),
            position="learned_absolute",
            experts_per_token=1,
        )
    )
    megatron.load_parameters(model, weights)
    return model


def roll_out(settings: Settings, weights: Weights, seed: int, step: int, version: int) -> tuple[list[Any], Any]:
    """The hook's samples, prompt by prompt, and what is reported of them: with plain lists, scored one by one."""
    from mismatch_plugin.data.sample import Sample
    from tests.data.dumps import spans_of

    task, drawn_with = get_task(settings.task), seed_for(seed, "rollout", step)
    prompts = task.prompts(settings.prompts_per_batch, seed_for(seed, "prompts", step))
    noise = exponential([drawn_with], settings.samples, task.max_response, task.vocab)
    flips = ExpertFlips(settings.expert_flips, settings.experts, [drawn_with]) if settings.expert_flips else None
    given = rollout_weights({name: weight[None] for name, weight in weights.items()}, settings.rollout_dtype)
    drawn = generate(settings, given, torch.tensor(prompts)[None], noise, flips)
    lengths = drawn.mask[0].sum(-1).tolist()
    asked = [prompt for prompt in prompts for _ in range(settings.samples_per_prompt)]
    responses = [ids[:n] for ids, n in zip(drawn.ids[0].tolist(), lengths, strict=True)]
    log_probs = [row[:n] for row, n in zip(drawn.log_probs[0].tolist(), lengths, strict=True)]
    rewards = []
    for prompt, response in zip(asked, responses, strict=True):
        right = sum(a == b for a, b in zip(task.target(prompt), response, strict=False))
        rewards.append(right / max(len(task.target(prompt)), len(response)))
    groups = [row // settings.samples_per_prompt for row in range(len(asked))]
    advantages = mp.group_advantages(rewards, groups).tolist()
    samples = [
        Sample(
            prompt_ids=prompt,
            response_ids=response,
            advantages=advantage,
            rollout_log_probs=row,
            weight_versions=spans_of([version] * len(response)),
        )
        for prompt, response, advantage, row in zip(asked, responses, advantages, log_probs, strict=True)
    ]
    exact = statistics.fmean(value == 1.0 for value in rewards)
    means = {"reward": statistics.fmean(rewards), "exact": exact, "response_length": statistics.fmean(lengths)}
    return samples, {**means, "weight_version": version}


def train(
    settings: Settings, config: mp.MismatchConfig, weights: Weights, seed: int
) -> tuple[Weights, list[dict[str, Any]]]:
    """(weights at the end, a record a step) of one run through megatron-core: the same loop, written once more."""
    from mismatch_plugin.hooks.megatron_core import MegatronLoss, make_batch
    from mismatch_plugin.parallel.groups import ParallelGroups
    from tests import megatron_cpu as megatron

    model = build(settings, weights)
    optimizer = megatron.build_optimizer(model, lr=settings.lr, betas=settings.betas, clip_grad=settings.clip_grad)
    groups, vocab = ParallelGroups.from_megatron(), get_task(settings.task).vocab
    hook = MegatronLoss(config, model[0].config, groups, vocab_size=vocab, temperature=settings.temperature)
    after, records, count = [weights], [], settings.mini_batches
    for first in range(0, settings.steps, count):
        version = max(0, first - settings.staleness)
        samples, facts = roll_out(settings, after[version], seed, first, version)
        # Each mini-batch has its share of every prompt's responses; π_old is of before the first step.
        share, batches = settings.samples_per_prompt // count, []
        for j in range(count):
            mine = [sample for i, sample in enumerate(samples) if i % settings.samples_per_prompt // share == j]
            batch = make_batch(mine, groups, layout="none", form="bshd", padding_id=PAD, trainer_version=first + j)
            if not config.use_rollout_log_probs:
                with torch.no_grad():
                    logits = model[0](batch.tokens, batch.position_ids, None).flatten(0, 1)[batch.rows, :vocab]
                table = (logits / settings.temperature).log_softmax(-1)
                old = table.gather(1, batch.targets[:, None])[:, 0]
                batch = replace(batch, packed=batch.packed.replace(old_log_probs=old))
            batches.append(batch)
        for batch in batches:
            hook.start([batch])
            (report,) = megatron.run_step(model, hook.forward_step, iter([batch]), 1)
            _, norm, _ = optimizer.step()
            after.append(megatron.gather_parameters(model))
            loss = float(report["policy_loss"] / report["denominator"].clamp(min=1))
            step = {"step": len(records) + 1, "loss": loss, "grad_norm": float(norm), "metrics": hook.metrics()}
            records.append({**step, **facts})
    return after[-1], records


@pytest.mark.parametrize(("name", "label"), CASES)
def test_both_train_alike(name: str, label: str, batched: dict[str, Followed]) -> None:
    start, end, blocks, noisy = batched[name]
    i = [*CONFIGS].index(label)
    seed, n = i % 2, 2 * i + i % 2
    before = {weight: value[seed] for weight, value in start.items()}
    weights, records = train(SETTINGS[name], CONFIGS[label], before, seed)
    assert weights.keys() == end.keys() and len(records) == SETTINGS[name].steps
    measured = 0
    for block, expected in zip(blocks[1:], records, strict=True):
        for key, value in block[n].items():
            if key == "metrics":
                measured += 1
                assert value == pytest.approx(expected[key], rel=1e-4, abs=1e-5)
            elif key not in ("seconds", "impossible_tokens", "held_out_exact"):
                assert value == pytest.approx(expected[key], rel=1e-4, abs=1e-5), (key, expected["step"])
    assert measured >= 1
    for weight, value in weights.items():
        sound = ~noisy[weight][n]
        assert sound.float().mean() > 0.9 or "experts" in weight  # one that no token took moves by nothing else
        torch.testing.assert_close(end[weight][n][sound], value[sound], atol=1e-5, rtol=0)
        assert (value - before[weight]).abs().max() > 1e-3  # it has moved
