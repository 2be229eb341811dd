"""slime and miles under the launcher: what is set on their command line and Namespace, and which mistakes are refused.

The trees parse as the hosts do; with the hosts' source named by MISMATCH_HOST_SRC their own parsers read the result.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from mismatch_plugin.hooks import miles, ray_actors, slime
from mismatch_plugin.hooks.base import Plan
from mismatch_plugin.hooks.hosts import find_host
from mismatch_plugin.hooks.slime.adapter import RayAdapter
from mismatch_plugin.hooks.slime.launch import TABLE
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.launch.command_line import read_command_line
from mismatch_plugin.report.log import write_step
from tests.hooks.contracts.launch_parsers import host_parser, read_custom_config
from tests.hooks.contracts.launch_trees import Outcome, launch, ray_tree, run
from tests.hooks.contracts.slime_cases import SHIPPED, hooked
from tests.hooks.contracts.slime_data import arguments
from tests.hooks.contracts.slime_source import host_root

ADAPTERS: dict[str, RayAdapter] = {"slime": slime.ADAPTER, "miles": miles.ADAPTER}
HOSTS = tuple(ADAPTERS)
BOTH = "--use-tis --use-rollout-log-probs"
MODULE = "mismatch_plugin.hooks.slime"
OURS = f"{MODULE}.policy_loss"
STEP_HOOK = "--custom-megatron-before-train-step-hook-path"


def _plan(folder: Path, line: str, host: str = "slime") -> Plan:
    return prepare([str(ray_tree(folder / "tree", host)), *line.split()])[3]


def _value(plan: Plan, flag: str) -> str | None:
    """What follows a flag that the launcher added."""
    return plan.added[plan.added.index(flag) + 1] if flag in plan.added else None


def _args(done: Outcome) -> Namespace:
    """The Namespace that the script was given."""
    assert done.given is not None, done.errors
    return Namespace(**done.given["args"])


# What is set ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("line", "algorithm", "custom", "switches"),
    [
        ("--rs-criterion token:k2:0.5", 0, False, {"--get-mismatch-metrics"}),
        ("--mismatch-metrics full", 0, False, {"--get-mismatch-metrics"}),
        ("--use-rollout-log-probs", 1, True, {"--use-rollout-logprobs"}),
        ("--use_rollout_log_probs", 1, True, {"--use-rollout-logprobs"}),
        ("--use-tis --tis-level geometric --tis-mode clip", 2, False, {"--use-tis"}),
        (BOTH, 3, True, {"--use-rollout-logprobs"}),
        ("--mismatch-preset pg_is", 3, True, {"--use-rollout-logprobs"}),
        ("--mismatch-preset decoupled_token_is", 2, False, {"--use-tis"}),
        ("--use-tis --advantage-estimator gspo --use-opsm", 2, False, {"--use-tis"}),
        ("--mismatch-metrics full --advantage-estimator cispo", 0, False, {"--get-mismatch-metrics"}),
        # What the host's own loss cannot run takes ours.
        ("--mismatch-objective gspo", 0, True, set()),
        ("--use-tis --mismatch-objective reinforce", 2, True, set()),
        ("--rs-criterion token:tv:0.15@away", 0, True, set()),
        ("--use-tis --rs-veto-threshold 1e-4 --rs-policy current", 2, True, set()),
        ("--use-tis --mismatch-rollout-kl-coef 1e-3", 2, True, set()),
    ],
)
def test_each_algorithm_has_its_path(
    host: str, line: str, algorithm: int, custom: bool, switches: set[str], tmp_path: Path
) -> None:
    plan = _plan(tmp_path, line, host)
    module = f"mismatch_plugin.hooks.{host}"
    assert f"algorithm {algorithm}: " in plan.lines[0]
    assert _value(plan, "--custom-loss-function-path") == (f"{module}.policy_loss" if custom else None)
    assert _value(plan, "--loss-type") == ("custom_loss" if custom else None)
    assert _value(plan, "--custom-tis-function-path") == (None if custom else f"{module}.tis_function")
    every = {"--use-rollout-logprobs", "--use-tis", "--get-mismatch-metrics"}
    assert every.intersection(plan.added) == switches
    assert _value(plan, "--custom-megatron-before-train-step-hook-path") == f"{module}.before_train_step"
    assert _value(plan, "--rollout-data-postprocess-path") == f"{module}.rollout_data_postprocess"
    assert _value(plan, "--custom-megatron-init-path") == f"{module}.init"


@pytest.mark.parametrize("host", HOSTS)
def test_both_flags_are_algorithm_3_on_the_namespace(host: str, tmp_path: Path) -> None:
    """The host's parser forbids the pair: its use_tis is cleared, use_rollout_logprobs kept, and the block says so."""
    script = ray_tree(tmp_path / "tree", host)
    done = launch(script, f"{BOTH} --tis-level sequence --rs-veto-threshold 1e-4 --eps-clip 0.3")
    args = _args(done)
    assert (args.use_tis, args.use_rollout_logprobs, args.loss_type) == (False, True, "custom_loss")
    assert f"{host}'s use_tis is cleared" in done.printed
    config = ADAPTERS[host].settings(args)
    assert (config.algorithm, config.tis.level, config.rs.veto_threshold) == (3, "sequence", 1e-4)
    assert done.given and "--tis-level" not in done.given["argv"]  # miles would stop, slime would ignore it


