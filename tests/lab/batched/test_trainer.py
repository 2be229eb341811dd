"""The loop over many runs: scores, evaluation, warm-up, what is reported when, and runs that do not touch each other.

That it trains as the megatron-core lab does is shown in test_megatron.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.lab.batched.mini_batches import mini_batch
from mismatch_plugin.lab.batched.model import (
    FINAL_NORM,
    OUTPUT,
    Weights,
    map_weights,
    response_log_probs,
    token_log_probs,
)
from mismatch_plugin.lab.batched.rollout import Responses
from mismatch_plugin.lab.batched.trainer import Questions, Runs, exact_match, scores, shape_of, train, warm_up
from mismatch_plugin.lab.compare import variant_config
from mismatch_plugin.lab.tasks import EOS, TASKS, Task, get_task
from tests.lab.batched.problem import SHAPE, small, weights_of

CONFIGS = [variant_config(label) for label in ("0", "1", "2:token", "3:sequence")]
Records = list[list[list[dict[str, Any]]]]


def _without_seconds(blocks: Records) -> Records:
    return [
        [[{k: v for k, v in record.items() if k != "seconds"} for record in row] for row in block] for block in blocks
    ]


def _ended(task: Task, ids: list[int]) -> list[int]:
    """The response up to its end, at most `max_response` tokens."""
    end = ids.index(task.eos) + 1 if task.eos in ids else len(ids)
    return ids[: min(end, task.max_response)]


# ------------------------------------------------------------------------------------------- scores and evaluation


@given(data=st.data(), name=st.sampled_from(TASKS), seed=st.integers(0, 99))
def test_scores_are_the_tasks(data: st.DataObject, name: str, seed: int) -> None:
    task = get_task(name)
    prompts = task.prompts(4, seed)
    targets = [task.target(prompt) for prompt in prompts]
    changes = st.lists(st.tuples(st.integers(0, task.max_response - 1), st.integers(0, task.vocab - 1)), max_size=3)
    responses = []
    for target in targets:
        ids = [*target, *[0] * (task.max_response - len(target))]
        for place, token in data.draw(changes):
            ids[place] = token
        responses.append(_ended(task, ids))
    width = task.max_response

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[row + [task.pad] * (width - len(row)) for row in rows]])

    mask = torch.tensor([[[t < len(row) for t in range(width)] for row in responses]])
    found = scores(task, padded(targets), Responses(padded(responses), mask.float(), mask))
    expected = [task.score(*pair) for pair in zip(prompts, responses, strict=True)]
    assert found.dense[0].tolist() == pytest.approx([score.dense for score in expected], abs=1e-6)
    assert found.exact[0].tolist() == [score.exact for score in expected]


def _solve_first(digits: list[int]) -> list[int]:
    return digits[: 1 + digits[1] % 2]


@pytest.mark.parametrize(
    "task",
    [
        Task("two", lambda draw: draw.choices(range(10), k=2), lambda digits: digits[::-1], 2, eos=None),
        Task("ends", lambda draw: draw.choices(range(10), k=2), _solve_first, 3),  # answers of two and of three tokens
    ],
    ids=["fixed length", "with an end"],
)
def test_exact_match_is_the_expectation(task: Task) -> None:
    """Over all 14² or 14³ responses, each scored by the task."""
    shape = SHAPE._replace(max_length=4 + task.max_response)
    weights, held_out = weights_of(0, 1, shape=shape), Questions.drawn(task, 3, [4, 5], "held_out")
    sharper = {name: weight * (20 if name == OUTPUT else 1) for name, weight in weights.items()}
    found, right = exact_match(shape, task, sharper, held_out)
    every = torch.tensor([*itertools.product(range(task.vocab), repeat=task.max_response)])
    lengths = set()
    for n in range(2):
        expected, of_tokens = [], []
        for prompt in held_out.prompts[n]:
            one = map_weights(sharper, lambda w, n=n: w[n : n + 1])
            table = response_log_probs(shape, one, prompt[None, None], every[None])[0]
            p = table.gather(2, every[..., None])[..., 0].sum(-1).exp().tolist()
            score = [task.score(prompt.tolist(), _ended(task, ids)).exact for ids in every.tolist()]
            expected.append(sum(a * b for a, b in zip(p, score, strict=True)))
            target = task.target(prompt.tolist())
            lengths.add(len(target))
            own = token_log_probs(shape, one, prompt[None, None], torch.tensor([[target]]))
            of_tokens += own.exp().flatten().tolist()
        assert found[n].item() == pytest.approx(sum(expected) / 3, rel=1e-4)
        assert right[n].item() == pytest.approx(sum(of_tokens) / len(of_tokens), rel=1e-4)
    assert lengths == ({2} if task.eos is None else {2, 3})


def test_questions_are_those_of_the_seeds() -> None:
    settings = small()
    task, held_out = get_task("reverse6"), Questions.held_out(settings, [3, 4])
    for n, seed in enumerate((3, 4)):
        given_ = settings.model_copy(update={"seed": seed}).seed_for("held-out")
        prompts = task.prompts(16, given_, "held_out")
        assert held_out.prompts[n].tolist() == prompts
        assert held_out.answers[n].tolist() == [task.target(prompt) for prompt in prompts]
    assert torch.equal(held_out.times(3).prompts, held_out.prompts[[0, 1, 0, 1, 0, 1]])


# --------------------------------------------------------------------------------------------------------- warm-up


def test_warm_up_stops_each_seed_at_the_target() -> None:
    settings = small(warm_up_target=0.2, warm_up_steps=80)
    shape, task = shape_of(settings), get_task("reverse6")
    weights = warm_up(settings, [0, 1, 2])
    right = exact_match(shape, task, weights, Questions.held_out(settings, [0, 1, 2]))[1]
    assert (right >= 0.2).all() and (right < 0.3).all()
    short = warm_up(small(warm_up_target=0.2, warm_up_steps=4), [0])
    assert exact_match(shape, task, short, Questions.held_out(settings, [0]))[1] < 0.2
    alone = warm_up(settings, [2])  # with nobody that stops at another step
    assert all(torch.equal(weight[0], weights[name][2]) for name, weight in alone.items())


def test_warm_weights_follow_from_their_key() -> None:
    """What is not in the key does not change them: settings of one problem share a file."""
    one = small(warm_up_steps=4)
    other = small(
        warm_up_steps=4, lr=1.0, weight_decay=0.5, temperature=0.5, rollout_dtype="int2", staleness=3, steps=9
    )
    assert one.warm_up_key == other.warm_up_key
    mine, its = warm_up(one, [0]), warm_up(other, [0])
    assert all(torch.equal(weight, its[name]) for name, weight in mine.items())


# -------------------------------------------------------------------------------------------------------- the loop


@pytest.fixture(scope="module")
def warm() -> Weights:
    """Of seeds 0 and 1."""
    return warm_up(small(), [0, 1])


def test_training_twice_gives_the_same_records(warm: Weights) -> None:
    settings = small(rollout_dtype="int4", steps=8)
    one, two = ([*train(settings, [0, 1], CONFIGS, warm)] for _ in range(2))
    assert _without_seconds(one) == _without_seconds(two)
    assert one[-1][0][0]["loss"] != one[-1][0][1]["loss"]


def test_a_run_does_not_depend_on_those_it_runs_with(warm: Weights) -> None:
    settings = small(rollout_dtype="int4", steps=8)
    doubled = [CONFIGS[0], CONFIGS[2], CONFIGS[0]]
    together = Runs(settings, [0, 1], doubled, warm)
    blocks = _without_seconds([*together.steps()])
    assert all(block[0] == block[2] for block in blocks) and blocks[-1][0] != blocks[-1][1]
    alone = Runs(settings, [1], [CONFIGS[2]], map_weights(warm, lambda w: w[1:]))
    assert [block[0][0] for block in _without_seconds([*alone.steps()])] == [block[1][1] for block in blocks]
    assert all(torch.equal(weight[0], together.weights[name][3]) for name, weight in alone.weights.items())


def test_the_caller_keeps_its_weights(warm: Weights) -> None:
    before = map_weights(warm, torch.Tensor.clone)
    assert len([*train(small(), [0, 1], CONFIGS[:1], warm)]) == 5
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
def test_what_is_reported_when(
    warm: Weights, settings: dict[str, int], evaluated: list[int], measured: list[int]
) -> None:
    rows = [block[0][0] for block in train(small(**settings), [0], CONFIGS[:1], map_weights(warm, lambda w: w[:1]))]
    assert [row["step"] for row in rows] == [*range(settings["steps"] + 1)]
    assert [row["step"] for row in rows if "held_out_exact" in row] == evaluated and rows[0].keys() == {
        "step",
        "held_out_exact",
    }
    for name in ("metrics", "impossible_tokens"):
        assert [row["step"] for row in rows if name in row] == measured
    always = {"reward", "exact", "response_length", "weight_version", "loss", "grad_norm", "seconds"}
    assert all(always < row.keys() for row in rows[1:])


@pytest.mark.parametrize(
    ("staleness", "versions"), [(0, [0] * 4 + [4] * 4 + [8] * 2), (3, [0] * 4 + [1] * 4 + [5] * 2), (9, [0] * 10)]
)
def test_staleness_is_counted_in_optimizer_steps(warm: Weights, staleness: int, versions: list[int]) -> None:
    settings = small(steps=10, staleness=staleness)
    runs = Runs(settings, [0], CONFIGS[:1], map_weights(warm, lambda w: w[:1]))
    after: dict[int, Weights] = {}
    for block in runs.steps():
        after[block[0][0]["step"]] = map_weights(runs.weights, lambda w: w.detach().clone())
        assert all(torch.equal(kept[OUTPUT], after[version][OUTPUT]) for version, kept in runs.versions.items())
        if block[0][0]["step"]:
            assert block[0][0]["weight_version"] == versions.pop(0)
    assert not versions


def test_both_passes_are_at_the_temperature_of_sampling(warm: Weights) -> None:
    first = [*train(small(temperature=0.7), [0, 1], CONFIGS[:1], warm)][1][0][0]["metrics"]
    assert first["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-5)  # π_old against what sampled
    assert first["rollout_corr/ppo_kl"] == pytest.approx(0.0, abs=1e-6)  # π_θ against π_old


def test_the_optimizer_has_the_settings(warm: Weights) -> None:
    changes = {"lr": 1e-3, "betas": (0.5, 0.6), "weight_decay": 0.1, "clip_grad": 0.2}
    runs = Runs(small(**changes), [0, 1], CONFIGS[:1], warm)
    found = {**runs.optimizer.adamw.defaults, "clip_grad": runs.optimizer.clip_grad}
    assert {name: found[name] for name in changes} == changes


def test_a_mini_batch_is_its_share_of_every_prompt_s_responses() -> None:
    """As `lab.trainer.Run._split` has it: of two prompts with four responses each, two mini-batches."""
    rows, prompts = torch.arange(8.0)[None], torch.zeros(1, 2, 3, dtype=torch.long)
    drawn = Responses(rows[..., None], rows[..., None] + 10, rows[..., None] >= 0)
    for j, expected in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        part = mini_batch(j, 2, prompts, drawn, rows + 20, rows + 30)
        assert part.drawn.ids.flatten().tolist() == expected
        assert part.old is not None and torch.equal(part.old - 30, part.advantages - 20)
        assert torch.equal(part.drawn.log_probs[..., 0] - 10, part.advantages - 20)
        assert part.advantages.flatten().tolist() == [20 + row for row in expected]


def test_rewards_are_the_means_of_what_was_drawn(warm: Weights) -> None:
    settings = small(task="reverse")
    runs = Runs(settings, [0, 1], CONFIGS[:2], warm_up(settings.model_copy(update={"warm_up_steps": 4}), [0, 1]))
    runs._keep(0)
    prompts, drawn, advantages, facts = runs._roll_out(0)
    task = get_task("reverse")
    for n in range(4):
        rows = zip(drawn.ids[n].tolist(), drawn.mask[n].sum(-1).tolist(), strict=True)
        responses = [ids[:length] for ids, length in rows]
        scored = [task.score(prompts[n][b // 4].tolist(), response) for b, response in enumerate(responses)]
        assert facts[n]["reward"] == pytest.approx(sum(score.dense for score in scored) / 32)
        assert facts[n]["exact"] == pytest.approx(sum(score.exact for score in scored) / 32)
        assert facts[n]["response_length"] == pytest.approx(sum(map(len, responses)) / 32)
        assert any(EOS in response and len(response) < 7 for response in responses)
        for first in range(0, 32, 4):  # a group's best response has its largest advantage, and they add up to 0
            dense = [score.dense for score in scored[first : first + 4]]
            group = advantages[n, first : first + 4]
            assert group.sum().item() == pytest.approx(0, abs=1e-5)
            assert dense[int(group.argmax())] == max(dense)


def test_impossible_tokens_by_hand(warm: Weights) -> None:
    """A trainer that is far more certain than its int2 rollouts finds many of their tokens impossible."""
    certain = {name: weight * (8 if name == OUTPUT else 1) for name, weight in warm.items()}
    settings = small(rollout_dtype="int2")
    runs = Runs(settings, [0, 1], CONFIGS[:2], certain)
    runs._keep(0)
    prompts, drawn, _, _ = runs._roll_out(0)
    log_probs = token_log_probs(SHAPE, runs.weights, prompts, drawn.ids)[:, ::4]  # the first of four mini-batches
    expected = (log_probs.detach().exp() < 1e-4).float().mean((1, 2)).tolist()
    first = [*Runs(settings, [0, 1], CONFIGS[:2], certain).steps()][1]
    assert [row["impossible_tokens"] for block in first for row in block] == pytest.approx(expected)
    assert all(0.02 < share < 0.9 for share in expected)
    sync = [*train(small(), [0, 1], CONFIGS[:1], warm)][1]
    assert [row["impossible_tokens"] for row in sync[0]] == [0.0, 0.0]


def test_seconds_are_shared_by_those_that_took_part(warm: Weights) -> None:
    blocks = [*train(small(steps=8), [0, 1], CONFIGS, warm)]
    for step, block in enumerate(blocks[1:]):
        rows = [row["seconds"] for variant in block for row in variant]
        assert all(row["train"] == rows[0]["train"] > 0 for row in rows)
        assert all((row["rollout"] > 0) == (step % 4 == 0) for row in rows)  # of a rollout batch's first step
        # Bypass, and algorithm 3, need no pass for π_old.
        assert [row["old_log_probs"] > 0 for row in rows] == [x and step % 4 == 0 for x in (1, 1, 0, 0, 1, 1, 0, 0)]


def test_a_run_that_breaks_stops_alone(warm: Weights) -> None:
    broken = map_weights(warm, torch.Tensor.clone)
    broken[FINAL_NORM][1] *= 1e-30
    broken[OUTPUT][1] *= 1e30  # the same logits, and a gradient whose square is more than float32 holds
    sound = _without_seconds([*train(small(), [0, 1], CONFIGS[:1], warm)])
    runs = Runs(small(), [0, 1], CONFIGS[:1], broken)
    blocks = _without_seconds([*runs.steps()])
    assert [block[0][0] for block in blocks] == [block[0][0] for block in sound]
    assert runs.optimizer.live.tolist() == [True, False]
    assert all(torch.equal(weight[1], broken[name][1]) for name, weight in runs.weights.items())


def test_a_run_whose_weights_overflow_stops_alone(warm: Weights) -> None:
    """Its log-probs are NaN, which the loss refuses."""
    broken = map_weights(warm, torch.Tensor.clone)
    broken[OUTPUT][1] = 1e38
    sound = _without_seconds([*train(small(), [0, 1], CONFIGS[:2], warm)])
    runs = Runs(small(), [0, 1], CONFIGS[:2], broken)
    blocks = _without_seconds([*runs.steps()])
    assert [[row[0] for row in block] for block in blocks] == [[row[0] for row in block] for block in sound]
    assert runs.optimizer.live.tolist() == [True, False, True, False]
    assert all(math.isnan(block[0][1]["grad_norm"]) for block in blocks[1:])


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"position": "rope", "engine": "transformers"}, {}, "position learned_absolute"),
        ({"kv_groups": 2}, {}, "kv_groups = heads"),
        ({"tp": 2}, {}, "no parallel layout"),
        ({"micro_batches": 2}, {}, "no micro-batches"),
        ({}, {"terms": {"kl_coef": 0.1}}, "no reference policy"),
        ({}, {"terms": {"entropy_coef": 0.1}}, "no entropy bonus"),
        ({}, {"rs": {"group": "exclude", "criteria": [{"upper_bound": 2.0}]}}, "--rs-group exclude"),
    ],
)
def test_what_it_does_not_have_is_refused(
    warm: Weights, settings: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(small(**settings), [0, 1], [CONFIGS[0], MismatchConfig.build(config)], warm)
