"""The launcher's own part: which tokens are ours, which host it is, how the script runs, what is said."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.hooks.base import MINIMUM_MEGATRON, megatron_core_version, peek
from mismatch_plugin.launch.__main__ import HOSTS, Target, host_of, main, prepare
from mismatch_plugin.launch.command_line import (
    Given,
    help_text,
    named_host,
    read_command_line,
    script_position,
)
from tests.hooks.contracts.launch_trees import launch, megatron_core, ray_tree


def _read(line: str, host_flags: tuple[str, ...] = ()) -> Given:
    return read_command_line(line.split(), host_flags)


# Our flags ------------------------------------------------------------------------------------------------------------


def test_our_flags_are_taken_and_the_rest_stays_as_it_is() -> None:
    line = "--lr 1e-6 --use-tis --tis-level=geometric --n -1 --mismatch-entropy-coef -0.1 a=b --x --use-tis"
    given = _read(line)
    assert given.host_argv == ("--lr", "1e-6", "--n", "-1", "a=b", "--x")
    assert given.settings == {"use_tis": True, "tis": {"level": "geometric"}, "terms": {"entropy_coef": -0.1}}
    assert given.flags == ("--use-tis", "--tis-level", "--mismatch-entropy-coef")


def test_underscores_are_dashes_in_every_flag() -> None:
    """Also in those of the launcher itself; what the host gets keeps its spelling."""
    line = "--mismatch_host slime --use_tis --tis_level=sequence --tis_upper_bound 3 --mismatch_explain_only --num_x 1"
    given = _read(line)
    assert (given.host, given.explain_only, given.host_argv) == ("slime", True, ("--num_x", "1"))
    assert given.settings == {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 3.0}}
    assert given.flags == ("--use-tis", "--tis-level", "--tis-upper-bound")
    assert named_host(line.split()) == "slime"
    assert script_position(["--use_tis", "--tis_level", "token", "train.py"]) == 3
    assert "--use_tis" not in help_text("usage", "description")


@pytest.mark.parametrize(
    "line",
    [
        *("--use-tis false", "--mismatch-dry-run True --lr 1", "--tis-batch-normalize off"),
        *("--use-tis 0", "--mismatch-dry-run 0", "--mismatch_dry_run 1 --lr 1"),
    ],
)
def test_a_switch_with_a_value_is_refused(line: str) -> None:
    """The value would go to the host, which may pass over it, and the switch would be on."""
    with pytest.raises(ValueError, match="is a switch and takes no value"):
        _read(line)


def test_what_follows_two_dashes_is_the_host_s() -> None:
    given = _read("--use-tis -- --tis-mode clip --tis-levle")
    assert given.host_argv == ("--", "--tis-mode", "clip", "--tis-levle")
    assert given.settings == {"use_tis": True}


@pytest.mark.parametrize("line", ["--mismatch-explain-only --mismatch-host slime", ""])
def test_the_launcher_s_own_flags_are_no_settings(line: str) -> None:
    given = _read(line)
    assert (given.flags, given.settings, given.explain_only) == ((), {}, bool(line))
    assert given.host == ("slime" if line else None)


def test_presets_and_files_are_resolved(tmp_path: Path) -> None:
    path = tmp_path / "mismatch.yaml"
    path.write_text("tis: {mode: clip}\nuse_tis: true\n")
    assert _read(f"--mismatch-config {path}").settings == {"use_tis": True, "tis": {"mode": "clip"}}
    assert _read("--mismatch-preset pg_is").config.algorithm == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tis-levle token", "--tis-levle is unknown: did you mean --tis-level?"),
        ("--use_tiss", "--use_tiss is unknown: did you mean --use-tis?"),
        ("--tis_levle token", "--tis_levle is unknown: did you mean --tis-level?"),
        ("--tis-level token --tis_level sequence", "--tis_level sequence contradicts --tis-level token"),
        ("--use-tls", "--use-tls is unknown: did you mean --use-tis?"),
        ("--tis-upper=3", "--tis-upper is unknown: did you mean --tis-upper-bound?"),
        ("--mismatch-colour red", "--mismatch-colour is unknown"),
        ("--use-rollout-logprob", "--use-rollout-logprob is unknown: did you mean --use-rollout-log"),
        ("--use-tis --tis-level token --tis-level sequence", "--tis-level sequence contradicts --tis-level token"),
        ("--use-tis --tis-mode", "Argument --tis-mode: expected one argument."),
        ("--use-tis --tis-mode cap", "Argument --tis-mode: invalid choice: 'cap'"),
        ("--tis-mode clip", "--tis-mode clip changes no weight without --use-tis"),
    ],
)
def test_misspelt_and_contradictory_flags_are_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _read(line)


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", "--rollout-top-p", "--use-rl", "--lr", "--test-mode"])
def test_other_flags_pass(flag: str) -> None:
    assert _read(f"{flag} 1").host_argv == (flag, "1")


def test_a_host_s_own_flags_near_ours_pass() -> None:
    assert _read("--tis-clip 3", ("--tis-clip",)).host_argv == ("--tis-clip", "3")
    with pytest.raises(ValueError, match="--tis-clip is unknown"):
        _read("--tis-clip 3")


@pytest.mark.parametrize("typed", ["--tis_clip", "--tis-clp"])
def test_the_flag_that_is_meant_may_be_the_host_s(typed: str) -> None:
    with pytest.raises(ValueError, match=rf"^{typed} is unknown: did you mean --tis-clip\?"):
        _read(f"{typed}=3", ("--tis-clip", "--tis-clip-low"))


def test_criteria_may_be_given_more_than_once() -> None:
    given = _read("--rs-criterion token:k2:0.5 --rs-criterion sequence_max:k3:0.5")
    assert [criterion["statistic"] for criterion in given.settings["rs"]["criteria"]] == ["k2", "k3"]


def test_peek_sees_defaults_and_what_was_typed() -> None:
    table: dict[str, dict[str, Any]] = {
        "--loss-type": {"default": "policy_loss"},
        "--eps-clip": {"type": float, "default": 0.2},
    }
    values, typed = peek(["--eps-clip=0.3", "--other", "1", "--eps", "9"], table)
    assert (values.loss_type, values.eps_clip, typed) == ("policy_loss", 0.3, {"eps_clip"})


# Script and host ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "position"),
    [("train.py --use-tis", 0), ("--use-tis --tis-level token train.py", 3), ("--mismatch-host=slime -m a.b c", 1)],
)
def test_the_script_is_the_first_token_that_is_not_ours(line: str, position: int) -> None:
    assert script_position(line.split()) == position


@pytest.mark.parametrize(
    ("source", "host"),
    [
        ("from slime.utils.arguments import parse_args", "slime"),
        ("import os\nif os:\n    from miles.utils.arguments import parse_args", "miles"),
        ("from megatron.rl.rl_utils import get_logprobs", "megatron-lm"),
        ("from megatron.rl import rl_utils", "megatron-lm"),
        ("import verl.trainer.main_ppo", "verl"),
        ("from nemo_rl.algorithms.grpo import setup", "nemo-rl"),
    ],
)
def test_the_host_is_what_the_script_imports(source: str, host: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(source)
    assert host_of(Target(str(path), False, path)).name == host


def test_a_script_is_read_in_its_own_encoding(tmp_path: Path) -> None:
    """As Python reads it: a byte order mark, or the encoding that is declared."""
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_bytes(b"\xef\xbb\xbf" + script.read_bytes())
    done = launch(script, "--use-tis --num-rollout 3")
    assert done.status == 0, done.errors
    assert done.given is not None and done.given["args"]["use_tis"] is True
    for module, host in (("verl", "verl"), ("megatron.rl", "megatron-lm")):
        latin = tmp_path / f"{host}.py"
        latin.write_bytes(f"# coding: latin-1\n# \xe9\nimport {module}\n".encode("latin-1"))
        line = "--use-tis --use-rollout-log-probs" if host == "verl" else "--use-tis"
        assert prepare([str(latin), *line.split()])[1].name == host


def test_every_host_can_be_named() -> None:
    target = Target("script.py", False, None)
    assert [host_of(target, name).name for name in HOSTS] == list(HOSTS)
    with pytest.raises(ValueError, match="--mismatch-host 'slim' is unknown: did you mean slime"):
        host_of(target, "slim")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import slimes", "imports no host that is known: say which it is, --mismatch-host slime|miles"),
        ("import slime, miles", "imports slime and miles: say which it is"),
        ("def (", "is no Python script"),
    ],
)
def test_a_script_that_does_not_tell(source: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        host_of(Target(str(path), False, path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no training script is given"),
        ("--use-tis", "no training script is given"),
        ("nowhere.py", "training script nowhere.py does not exist"),
        ("-m", "-m names no module"),
        ("-m no_such_package.train", "module no_such_package.train is not found"),
    ],
)
def test_no_script(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--help", "-h", "--use-tis --help"])
def test_help_before_a_script_is_named(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # no word is broken at a hyphen
    main(line.split())
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("usage: python -m mismatch_plugin.launch [--mismatch-host NAME] TRAIN_SCRIPT ARGS…")
    page = " ".join(printed.out.split())
    assert "found by what the script imports" in page
    assert all(name in page for name in HOSTS)
    for action in add_arguments(ArgumentParser(add_help=False))._actions:
        if action.help == SUPPRESS:
            continue  # the spellings with underscores
        assert all(f"{flag} " in page or f"{flag}," in page for flag in action.option_strings)
        assert " ".join((action.help or "").replace("%%", "%").split()) in page


def test_help_behind_a_script_that_cannot_start_names_ours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import slime\n")
    done = launch(tmp_path / "train.py", "--use-tis --help")
    assert done.status == 2
    assert done.errors.endswith("(The plugin's own flags: python -m mismatch_plugin.launch --help)\n")
    assert "own flags" not in launch(tmp_path / "train.py", "--use-tis").errors


# Scripts that train nothing -------------------------------------------------------------------------------------------


def test_a_shell_script_is_refused_with_the_place_for_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\nray job submit -- python3 train.py --x\n")
    for line in ([str(script)], ["--mismatch-host", "slime", str(script)]):
        with pytest.raises(ValueError, match=r"is no Python script .* put the launcher inside it, before that one"):
            prepare([*line, "--use-tis"])


@pytest.mark.parametrize("end", ["", "sys.exit(0)"])
def test_a_script_that_never_reads_its_command_line_fails_in_the_end(end: str, tmp_path: Path) -> None:
    """What no source tells: the flags went nowhere, so the run must not look corrected."""
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_text(f"import sys\nimport slime.utils.arguments\nprint('TRAINED')\n{end}\n")
    done = launch(script, "--use-tis")
    assert done.status == 2
    assert "TRAINED" in done.printed
    assert "train.py has ended and never read slime's command line" in done.errors
    assert launch(script, "--num-rollout 3").status == 0


# Megatron's version ---------------------------------------------------------------------------------------------------


def test_the_version_that_will_be_imported_is_read_from_the_script_s_folder(tmp_path: Path) -> None:
    megatron_core(tmp_path, (0, 12))
    assert megatron_core_version([tmp_path]) == ("0.12.0", (0, 12))
    installed = megatron_core_version()  # the tests run with a megatron-core that is new enough, or with none
    assert installed is None or installed[1] >= MINIMUM_MEGATRON


@pytest.mark.parametrize("version", [(0, 12), (0, 15)])
def test_an_old_megatron_is_refused_before_the_script_runs(version: tuple[int, int], tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime", megatron=version)
    with pytest.raises(ValueError, match=rf"megatron-core {version[0]}\.{version[1]}\.0 is too old: .* 0\.16 or newer"):
        prepare([str(script), "--use-tis"])
    assert prepare([str(script)])[3].added == ()  # nothing of ours, nothing to refuse


# A whole run ----------------------------------------------------------------------------------------------------------


def test_the_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    done = launch(script, "--num-rollout 7 --use-tis --unknown-to-slime 1")
    assert done.status == 0, done.errors
    assert done.given is not None
    assert done.given["argv"][:4] == [str(script), "--num-rollout", "7", "--unknown-to-slime"]
    assert (done.given["path"], done.given["name"]) == (str(script.parent), "__main__")
    assert done.given["args"]["num_rollout"] == 7
    assert done.printed.index("mismatch_plugin on slime:") < done.printed.index("BEFORE PARSING")
    assert done.printed.count("mismatch_plugin on slime:") == 1


def test_explain_only_prints_the_block_and_exits_0(tmp_path: Path) -> None:
    done = launch(ray_tree(tmp_path / "tree", "slime"), "--use-tis --use-rollout-log-probs --mismatch-explain-only")
    assert (done.status, done.given) == (0, None)
    for part in ("algorithm 3: REINFORCE + IS", "normaliser: slime's", "algorithm 3 at token level is biased"):
        assert part in done.printed
    assert "MismatchWarning" not in done.errors


def test_one_sentence_and_exit_2_before_the_script_runs(tmp_path: Path) -> None:
    done = launch(ray_tree(tmp_path / "tree", "slime"), "--use-tis --tis-levle sequence")
    assert (done.status, done.given) == (2, None)
    (line,) = done.errors.splitlines()
    assert line.startswith("mismatch_plugin: --tis-levle is unknown: did you mean --tis-level?")


def test_the_exit_status_is_the_script_s(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_text(script.read_text() + "    sys.exit(7)\n")
    assert launch(script, "--use-tis").status == 7


def test_one_block_under_torchrun(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    first, second = (launch(script, "--use-tis", env={"RANK": rank}) for rank in ("0", "1"))
    assert "mismatch_plugin on slime" in first.printed
    assert "mismatch_plugin on" not in second.printed
    assert first.given is not None and second.given is not None
    assert first.given["args"] == second.given["args"]


def test_a_module_runs_as_python_m_would(tmp_path: Path) -> None:
    ray_tree(tmp_path / "tree", "slime")
    (tmp_path / "tree" / "train.py").rename(tmp_path / "tree" / "slime" / "train.py")
    script = tmp_path / "tree" / "slime" / "train.py"
    env = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path / 'tree'}"}
    done = launch(Path("-m"), "slime.train --use-tis --num-rollout 3", env=env)
    assert done.given is not None, done.errors
    assert done.given["argv"][:3] == [str(script), "--num-rollout", "3"]
    assert done.given["args"]["use_tis"] is True