@pytest.mark.parametrize("host", HOSTS)
def test_the_host_s_switches_reach_our_loss(host: str, tmp_path: Path) -> None:
    """Bypass takes our loss, where the masking of whole sequences is a criterion, on the Namespace as in the plan."""
    line = "--use-rollout-logprobs --advantage-estimator gspo --use-opsm --opsm-delta 0.05 --eps-clip 3e-4"
    done = launch(ray_tree(tmp_path / "tree", host), line)
    config = ADAPTERS[host].settings(_args(done))
    assert (config.algorithm, config.objective, config.ppo.eps_clip_high) == (1, "gspo", 3e-4)
    assert [rule.name for rule in config.criteria] == ["sequence_mean_ratio_negative"]
    assert "objective: gspo, ratio in [0.9997, 1.0003]" in done.printed
    assert "rejection: sequence_mean_ratio_negative in [0.951229, inf]" in done.printed


def test_what_needs_our_loss_contradicts_the_host_s_by_hand(tmp_path: Path) -> None:
    line = "--use-tis --mismatch-objective gspo"
    with pytest.raises(ValueError, match="policy_loss contradicts --mismatch-objective gspo: slime's policy_loss comp"):
        _plan(tmp_path, f"{line} --loss-type policy_loss")
    with pytest.raises(ValueError, match=r"mine\.tis is another correction"):
        _plan(tmp_path, f"{line} --custom-tis-function-path mine.tis")
    assert _value(_plan(tmp_path, f"{line} --advantage-estimator gspo"), "--loss-type") is None


def test_a_custom_arguments_hook_of_the_script_still_runs(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    extra = "parse_args(lambda p: p.add_argument('--mine', default='x') and p)"
    script.write_text(script.read_text().replace("parse_args()", extra))
    assert _args(launch(script, "--use-tis --mine y")).mine == "y"


@pytest.mark.parametrize("host", HOSTS)
def test_a_patched_tree_needs_no_launcher(host: str, tmp_path: Path) -> None:
    """The decorator that the patch puts on parse_args does what the launcher does, and only once under it."""
    script = ray_tree(tmp_path / "tree", host, patched=True)
    line = f"{BOTH} --tis-level sequence --num-rollout 5"
    alone, launched = run(script, line), launch(script, line)
    assert _args(alone) == _args(launched)
    assert _args(alone).mismatch_settings["tis"] == {"level": "sequence"}
    for done in (alone, launched):
        assert done.printed.count(f"mismatch_plugin on {host}:") == 1


def test_a_patched_tree_refuses_and_explains(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime", patched=True)
    wrong = run(script, "--use-tis --tis-levle sequence")
    assert (wrong.status, wrong.given) == (2, None)
    assert "mismatch_plugin: --tis-levle is unknown" in wrong.errors
    explained = run(script, "--use-tis --mismatch-explain-only")
    assert (explained.status, explained.given) == (0, None)


def test_slime_s_own_loss_can_be_kept_for_algorithm_1(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "--use-rollout-log-probs --loss-type policy_loss")
    assert plan.added == ("--use-rollout-logprobs",)
    assert "through: slime's policy_loss" in plan.lines


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        (f"--use-tis --loss-type custom_loss --custom-loss-function-path {OURS}", ["--custom-tis-function-path"]),
        (
            f"{BOTH} --custom-megatron-init-path mine.init --rollout-data-postprocess-path mine.post",
            ["--custom-megatron-init-path", "--rollout-data-postprocess-path"],
        ),
    ],
)
def test_paths_of_the_user_stay(line: str, left_out: list[str], tmp_path: Path) -> None:
    plan = _plan(tmp_path, line)
    assert not set(left_out).intersection(plan.added)
    assert f"through: {OURS}" in plan.lines
    assert _value(plan, "--custom-megatron-before-train-step-hook-path") == f"{MODULE}.before_train_step"


