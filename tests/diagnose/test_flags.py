"""The flags that are shown give the settings back, and every trainer's launcher takes them."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import mismatch_plugin as mp
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.diagnose.flags import available, flags_for, preset_of, shortest_flags
from mismatch_plugin.diagnose.recommend import RULES
from mismatch_plugin.hooks.base import Plan
from mismatch_plugin.hooks.hosts import HOSTS as LAUNCHED
from mismatch_plugin.hooks.hosts import find_host
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.launch.command_line import read_command_line
from mismatch_plugin.report.presets import quiet_preset
from tests.hooks.contracts.launch_trees import megatron_tree, ray_tree

TRAINERS: tuple[str, ...] = tuple(name for name, host in LAUNCHED.items() if host.launch)
NEMO_RL = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "token_level_loss": True,
    "use_importance_sampling_correction": False,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
}


def _built(**data: Any) -> mp.MismatchConfig:
    with ignore_mismatch_warnings():
        return mp.MismatchConfig.build(data)


MADE = {
    "bounds of the data": quiet_preset("geo_rs_token_tis").replace(
        rs={"criteria": ["sequence_mean:ratio:0.99654:1.0003210987654321"]}
    ),
    "icepop by hand": quiet_preset("token_icepop").replace(tis={"lower_bound": 0.123, "upper_bound": 8.77}),
    "accepted": quiet_preset("seq_is_rs").replace(denominator="accepted"),
    "accepted under bypass": _built(
        use_rollout_log_probs=True, rs={"criteria": ["token:k2:0.5"]}, denominator="accepted"
    ),
    "normalised": quiet_preset("token_is").replace(tis={"batch_normalize": True}),
    "normalised over the step": quiet_preset("token_is").replace(
        tis={"batch_normalize": True, "batch_normalize_scope": "step"}
    ),
    "normalised REINFORCE": quiet_preset("pg_is").replace(tis={"batch_normalize": True}),
    "owned by the host": quiet_preset("token_is").replace(
        ppo={"eps_clip_high": 0.28, "dual_clip": 3.0}, terms={"entropy_coef": 0.01}, aggregation="seq-mean-token-sum"
    ),
    "veto and metrics": quiet_preset("token_is").replace(rs={"veto_threshold": 1e-4}, metrics="full"),
    "turns": quiet_preset("seq_is").replace(tis={"level": "turn"}),
    "grown by hand": quiet_preset("prefix_is").replace(tis={"level": "sequence", "mode": "mask"}),
    "old tokens": quiet_preset("token_is").replace(rs={"max_staleness": 2}),
    "groups": quiet_preset("geo_rs_token_tis").replace(rs={"group": "drop", "min_group": 2}),
    "penalty": quiet_preset("disabled").replace(terms={"rollout_kl_coef": 0.001, "rollout_kl_type": "k3"}),
    "objective": quiet_preset("bypass_ppo_clip").replace(objective="cispo"),
    "condition": quiet_preset("token_is").replace(rs={"criteria": ["token:tv:0.15@away", "token:k2:0.5"]}),
    "invalid log-probs": quiet_preset("token_is").replace(rollout_log_prob_policy="drop-token"),
}
CONFIGS = {record.name: quiet_preset(record.name) for record in PRESETS} | MADE


def _words(text: str) -> list[str]:
    """Our flags: what is behind the host's own words."""
    (command,) = [line for line in text.splitlines() if not line.startswith("#")]
    return shlex.split(command.rsplit("…", 1)[1])


def _read(words: list[str]) -> mp.MismatchConfig:
    parser = ArgumentParser()
    mp.add_arguments(parser)
    with ignore_mismatch_warnings():
        arguments, overrides = parser.parse_known_args(words)
        assert not overrides
        return mp.MismatchConfig.from_args(arguments)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_flags_give_the_settings_back(name: str) -> None:
    assert _read(shortest_flags(CONFIGS[name])) == CONFIGS[name]
    for host in TRAINERS:
        assert _read(_words(flags_for(CONFIGS[name], host))) == available(CONFIGS[name], host)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_python_gives_the_settings_back(name: str) -> None:
    text = flags_for(CONFIGS[name], "python")
    with ignore_mismatch_warnings():
        assert eval(text, {"mp": mp, "inf": float("inf")}) == CONFIGS[name]
    assert text.startswith("mp.preset(" if preset_of(CONFIGS[name]) else "mp.MismatchConfig.build({")


