"""verl and NeMo-RL under the launcher: our flags as overrides of their configuration trees."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_plugin.hooks.base import Plan
from mismatch_plugin.hooks.nemo_rl import config as nemo_rl_settings
from mismatch_plugin.hooks.tree import put, read_overrides, text
from mismatch_plugin.hooks.verl import config as verl_settings
from mismatch_plugin.hooks.verl import launch as verl
from mismatch_plugin.launch.__main__ import prepare
from tests.hooks.contracts.launch_trees import ROOT, launch, run

_RC, _ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"
_LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"


def _script(folder: Path, host: str) -> Path:
    path = folder / "tree" / "main.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"import sys\n\nif __name__ == '__main__':\n    print(sys.argv)\n\n\ndef unused():\n    import {host}\n"
    )
    return path


def _verl(folder: Path, line: str) -> Plan:
    return prepare([str(_script(folder, "verl.trainer")), *line.split()])[3]


def _tree(plan: Plan) -> dict[str, Any]:
    """What Hydra would make of the line, with the interpolation resolved."""
    tree: dict[str, Any] = {
        "algorithm": {"rollout_correction": {}},
        "actor_rollout_ref": {"actor": {"clip_ratio": 0.2}},
    }
    for name, value in read_overrides(plan.argv).items():
        put(tree, name, value)
    policy_loss = tree["actor_rollout_ref"]["actor"]["policy_loss"]
    assert policy_loss["rollout_correction"] == "${algorithm.rollout_correction}"
    policy_loss["rollout_correction"] = tree["algorithm"]["rollout_correction"]
    return tree


# verl -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "algorithm", "bypass", "loss_type"),
    [
        ("--rs-criterion sequence_max:k2:0.5", 0, False, "ppo_clip"),
        ("--use-rollout-log-probs", 1, True, "ppo_clip"),
        ("--use-tis --tis-level geometric --tis-mode clip --tis-lower-bound 0", 2, False, "ppo_clip"),
        ("--use-rollout-log-probs --use-tis --tis-level sequence", 3, True, "reinforce"),
        # Switches that are on the line already stay.
        (f"{_RC}.bypass_mode=true {_RC}.loss_type=reinforce --use-rollout-log-probs --use-tis", 3, True, "reinforce"),
    ],
)
def test_flags_become_verl_s_switches_and_our_block(
    line: str, algorithm: int, bypass: bool, loss_type: str, tmp_path: Path
) -> None:
    plan = _verl(tmp_path, f"trainer.nnodes=1 {line}")
    tree = _tree(plan)
    correction = tree["algorithm"]["rollout_correction"]
    assert (correction["bypass_mode"], correction["loss_type"]) == (bypass, loss_type)
    config = verl_settings.check_tree(tree)
    assert config is not None
    assert config.algorithm == algorithm
    assert f"algorithm {algorithm}" in plan.lines[0]
    assert tree["trainer"] == {"nnodes": 1}
    assert not ("=reinforce" in line and any(token.startswith(f"{_RC}.loss_type") for token in plan.added))
    if "geometric" in line:
        assert (config.tis.level, config.tis.mode, config.tis.lower_bound) == ("geometric", "clip", 0.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"{_RC}.bypass_mode=true --use-tis",
            "bypass_mode=true contradicts algorithm 2 of the plugin's flags, which mak",
        ),
        ("actor_rollout_ref.rollout.calculate_log_probs=false --use-tis", "calculate_log_probs=false contradicts"),
        (f"{_RC}.mismatch.use_tis=true --use-tis", "mismatch.use_tis is on the line next to the plugin's flags"),
        ("--use-tis --mismatch-eps-clip-low 0.1", "ppo.eps_clip_low 0.1 contradicts .*clip_ratio"),
    ],
)
def test_verl_s_own_settings_win_or_stop(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _verl(tmp_path, line)


@pytest.mark.parametrize("line", ["trainer.nnodes=1", f"{_RC}.rollout_is=token {_LOSS_MODE}=gspo"])
def test_verl_without_our_flags_is_untouched(line: str, tmp_path: Path) -> None:
    plan = _verl(tmp_path, line)
    assert plan.added == () and plan.argv == tuple(line.split())
    # Its YAML files, which Hydra reads later, may hold settings of ours.
    assert "Settings in verl's YAML files, if any, are checked and printed when verl reads them" in plan.lines[0]


@pytest.mark.parametrize(
    ("line", "algorithm", "level"),
    [
        (f"+{_RC}.mismatch.use_tis=true +{_RC}.mismatch.tis.level=geometric", 2, "geometric"),
        (f"{_RC}={{bypass_mode:true,mismatch:{{metrics:full}}}}", 1, "token"),
        (f"{_RC}.bypass_mode=true {_RC}.loss_type=reinforce +{_RC}.mismatch.tis.level=sequence", 3, "sequence"),
    ],
)
def test_settings_on_verl_s_line_get_the_loss_that_they_need(
    line: str, algorithm: int, level: str, tmp_path: Path
) -> None:
    plan = _verl(tmp_path, line)
    assert plan.added == (f"{_LOSS_MODE}=mismatch", f"+{_ACTOR}.policy_loss.rollout_correction=${{{_RC}}}")
    assert f"loss in the workers: the plugin's; loss_mode mismatch is algorithm {algorithm} here" in plan.lines
    config = verl_settings.check_tree(_tree(plan))
    assert config is not None and (config.algorithm, config.tis.level) == (algorithm, level)


@pytest.mark.parametrize("more", ["", f" +{_ACTOR}.policy_loss.rollout_correction=${{{_RC}}}"])
def test_the_loss_by_itself_is_described_as_what_verl_s_own_keys_make_of_it(more: str, tmp_path: Path) -> None:
    bypass = _verl(tmp_path, f"{_RC}.bypass_mode=true {_RC}.rollout_rs=token {_LOSS_MODE}=mismatch{more}")
    assert bypass.lines[0] == "algorithm 1: bypass PPO"
    assert bypass.added == (() if more else (f"+{_ACTOR}.policy_loss.rollout_correction=${{{_RC}}}",))
    assert "weights and rejection are made in the workers' loss, micro-batch by micro-batch" in bypass.lines
    decoupled = _verl(tmp_path, f"{_RC}.rollout_is=token {_LOSS_MODE}=mismatch{more}")
    assert decoupled.lines[0] == "algorithm 2: decoupled PPO"
    assert any(line.startswith("weights, rejection and metrics are made by verl's own") for line in decoupled.lines)
    assert not any("invalid rollout log-probs" in line for line in decoupled.lines)  # verl looks at none


@pytest.mark.parametrize(
    ("use_v1", "counted"),
    [
        ("", "before"),
        (" trainer.use_v1=false", "after"),
        (" trainer={use_v1:false}", "after"),
        (" +rollout.nnodes=1", "after"),
    ],
)
def test_the_block_says_that_verl_s_v1_trainers_count_before_rejection(
    use_v1: str, counted: str, tmp_path: Path
) -> None:
    plan = _verl(tmp_path, f"--use-tis --use-rs{use_v1}")
    assert (
        f"divided as in verl, token-mean: rejected tokens {'still' if counted == 'before' else 'do not'} count"
        in plan.lines
    )


def test_another_loss_of_verl_s_is_named_with_what_ours_needs(tmp_path: Path) -> None:
    plan = _verl(tmp_path, f"+{_RC}.mismatch.use_tis=true {_LOSS_MODE}=gspo")
    assert plan.added == ()
    assert (
        f"loss in the workers: verl's own gspo, with the driver's weights and mask; for the plugin's add "
        f"{_LOSS_MODE}=mismatch and +{_ACTOR}.policy_loss.rollout_correction='${{{_RC}}}'"
    ) in plan.lines
    with pytest.raises(ValueError, match=f"needs our loss in the workers: add {_LOSS_MODE}=mismatch and"):
        _verl(tmp_path, f"{_RC}.bypass_mode=true +{_RC}.mismatch.metrics=full {_LOSS_MODE}=gspo")
    assert "objective: gspo, ratio in [0.8, 1.2]" in plan.lines
    unknown = _verl(tmp_path, f"+{_RC}.mismatch.use_tis=true {_LOSS_MODE}=clip_cov").lines
    assert any(line.startswith("loss in the workers: verl's own clip_cov, with") for line in unknown)
    assert not any(line.startswith("objective: ") for line in unknown)


@pytest.mark.parametrize(
    ("line", "algorithm", "objective"),
    [
        (f"--use-tis {_LOSS_MODE}=gspo", 2, "gspo"),
        (f"--use-rollout-log-probs {_LOSS_MODE}=cispo", 1, "cispo"),
        (f"--use-tis {_LOSS_MODE}=sapo", 2, "sapo"),
        (f"{_LOSS_MODE}=geo_mean --use-tis", 2, "gmpo"),
        (f"--rs-criterion token:k2:0.5 {_LOSS_MODE}=gpg", 0, "reinforce"),
        (f"--use-tis --use-rollout-log-probs {_LOSS_MODE}=gpg", 3, "ppo"),
        ("--use-tis --mismatch-objective cispo", 2, "cispo"),
        (f"--use-tis --mismatch-objective gspo {_LOSS_MODE}=gspo", 2, "gspo"),
    ],
)
def test_verl_s_loss_mode_is_the_objective_of_our_loss(
    line: str, algorithm: int, objective: str, tmp_path: Path
) -> None:
    """Its place on the line is ours: in bypass mode verl would run its own bypass loss whatever it says."""
    plan = _verl(tmp_path, f"{line} {_ACTOR}.clip_ratio_low=4 {_ACTOR}.clip_ratio_high=0.3")
    tree = _tree(plan)
    assert tree["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "mismatch"
    assert sum(token.startswith(_LOSS_MODE) for token in plan.argv) == 1
    config = verl_settings.check_tree(tree)
    assert config is not None and (config.algorithm, config.objective) == (algorithm, objective)
    if objective in ("gspo", "cispo"):
        assert (config.ppo.eps_clip_low, config.ppo.eps_clip_high, config.ppo.dual_clip) == (1.0, 0.3, None)
        assert f"objective: {objective}, ratio in [0, 1.3]" in plan.lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"--use-tis --use-rollout-log-probs {_LOSS_MODE}=gspo", "gspo contradicts algorithm 3"),
        (f"--use-tis --mismatch-objective cispo {_LOSS_MODE}=gspo", "gspo contradicts --mismatch-objective cispo"),
        (f"--use-tis {_LOSS_MODE}=dppo_tv", "next to it comes preset dppo_tv with bypass_mode, which judges"),
        (f"--use-tis {_LOSS_MODE}=clip_cov", "clip_cov is no setting here; next to it comes objective ppo"),
        (
            f"+{_RC}.mismatch.use_tis=true +{_RC}.mismatch.objective=cispo {_LOSS_MODE}=gspo",
            "cispo contradicts .*makes it gspo",
        ),
        (f"+{_RC}.mismatch.use_tis=true +{_RC}.mismatch.objective=cispo {_LOSS_MODE}=vanilla", "needs our loss in the"),
        (
            f"{_RC}.bypass_mode=true +{_RC}.mismatch.metrics=full {_LOSS_MODE}=gspo",
            rf"\(gspo is \+{_RC}.mismatch.objective=gspo there\)",
        ),
        (
            "--use-rollout-log-probs --rs-criterion token:k2:0.5 --mismatch-rollout-kl-coef 0.1",
            "rollout_kl_on all reaches no rejected token in verl.*: choose accepted, or denominator original",
        ),
    ],
)
def test_verl_s_losses_and_ours_that_cannot_be_had_together(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _verl(tmp_path, line)


def test_the_entry_point_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = '[project.entry-points."verl.plugins"]\nmismatch_plugin = "mismatch_plugin.hooks.verl_plugin"'
    assert declared in (ROOT / "pyproject.toml").read_text()
    here = SimpleNamespace(name="mismatch_plugin")
    monkeypatch.setattr(verl, "entry_points", lambda group: [here] if group == "verl.plugins" else [])
    verl.validate_registration()
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    with pytest.raises(ValueError, match="VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading"):
        verl.validate_registration()
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other,mismatch_plugin")
    verl.validate_registration()
    monkeypatch.setattr(verl, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match="pip install it"):
        verl.validate_registration()


# NeMo-RL --------------------------------------------------------------------------------------------------------------


def _nemo(folder: Path, line: str, yaml: str = "loss_fn: {ratio_clip_min: 0.2}\n") -> Plan:
    script = _script(folder, "nemo_rl.algorithms.grpo")
    base = "loss_fn: {token_level_loss: false, ratio_clip_max: 0.3}\npolicy: {max_total_sequence_length: 8192}\n"
    (folder / "base.yaml").write_text(base)
    (folder / "grpo.yaml").write_text(yaml if "defaults" in yaml else f"defaults: base.yaml\n{yaml}")
    config = [] if "--config" in line else ["--config", str(folder / "grpo.yaml")]
    return prepare([str(script), *config, *line.split()])[3]


def test_flags_become_the_block_of_nemo_rl(tmp_path: Path) -> None:
    """Next to what its YAML file and that one's defaults hold."""
    plan = _nemo(tmp_path, "grpo.num_prompts_per_step=8 --use-tis --tis-level sequence --tis-upper-bound 3")
    section: dict[str, Any] = {"token_level_loss": False, "ratio_clip_min": 0.2, "ratio_clip_max": 0.3}
    for name, value in read_overrides(plan.argv).items():
        if name.startswith("loss_fn."):
            put(section, name.removeprefix("loss_fn."), value)
    config = nemo_rl_settings.settings({"loss_fn": section})
    assert (config.algorithm, config.aggregation, config.ppo.eps_clip_high) == (2, "seq-mean-token-mean", 0.3)
    assert "algorithm 2" in plan.lines[0] and "by the step's sequences" in "\n".join(plan.lines)


