"""The lab: tasks, rollout engines, weight export, and the RL loop, which is the same in every parallel layout."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.lab.engines import TransformersEngine, draw, quantised
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.lab.tasks import BOS, EOS, FILL, PAD, SEP, TASKS, get_task
from tests.distributed.lab_worker import TINY, LabCase, LabOutcome, run_case
from tests.distributed.launch import launch

needs_lab = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("transformers") is None,
    reason="needs megatron-core and transformers",
)

DECOUPLED = {"use_tis": True}
REINFORCE = {"use_rollout_log_probs": True, "use_tis": True}
CASES = (LabCase(config=DECOUPLED), LabCase({"task": "swap", "rollout_dtype": "int4", "staleness": 1}, REINFORCE))


# ------------------------------------------------------------------------------------------------------------ tasks


def test_reverse_by_hand() -> None:
    task = get_task("reverse")
    prompt = [BOS, 1, 2, 3, 4, 5, 6, SEP]
    assert task.target(prompt) == [6, 5, 4, 3, 2, 1, EOS]
    assert task.score(prompt, [6, 5, 4, 3, 2, 1, EOS]) == (1.0, 1.0)
    assert task.score(prompt, [6, 5, 4, 3, 2, 2, EOS]) == (6 / 7, 0.0)
    assert task.score(prompt, [6, 5, EOS]) == (2 / 7, 0.0)  # stopped early: the rest is wrong
    assert task.score(prompt, [6, 5, 4, 3, 2, 1, 0]) == (6 / 7, 0.0)  # did not stop


def test_swap_by_hand() -> None:
    task = get_task("swap")
    prompt = [BOS, 3, 1, 7, 4, SEP]
    assert task.target(prompt) == [4, 1, 7, 3, EOS]
    assert task.score(prompt, [4, 1, 7, 3, EOS]) == (1.0, 1.0)
    assert task.score(prompt, [4, 1, 7, 3, 3, EOS]) == (4 / 6, 0.0)  # running on costs as much as stopping early
    assert task.score(prompt, [4, 1, 7, EOS]) == (3 / 5, 0.0)
    assert task.score(prompt, [3, 1, 7, 4, EOS]) == (3 / 5, 0.0)


def test_reverse3to9_by_hand() -> None:
    task = get_task("reverse3to9")
    prompt = [BOS, *[FILL] * 5, 0, 7, 7, 1, SEP]
    assert task.target(prompt) == [1, 7, 7, 0, EOS]
    assert task.score(prompt, [1, 7, 7, 0, 0, EOS]) == (4 / 6, 0.0)


def test_reverse3to9_has_prompts_of_one_length_and_answers_of_seven() -> None:
    task = get_task("reverse3to9")
    prompts = task.prompts(200, 0)
    assert {len(prompt) for prompt in prompts} == {11}
    assert {len(task.target(prompt)) for prompt in prompts} == {4, 5, 6, 7, 8, 9, 10}
    assert all(FILL not in prompt[prompt.index(next(i for i in prompt if i < 10)) :] for prompt in prompts)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_seeded_split_and_in_bounds(name: str) -> None:
    task = get_task(name)
    train, held_out = task.prompts(300, 0), task.prompts(300, 0, "held_out")
    assert train == task.prompts(300, 0) != task.prompts(300, 1)
    assert not {*map(tuple, train)} & {*map(tuple, held_out)}
    answers = [task.target(prompt) for prompt in train + held_out]
    assert max(map(len, answers)) <= task.max_response
    assert {i for answer in answers for i in answer} < set(range(task.vocab)) - {task.pad}


def test_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="choose one of reverse6, reverse, reverse3to9, swap"):
        get_task("sort")


# ---------------------------------------------------------------------------------------------------------- sampling


def test_top_p_log_probs_by_hand() -> None:
    # Probabilities .5 .3 .15 .05 at top-p .6: the first two stay, since .5 alone is less; renormalised .625 and .375.
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log().expand(4000, -1)
    drawn = draw(logits, 1.0, 0.6, torch.Generator().manual_seed(0))
    assert set(drawn.ids.tolist()) == {1, 3} and drawn.kept[0].tolist() == [False, True, False, True]
    likely = drawn.ids == 1
    assert likely.double().mean().item() == pytest.approx(0.625, abs=0.03)
    torch.testing.assert_close(drawn.behaviour[likely].exp(), torch.full((int(likely.sum()),), 0.625))
    torch.testing.assert_close(drawn.behaviour[~likely].exp(), torch.full((int((~likely).sum()),), 0.375))
    torch.testing.assert_close(drawn.log_probs[likely].exp(), torch.full((int(likely.sum()),), 0.5))
    greedy = draw(logits, 1.0, 1e-6, torch.Generator())  # at least one token stays
    assert greedy.ids.eq(1).all() and greedy.behaviour.eq(0).all()


def test_temperature_divides_logits_and_zero_is_greedy() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    warm = draw(logits, 2.0, 1.0, torch.Generator().manual_seed(0))
    assert warm.log_probs.item() == pytest.approx((logits / 2).log_softmax(-1)[0, warm.ids[0]].item())
    greedy = draw(logits, 0.0, 1.0, torch.Generator())
    assert greedy.ids.item() == 2 and greedy.log_probs.item() == pytest.approx(logits.log_softmax(-1)[0, 2].item())


def test_quantised_by_hand() -> None:
    weight = torch.tensor([[7.0, -3.4, 0.6], [0.0, 0.0, 0.0]])  # int4: integers from -7 to 7, scale 1 in the first row
    assert quantised(weight, 4).tolist() == [[7.0, -3.0, 1.0], [0.0, 0.0, 0.0]]
    assert (quantised(weight, 8) - weight).abs().max() <= 7 / 127 / 2 + 1e-6


# ----------------------------------------------------------------------------------------------------------- engines


def _engine(dtype: Any = "float32") -> TransformersEngine:
    config = {
        "vocab_size": 14,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    engine = TransformersEngine(config, dtype, eos=EOS, pad=PAD)
    generator = torch.Generator().manual_seed(0)
    names = engine.model.state_dict()
    state = {n: 0.3 * torch.randn(w.shape, generator=generator) + (w.dim() == 1) for n, w in names.items()}
    engine.load_weights(state, 7)
    return engine


@needs_lab
def test_prompts_of_uneven_length_are_padded_without_trace() -> None:
    prompts = [[BOS, 1, 2, 3, SEP], [BOS, SEP], [BOS, 9, 8, 7, 6, 5, SEP]]
    engine = _engine()
    together = engine.generate(prompts, samples_per_prompt=3, max_new_tokens=6, seed=0)
    assert [r.prompt_ids for r in together] == [p for p in prompts for _ in range(3)]
    for record in together:
        ids = torch.tensor([record.prompt_ids + record.response_ids])
        start = len(record.prompt_ids)
        table = engine.model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        alone = table.gather(1, ids[0, start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(record.rollout_log_probs), alone, atol=1e-5, rtol=0)


@needs_lab
def test_records_of_an_engine() -> None:
    engine = _engine()
    draws = [engine.generate([[BOS, 1, SEP]], samples_per_prompt=64, max_new_tokens=5, seed=s) for s in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert [r.response_ids for r in draws[0]] != [r.response_ids for r in draws[2]]
    assert {r.finish_reason for r in draws[0]} == {"stop", "length"}
    for record in draws[0]:
        length = len(record.response_ids)
        assert (record.finish_reason == "stop") == (record.response_ids[-1] == EOS)
        assert EOS not in record.response_ids[:-1] and (length == 5 or record.finish_reason == "stop")
        assert len(record.rollout_log_probs) == length and record.version_of_token == ["7"] * length
        assert record.behaviour_log_probs is None and not record.faults()
    filtered = engine.generate([[BOS, 1, SEP]], samples_per_prompt=64, max_new_tokens=5, top_p=0.5, seed=0)
    pairs = [p for r in filtered for p in zip(r.behaviour_log_probs or (), r.rollout_log_probs, strict=True)]
    # At least half is kept.
    assert all(f is not None and b is not None and f < b <= math.log(2) + f + 1e-6 for b, f in pairs)


@needs_lab
@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [("bfloat16", 1e-3, 0.3), ("float16", 1e-5, 0.05), ("int8", 1e-3, 0.3), ("int4", 0.05, 9)],
)
def test_other_forms_differ_visibly(dtype: str, least: float, most: float) -> None:
    prompt = [BOS, *range(10), SEP]
    exact = _engine().model(input_ids=torch.tensor([prompt])).logits.log_softmax(-1)
    other = _engine(dtype).model(input_ids=torch.tensor([prompt])).logits.float().log_softmax(-1)
    assert least < (exact - other).abs().max().item() < most


@needs_lab
def test_weights_that_do_not_fit_are_named() -> None:
    engine = _engine()
    short = {name: weight for name, weight in engine.model.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        engine.load_weights(short, 1)


# -------------------------------------------------------------------------------------------------- parallel layouts


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[LabOutcome]]:
    """Layout -> outcomes of CASES on rank 0, with what only the last rank has."""
    two = [LabCase({**case.settings, size: 2}, case.config) for size in ("tp", "pp") for case in CASES]
    one = [run_case(case) for case in CASES]
    both = launch(run_case, two, 2, timeout=120)
    merged = [LabOutcome(last.by_megatron, first.by_engine, first.records) for first, last in both]
    assert all(not last.records for _, last in both)  # rank 0 alone reports
    return {"one": one, "tp": merged[: len(CASES)], "pp": merged[len(CASES) :]}


@needs_lab
@pytest.mark.parametrize("layout", ["one", "tp", "pp"])
def test_exported_weights_give_the_same_log_probs(outcomes: dict[str, list[LabOutcome]], layout: str) -> None:
    for outcome in outcomes[layout]:
        (by_megatron,) = outcome.by_megatron
        by_engine = [value for row in outcome.by_engine for value in row]
        assert by_megatron == pytest.approx(by_engine, abs=1e-4)
        assert max(by_engine) - min(by_engine) > 0.1


@needs_lab
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_first_step_is_the_same_in_every_layout(outcomes: dict[str, list[LabOutcome]], layout: str) -> None:
    for one, other in zip(outcomes["one"], outcomes[layout], strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert other.records[1][name] == pytest.approx(one.records[1][name], rel=1e-4, abs=1e-6)
        assert other.records[1]["metrics"].keys() == one.records[1]["metrics"].keys() != set()
        assert len(other.records) == len(one.records) == TINY["steps"] + 1


def test_engines_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout_dtype int4 is not made by the engine sglang"):
        LabSettings.model_validate({"engine": "sglang", "rollout_dtype": "int4"})
    with pytest.raises(ValueError, match="Input should be 'transformers', 'sglang' or 'batched'"):
        LabSettings.model_validate({"engine": "vllm"})


# ------------------------------------------------------------------------------------------------------------ the loop


def _train(config: dict[str, Any], weights: Any = None, **settings: Any) -> list[dict[str, Any]]:
    from mismatch_plugin.lab.policy import Policy
    from mismatch_plugin.lab.trainer import train

    chosen = LabSettings.model_validate({**TINY, **settings})
    weights = weights or Policy(chosen, None, lr=1.0).weights()
    records: list[dict[str, Any]] = []
    assert train(chosen, mp.MismatchConfig.model_validate(config), weights, records.append)
    return records


def _without_seconds(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@needs_lab
def test_same_seed_same_run() -> None:
    runs = [_without_seconds(_train(DECOUPLED, seed=seed)) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


@needs_lab
def test_staleness_is_counted_in_optimizer_steps() -> None:
    from mismatch_plugin.lab import trainer

    class Recording(TransformersEngine):
        """Keeps what it was given."""

        def load_weights(self, state_dict: Any, version: int) -> None:
            super().load_weights(state_dict, version)
            loaded[version] = state_dict["lm_head.weight"].clone()

    settings = LabSettings.model_validate({**TINY, "steps": 10, "staleness": 3, "eval_every": 1})
    policy = trainer.Policy(settings, None, lr=1.0)
    config = trainer.llama_config(trainer.model_settings(settings))
    loaded: dict[int, torch.Tensor] = {}
    records: list[dict[str, Any]] = []
    engine = Recording(config, eos=EOS, pad=PAD)
    trainer.train(settings, mp.MismatchConfig(), policy.weights(), records.append, engine=engine)
    assert [record["weight_version"] for record in records[1:]] == [0, 0, 0, 0, 1, 1, 3, 3, 5, 5]

    # The weights of version 3 are really those after three steps: a run of three steps ends with them.
    short = settings.model_copy(update={"steps": 3})
    policy = trainer.Policy(settings, None, lr=1.0)
    run = trainer.Run(short, mp.MismatchConfig(), policy.weights(), lambda record: None, None)
    run.all_steps()
    assert torch.equal(run.policy.export()["lm_head.weight"], loaded[3])
    assert not torch.equal(loaded[3], loaded[1])


@needs_lab
@pytest.mark.parametrize("config", [{}, {"use_rollout_log_probs": True}, DECOUPLED, REINFORCE])
def test_old_log_probs_pass_is_skipped_where_it_is_not_needed(config: dict[str, Any]) -> None:
    step = _train(config, steps=2)[1]
    skipped = bool(config.get("use_rollout_log_probs"))
    assert (step["seconds"]["old_log_probs"] == 0.0) == skipped
    assert step["seconds"]["rollout"] > 0 and step["seconds"]["train"] > 0
    assert step["metrics"]["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-5)  # float32 and in sync


@needs_lab
def test_top_p_and_quantisation_show_in_the_metrics() -> None:
    ratio = "rollout_corr/rollout_is_mean"
    filtered = _train(DECOUPLED, top_p=0.5, steps=1)[1]["metrics"]
    full = _train(DECOUPLED, top_p=0.5, top_p_log_probs="full", steps=1)[1]["metrics"]
    masked = _train(DECOUPLED, top_p=0.5, top_p_log_probs="masked", steps=1)[1]["metrics"]
    assert 0.45 < filtered[ratio] < 0.8 and full[ratio] == pytest.approx(1.0, abs=1e-4)
    assert masked[ratio] == pytest.approx(1.0, abs=1e-4) and masked["rollout_corr/k3_kl"] < 1e-6
    assert _train(DECOUPLED, rollout_dtype="int4", steps=1)[1]["metrics"]["rollout_corr/k3_kl"] > 1e-5


@needs_lab
def test_staleness_counts_from_the_weights_that_train() -> None:
    config = {"rs": {"max_staleness": 1}}
    for staleness, kept in ((0, [1.0, 1.0, 1.0]), (2, [1.0, 1.0, 0.0])):  # the first rollouts are of step 0
        steps = _train(config, staleness=staleness, steps=3)[1:]
        assert [step["metrics"]["rollout_corr/accepted_token_fraction"] for step in steps] == kept


@needs_lab
def test_a_server_as_engine_must_be_given(tmp_path: Path) -> None:
    from mismatch_plugin.lab.run import run_one

    with pytest.raises(ValueError, match="the engine is sglang: give the one to roll out with"):
        _train({}, engine="sglang")
    settings = LabSettings.model_validate(TINY)
    with pytest.raises(ValueError, match="give both of one kind"):
        run_one(settings, mp.MismatchConfig(), tmp_path, server_url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="give both of one kind"):
        run_one(settings.model_copy(update={"engine": "sglang"}), mp.MismatchConfig(), tmp_path)


@needs_lab
def test_it_learns(tmp_path: Path) -> None:
    from mismatch_plugin.lab.trainer import warm_up

    settings = {"hidden": 64, "ffn": 192, "prompts_per_batch": 16, "samples_per_prompt": 8, "seed": 1}
    chosen = LabSettings.model_validate({**TINY, **settings, "warm_up_target": 0.5, "eval_prompts": 128})
    weights = warm_up(chosen, tmp_path)
    again = warm_up(chosen.model_copy(update={"staleness": 4, "steps": 9}), tmp_path)  # shared by all variants
    assert all(torch.equal(weights[name], again[name]) for name in weights) and len([*tmp_path.iterdir()]) == 1
    records = _train({}, weights, **settings, mini_batches=4, steps=80, eval_prompts=128)
    assert records[0]["held_out_reward"] >= 0.5
    # Seeds 0 to 3 gain .12 to .22 in 100 steps of these sizes.
    assert records[-1]["held_out_reward"] > records[0]["held_out_reward"] + 0.07


@needs_lab
def test_a_run_in_a_folder_is_resumed_as_a_whole(tmp_path: Path) -> None:
    from mismatch_plugin.lab.run import run_one

    settings = LabSettings.model_validate({**TINY, "warm_up_steps": 2})
    folder = tmp_path / "run"
    outcome = run_one(settings, mp.MismatchConfig(), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert outcome["status"] == "finished" and outcome["held_out_exact"] == lines[-1]["held_out_exact"]
    config = json.loads((folder / "config.json").read_text())
    assert LabSettings(**config["settings"]) == settings and set(config["versions"]) >= {"torch", "megatron-core"}

    assert run_one(settings, mp.MismatchConfig(), folder) == outcome  # the seconds too: it did not run again
    (folder / "done.json").unlink()
    (folder / "metrics.jsonl").write_text("half a li")
    assert run_one(settings, mp.MismatchConfig(), folder)["seconds"] != outcome["seconds"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5
    other = run_one(settings, mp.MismatchConfig(use_tis=True), folder)
    assert other["seconds"] != outcome["seconds"]  # another variant is not taken for this one
    assert [path.suffix for path in (tmp_path / "warm").iterdir()] == [".pt"]
