"""slime and miles under the launcher: what is set on their command line and Namespace, and which mistakes are refused.

The trees parse as the hosts do; with the hosts' source named by MISMATCH_HOST_SRC their own parsers read the result.
"""

from __future__ import annotations

from argparse import Namespace
from base64 import b64encode
from pathlib import Path

import pytest
import yaml

from mismatch_plugin.hooks import miles, slime
from mismatch_plugin.hooks.base import Plan
from mismatch_plugin.hooks.slime.adapter import RayAdapter
from mismatch_plugin.hooks.slime.config import FLAGS, TABLE
from mismatch_plugin.hooks.slime.samples import OWN_SOURCE
from mismatch_plugin.launch.__main__ import prepare
from mismatch_plugin.launch.command_line import read_command_line
from tests.hooks.contracts.launch_parsers import host_parser
from tests.hooks.contracts.launch_trees import Outcome, launch, ray_tree, run
from tests.hooks.contracts.slime_data import SHIPPED

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
ADAPTERS: dict[str, RayAdapter] = {"slime": slime.ADAPTER, "miles": miles.ADAPTER}
hosts = pytest.mark.parametrize("host", ADAPTERS)
BOTH = "--use-tis --use-rollout-log-probs"
OURS = "mismatch_plugin.hooks.slime.policy_loss"
STEP_HOOK = "--custom-megatron-before-train-step-hook-path"


def plan_of(folder: Path, line: str, host: str = "slime") -> Plan:
    return prepare([str(ray_tree(folder / "tree", host)), *line.split()])[3]


def value(plan: Plan, flag: str) -> str | None:
    """What follows a flag that the launcher added."""
    return plan.added[plan.added.index(flag) + 1] if flag in plan.added else None


def args_of(done: Outcome) -> Namespace:
    """The Namespace that the script was given."""
    assert done.given is not None, done.errors
    return Namespace(**done.given["args"])


# What is set ----------------------------------------------------------------------------------------------------------

HOOKS = (STEP_HOOK, "--rollout-data-postprocess-path", "--custom-megatron-init-path")
SET: list[tuple[str, int, bool, str]] = [
    ("--mismatch-metrics full --advantage-estimator cispo", 0, False, "--get-mismatch-metrics"),
    ("--use-rollout-log-probs", 1, True, "--use-rollout-logprobs"),
    ("--use-tis --advantage-estimator gspo --use-opsm", 2, False, "--use-tis"),
    (BOTH, 3, True, "--use-rollout-logprobs"),
    # what the host's own loss cannot run takes ours
    ("--mismatch-objective gspo", 0, True, ""),
]  # fmt: skip


@hosts
@pytest.mark.parametrize(("line", "algorithm", "custom", "switch"), SET)
def test_each_algorithm_has_its_path(
    host: str, line: str, algorithm: int, custom: bool, switch: str, tmp_path: Path
) -> None:
    plan, module = plan_of(tmp_path, line, host), f"mismatch_plugin.hooks.{host}"
    assert f"algorithm {algorithm}: " in plan.lines[0]
    assert value(plan, "--custom-loss-function-path") == (f"{module}.policy_loss" if custom else None)
    assert value(plan, "--loss-type") == ("custom_loss" if custom else None)
    assert value(plan, "--custom-tis-function-path") == (None if custom else f"{module}.tis_function")
    every = {"--use-rollout-logprobs", "--use-tis", "--get-mismatch-metrics"}
    assert every.intersection(plan.added) == {*filter(None, [switch])}
    names = ("before_train_step", "rollout_data_postprocess", "init")
    assert [value(plan, flag) for flag in HOOKS] == [f"{module}.{name}" for name in names]


STAYS = [
    (f"--use-tis --loss-type custom_loss --custom-loss-function-path {OURS}", ["--custom-tis-function-path"]),
    (f"{BOTH} --custom-megatron-init-path mine.init", ["--custom-megatron-init-path"]),
    (f"{BOTH} --rollout-data-postprocess-path mine.post", ["--rollout-data-postprocess-path"]),
    ("--use-tis --mismatch-objective gspo --advantage-estimator gspo", ["--loss-type"]),
    ("--use-rollout-log-probs --loss-type policy_loss", [*HOOKS, "--loss-type", "--custom-loss-function-path"]),
]


@pytest.mark.parametrize(("line", "left_out"), STAYS)
def test_what_the_user_set_stays(line: str, left_out: list[str], tmp_path: Path) -> None:
    """The last: slime's own loss is algorithm 1, and may be kept."""
    assert not {*left_out}.intersection(plan_of(tmp_path, line).added)