@pytest.mark.parametrize(
    ("line", "yaml", "message"),
    [
        ("--use-tis", "loss_fn: {mismatch: {use_tis: true}}\n", "is set next to the plugin's flags"),
        (
            "--use-tis",
            "loss_fn: &a {mismatch: *a}\n",
            r"grpo\.yaml is not valid YAML or JSON: .* each alias \(\*\) counted in full",
        ),
        ("--use-tis --config nowhere.yaml", "loss_fn: {}\n", r"nowhere\.yaml does not exist: give --config FILE"),
        ("--use-tis", "defaults: [grpo.yaml]\n", r"grpo\.yaml is among its own defaults: take it out"),
        (
            "--use-tis --mismatch-objective gspo loss_fn.use_cispo=true",
            "loss_fn: {}\n",
            "objective gspo contradicts NeMo-RL's loss_fn.* makes it cispo",
        ),
        ("--use-tis loss_fn.positive_example_nll_weight=0.1", "loss_fn: {}\n", "makes another loss"),
        ("--use-tis --mismatch-eps-clip-low 0.1", "loss_fn: {}\n", "eps_clip_low 0.1 contradicts NeMo-RL's loss_fn"),
    ],
)
def test_nemo_rl_s_own_settings_win_or_stop(line: str, yaml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _nemo(tmp_path, line, yaml)


def test_the_longest_response_is_nemo_rl_s_and_verl_s_own(tmp_path: Path) -> None:
    line, said = "--use-tis --tis-level sequence", "! --tis-level sequence over 8192 tokens: "
    plans = {
        "the defaults' file": _nemo(tmp_path, line, "policy: {generation: {top_p: 1.0}}\n"),
        "short by override": _nemo(tmp_path, f"policy.max_total_sequence_length=64 {line}"),
        "a reference": _nemo(tmp_path, line, "policy: {max_total_sequence_length: '${oc.env:LENGTH}'}\n"),
        "verl": _verl(tmp_path, f"data.max_response_length=8192 {line}"),
        "verl, short": _verl(tmp_path, f"data.max_response_length=64 {line}"),
    }
    warned = {name for name, plan in plans.items() if any(row.startswith(said) for row in plan.lines)}
    assert warned == {"the defaults' file", "verl"}


@pytest.mark.parametrize("launched", [True, False])
def test_setup_gets_our_loss_wherever_the_script_has_imported_it(launched: bool, tmp_path: Path) -> None:
    """By the launcher, before the script takes it; by `install`, after. A stand-in for nemo_rl: its setup returns a
    loss, and the script prints which."""
    algorithms = tmp_path / "tree" / "nemo_rl" / "algorithms"
    algorithms.mkdir(parents=True)
    for folder in (algorithms.parent, algorithms):
        (folder / "__init__.py").write_text("")
    loss = "class Loss:\n    input_type = loss_type = None\n\n\n"
    (algorithms / "grpo.py").write_text(f"{loss}def setup(config):\n    return ('policy', Loss())\n")
    install = "import mismatch_plugin.hooks.nemo_rl as ours\nours.install()\n"
    script, config = tmp_path / "tree" / "run.py", tmp_path / "tree" / "grpo.yaml"
    config.write_text("loss_fn: {}\n")
    script.write_text(
        f"import sys\nfrom nemo_rl.algorithms.grpo import setup\nprint(sys.argv[3:])\n{'' if launched else install}"
        "print('GIVEN [\"%s\"]' % type(setup({'loss_fn': {'mismatch': {'use_tis': True}}})[1]).__name__)\n"
    )
    done = launch(script, f"--config {config} --use-tis") if launched else run(script, "")
    assert done.given == ["MismatchLoss"], done.errors
    assert ("+loss_fn.mismatch={use_tis: true}" in done.printed) == launched


# Hydra's grammar ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["+a.b={c:true,d:{e:x}}", "++a.b={c: true, d: {e: x}}"])
def test_overrides_are_read_with_and_without_spaces(token: str) -> None:
    assert read_overrides([token, "--config-name=x", "positional"]) == {"a.b": {"c": True, "d": {"e": "x"}}}


def test_values_are_written_as_hydra_reads_them() -> None:
    value = {"a": True, "b": [1e-05, math.inf], "c": {"d": None, "e": "two words", "f": "it's", "g": "geometric"}}
    written = text(value)
    assert written == "{a: true,b: [1e-05,inf],c: {d: null,e: 'two words',f: 'it\\'s',g: geometric}}"
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser", reason="hydra is not installed here")
    assert parser.OverridesParser.create().parse_override(f"+x={written}").value() == value
