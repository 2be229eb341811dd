"""Megatron-LM RL: settings from its arguments and launch line, the replaced functions, and what happens once a step."""

from __future__ import annotations

import json
import math
import os
import subprocess
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
from tests.hooks.contracts.launch_trees import ROOT, launch, megatron_tree, run
from tests.hooks.contracts.megatron_rl_batches import make_config, one_bin, rows, run_loss
from tests.host_source import host_source

_ON = "--rl-inference-logprobs-is-correction"

# Settings -------------------------------------------------------------------------------------------------------------


def _args(line: str = "", **given: Any) -> Namespace:
    """Arguments as train_rl.py parses them, with our flags through its extra-args provider."""
    parser = ArgumentParser(allow_abbrev=False)
    for flag, options in TABLE.items():
        parser.add_argument(flag, **options)
    args = megatron_rl.extra_args_provider(lambda p: p)(parser).parse_args(line.split())
    return Namespace(**{**vars(args), **given})


@pytest.mark.parametrize(
    ("line", "algorithm", "bound"),
    [
        (_ON, 2, 2.0),  # Megatron's own switch by itself, without its coefficient
        (f"{_ON} --rl-importance-sampling-truncation-coef 5", 2, 5.0),
        (f"{_ON} --mismatch-preset disabled", 0, 2.0),
        (f"{_ON} --use-rollout-log-probs", 1, 2.0),
    ],
)
def test_megatron_s_own_values_are_read_in_a_tree_without_the_launcher(line: str, algorithm: int, bound: float) -> None:
    config = megatron_rl.settings(_args(f"{line} --grpo-clamp-eps-upper 0.3 --grpo-kl-beta 0"))
    assert (config.algorithm, config.tis.level, config.tis.upper) == (algorithm, "token", bound)
    assert (config.denominator, config.terms.kl_coef) == ("original", 0.0)
    assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high) == (0.01, 0.3)


def test_what_the_launcher_hands_over_is_read_the_same_and_the_block_says_what_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = f"{_ON} --use-tis --tis-level sequence"
    handed = {"use_tis": True, "tis": {"level": "sequence"}}
    config = megatron_rl.settings(_args(line))
    assert config == megatron_rl.settings(_args(_ON, mismatch_settings=handed))
    megatron_rl.start(_args(line))  # a patched tree without the launcher
    assert "host: megatron-lm " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^mismatch_plugin: .* needs the inference log-probs"):
        megatron_rl.start(_args("--use-tis"))


# The launcher ---------------------------------------------------------------------------------------------------------


def test_without_the_patch_two_functions_are_replaced(tmp_path: Path) -> None:
    done = launch(megatron_tree(tmp_path / "tree"), "--use-tis --tis-upper-bound 3 --grpo-clamp-eps-upper 0.28")
    assert done.given is not None, done.errors
    assert done.given["functions"] == ["mismatch_plugin.hooks.megatron_rl.adapter"] * 2
    args = Namespace(**done.given["args"])
    assert (args.rl_inference_logprobs_is_correction, args.model_provider) == (True, "gpt")
    config = megatron_rl.settings(args)
    assert (config.algorithm, config.tis.upper_bound, config.ppo.eps_clip_high) == (2, 3.0, 0.28)
    assert "--tis-upper-bound" not in done.given["argv"]  # its parser stops at what it does not know
    parts = ("divided as in Megatron: by each micro-batch", "\n! no loss mask without", f"the command line: {_ON}")
    assert [part for part in parts if part not in done.printed] == []


def test_a_patched_tree_has_every_level_and_needs_no_launcher(tmp_path: Path) -> None:
    script = megatron_tree(tmp_path / "tree", patched=True)
    line = "--use-rollout-log-probs --use-tis --tis-level sequence --rs-veto-threshold 1e-4 --bf16"
    for done in (launch(script, line), run(script, f"{_ON} {line}")):
        assert done.given is not None, done.errors
        config = megatron_rl.settings(Namespace(**done.given["args"]))
        assert (config.algorithm, config.tis.level, config.rs.veto_threshold) == (3, "sequence", 1e-4)


def test_another_megatron_is_refused_and_one_without_our_flags_is_left_alone(tmp_path: Path) -> None:
    done = launch(megatron_tree(tmp_path / "tree", parameters=", sequence_mask=None"), "--use-tis")
    assert (done.status, done.given) == (2, None)
    assert "calculate_grpo_loss is not the one that the plugin replaces (sequence_mask differs)" in done.errors
    done = launch(megatron_tree(tmp_path / "other"), "--grpo-kl-beta 0")
    assert done.given is not None, done.errors
    assert done.given["functions"] == ["megatron.rl.rl_utils"] * 2
    assert "mismatch_settings" not in done.given["args"]


_READ = """
import json, sys, typing
import typing_extensions
typing.override = typing_extensions.override  # for Pythons older than 3.12
from megatron.training.arguments import parse_args
from mismatch_plugin.hooks.megatron_rl import extra_args_provider, settings
from mismatch_plugin.launch.command_line import read_command_line
from mismatch_plugin.hooks.megatron_rl.adapter import TABLE
seen = []
def provider(parser):
    seen.extend(parser._option_string_actions.items())
    return extra_args_provider()(parser)
args = parse_args(provider)
for flag, _ in seen:
    read_command_line(["--use-tis", flag], TABLE)  # raises where one is taken for a misspelling
flags = {flag: action.default for flag, action in seen if flag in TABLE}
config = settings(args)
print("READ " + json.dumps({"flags": flags, "algorithm": config.algorithm, "level": config.tis.level}))
"""