def test_hooks_of_the_user_around_the_step_change_the_scope_and_the_block_says_so(tmp_path: Path) -> None:
    line = "--use-tis --tis-level sequence --tis-batch-normalize"
    assert "over: the optimizer step (its mean weight is known before it)" in "\n".join(_plan(tmp_path, line).lines)
    mine = "\n".join(_plan(tmp_path, f"{line} --rollout-data-postprocess-path mine.post").lines)
    assert (
        "over: the optimizer step (gradients are divided by the mean weight at its end, the logged loss is not)" in mine
    )
    block = "\n".join(_plan(tmp_path, f"{line} {STEP_HOOK} mine.step").lines)
    assert f"over: each micro-batch; for the optimizer step set {STEP_HOOK} mismatch_plugin.hooks.slime.bef" in block


@pytest.mark.parametrize("host", HOSTS)
def test_bounds_that_do_harm_are_warned_of_in_the_block(host: str, tmp_path: Path) -> None:
    def warned(line: str) -> list[str]:
        return [
            said for said in _plan(tmp_path, f"{line} --rollout-max-response-len 8192", host).lines if "! --" in said
        ]

    (said,) = warned("--use-tis --tis-level sequence")
    assert "over 8192 tokens: at KL 0.001 weights bounded by 2 have mean 0.06, ESS 4.5%" in said
    for bound in ("0.5", "101", "inf"):
        assert [said.split(":")[0] for said in warned(f"--use-tis --tis-upper-bound {bound}")] == [
            f"! --tis-upper-bound {bound}"
        ]
    for line in (
        "--use-tis",
        "--use-tis --tis-level geometric",
        "--use-tis --tis-upper-bound 100",
        "--rs-criterion token:k2:0.5",
    ):
        assert warned(line) == []
    assert not any("! --" in said for said in _plan(tmp_path, "--use-tis --tis-level sequence", host).lines)


@pytest.mark.parametrize("host", HOSTS)
def test_a_report_folder_of_other_settings_is_refused_at_launch(host: str, tmp_path: Path) -> None:
    """What the trainer's processes will write there is what the launcher asks of."""
    line = f"--use-tis --eps-clip 0.3 --mismatch-report-dir {tmp_path / 'run'}"
    args = _args(launch(ray_tree(tmp_path / "tree", host), line))
    write_step(tmp_path / "run", ADAPTERS[host].settings(args), {"rollout_corr/kl": 0.1})
    assert _plan(tmp_path, line, host).config == ADAPTERS[host].settings(args)
    for other in ("--tis-level geometric", "--rs-veto-threshold 1e-4", "--use-rollout-log-probs"):
        with pytest.raises(ValueError, match=r"run holds steps of a run with .*: give this run another folder"):
            _plan(tmp_path, f"{line} {other}", host)


def test_a_switch_that_makes_a_preset_another_algorithm_is_noted(tmp_path: Path) -> None:
    lines = _plan(tmp_path, "--use-tis --mismatch-preset geo_rs").lines
    note = "! preset geo_rs is algorithm 0 (PPO), and --use-tis makes it 2 (decoupled PPO): leave --use-tis out to "
    assert lines[0] == "algorithm 2: decoupled PPO"
    assert [line for line in lines if line.startswith("! preset")] == [f"{note}run the preset as it is."]
    for line in ("--mismatch-preset geo_rs", "--use-tis --mismatch-preset token_is"):
        assert not [line for line in _plan(tmp_path, line).lines if line.startswith("! preset")]


# YAML -----------------------------------------------------------------------------------------------------------------


def _yaml(folder: Path, text: str) -> str:
    path = folder / "mis.yaml"
    path.write_text(text)
    return f"--custom-config-path {path}"


def test_both_switches_in_yaml_evade_the_host_s_check_and_not_the_launcher(tmp_path: Path) -> None:
    """Read after the assertion, the pair would count the weight twice: through the launcher it is algorithm 3."""
    line = _yaml(tmp_path, "use_tis: true\nuse_rollout_logprobs: true\ntis_level: sequence\n")
    args = _args(launch(ray_tree(tmp_path / "tree", "slime"), line))
    assert (args.use_tis, args.loss_type) == (False, "custom_loss")
    config = ADAPTERS["slime"].settings(args)
    assert (config.algorithm, config.tis.level) == (3, "sequence")


