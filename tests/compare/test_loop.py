"""The loop over many runs: runs are independent, each is what it would be alone, and every part is what it says.

That model, loss and optimizer are megatron-core's is shown in test_megatron.py.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mismatch_plugin.compare.experiments import EOS, PAD, TASKS, Settings, Task, get_task, seed_for, variant_config
from mismatch_plugin.compare.loop import (
    Batch,
    BatchedAdamW,
    ExpertFlips,
    Responses,
    Runs,
    exact_match,
    exponential,
    generate,
    quantised,
    questions,
    rollout_weights,
    score,
    warm_up,
    warm_weights,
)
from mismatch_plugin.compare.model import (
    FINAL_NORM,
    OUTPUT,
    POSITIONS,
    WORDS,
    Weights,
    forward,
    initial_weights,
    layer_name,
    map_weights,
    response_log_probs,
    token_log_probs,
)

CONFIGS = [variant_config(label) for label in ("PPO", "bypass", "token_is", "pg_is")]
LENGTH = 14  # of a prompt and a response of reverse6


def small(**changes: Any) -> Settings:
    """The problem in small."""
    sizes = {"hidden": 16, "ffn": 24, "steps": 4, "prompts_per_batch": 8, "samples_per_prompt": 4, "lr": 4e-3}
    warm = {"warm_up_target": 0.3, "warm_up_steps": 40, "warm_up_batch": 64, "warm_up_lr": 1e-2}
    return Settings.model_validate({**sizes, **warm, "eval_every": 2, "eval_prompts": 16, **changes})


def weights_of(*seeds: int, **changes: Any) -> Weights:
    """Initial weights, and norms other than 1, so that a forgotten one shows."""
    weights = initial_weights(small(**changes), seeds)
    return {name: weight + 0.3 * torch.sin(weight.cumsum(-1)) for name, weight in weights.items()}


def run_of(weights: Weights, n: int) -> Weights:
    """Run n alone."""
    return map_weights(weights, lambda weight: weight[n : n + 1])


def random_ids(*size: int, seed: int = 0) -> Tensor:
    return torch.randint(14, size, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


# ----------------------------------------------------------------------------------------------------------- model


def test_runs_together_are_runs_alone_and_gradients_stay_in_theirs() -> None:
    settings, ids = small(), random_ids(3, 4, LENGTH)
    weights = map_weights(weights_of(0, 1, 2), lambda w: w.requires_grad_())
    together, _ = forward(settings, weights, ids)
    for n in range(3):
        close(together[n], forward(settings, run_of(weights, n), ids[n : n + 1])[0][0], 1e-6)
    assert (together[0] - forward(settings, weights, ids[:1].expand(3, -1, -1))[0][1]).abs().max() > 0.1
    gradients = torch.autograd.grad(together[0].square().sum(), list(weights.values()))
    assert all(gradient[0].any() and not gradient[1:].any() for gradient in gradients)


def test_a_cache_continues_a_pass_and_no_position_sees_a_later_one() -> None:
    settings, weights, ids = small(), weights_of(0, 1), random_ids(2, 3, LENGTH)
    whole, _ = forward(settings, weights, ids)
    for cuts in ((8,), (1, 2, 9), tuple(range(1, LENGTH))):
        cache, parts = None, []
        for start, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
            part, cache = forward(settings, weights, ids[:, :, start:end], cache)
            close(forward(settings, weights, ids[:, :, :end], last_only=True)[0], part[:, :, -1:])
            parts.append(part)
        close(torch.cat(parts, dim=2), whole)
    other = ids.clone()
    other[:, :, 9:] = (other[:, :, 9:] + 1) % 14
    changed = (forward(settings, weights, other)[0] - whole).abs().amax(-1)
    assert changed[:, :, :9].max() < 1e-6 and changed[:, :, 9:].min() > 1e-2


def test_log_probs_of_responses_to_shared_prompts() -> None:
    settings, weights = small(temperature=1.3), weights_of(0, 1)
    prompts, responses = random_ids(2, 2, 8), random_ids(2, 6, 6, seed=1)
    whole = torch.cat([prompts.repeat_interleave(3, dim=1), responses], dim=2)  # three responses a prompt
    expected = (forward(settings, weights, whole)[0][:, :, 7:-1] / 1.3).log_softmax(-1)
    close(response_log_probs(settings, weights, prompts, responses), expected)
    own = expected.gather(3, responses[..., None])[..., 0]
    close(token_log_probs(settings, weights, prompts, responses), own)
    close(token_log_probs(settings, weights, prompts, responses[:, :, :1]), own[:, :, :1])


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    one, two = initial_weights(small(), [7, 3]), initial_weights(small(layers=1), [3])
    for name, weight in two.items():
        assert torch.equal(weight[0], one[name][1])
        assert "norm" in name or not torch.equal(one[name][0], one[name][1])


@pytest.mark.parametrize("e", range(3))
def test_a_token_takes_one_expert_times_its_probability(e: int) -> None:
    ids, mixed = random_ids(2, 5, 7), weights_of(0, 1, experts=3)
    mixed = {name: weight * ("router" not in name) for name, weight in mixed.items()}  # every expert gets 1 / 3
    found, _ = forward(small(experts=3), mixed, ids, reroute=lambda chosen: torch.full_like(chosen, e))
    dense = {name: weight for name, weight in mixed.items() if "mlp." not in name}
    for i, fc in itertools.product(range(2), ("linear_fc1", "linear_fc2")):
        expert = mixed[layer_name(i, f"mlp.experts.local_experts.{e}.{fc}")]
        dense[layer_name(i, f"mlp.{fc}")] = expert / (3 if fc == "linear_fc2" else 1)
    close(found, forward(small(), dense, ids)[0])


def test_the_router_takes_the_expert_that_its_weights_prefer() -> None:
    settings, weights, ids, seen = small(experts=3), weights_of(0, 1, experts=3), random_ids(2, 5, 7), []

    def watched(chosen: Tensor) -> Tensor:
        seen.append(chosen)
        return chosen

    free, _ = forward(settings, weights, ids, reroute=watched)
    assert [len(chosen.unique()) for chosen in seen] == [3, 3]  # tokens differ
    close(forward(settings, weights, ids)[0], free)
    name = layer_name(0, "mlp.router")
    forward(settings, {**weights, name: weights[name].flip(1)}, ids, reroute=watched)
    assert torch.equal(seen[2], 2 - seen[0])


# ------------------------------------------------------------------------------------------------- rollout engine


def test_sampled_log_probs_are_the_models_and_runs_that_share_noise_draw_the_same() -> None:
    settings, weights, prompts = small(temperature=0.7), weights_of(5, 5, 6), random_ids(1, 3, 8).repeat(3, 1, 1)
    noise = exponential([2], 12, 6, 14).repeat(3, 1, 1, 1)
    drawn = generate(settings, weights, prompts, noise)
    close(drawn.log_probs, token_log_probs(settings, weights, prompts, drawn.ids))
    assert drawn.mask.all() and drawn.ids.shape == (3, 12, 6)
    assert torch.equal(drawn.ids[0], drawn.ids[1]) and not torch.equal(drawn.ids[0], drawn.ids[2])
    other = generate(settings, weights, prompts, exponential([2, 4, 2], 12, 6, 14))
    assert torch.equal(other.ids[0], drawn.ids[0]) and not torch.equal(other.ids[1], drawn.ids[1])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_follow_the_probabilities(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """χ² over the 25 responses of two tokens from five: 24 degrees of freedom, of which 51.2 is the .999 quantile."""
    monkeypatch.setitem(TASKS, "two", Task("two", lambda _: [], lambda _: [], 2, vocab=5, eos=None))
    settings, count = small(task="two", layers=1, temperature=temperature), 20_000
    weights, prompt = weights_of(0, task="two", layers=1), torch.tensor([[[1, 3]]])
    every = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    p = token_log_probs(settings, weights, prompt, every[None]).sum(2).exp()[0]
    assert p.sum().item() == pytest.approx(1, abs=1e-5) and p.max() / p.min() > 2
    drawn = generate(settings, weights, prompt, exponential([1], count, 2, 5))
    observed = torch.bincount(drawn.ids[0, :, 0] * 5 + drawn.ids[0, :, 1], minlength=25)
    assert ((observed - count * p).square() / (count * p)).sum().item() < 51.2


def test_an_end_ends_and_what_follows_is_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "ends", Task("ends", get_task("reverse6").draw, lambda x: x, 6))
    weights, prompts, noise = weights_of(0), random_ids(1, 4, 8), exponential([3], 64, 6, 14)
    free, ended = generate(small(), weights, prompts, noise), generate(small(task="ends"), weights, prompts, noise)
    lengths = set()
    for ids, kept, log_probs, unended in zip(*(rows[0] for rows in ended), free.ids[0].tolist(), strict=True):
        (ids, kept), log_probs = (ids, log_probs), kept  # Responses: ids, log_probs, mask
        length = unended.index(EOS) + 1 if EOS in unended else 6
        lengths.add(length)
        assert ids.tolist() == unended[:length] + [PAD] * (6 - length)
        assert kept.tolist() == [True] * length + [False] * (6 - length)
        assert not log_probs[length:].any() and (log_probs[:length] < 0).all()
    assert {2, 6} < lengths


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 255), ("int4", 15), ("int3", 7), ("int2", 3)])
def test_linear_layers_are_rounded_and_nothing_else(dtype: str, levels: int) -> None:
    weights = weights_of(0, 1)
    rounded = rollout_weights(weights, dtype)
    same = {name for name in weights if torch.equal(rounded[name], weights[name])}
    assert {WORDS, POSITIONS} < same == {name for name in weights if "linear" not in name and name != OUTPUT}
    for name in weights.keys() - same:
        scale = weights[name].abs().amax(-1, keepdim=True) / (levels // 2)
        close((rounded[name] / scale).round() * scale, rounded[name])
        assert (rounded[name] - weights[name]).abs().max() <= scale.max() / 2 + 1e-6
        assert max(len(row.unique()) for row in rounded[name].flatten(0, 1)) <= levels
        assert torch.equal(rounded[name][1], quantised(weights[name][1], levels.bit_length()))
    assert rollout_weights(weights, "float32") is weights


def test_flips_take_every_other_expert_alike_and_variants_of_a_seed_share_them() -> None:
    chosen = torch.arange(4).repeat(2, 10_000)
    always = ExpertFlips(1.0, 4, [0, 1])(chosen)
    counts = ((always - chosen) % 4).flatten().bincount(minlength=4)
    assert counts[0] == 0 and (counts[1:] / counts.sum() - 1 / 3).abs().max() < 0.01
    assert ((ExpertFlips(0.25, 4, [0, 1])(chosen) != chosen).float().mean(1) - 0.25).abs().max() < 0.01
    flips, zeros = ExpertFlips(0.5, 4, [7, 8]), torch.zeros(4, 100, dtype=torch.long)  # two variants of two seeds
    first, second = flips(zeros), flips(zeros)
    assert torch.equal(first[:2], first[2:])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)
    assert torch.equal(ExpertFlips(0.5, 4, [8])(zeros[:1])[0], first[1])


# ------------------------------------------------------------------------------------------------ reward, optimizer


def reward_of(task: Task, prompt: list[int], response: list[int]) -> tuple[float, float]:
    """(dense, exact) of one response up to its end, with plain lists."""
    target = task.target(prompt)
    right = sum(a == b for a, b in zip(target, response, strict=False))
    return right / max(len(target), len(response)), float(response == target)


def until_end(task: Task, ids: list[int]) -> list[int]:
    end = ids.index(task.eos) + 1 if task.eos in ids else len(ids)
    return ids[: min(end, task.max_response)]


@given(data=st.data(), name=st.sampled_from(sorted(TASKS)), seed=st.integers(0, 99))
def test_scores_are_those_of_plain_lists(data: st.DataObject, name: str, seed: int) -> None:
    task = get_task(name)
    prompts, answers = questions(task, 4, [seed])
    changes = st.lists(st.tuples(st.integers(0, task.max_response - 1), st.integers(0, task.vocab - 1)), max_size=3)
    responses = []
    for prompt in prompts[0].tolist():
        target = task.target(prompt)
        ids = [*target, *[0] * (task.max_response - len(target))]
        for place, token in data.draw(changes):
            ids[place] = token
        responses.append(until_end(task, ids))
    padded = torch.tensor([[row + [PAD] * (task.max_response - len(row)) for row in responses]])
    mask = torch.tensor([[[t < len(row) for t in range(task.max_response)] for row in responses]])
    found = score(answers, Responses(padded, mask.float(), mask))
    expected = [reward_of(task, *pair) for pair in zip(prompts[0].tolist(), responses, strict=True)]
    for mine, plain in zip(found, zip(*expected, strict=True), strict=True):
        assert mine[0].tolist() == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks(name: str) -> None:
    task = get_task(name)
    train, held_out = task.prompts(300, 3), task.prompts(300, 3, "held_out")
    assert train == task.prompts(300, 3) != task.prompts(300, 4)
    assert not set(map(tuple, train)) & set(map(tuple, held_out))
    assert len({len(prompt) for prompt in train + held_out}) == 1
    for prompt in train:
        digits, target = [id_ for id_ in prompt if id_ < 10], task.target(prompt)
        assert target == digits[::-1] + ([] if task.eos is None else [EOS])
        assert max(*prompt, *target) < task.vocab and len(target) <= task.max_response and PAD not in prompt + target


def test_every_run_is_torchs_adamw_after_clipping_and_one_that_is_not_finite_stops_for_good() -> None:
    settings = small(betas=(0.8, 0.9), clip_grad=0.5)
    generator = torch.Generator().manual_seed(0)
    weights = {str(i): torch.randn((4, *size), generator=generator) for i, size in enumerate(((3, 4), (5,), (2, 6)))}
    alone = [[torch.nn.Parameter(weight[n].clone()) for weight in weights.values()] for n in range(4)]
    options: dict[str, Any] = {"lr": 1e-2, "betas": settings.betas, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(parameters, **options) for parameters in alone]
    batched = BatchedAdamW(weights, settings, 1e-2, 0.1)
    scales = torch.tensor([10.0, 0.2, 1e-3, 1.0])  # norms far above, about and far below the clip's
    for step in range(6):
        gradients = [torch.randn(weight.shape, generator=generator) for weight in weights.values()]
        gradients = [gradient * scales.view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]
        if step == 2:
            gradients[1][3, 0] = (torch.inf, torch.nan)[step % 2]
        norms = batched.step(gradients).tolist()
        assert norms[0] > 0.5 > norms[2] and math.isfinite(norms[3]) == (step != 2)
        for n in range(3 if step >= 2 else 4):
            for parameter, gradient in zip(alone[n], gradients, strict=True):
                parameter.grad = gradient[n].clone()
            assert norms[n] == pytest.approx(torch.nn.utils.clip_grad_norm_(alone[n], 0.5).item(), rel=1e-5)
            optimizers[n].step()
        for n, parameters in enumerate(alone):
            for parameter, weight in zip(parameters, weights.values(), strict=True):
                torch.testing.assert_close(weight[n], parameter.detach(), atol=1e-6, rtol=1e-5)
    assert batched.live.tolist() == [True, True, True, False]


# -------------------------------------------------------------------------------------------------------- the loop


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


@pytest.mark.parametrize(
    ("settings", "evaluated", "measured"),
    [
        ({"steps": 10, "eval_every": 4}, [0, 4, 8, 10], [1, 5, 9]),
        ({"steps": 10, "eval_every": 8}, [0, 8, 10], [1, 9]),
        ({"steps": 6, "eval_every": 0}, [0, 6], [1]),
        ({"steps": 3, "eval_every": 1}, [0, 1, 2, 3], [1]),
    ],
)
def test_what_is_recorded_when(warm: Weights, settings: Any, evaluated: list[int], measured: list[int]) -> None:
    rows = [block[0] for block in records_of(small(**settings), run_of(warm, 0))]
    assert [row["step"] for row in rows] == [*range(settings["steps"] + 1)]
    assert [row["step"] for row in rows if "held_out_exact" in row] == evaluated
    assert rows[0].keys() == {"step", "held_out_exact"}
    for name in ("metrics", "impossible_tokens"):
        assert [row["step"] for row in rows if name in row] == measured
    always = {"reward", "exact", "response_length", "weight_version", "loss", "grad_norm"}
    assert all(always < row.keys() for row in rows[1:])


@pytest.mark.parametrize(
    ("staleness", "versions"), [(0, [0] * 4 + [4] * 4 + [8] * 2), (3, [0] * 4 + [1] * 4 + [5] * 2), (9, [0] * 10)]
)
def test_staleness_is_counted_in_optimizer_steps(warm: Weights, staleness: int, versions: list[int]) -> None:
    runs = Runs(small(steps=10, staleness=staleness), [0], CONFIGS[:1], run_of(warm, 0))
    after: dict[int, Weights] = {}
    for block in runs.steps():
        after[block[0]["step"]] = map_weights(runs.weights, lambda w: w.detach().clone())
        assert all(torch.equal(kept[OUTPUT], after[version][OUTPUT]) for version, kept in runs.versions.items())
        if block[0]["step"]:
            assert block[0]["weight_version"] == versions.pop(0)
    assert not versions


def test_only_the_rollout_engine_differs(warm: Weights) -> None:
    """π_old is of the temperature and the experts that π_θ has; what sampled is apart where the setting says so."""
    mixed = warm_up(small(experts=3, warm_up_steps=8), [0, 1])
    for settings, weights, apart in (
        (small(temperature=0.7), warm, False),
        (small(rollout_dtype="int2"), warm, True),
        (small(experts=3), mixed, False),
        (small(experts=3, expert_flips=0.5), mixed, True),
    ):
        metrics = records_of(settings, weights)[1][0]["metrics"]
        assert metrics["rollout_corr/ppo_kl"] == pytest.approx(0.0, abs=1e-6)  # π_θ against π_old
        k3 = metrics["rollout_corr/k3_kl"]  # π_old against what sampled
        assert k3 > 1e-4 if apart else k3 == pytest.approx(0.0, abs=1e-7)


def test_a_mini_batch_is_its_share_of_every_prompts_responses() -> None:
    rows = torch.arange(8.0)[None]  # two prompts with four responses each
    drawn = Responses(rows[..., None], rows[..., None] + 10, rows[..., None] >= 0)
    batch = Batch(torch.zeros(1, 2, 3), drawn, rows + 20, 0, rows[..., None] + 30)
    for j, expected in enumerate(([0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0])):
        part = batch.mini(j, 2)
        assert part.old_NBR is not None
        columns = (part.drawn.ids, part.drawn.log_probs - 10, part.advantages_NB - 20, part.old_NBR - 30)
        assert all(column.flatten().tolist() == expected for column in columns)


def test_rewards_and_advantages_are_of_what_was_drawn(warm: Weights) -> None:
    settings = small(task="reverse")
    runs = Runs(settings, [0, 1], CONFIGS[:2], warm_up(small(task="reverse", warm_up_steps=4), [0, 1]))
    runs._keep(0)
    batch, facts = runs._roll_out(0)
    task, ended = get_task("reverse"), False
    for n in range(4):
        assert batch.prompts_NPT[n].tolist() == task.prompts(8, seed_for(n % 2, "prompts", 0))
        lengths = batch.drawn.mask[n].sum(-1).tolist()
        responses = [ids[:length] for ids, length in zip(batch.drawn.ids[n].tolist(), lengths, strict=True)]
        ended |= any(EOS in response and len(response) < 7 for response in responses)
        scored = [reward_of(task, batch.prompts_NPT[n][b // 4].tolist(), ids) for b, ids in enumerate(responses)]
        dense = torch.tensor([score[0] for score in scored])
        assert facts[n]["reward"] == pytest.approx(dense.mean().item())
        assert facts[n]["exact"] == pytest.approx(sum(score[1] for score in scored) / 32)
        assert facts[n]["response_length"] == pytest.approx(sum(lengths) / 32)
        groups = dense.view(8, 4)
        expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        close(batch.advantages_NB[n].view(8, 4), expected, 1e-3)
    assert ended


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
    assert [row["impossible_tokens"] for row in records_of(small(), warm)[1]] == [0.0, 0.0]


@pytest.mark.parametrize("overflows", [False, True])
def test_a_run_that_breaks_stops_alone(warm: Weights, overflows: bool) -> None:
    broken = map_weights(warm, torch.Tensor.clone)
    if overflows:
        broken[OUTPUT][1] = 1e38  # log-probs that are not finite, which the loss refuses
    else:
        broken[FINAL_NORM][1] *= 1e-30
        broken[OUTPUT][1] *= 1e30  # the same logits, and a gradient whose square is more than float32 holds
    sound = records_of(small(), warm, CONFIGS[:2])
    runs = Runs(small(), [0, 1], CONFIGS[:2], broken)
    blocks = [*runs.steps()]
    assert [block[::2] for block in blocks] == [block[::2] for block in sound]
    assert runs.optimizer.live.tolist() == [True, False, True, False]
    assert all(not math.isfinite(block[1]["grad_norm"]) for block in blocks[1:])
    assert all(torch.equal(weight[1], broken[name][1]) for name, weight in runs.weights.items())


# ---------------------------------------------------------------------------------------------- evaluation, warm-up


@pytest.mark.parametrize("eos", [None, EOS])
def test_exact_match_is_the_expectation(eos: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all 14² or 14³ responses, each scored with plain lists."""
    length, solve = (2, lambda x: x[::-1]) if eos is None else (3, lambda x: x[: 1 + x[1] % 2])
    task = Task("tiny", lambda draw: draw.choices(range(10), k=2), solve, length, eos=eos)
    monkeypatch.setitem(TASKS, "tiny", task)
    settings, (prompts, answers) = small(task="tiny", temperature=0.5), questions(task, 3, [4, 5], "held_out")
    weights = {n: w * (20 if n == OUTPUT else 1) for n, w in weights_of(0, 1, task="tiny").items()}
    found, right = exact_match(settings, weights, prompts, answers)
    every, lengths = torch.tensor([*itertools.product(range(14), repeat=length)]), set()
    for n in range(2):
        expected, of_tokens = [], []
        for prompt in prompts[n]:
            at_one = small(task="tiny"), run_of(weights, n), prompt[None, None]
            p = token_log_probs(*at_one, every[None])[0].sum(-1).exp().tolist()
            scores = [reward_of(task, prompt.tolist(), until_end(task, ids))[1] for ids in every.tolist()]
            expected.append(sum(a * b for a, b in zip(p, scores, strict=True)))
            target = task.target(prompt.tolist())
            lengths.add(len(target))
            of_tokens += token_log_probs(*at_one, torch.tensor([[target]])).exp().flatten().tolist()
        assert found[n].item() == pytest.approx(sum(expected) / 3, rel=1e-4)
        assert right[n].item() == pytest.approx(sum(of_tokens) / len(of_tokens), rel=1e-4)
    assert lengths == ({2} if eos is None else {2, 3})