def test_megatron_s_own_parser_takes_our_flags() -> None:
    """The strict parser of the real tree, with our group added by the provider; its defaults are the recorded ones."""
    environment = {**os.environ, "PYTHONPATH": f"{host_source('Megatron-LM')}:{ROOT}"}
    line = f"{_ON} --use-rollout-log-probs --use-tis --tis-level sequence --rs-criterion sequence_max:k2:0.5"
    command = [sys.executable, "-W", "ignore", "-c", _READ, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    marked = [row for row in done.stdout.splitlines() if row.startswith("READ ")]
    assert marked, done.stderr
    read = json.loads(marked[0].removeprefix("READ "))
    assert (read["algorithm"], read["level"]) == (3, "sequence")
    assert read["flags"] == {flag: recorded["default"] for flag, recorded in TABLE.items()}


# The step's end -------------------------------------------------------------------------------------------------------


class _Chunk(torch.nn.Module):
    """One model chunk as Megatron's DDP: parameters, and gradients that can be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.config = types.SimpleNamespace(finalize_model_grads_func=lambda *_: None)
        self.scaled: list[float] = []

    def scale_gradients(self, factor: float) -> None:
        self.scaled.append(factor)


def _begun(config: mp.MismatchConfig, calls: list[str]) -> tuple[Any, Any]:
    """(the step, the model config's finalize, which ends it)."""
    model_config = types.SimpleNamespace(finalize_model_grads_func=lambda *_, **__: calls.append("megatron"))
    step = MegatronStep(megatron_rl._log, is_first=lambda groups: True)
    step.begin(Namespace(), config, ParallelGroups(), model_config, 4, compare=False)
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


def test_what_stops_a_step_before_the_optimizer(written: dict[str, float]) -> None:
    data, place = rows()
    statistics = run_loss(make_config(use_tis=True), data, place)[2]
    k3_kl = float(statistics.k3_kl())
    end, finalize = _begun(make_config(use_tis=True, gate_kl=0.99 * k3_kl), [])
    end.add(statistics)
    with pytest.raises(mp.GateError, match=f"^step 4: k3_kl {k3_kl:.3g} nats per token is above the bar"):
        finalize([_Chunk()])
    data["mask"][1, 2], data["rollout"][1, 2] = 1.0, math.nan
    end, finalize = _begun(make_config(use_tis=True), [])
    end.add(run_loss(make_config(use_tis=True), data, place)[2])
    with pytest.raises(mp.InvalidLogProbError, match="sequence 1, position 2 is missing or NaN"):
        finalize([_Chunk()])
    assert not written
    end, finalize = _begun(make_config(use_tis=True, gate_kl=1.01 * k3_kl), [])
    end.add(statistics)
    finalize([_Chunk()])
    assert written["rollout_corr/k3_kl@4"] == pytest.approx(k3_kl)


def test_the_weight_mean_divides_the_gradients_of_the_step(written: dict[str, float]) -> None:
    tis = {"level": "sequence", "batch_normalize": True}
    config = mp.MismatchConfig.build({"use_tis": True, "tis": tis, "denominator": "original"})
    (end, finalize), chunk = _begun(config, []), _Chunk()
    assert end.factor(config) == 1.0
    statistics = run_loss(config, *rows())[2]
    end.add(statistics)
    finalize([chunk])
    assert chunk.scaled == pytest.approx([1.0 / float(statistics.batch_factor())])
    assert written["rollout_corr/rollout_is_weight_after_mean@4"] > 0
    with pytest.raises(ValueError, match="there is also: a KL term"):
        _begun(make_config(use_tis=True, tis={"batch_normalize": True}), [])
    _begun(make_config(use_tis=True, tis={"batch_normalize": True, "batch_normalize_scope": "micro_batch"}), [])


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
    megatron_rl.get_logprobs(model, no_grad=True)
    assert not megatron_rl.RUN.step.begun
    log_probs = megatron_rl.get_logprobs(model, no_grad=False)
    given: dict[str, Any] = {"advantages": data["advantages"], "inference_logprobs": data["rollout"], **place}
    host: dict[str, Any] = {"clamp_eps_lower": 0.01, "clamp_eps_upper": 0.01, "kl_beta": 0.03, "entropy_weight": 0.0}
    with pytest.raises(ValueError, match="passes no loss mask"):
        megatron_rl.calculate_grpo_loss(log_probs, data["old"], data["ref"], **given, **host)
    host["loss_mask"] = data["mask"]
    terms = megatron_rl.calculate_grpo_loss(log_probs, data["old"], data["ref"], **given, **host)
    terms.loss.sum().backward()
    assert megatron_rl.RUN.step.begun
    model.config.finalize_model_grads_func([model])
    assert not megatron_rl.RUN.step.begun  # the next call with gradient begins another
    assert written["rollout_corr/tokens@2"] == float(data["mask"].sum())
    training.get_args = lambda: _args(f"{_ON} --use-rollout-log-probs --grpo-kl-beta 0.03")  # another run's, its first
    megatron_rl.get_logprobs(model, no_grad=False)
    megatron_rl.calculate_grpo_loss(log_probs, data["old"], data["ref"], **given, **host)
    assert megatron_rl.RUN.config is not None and megatron_rl.RUN.config.algorithm == 1
    model.config.finalize_model_grads_func([model])
    assert "rollout_corr/tokens@1" in written
    training.get_args = lambda: args
    half = {"old_logprobs": data["old"].bfloat16(), "ref_logprobs": data["ref"]}
    with pytest.warns(mp.MismatchWarning, match="^log-probs are .*half precision"):
        megatron_rl.calculate_grpo_loss(log_probs, **half, **given, **host)