@pytest.mark.parametrize("host", HOSTS)
def test_the_shipped_mis_yaml_runs_under_the_launcher(host: str, tmp_path: Path) -> None:
    plan = _plan(tmp_path, _yaml(tmp_path, yaml.safe_dump(SHIPPED)), host)
    assert plan.lines[:3] == (
        "algorithm 2: decoupled PPO",
        "weights: token level, truncate, at most 2, normalised over auto",
        "rejection: token_ratio in [0.5, 2], veto below 0.0001",
    )
    assert len([line for line in plan.lines if "tis.lower_bound 0.5 bounds no weight" in line]) == 1


@pytest.mark.parametrize("host", HOSTS)
def test_without_the_launcher_the_settings_ride_in_the_host_s_yaml(host: str, tmp_path: Path) -> None:
    """The path arguments, and --custom-config-path with our settings: the host puts every key on its arguments."""
    text = "use_tis: true\ntis_level: sequence\nrs_criterion: ['token:k2:0.5']\nmismatch_metrics: off\n"
    script = ray_tree(tmp_path / "tree", host)
    hook = f"--custom-tis-function-path mismatch_plugin.hooks.{host}.tis_function"
    config = ADAPTERS[host].check(_args(run(script, f"{hook} {_yaml(tmp_path, text)}")))
    assert config and (config.algorithm, config.tis.level, config.metrics) == (2, "sequence", "off")
    assert [criterion.name for criterion in config.criteria] == ["token_k2"]