@hosts
def test_the_namespace_is_what_the_host_would_have_and_algorithm_3_is_ours(host: str, tmp_path: Path) -> None:
    """By the launcher, and alone in a patched tree: there the decorator on parse_args does the same, and once."""
    script = ray_tree(tmp_path / "tree", host, patched=True)
    parsing = tmp_path / "tree" / host / "utils" / "arguments.py"
    head, found, tail = parsing.read_text().rpartition("    return args\n")
    parsing.write_text(f'{head}    args.data_source_path = "mine.Source"\n{found}{tail}')
    script.write_text(
        script.read_text().replace("parse_args()", "parse_args(lambda p: p.add_argument('--mine', default='x') and p)")
    )
    line = f"{BOTH} --tis-level sequence --rs-veto-threshold 1e-4 --eps-clip 0.3 --mine y"
    alone, launched = run(script, line), launch(script, line)
    args = args_of(launched)
    assert args_of(alone) == args
    assert (args.use_tis, args.use_rollout_logprobs, args.loss_type, args.mine) == (False, True, "custom_loss", "y")
    assert args.data_source_path == f"mismatch_plugin.hooks.{host}.data_source"
    assert vars(args)[OWN_SOURCE] == "mine.Source"
    config = ADAPTERS[host].settings(args)
    assert (config.algorithm, config.tis.level, config.rs.veto_threshold) == (3, "sequence", 1e-4)
    assert launched.given and "--tis-level" not in launched.given["argv"]  # miles would stop, slime would ignore it
    for done in (alone, launched):
        assert done.printed.count(f"mismatch_plugin on {host}:") == 1
        assert f"{host}'s use_tis is cleared: its parser forbids the pair" in done.printed
        assert "weight updates: verified where servers have the SGLang plugin; a diff" in done.printed


# YAML -----------------------------------------------------------------------------------------------------------------


def _yaml(folder: Path, text: str) -> str:
    path = folder / "mis.yaml"
    path.write_text(text)
    return f"--custom-config-path {path}"


def test_both_switches_in_yaml_evade_the_host_s_check_and_not_the_launcher(tmp_path: Path) -> None:
    """Read after the assertion, the pair would count the weight twice: through the launcher it is algorithm 3."""
    line = _yaml(tmp_path, "use_tis: true\nuse_rollout_logprobs: true\ntis_level: sequence\n")
    args = args_of(launch(ray_tree(tmp_path / "tree", "slime"), line))
    config = ADAPTERS["slime"].settings(args)
    assert (args.use_tis, args.loss_type, config.algorithm, config.tis.level) == (False, "custom_loss", 3, "sequence")


@hosts
def test_a_mis_yaml_runs_under_the_launcher(host: str, tmp_path: Path) -> None:
    """As a file, or itself in base64, which is miles's form."""
    text = yaml.safe_dump(SHIPPED)
    for line in (_yaml(tmp_path, text), f"--custom-config-path base64:{b64encode(text.encode()).decode()}"):
        lines = plan_of(tmp_path, line, host).lines
        assert lines[:3] == (
            "algorithm 2: decoupled PPO",
            "weights: token level, truncate, at most 2, normalised over auto",
            "rejection: token_ratio in [0.5, 2], veto below 0.0001",
        )
        assert len([line for line in lines if "tis.lower_bound 0.5 bounds no weight" in line]) == 1


# A user's mistakes ----------------------------------------------------------------------------------------------------

IN_YAML = [
    ("loss_type: policy_loss\n", BOTH, "--loss-type policy_loss cannot run algorithm 3"),
    ("tis_mode: clip\n", "--use-tis --tis-level token", "are in --custom-config-path .* and on the command line"),
    ("tis_mode: [\n", "--use-tis", r"mis\.yaml cannot be read as YAML or JSON: "),
]
ON_THE_LINE = [
    (f"{BOTH} --loss-type policy_loss", r"cannot run algorithm 3 .*: .* count twice. Leave it out"),
    ("--use-rollout-log-probs --rs-criterion token:k2:1 --loss-type policy_loss", "cannot run algorithm 1 .* compare"),
    ("--use-tis --loss-type custom_loss --custom-loss-function-path mine.loss", "mine.loss is another loss, in"),
    ("--use-tis --custom-tis-function-path mine.tis", "mine.tis is another correction, and"),
    (f"{BOTH} --custom-tis-function-path mine.tis", "mine.tis is another correction, which .* does not call"),
    ("--use-tis --mismatch-objective gspo --loss-type policy_loss", "cannot run --mismatch-objective gspo: .* comput"),
    ("--use-tis --loss-type sft_loss", "--loss-type sft_loss is another loss, in which nothing would be corrected"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "message"), [*IN_YAML, *(("", *row) for row in ON_THE_LINE)])
def test_one_sentence_for_each_mistake(text: str, line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        plan_of(tmp_path, f"{line} {_yaml(tmp_path, text) if text else ''}")
    assert text or "\n" not in str(caught.value)


# The hosts' own -------------------------------------------------------------------------------------------------------


@hosts
def test_the_recorded_flags_are_the_host_s(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of the host's is taken for a misspelling of ours."""
    options = host_parser(host, monkeypatch)._option_string_actions
    # miles's, Megatron's, and slime's alone
    optional = {"--skip-actor-forward-only", "--calculate-per-token-loss"}
    optional |= {"--custom-advantage-function-path"} if host == "miles" else set()
    for flag, recorded in TABLE.items():
        assert flag in options or flag in optional, f"{host} no longer declares {flag}"
        if flag in options:
            assert options[flag].default == recorded.get("default"), f"{host}'s default of {flag} is now another"
    for flag in options:
        read_command_line(["--use-tis", flag], FLAGS)
