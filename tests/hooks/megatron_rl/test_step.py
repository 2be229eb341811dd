"""Megatron-LM RL: settings read from its arguments, and what happens once a step."""

from __future__ import annotations

import json
import math
import sys
import types
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.hooks.megatron_rl import adapter as megatron_rl
from mismatch_plugin.hooks.megatron_rl.adapter import TABLE
from mismatch_plugin.hooks.megatron_step import MegatronStep
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.distributed.launch import launch
from tests.hooks.contracts.megatron_rl_batches import make_config, one_bin, rows, run_loss

# Settings -------------------------------------------------------------------------------------------------------------


def _args(line: str = "", **given: Any) -> Namespace:
    """Arguments as train_rl.py parses them, with our flags through its extra-args provider."""
    parser = ArgumentParser(allow_abbrev=False)
    for flag, options in TABLE.items():
        parser.add_argument(flag, **options)
    args = megatron_rl.extra_args_provider(lambda p: p)(parser).parse_args(line.split())
    for name, value in given.items():
        setattr(args, name, value)
    return args


_ON = "--rl-inference-logprobs-is-correction"


def test_megatron_s_own_values_are_read() -> None:
    config = megatron_rl.settings(
        _args(f"{_ON} --use-tis --rl-importance-sampling-truncation-coef 3 --grpo-clamp-eps-upper 0.3 --grpo-kl-beta 0")
    )
    assert (config.algorithm, config.tis.upper_bound, config.denominator) == (2, 3.0, "original")
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.terms.kl_coef) == (0.01, 0.3, 0.0)
    contradicts = "--use-tis --tis-upper-bound 3 --rl-importance-sampling-truncation-coef 2"
    with pytest.raises(
        ValueError, match=r"--tis-upper-bound 3.0 contradicts Megatron-LM's --rl-importance-sampling-tr"
    ):
        megatron_rl.settings(_args(f"{_ON} {contradicts}"))
    with pytest.raises(ValueError, match="--mismatch-kl-type k1 cannot be had in Megatron-LM: leave it out"):
        megatron_rl.settings(_args(f"{_ON} --mismatch-kl-coef 0.001 --mismatch-kl-type k1"))


def test_what_the_launcher_hands_over_is_read_the_same() -> None:
    line = f"{_ON} --use-tis --use-rollout-log-probs --tis-level geometric"
    handed = {"use_tis": True, "use_rollout_log_probs": True, "tis": {"level": "geometric"}}
    assert megatron_rl.settings(_args(line)) == megatron_rl.settings(_args(_ON, mismatch_settings=handed))


@pytest.mark.parametrize("line", ["--use-tis", "--use-rollout-log-probs", "--rs-criterion token:k2:0.5"])
def test_inference_log_probs_that_megatron_keeps_back_are_asked_for(line: str) -> None:
    with pytest.raises(ValueError, match=r"needs the inference log-probs, .* without --rl-inference-logprobs-is-corr"):
        megatron_rl.settings(_args(line))
    assert megatron_rl.settings(_args(f"{_ON} {line}")).algorithm in (0, 1, 2)


def test_the_start_block_says_whose_denominator_it_is() -> None:
    config = megatron_rl.settings(_args(f"{_ON} --use-tis --tis-level sequence"))
    text = "\n".join(megatron_rl.describe(config, Namespace(bf16=True, rl_use_sequence_packing=True), masked=False))
    parts = ("algorithm 2", "sequence level", "as in Megatron", "each micro-batch", "half precision", "0.0", "no l")
    assert [part for part in parts if part not in text] == []


# The step's end -------------------------------------------------------------------------------------------------------


class _Chunk(torch.nn.Module):
    """One model chunk as Megatron's DDP: parameters, and gradients that can be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.scaled: list[float] = []

    def scale_gradients(self, factor: float) -> None:
        self.scaled.append(factor)


def _begun(config: mp.MismatchConfig, calls: list[str], groups: ParallelGroups | None = None) -> tuple[Any, Any]:
    """(the step, the model config whose finalize ends it)."""
    model_config = types.SimpleNamespace(finalize_model_grads_func=lambda *_, **__: calls.append("megatron"))
    step = MegatronStep(megatron_rl._log, is_first=lambda groups: True)
    step.begin(Namespace(), config, groups or ParallelGroups(), model_config, 4, compare=False)
    return step, model_config.finalize_model_grads_func


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Stands for megatron.training: what its TensorBoard writer was given."""
    values: dict[str, float] = {}
    board = types.SimpleNamespace(add_scalar=lambda name, value, step: values.update({f"{name}@{step}": value}))
    training: Any = types.ModuleType("megatron.training")
    training.get_tensorboard_writer, training.get_wandb_writer = lambda: board, lambda: None
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setattr(megatron_rl.RUN.step, "is_first", lambda groups: True)
    return values


def test_metrics_of_a_step_are_those_of_all_its_micro_batches(written: dict[str, float], tmp_path: Path) -> None:
    config = make_config(use_tis=True, report_dir=str(tmp_path / "run"))
    calls: list[str] = []
    end, finalize = _begun(config, calls)
    data, place = rows()
    whole = run_loss(config, data, place)[2].metrics()
    for row in range(3):
        part = {name: value[row : row + 1] for name, value in data.items()}
        end.add(run_loss(config, part, place)[2])
    finalize([_Chunk()])
    assert calls == ["megatron"]
    assert {name.removesuffix("@4"): value for name, value in written.items()} == pytest.approx(whole, rel=1e-10)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 4