def test_a_preset_is_named() -> None:
    assert shortest_flags(quiet_preset("decoupled_token_is")) == ["--mismatch-preset", "token_is"]
    assert preset_of(quiet_preset("pg_is")) == "pg_is" and preset_of(MADE["normalised"]) is None
    assert shortest_flags(MADE["icepop by hand"])[:3] == ["--use-tis", "--tis-mode", "mask"]
    for rule in RULES:
        assert preset_of(quiet_preset(rule.preset)) == rule.preset


def _plan(host: str, words: list[str], folder: Path, patched: bool) -> Plan:
    if host in ("slime", "miles"):
        return prepare([str(ray_tree(folder / "tree", host)), *words])[3]
    if host == "megatron-lm":
        return prepare([str(megatron_tree(folder / "tree", patched)), *words])[3]
    if host == "nemo-rl":
        folder.mkdir(exist_ok=True)
        (folder / "grpo.yaml").write_text(yaml.safe_dump({"loss_fn": NEMO_RL}))
        words = ["--config", str(folder / "grpo.yaml"), *words]
    found = find_host(host)
    return found.part.plan(found, read_command_line(words, found.part.FLAGS), None)


@pytest.mark.parametrize("host", TRAINERS)
def test_the_launcher_takes_what_is_shown_and_refuses_what_is_not(host: str, tmp_path: Path) -> None:
    """What is left out of the flags is said, and would be refused; a patch is asked for where one is needed."""
    for name, config in CONFIGS.items():
        text = flags_for(config, host)
        allowed, notes = available(config, host)
        patched = "needs the patch" in text
        with ignore_mismatch_warnings():
            plan = _plan(host, _words(text), tmp_path, patched)
            assert plan.config and f"algorithm {config.algorithm}: " in "\n".join(plan.lines), name
            if allowed != config:
                assert notes and all(f"# {note}" in text for note in notes), name
            theirs = host in ("slime", "miles") and config.aggregation == "seq-mean-token-mean"
            if allowed != config and not theirs:
                with pytest.raises(ValueError, match=r"\w{4}"):
                    _plan(host, shortest_flags(config), tmp_path, patched=True)
            if patched and host == "megatron-lm":
                with pytest.raises(ValueError, match="without it"):
                    _plan(host, _words(text), tmp_path, patched=False)


@pytest.mark.parametrize(
    ("name", "host", "said"),
    [
        ("accepted", "slime", "denominator accepted cannot be had on slime: it divides by the tokens of the original"),
        ("owned by the host", "miles", "ppo.eps_clip_high 0.28 is miles's own: set it by --eps-clip-high"),
        ("owned by the host", "nemo-rl", "terms.entropy_coef 0.01 is nemo-rl's own: it cannot be had there"),
        ("old tokens", "verl", "which weights train. Set trainer.v1's max_off_policy_threshold"),
        (
            "condition",
            "verl",
            "criterion token_tv_away cannot be had on verl without algorithm.rollout_correction.by",
        ),
        ("normalised", "nemo-rl", "batch normalisation runs over the micro-batch on nemo-rl"),
        ("normalised over the step", "verl", "batch normalisation runs over the rollout-batch on verl"),
        ("old tokens", "slime", "needs the patch: mismatch-plugin patch apply --host slime --root DIR"),
    ],
)
def test_what_a_host_has_not_is_said(name: str, host: str, said: str) -> None:
    assert said in flags_for(CONFIGS[name], host)


_HAD: dict[str, tuple[str, ...]] = {
    "normalised": ("verl", "slime"),
    "groups": ("verl", "slime"),
    "turns": ("nemo-rl",),
    "grown by hand": ("verl",),
}


@pytest.mark.parametrize(("name", "host"), [(name, host) for name, hosts in _HAD.items() for host in hosts])
def test_what_a_host_has_is_left_alone(name: str, host: str) -> None:
    assert "#" not in flags_for(CONFIGS[name], host) and available(CONFIGS[name], host)[0] == CONFIGS[name]


def test_every_trainer_is_there() -> None:
    assert {*TRAINERS, "trl", "skyrl", "prime-rl"} == {*LAUNCHED}  # those have doors of their own
    with pytest.raises(ValueError, match="host 'openrlhf' is unknown"):
        flags_for(quiet_preset("token_is"), "openrlhf")