@pytest.mark.parametrize("host", HOSTS)
def test_the_host_s_own_code_puts_the_yaml_on_its_arguments(host: str, tmp_path: Path) -> None:
    path = _yaml(tmp_path, "use_tis: true\ntis_level: sequence\nmismatch_metrics: off\n").split()[1]
    args = arguments(host, custom_config_path=path, **hooked(host))
    read_custom_config(host, args)
    config = ADAPTERS[host].check(args)
    assert config and (config.algorithm, config.tis.level, config.metrics) == (2, "sequence", "off")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("tis_levle: token\n", "--use-tis", "setting 'tis_levle' is unknown: did you mean tis_level"),
        ("mismatch_colour: red\n", "", "setting 'mismatch_colour' is unknown"),
        ("loss_type: policy_loss\n", BOTH, "--loss-type policy_loss contradicts algorithm 3"),
        ("tis_mode: clip\n", "--use-tis --tis-level token", "are in --custom-config-path .* and on the command line"),
        ("- 1\n", "--use-tis", "holds a list, not a mapping"),
        ("tis_upper_bound: lots\n", "--use-tis", "tis_upper_bound"),
        ("tis_mode: [\n", "--use-tis", r"--custom-config-path .*mis\.yaml is not valid YAML: "),
    ],
)
def test_yaml_that_contradicts(text: str, line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _plan(tmp_path, f"{line} {_yaml(tmp_path, text)}")


def test_a_yaml_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--custom-config-path nowhere\.yaml does not exist"):
        _plan(tmp_path, "--use-tis --custom-config-path nowhere.yaml")


# A user's mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"{BOTH} --loss-type policy_loss",
            r"--loss-type policy_loss contradicts algorithm 3 \(--use-rollout-log-probs with --use-tis\): .* count "
            r"twice. Leave --loss-type out",
        ),
        (
            "--use-rollout-log-probs --rs-criterion token:k2:0.5 --loss-type policy_loss",
            "contradicts algorithm 1 .* compare π_θ with π_rollout, which .*policy_loss does not pass on",
        ),
        ("--use-tis --loss-type custom_loss --custom-loss-function-path mine.loss", "mine.loss is another loss"),
        ("--use-tis --custom-tis-function-path mine.tis", "mine.tis is another correction, and"),
        *(
            (f"{line} --custom-tis-function-path mine.tis", "mine.tis is another correction, which .* does not call")
            for line in (BOTH, "--use-rollout-log-probs", "--use-tis --mismatch-objective gspo")
        ),
        *(
            (f"{line} --loss-type {kind}", f"--loss-type {kind} is no policy loss, so that nothing would be corrected")
            for line in ("--use-tis", BOTH, "--mismatch-metrics full")
            for kind in ("sft_loss", "value_loss")
        ),
        (
            f"--use-tis --tis-batch-normalize --tis-batch-normalize-scope step {STEP_HOOK} mine.step",
            "--tis-batch-normalize-scope step needs the mean weight of a whole step, known only to its hook",
        ),
    ],
)
def test_one_sentence_for_each_mistake(host: str, line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _plan(tmp_path, line, host)
    assert "\n" not in str(caught.value)


def test_the_plugin_missing_in_ray_s_processes_is_said_before_training(tmp_path: Path) -> None:
    """A stand-in for ray whose second node cannot import the package."""
    script = ray_tree(tmp_path / "tree", "slime")
    _fake_ray(tmp_path / "tree", missing="10.0.0.2")
    done = launch(script, "--use-tis")
    assert (done.status, done.given) == (2, None)
    (line,) = [row for row in done.errors.splitlines() if row.startswith("mismatch_plugin")]
    assert "cannot be imported in Ray's processes on 10.0.0.2 (ModuleNotFoundError" in line
    assert "--runtime-env-json" in line
    _fake_ray(tmp_path / "tree", missing="none")
    assert launch(script, "--use-tis").status == 0


def _fake_ray(folder: Path, missing: str) -> None:
    (folder / "ray" / "util").mkdir(parents=True, exist_ok=True)
    (folder / "ray" / "__init__.py").write_text(_RAY.replace("MISSING", missing))
    (folder / "ray" / "util" / "__init__.py").write_text("")
    (folder / "ray" / "util" / "scheduling_strategies.py").write_text(
        "class NodeAffinitySchedulingStrategy:\n    def __init__(self, node, soft):\n        self.node = node\n"
    )


_RAY = """
import sys
nodes = lambda: [{"NodeID": n, "NodeManagerAddress": n, "Alive": n != "dead"} for n in ("10.0.0.1", "10.0.0.2", "dead")]
is_initialized, init, get = lambda: False, lambda: None, lambda answer: answer


class Task:
    def __init__(self, function, node=None):
        self.function, self.node = function, node

    def options(self, scheduling_strategy):
        return Task(self.function, scheduling_strategy.node)

    def remote(self):
        if self.node != "MISSING":
            return self.function()
        saved = sys.modules.pop("mismatch_plugin")
        sys.modules["mismatch_plugin"] = None
        try:
            return self.function()
        finally:
            sys.modules["mismatch_plugin"] = saved


remote = lambda **options: Task
"""


def test_ray_imports_the_package_on_a_real_node() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed here")
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        ray_actors.check_actors()
    finally:
        ray.shutdown()


# The hosts' own scripts -----------------------------------------------------------------------------------------------


def test_miles_s_scripts_are_refused_and_its_trainers_are_not() -> None:
    root = host_root("miles")
    for script in sorted(root.glob("scripts/run_*.py")):
        with pytest.raises(ValueError, match=r"it imports miles.*command_utils.*--host miles.*--extra-args"):
            prepare([str(script), "--use-tis"])
    for script in (root / "train.py", root / "train_async.py", host_root("slime") / "train.py"):
        assert prepare([str(script), "--use-tis"])[1].name == script.parent.name


# The hosts' own parsers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_the_host_s_own_parser_takes_what_is_added(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["--use-tis", BOTH, "--rs-criterion token:k2:0.5"]
    if host == "slime":
        lines.append("--use-tis --rs-criterion token:k2:0.5 --rs-group exclude")
    plans = [_plan(tmp_path, line, host) for line in lines]
    parser = host_parser(host, monkeypatch)
    for plan in plans:
        args, unknown = parser.parse_known_args([*plan.argv, "--rollout-batch-size", "4"])
        assert unknown == []
        assert not (args.use_rollout_logprobs and args.use_tis)  # its assertion
        assert not args.get_mismatch_metrics or args.custom_tis_function_path is not None


@pytest.mark.parametrize("host", HOSTS)
def test_the_recorded_flags_are_the_host_s(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = host_parser(host, monkeypatch)
    options = parser._option_string_actions
    # miles's, Megatron's, and slime's alone
    optional = {"--skip-actor-forward-only", "--calculate-per-token-loss"}
    optional |= {"--custom-advantage-function-path"} if host == "miles" else set()
    missing = sorted(flag for flag in TABLE if flag not in options and flag not in optional)
    assert not missing, f"{host} no longer declares {', '.join(missing)}"
    for flag, recorded in TABLE.items():
        if flag in options:
            theirs = options[flag].default
            assert theirs == recorded.get("default"), f"{host}'s default of {flag} is now {theirs!r}"


@pytest.mark.parametrize("host", HOSTS)
def test_no_flag_of_the_host_is_taken_for_a_misspelling(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = find_host(host).part.FLAGS
    for flag in host_parser(host, monkeypatch)._option_string_actions:
        read_command_line(["--use-tis", flag], declared)