def test_invalid_log_probs_stop_the_step_before_the_optimizer(written: dict[str, float]) -> None:
    config = make_config(use_tis=True)
    data, place = rows()
    data["mask"][1, 2], data["rollout"][1, 2] = 1.0, math.nan
    end, finalize = _begun(config, [])
    end.add(run_loss(config, data, place)[2])
    with pytest.raises(mp.InvalidLogProbError, match="sequence 1, position 2 is missing or NaN"):
        finalize([_Chunk()])
    assert not written


def test_a_failed_gate_stops_the_step_before_the_optimizer(written: dict[str, float]) -> None:
    data, place = rows()
    k3_kl = float(run_loss(make_config(use_tis=True), data, place)[2].k3_kl())
    config = make_config(use_tis=True, gate_kl=0.99 * k3_kl)
    end, finalize = _begun(config, [])
    end.add(run_loss(config, data, place)[2])
    with pytest.raises(mp.GateError, match=f"^step 4: k3_kl {k3_kl:.3g} nats per token is above the bar"):
        finalize([_Chunk()])
    assert not written
    config = make_config(use_tis=True, gate_kl=1.01 * k3_kl)
    end, finalize = _begun(config, [])
    end.add(run_loss(config, data, place)[2])
    finalize([_Chunk()])
    assert written["rollout_corr/k3_kl@4"] == pytest.approx(k3_kl)


def test_the_weight_mean_divides_the_gradients_of_the_step(written: dict[str, float]) -> None:
    config = mp.MismatchConfig.build(
        {"use_tis": True, "tis": {"level": "sequence", "batch_normalize": True}, "denominator": "original"}
    )
    (end, finalize), chunk = _begun(config, []), _Chunk()
    data, place = rows()
    assert end.factor(config) == 1.0
    statistics = run_loss(config, data, place)[2]
    end.add(statistics)
    finalize([chunk])
    assert chunk.scaled == pytest.approx([1.0 / float(statistics.batch_factor())])
    assert written["rollout_corr/rollout_is_weight_after_mean@4"] > 0


def test_the_weight_mean_of_the_step_is_refused_beside_a_kl_term() -> None:
    config = make_config(use_tis=True, tis={"batch_normalize": True})
    with pytest.raises(ValueError, match=r"there is also: a KL term"):
        _begun(config, [])
    _begun(make_config(use_tis=True, tis={"batch_normalize": True, "batch_normalize_scope": "micro_batch"}), [])


def _ranks_that_differ(plant: str) -> str:
    """What the step's end raises on two data-parallel ranks of which the second is odd."""
    world, odd = torch.distributed.group.WORLD, torch.distributed.get_rank() == 1
    config = make_config(use_tis=True, metrics="basic" if odd and plant == "other metrics" else "full")
    end, finalize = _begun(config, [], ParallelGroups(dp=world, dp_cp=world))
    if not (odd and plant == "no micro-batch"):
        end.add(run_loss(config, *rows())[2])
    try:
        finalize([_Chunk()])
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_that_differ_are_named_on_all_of_them() -> None:
    """Nothing begins a step here, and no loss has a collective: the end compares them, before the optimizer steps."""
    sentences = {
        "other metrics": "rank 0 has metrics = 'full', rank 1 has metrics = 'basic'",
        "no micro-batch": "rank 1 ran no micro-batch in this step, other ranks did",
    }
    said = launch(_ranks_that_differ, list(sentences), 2, timeout=20.0)
    for sentence, (one, two) in zip(sentences.values(), said, strict=True):
        assert one == two and sentence in one


def test_the_drop_in_functions_work_together(written: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """get_logprobs attaches the step's end, calculate_grpo_loss feeds it, Megatron's finalize call reports it."""
    data, place = one_bin()
    args = _args(f"{_ON} --use-tis --tis-level sequence --grpo-kl-beta 0.03", curr_iteration=1)
    training: Any = sys.modules["megatron.training"]
    training.get_args = lambda: args
    rl_utils: Any = types.ModuleType("megatron.rl.rl_utils")
    rl_utils.get_logprobs = lambda model, no_grad=False: data["current"].clone().requires_grad_(not no_grad)
    monkeypatch.setitem(sys.modules, "megatron.rl", types.ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", rl_utils)
    monkeypatch.setattr(megatron_rl, "data_groups", ParallelGroups)
    monkeypatch.setattr(megatron_rl, "RUN", megatron_rl._Run())
    megatron_rl.RUN.step.is_first = lambda groups: True
    model: Any = _Chunk()
    model.config = types.SimpleNamespace(finalize_model_grads_func=lambda *_: None)
    megatron_rl.get_logprobs(model, no_grad=True)
    assert not megatron_rl.RUN.step.begun
    log_probs = megatron_rl.get_logprobs(model, no_grad=False)
    given: dict[str, Any] = {"advantages": data["advantages"], "inference_logprobs": data["rollout"], **place}
    host: dict[str, Any] = {"clamp_eps_lower": 0.01, "clamp_eps_upper": 0.01, "kl_beta": 0.03, "entropy_weight": 0.0}
    with pytest.raises(ValueError, match="passes no loss mask"):
        megatron_rl.calculate_grpo_loss(log_probs, data["old"], data["ref"], **given, **host)
    terms = megatron_rl.calculate_grpo_loss(
        log_probs, data["old"], data["ref"], **given, **host, loss_mask=data["mask"]
    )
    terms.loss.sum().backward()
    assert megatron_rl.RUN.step.begun
    model.config.finalize_model_grads_func([model])
    assert not megatron_rl.RUN.step.begun  # the next call with gradient begins another
    assert written["rollout_corr/tokens@2"] == float(data["mask"].sum())
    with pytest.raises(ValueError, match=r"shapes \(1, 17\), \(1, 16\) and \(1, 17\)"):
        megatron_rl.calculate_grpo_loss(
            log_probs, data["old"][:, 1:], data["ref"], **given, **host, loss_mask=data["mask"]
        )
