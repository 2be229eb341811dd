"""Megatron-LM RL under the launcher: a strict parser, its provider of extra arguments, and two replaced functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from mismatch_plugin.hooks import megatron_rl
from mismatch_plugin.hooks.base import Plan
from mismatch_plugin.hooks.megatron_rl.adapter import TABLE
from mismatch_plugin.launch.__main__ import prepare
from tests.hooks.contracts.launch_trees import ROOT, launch, megatron_tree, run

_ON = "--rl-inference-logprobs-is-correction"


def _plan(folder: Path, line: str, patched: bool = False) -> Plan:
    return prepare([str(megatron_tree(folder / "tree", patched)), *line.split()])[3]


def test_without_the_patch_two_functions_are_replaced(tmp_path: Path) -> None:
    done = launch(megatron_tree(tmp_path / "tree"), "--use-tis --tis-upper-bound 3 --grpo-clamp-eps-upper 0.28")
    assert done.given is not None, done.errors
    assert done.given["functions"] == ["mismatch_plugin.hooks.megatron_rl.adapter"] * 2
    args = Namespace(**done.given["args"])
    assert (args.rl_inference_logprobs_is_correction, args.model_provider) == (True, "gpt")
    config = megatron_rl.settings(args)
    assert (config.algorithm, config.tis.upper_bound, config.ppo.eps_clip_high) == (2, 3.0, 0.28)
    assert "--tis-upper-bound" not in done.given["argv"]  # its parser stops at what it does not know
    parts = (
        "algorithm 2",
        "divided as in Megatron: by each micro-batch",
        "\n! no loss mask without",
        f"added to the command line: {_ON}",
    )
    assert [part for part in parts if part not in done.printed] == []


@pytest.mark.parametrize(("coefficient", "bound"), [(None, 2.0), (5.0, 5.0)])
def test_megatron_s_missing_coefficient_leaves_our_bound(coefficient: float | None, bound: float) -> None:
    """A patched tree under Megatron's own switch, with none of our flags."""
    args = Namespace(rl_inference_logprobs_is_correction=True, rl_importance_sampling_truncation_coef=coefficient)
    config = megatron_rl.settings(args)
    assert (config.algorithm, config.tis.level, config.tis.upper_bound) == (2, "token", bound)


def test_the_longest_response_is_megatron_s_own(tmp_path: Path) -> None:
    line = "--use-tis --tis-level sequence"
    warned = {
        length: [said for said in _plan(tmp_path, f"{line} {length}", patched=True).lines if said.startswith("! --tis")]
        for length in ("", "--inference-max-seq-length 64")
    }
    assert [said[:38] for said in warned[""]] == ["! --tis-level sequence over 2560 tokens"[:38]]
    assert warned["--inference-max-seq-length 64"] == []


def test_objectives_have_megatron_s_eps_and_are_in_the_block(tmp_path: Path) -> None:
    line = "--mismatch-objective gspo --use-tis --grpo-clamp-eps-lower 3 --grpo-clamp-eps-upper 4e-4 --bf16"
    done = launch(megatron_tree(tmp_path / "tree", patched=True), line)
    assert done.given is not None, done.errors
    config = megatron_rl.settings(Namespace(**done.given["args"]))
    assert (config.objective, config.ppo.eps_clip_low, config.ppo.eps_clip_high) == ("gspo", 1.0, 4e-4)
    assert "objective: gspo, ratio in [0, 1.0004]" in done.printed
    assert "half precision" in done.printed  # which the mean of a response's log-ratios is judged in
    plain = launch(megatron_tree(tmp_path / "other", patched=True), "--use-tis --bf16").printed
    assert "objective: ppo, ratio in [0.99, 1.01]" in plain and "half precision" not in plain


def test_a_patched_tree_has_every_level(tmp_path: Path) -> None:
    line = "--use-rollout-log-probs --use-tis --tis-level sequence --rs-veto-threshold 1e-4 --bf16"
    done = launch(megatron_tree(tmp_path / "tree", patched=True), line)
    assert done.given is not None, done.errors
    config = megatron_rl.settings(Namespace(**done.given["args"]))
    assert (config.algorithm, config.tis.level, config.rs.veto_threshold) == (3, "sequence", 1e-4)
    assert "half precision" in done.printed
    assert "no loss mask" not in done.printed


