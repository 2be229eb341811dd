"""Megatron-LM RL: settings from its arguments and launch line, the replaced functions, and what happens once a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_plugin.hooks import megatron_rl
from mismatch_plugin.hooks.megatron_rl import TABLE
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.hooks.contracts.launch_trees import ROOT, launch, megatron_tree, run
from tests.hooks.contracts.megatron_rl_batches import one_bin
from tests.hooks.contracts.slime_data import Model
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


OWN = {
    _ON: (2, 2.0),
    f"{_ON} --rl-importance-sampling-truncation-coef 5": (2, 5.0),
    f"{_ON} --mismatch-preset disabled": (0, 2.0),
    f"{_ON} --use-rollout-log-probs": (1, 2.0),
}


@pytest.mark.parametrize("line", OWN)
def test_megatron_s_own_values_are_read_in_a_tree_without_the_launcher(line: str) -> None:
    config = megatron_rl.settings(_args(f"{line} --grpo-clamp-eps-upper 0.3 --grpo-kl-beta 0"))
    assert (config.algorithm, config.tis.upper) == OWN[line]
    assert (config.denominator, config.terms.kl_coef, config.ppo.eps_clip_high) == ("original", 0.0, 0.3)


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


def test_the_launcher_makes_the_patch_in_memory_and_a_patched_tree_needs_no_launcher(tmp_path: Path) -> None:
    bare, script = megatron_tree(tmp_path / "tree"), megatron_tree(tmp_path / "patched", patched=True)
    line = "--use-rollout-log-probs --use-tis --tis-level sequence --rs-veto-threshold 1e-4 --bf16"
    for done in (launch(bare, line), launch(script, line), run(script, f"{_ON} {line}")):
        assert done.given is not None, done.errors
        assert done.given["functions"] == ["mismatch_plugin.hooks.megatron_rl"] * 2
        args = Namespace(**done.given["args"])
        assert (args.rl_inference_logprobs_is_correction, args.model_provider) == (True, "gpt")
        config = megatron_rl.settings(args)
        assert (config.algorithm, config.tis.level, config.rs.veto_threshold) == (3, "sequence", 1e-4)
        assert done.printed.count("mismatch_plugin on megatron-lm:") == 1
    assert "mismatch_plugin" not in bare.read_text()
    untouched = launch(bare, "--bf16")
    assert untouched.given and untouched.given["functions"] == ["megatron.rl.rl_utils"] * 2
    bare.write_text(bare.read_text().replace("seq_lengths=seq_lengths", "seq_lengths=None"))
    done = launch(bare, "--use-tis")
    assert (done.status, done.given) == (2, None)
    assert "train_rl.py is not the train_rl.py that the plugin's patch is for, of NVIDIA/Megatron-LM at " in done.errors


_READ = """
import json, sys, typing
import typing_extensions
typing.override = typing_extensions.override  # for Pythons older than 3.12
from megatron.training.arguments import parse_args
from mismatch_plugin.hooks.megatron_rl import TABLE, extra_args_provider, settings
from mismatch_plugin.launch.command_line import read_command_line
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


# The functions --------------------------------------------------------------------------------------------------------


def test_the_drop_in_functions_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """get_logprobs attaches the step's end, calculate_grpo_loss feeds it, Megatron's finalize call reports it."""
    data, place = one_bin()
    args = _args(f"{_ON} --use-tis --tis-level sequence --tis-batch-normalize --grpo-kl-beta 0", curr_iteration=1)
    written: dict[str, float] = {}
    board = SimpleNamespace(add_scalar=lambda name, value, step: written.update({f"{name}@{step}": value}))
    training: Any = SimpleNamespace(get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: None)
    training.get_args = lambda: args
    own = SimpleNamespace(get_logprobs=lambda model, no_grad: data["current"].clone().requires_grad_(not no_grad))
    modules = {"megatron.training": training, "megatron.rl": SimpleNamespace(), "megatron.rl.rl_utils": own}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(megatron_rl, "data_groups", ParallelGroups)
    monkeypatch.setattr(megatron_rl, "RUN", megatron_rl._Run())
    megatron_rl.RUN.step.is_first = lambda groups: True
    model: Any = Model()
    megatron_rl.get_logprobs(model, no_grad=True)
    assert not megatron_rl.RUN.step.begun
    log_probs = megatron_rl.get_logprobs(model, no_grad=False)
    given: dict[str, Any] = {"advantages": data["advantages"], "inference_logprobs": data["rollout"], **place}
    host: dict[str, Any] = {"clamp_eps_lower": 0.01, "clamp_eps_upper": 0.01, "kl_beta": 0.0, "entropy_weight": 0.0}
    host["loss_mask"] = data["mask"]
    terms = megatron_rl.calculate_grpo_loss(log_probs, data["old"], data["ref"], **given, **host)
    terms.loss.sum().backward()
    assert megatron_rl.RUN.step.begun
    model.config.finalize_model_grads_func([model])
    assert not megatron_rl.RUN.step.begun  # the next call with gradient begins another
    assert written["rollout_corr/tokens@2"] == float(data["mask"].sum())
    assert model.scale == pytest.approx(1.0 / written["rollout_corr/rollout_is_batch_norm_factor@2"]) != 1.0
    training.get_args = lambda: _args(f"{_ON} --use-rollout-log-probs --grpo-kl-beta 0")  # another run's, its first
    megatron_rl.get_logprobs(model, no_grad=False)
    megatron_rl.calculate_grpo_loss(log_probs, data["old"], data["ref"], **given, **host)
    assert megatron_rl.RUN.config is not None and megatron_rl.RUN.config.algorithm == 1
    model.config.finalize_model_grads_func([model])
    assert "rollout_corr/tokens@1" in written
