"""The loop over many runs: runs are independent, each is what it would be alone, and every part is what it says.

That model, loss, optimizer, rewards and mini-batches are megatron-core's and plain lists' is shown in test_megatron.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_plugin.compare.experiments import EOS, PAD, TASKS, Settings, Task, get_task, seed_for, variant_config
from mismatch_plugin.compare.loop import (
    ExpertFlips,
    Runs,
    exact_match,
    exponential,
    generate,
    quantised,
    questions,
    rollout_weights,
    warm_up,
)
from mismatch_plugin.compare.model import (
    OUTPUT,
    POSITIONS,
    WORDS,
    Weights,
    initial_weights,
    map_weights,
    token_log_probs,
)
from tests.compare.synthetic import small

CONFIGS = [variant_config(label) for label in ("PPO", "bypass", "token_is", "pg_is")]


def weights_of(*seeds: int, **changes: Any) -> Weights:
    """Initial weights, and norms other than 1, so that a forgotten one shows."""
    weights = initial_weights(small(**changes), seeds)
    return {name: weight + 0.3 * torch.sin(weight.cumsum(-1)) for name, weight in weights.items()}


def run_of(weights: Weights, n: int) -> Weights:
    """Run n alone."""
    return map_weights(weights, lambda weight: weight[n : n + 1])


def random_ids(*size: int) -> Tensor:
    return torch.randint(14, size, generator=torch.Generator().manual_seed(0))


def test_sampled_log_probs_are_the_models_and_runs_that_share_noise_draw_the_same() -> None:
    settings, weights, prompts = small(temperature=0.7), weights_of(5, 5, 6), random_ids(1, 3, 8).repeat(3, 1, 1)
    drawn = generate(settings, weights, prompts, exponential([2], 12, 6, 14).repeat(3, 1, 1, 1))
    expected = token_log_probs(settings, weights, prompts, drawn.ids)
    torch.testing.assert_close(drawn.log_probs, expected, atol=1e-5, rtol=0)
    assert drawn.mask.all() and drawn.ids.shape == (3, 12, 6)
    assert torch.equal(drawn.ids[0], drawn.ids[1]) and not torch.equal(drawn.ids[0], drawn.ids[2])
    other = generate(settings, weights, prompts, exponential([2, 4, 2], 12, 6, 14))
    assert torch.equal(other.ids[0], drawn.ids[0]) and not torch.equal(other.ids[1], drawn.ids[1])


def test_an_end_ends_and_what_follows_is_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "ends", Task("ends", get_task("reverse6").draw, lambda x: x, 6))
    weights, prompts, noise = weights_of(0), random_ids(1, 4, 8), exponential([3], 64, 6, 14)
    free, ended = (generate(small(task=task), weights, prompts, noise) for task in ("reverse6", "ends"))
    lengths = [row.index(EOS) + 1 if EOS in row else 6 for row in free.ids[0].tolist()]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    assert {2, 6} < {*lengths}
    assert torch.equal(ended.mask[0], mask) and torch.equal(ended.ids[0], free.ids[0].where(mask, PAD))
    assert (ended.log_probs[0] < 0).equal(mask)


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 255), ("int2", 3)])
def test_linear_layers_are_rounded_and_nothing_else(dtype: str, levels: int) -> None:
    weights = weights_of(0, 1)
    rounded = rollout_weights(weights, dtype)
    same = {name for name in weights if torch.equal(rounded[name], weights[name])}
    assert {WORDS, POSITIONS} < same == {name for name in weights if "linear" not in name and name != OUTPUT}
    for name in weights.keys() - same:
        scale = weights[name].abs().amax(-1, keepdim=True) / (levels // 2)
        torch.testing.assert_close((rounded[name] / scale).round() * scale, rounded[name], atol=1e-5, rtol=0)
        assert (rounded[name] - weights[name]).abs().max() <= scale.max() / 2 + 1e-6
        assert max(len(row.unique()) for row in rounded[name].flatten(0, 1)) <= levels
        assert torch.equal(rounded[name][1], quantised(weights[name][1], levels.bit_length()))
    assert rollout_weights(weights, "float32") is weights


def test_flips_take_every_other_expert_alike_and_variants_of_a_seed_share_them() -> None:
    chosen = torch.arange(4).repeat(2, 10_000)
    counts = ((ExpertFlips(1.0, 4, [0, 1])(chosen) - chosen) % 4).flatten().bincount(minlength=4)
    assert counts[0] == 0 and (counts[1:] / counts.sum() - 1 / 3).abs().max() < 0.01
    assert ((ExpertFlips(0.25, 4, [0, 1])(chosen) != chosen).float().mean(1) - 0.25).abs().max() < 0.01
    flips, zeros = ExpertFlips(0.5, 4, [7, 8]), torch.zeros(4, 100, dtype=torch.long)  # two variants of two seeds
    first, second = flips(zeros), flips(zeros)
    assert torch.equal(first[:2], first[2:])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)
    assert torch.equal(ExpertFlips(0.5, 4, [8])(zeros[:1])[0], first[1])


@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_hold_prompts_back_and_their_answers_are_the_digits_in_reverse(name: str) -> None:
    task = get_task(name)
    train, held_out = task.prompts(300, 3), task.prompts(300, 3, "held_out")
    assert train == task.prompts(300, 3) != task.prompts(300, 4)
    assert not set(map(tuple, train)) & set(map(tuple, held_out))
    assert len({len(prompt) for prompt in train + held_out}) == 1
    for prompt in train:
        digits, target = [id_ for id_ in prompt if id_ < 10], task.target(prompt)
        assert target == digits[::-1] + ([] if task.eos is None else [EOS])
        assert max(*prompt, *target) < task.vocab and len(target) <= task.max_response and PAD not in prompt + target


@pytest.fixture(scope="module")
def warm() -> Weights:
    """Of seeds 0 and 1."""
    return warm_up(small(), [0, 1])


def records_of(settings: Settings, warm: Weights, configs: list[Any] | None = None) -> list[list[dict[str, Any]]]:
    return [*Runs(settings, [*range(len(warm[OUTPUT]))], configs or CONFIGS[:1], warm).steps()]


def test_a_run_does_not_depend_on_those_it_runs_with(warm: Weights) -> None:
    settings, before = small(rollout_dtype="int4", staleness=4, steps=8), map_weights(warm, torch.Tensor.clone)
    together = Runs(settings, [0, 1], [CONFIGS[0], CONFIGS[2], CONFIGS[0]], warm)
    blocks = [*together.steps()]
    assert all(block[:2] == block[4:] for block in blocks) and blocks[-1][:2] != blocks[-1][2:4]
    alone = Runs(settings, [1], [CONFIGS[2]], run_of(warm, 1))
    assert [block[0] for block in alone.steps()] == [block[3] for block in blocks]
    assert all(torch.equal(weight[0], together.weights[name][3]) for name, weight in alone.weights.items())
    assert all(torch.equal(weight, before[name]) and not weight.requires_grad for name, weight in warm.items())


def test_impossible_tokens_by_hand(warm: Weights) -> None:
    """A trainer that is far more certain than its int2 rollouts finds many of their tokens impossible."""
    certain = {name: weight * (8 if name == OUTPUT else 1) for name, weight in warm.items()}
    settings = small(rollout_dtype="int2")
    runs = Runs(settings, [0, 1], CONFIGS[:2], certain)
    runs._keep(0)
    batch, _ = runs._roll_out(0)
    log_probs = token_log_probs(settings, runs.weights, batch.prompts_NPT, batch.drawn.ids)[:, ::4]
    expected = (log_probs.detach().exp() < 1e-4).float().mean((1, 2)).tolist()  # of the first of four mini-batches
    found = records_of(settings, certain, CONFIGS[:2])[1]
    assert [row["impossible_tokens"] for row in found] == pytest.approx(expected)
    assert all(0.02 < share < 0.9 for share in expected)


def test_a_run_that_breaks_stops_alone(warm: Weights) -> None:
    broken = map_weights(warm, torch.Tensor.clone)
    broken[OUTPUT][1] = 1e38  # log-probs that are not finite, which the loss refuses
    sound, runs = records_of(small(), warm, CONFIGS[:2]), Runs(small(), [0, 1], CONFIGS[:2], broken)
    blocks = [*runs.steps()]
    assert [block[::2] for block in blocks] == [block[::2] for block in sound]
    assert runs.optimizer.live.tolist() == [True, False, True, False]
    assert all(not math.isfinite(block[1]["grad_norm"]) for block in blocks[1:])
    assert all(torch.equal(weight[1], broken[name][1]) for name, weight in runs.weights.items())


def test_exact_match_is_the_expectation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all 14³ responses; an answer that ends earlier is the sum of those that begin with it."""
    task = Task("tiny", lambda draw: draw.choices(range(10), k=2), lambda x: [*x, 11], 3, eos=None)
    monkeypatch.setitem(TASKS, "tiny", task)
    settings, (prompts, answers) = small(task="tiny", temperature=0.5), questions(task, 3, [4, 5], "held_out")
    answers[:, 0, -1] = PAD
    weights = {n: w * (20 if n == OUTPUT else 1) for n, w in weights_of(0, 1, task="tiny").items()}
    found, right = exact_match(settings, weights, prompts, answers)
    every = torch.tensor([*itertools.product(range(14), repeat=3)])
    for n in range(2):
        expected, of_tokens = [], []
        for prompt, answer in zip(prompts[n], answers[n], strict=True):
            at_one = small(task="tiny"), run_of(weights, n), prompt[None, None]
            p = token_log_probs(*at_one, every[None])[0].sum(-1).exp()
            target = answer[answer != PAD]
            expected.append(p[(every[:, : len(target)] == target).all(-1)].sum().item())
            of_tokens += token_log_probs(*at_one, target[None, None]).exp().flatten().tolist()
        assert found[n].item() == pytest.approx(sum(expected) / 3, rel=1e-4)
        assert right[n].item() == pytest.approx(sum(of_tokens) / len(of_tokens), rel=1e-4)


def test_warm_up_stops_each_seed_at_the_target_and_follows_from_its_key() -> None:
    settings, seeds = small(warm_up_target=0.2, warm_up_steps=80), [0, 1, 2]
    held_out = questions(get_task("reverse6"), 16, [seed_for(seed, "held-out") for seed in seeds], "held_out")
    weights = warm_up(settings, seeds)
    right = exact_match(settings, weights, *held_out)[1]
    assert (right >= 0.2).all() and (right < 0.3).all()
    # With nobody that stops at another step, and with all other settings changed that its file's name leaves out.
    other = settings.model_copy(update={"lr": 1.0, "weight_decay": 0.5, "temperature": 0.5, "staleness": 3, "steps": 9})
    assert other.warm_up_key(2) == settings.warm_up_key(2) != settings.warm_up_key(1)
    alone = warm_up(other, [2])
    assert all(torch.equal(weight[0], weights[name][2]) for name, weight in alone.items())