def test_a_patched_tree_needs_no_launcher(tmp_path: Path) -> None:
    script = megatron_tree(tmp_path / "tree", patched=True)
    line = f"{_ON} --use-tis --tis-level geometric --tis-mode clip"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert '"tis_level": "geometric"' in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--use-tis --tis-level sequence", "cannot be had: level sequence. Apply the patch"),
        ("--use-tis --mismatch-metrics basic", "cannot be had: --mismatch-metrics basic. Apply the patch"),
        ("--mismatch-preset disabled", "cannot be had: a run that only measures. Apply the patch .mismatch-plugin"),
        (
            f"{_ON} --use-rollout-log-probs",
            f"{_ON} weighs the loss .algorithm 2., but .* choose algorithm 1: add --use-t",
        ),
        (
            "--rl-importance-sampling-truncation-coef 2 --rs-criterion token:k2:0.5",
            "--rl-importance-sampling-truncation-coef weighs the loss .algorithm 2., but .* algorithm 0",
        ),
        ("--use-tis --no-rl-inference-logprobs-is-correction", "keeps the inference log-probs from the loss"),
    ],
)
def test_one_sentence_for_each_mistake(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _plan(tmp_path, line)


@pytest.mark.parametrize(
    "line",
    [
        *("--use-tis", "--use-tis --mismatch-metrics off", "--rs-criterion token:k2:0.5", "--use-rollout-log-probs"),
        *("--mismatch-objective cispo", "--mismatch-rollout-kl-coef 1e-3"),
        "--rs-criterion token:tv:0.15@away --rs-policy current",
    ],
)
def test_what_corrects_single_tokens_needs_no_patch(line: str, tmp_path: Path) -> None:
    assert "! no loss mask without the patch: token level only, no metrics" in _plan(tmp_path, line).lines


@pytest.mark.parametrize("more", ["", " --mismatch-metrics full --mismatch-report-dir runs"])
def test_a_patched_tree_measures_without_a_correction(more: str, tmp_path: Path) -> None:
    """The preset sets nothing, and Megatron's own flag, which hands the log-probs over, is algorithm 2 by itself."""
    line = f"--mismatch-preset disabled{more}"
    assert "algorithm 0: PPO" in _plan(tmp_path / "planned", line, patched=True).lines
    done = launch(megatron_tree(tmp_path / "launched", patched=True), line)
    assert done.given is not None, done.errors
    assert megatron_rl.settings(Namespace(**done.given["args"])).algorithm == 0
    alone = run(megatron_tree(tmp_path / "alone", patched=True), f"{_ON} {line}")
    assert alone.given is not None, alone.errors
    assert megatron_rl.settings(Namespace(**alone.given["args"])).algorithm == 0


def test_another_megatron_is_refused_before_training(tmp_path: Path) -> None:
    done = launch(megatron_tree(tmp_path / "tree", parameters=", sequence_mask=None"), "--use-tis")
    assert (done.status, done.given) == (2, None)
    assert "calculate_grpo_loss is not the one that the plugin replaces (sequence_mask differs)" in done.errors


def test_without_our_flags_nothing_is_replaced(tmp_path: Path) -> None:
    done = launch(megatron_tree(tmp_path / "tree"), "--grpo-kl-beta 0")
    assert done.given is not None, done.errors
    assert done.given["functions"] == ["megatron.rl.rl_utils"] * 2
    assert "mismatch_settings" not in done.given["args"]


# Megatron's own parser ------------------------------------------------------------------------------------------------

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
    root = os.environ.get("MISMATCH_HOST_SRC")
    if root is None or not Path(root, "Megatron-LM", "megatron", "training").is_dir():
        pytest.skip("NOT RUN (host source absent)")
    environment = {**os.environ, "PYTHONPATH": f"{Path(root, 'Megatron-LM')}:{ROOT}"}
    line = f"{_ON} --use-rollout-log-probs --use-tis --tis-level sequence --rs-criterion sequence_max:k2:0.5"
    command = [sys.executable, "-W", "ignore", "-c", _READ, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    marked = [row for row in done.stdout.splitlines() if row.startswith("READ ")]
    assert marked, done.stderr
    read = json.loads(marked[0].removeprefix("READ "))
    assert (read["algorithm"], read["level"]) == (3, "sequence")
    missing = set(TABLE) - set(read["flags"])
    assert not missing, f"Megatron-LM no longer declares {', '.join(sorted(missing))}"
    for flag, recorded in TABLE.items():
        assert read["flags"][flag] == recorded["default"], f"Megatron-LM's default of {flag} changed"