def test_warm_up_stops_each_seed_at_the_target_and_follows_from_its_key() -> None:
    settings, seeds = small(warm_up_target=0.2, warm_up_steps=80), [0, 1, 2]
    held_out = questions(get_task("reverse6"), 16, [seed_for(seed, "held-out") for seed in seeds], "held_out")
    weights = warm_up(settings, seeds)
    right = exact_match(settings, weights, *held_out)[1]
    assert (right >= 0.2).all() and (right < 0.3).all()
    short = warm_up(small(warm_up_target=0.2, warm_up_steps=4), seeds)
    assert (exact_match(settings, short, *held_out)[1] < 0.2).all()
    # With nobody that stops at another step, and with all other settings changed that its file's name leaves out.
    other = settings.model_copy(update={"lr": 1.0, "weight_decay": 0.5, "temperature": 0.5, "staleness": 3, "steps": 9})
    assert other.warm_up_key(2) == settings.warm_up_key(2) != settings.warm_up_key(1)
    alone = warm_up(other, [2])
    assert all(torch.equal(weight[0], weights[name][2]) for name, weight in alone.items())


def test_warm_weights_are_kept_and_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    settings, cache = small(warm_up_steps=4), tmp_path / "warm"
    first = warm_weights(settings, [4, 5], cache)
    files = [cache / settings.warm_up_key(seed) for seed in (4, 5)]
    assert sorted(cache.iterdir()) == sorted(files)
    torch.save({name: weight[0] + 1 for name, weight in first.items()}, files[0])
    for damage in (b"", files[1].read_bytes()[:1000], b"no weights"):
        files[1].write_bytes(damage)
        found = warm_weights(settings, [5, 4], cache)
        assert all(torch.equal(found[name][1], weight[0] + 1) for name, weight in first.items())  # found
        assert all(torch.equal(found[name][0], weight[1]) for name, weight in first.items())  # made again
        assert sorted(cache.iterdir()) == sorted(files) and torch.load(files[1], weights_only=True)
