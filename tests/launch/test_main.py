"""The launcher's own part: which script and host it is, how the script runs, what is said."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from pathlib import Path

import pytest

from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.launch.__main__ import host_of, main, prepare
from mismatch_plugin.launch.script import Target
from tests.hooks.contracts.launch_trees import launch, ray_tree

# Script and host ------------------------------------------------------------------------------------------------------


def _host(folder: Path, source: bytes) -> str:
    path = folder / "script.py"
    path.write_bytes(source)
    return host_of(path.name, Target(str(path), False, path).imports()).name


@pytest.mark.parametrize(
    ("source", "host"),
    [
        (b"from slime.utils.arguments import parse_args", "slime"),
        (b"import os\nif os:\n    from miles.utils.arguments import parse_args", "miles"),
        (b"from megatron.rl.rl_utils import get_logprobs", "megatron-lm"),
        (b"from megatron.rl import rl_utils", "megatron-lm"),
        (b"import verl.trainer.main_ppo", "verl"),
        (b"from nemo_rl.algorithms.grpo import setup", "nemo-rl"),
        (b"\xef\xbb\xbfimport slime", "slime"),  # a byte order mark, and a declared encoding
        (b"# coding: latin-1\n# \xe9\nimport megatron.rl\n", "megatron-lm"),
    ],
)
def test_the_host_is_what_the_script_imports(source: bytes, host: str, tmp_path: Path) -> None:
    assert _host(tmp_path, source) == host


def test_every_host_can_be_named() -> None:
    assert [host_of("script.py", set(), name).name for name in HOSTS] == list(HOSTS)
    for name in ("megatron_lm", "megatron-rl", "megatron_rl", "Megatron-LM"):
        assert host_of("script.py", set(), name).name == "megatron-lm"
    assert host_of("script.py", set(), "nemo_rl").name == "nemo-rl"
    for name in ("megatron", "nemo"):
        with pytest.raises(ValueError, match=f"--mismatch-host '{name}' is unknown"):
            host_of("script.py", set(), name)
    with pytest.raises(ValueError, match="--mismatch-host 'slim' is unknown: did you mean slime"):
        host_of("script.py", set(), "slim")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"import slimes", "imports no host that is known: say which it is, --mismatch-host slime|miles"),
        (b"import slime, miles", "imports slime and miles: say which it is"),
        (b"def (", "is no Python script"),
    ],
)
def test_a_script_that_does_not_tell(source: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        _host(tmp_path, source)


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


@pytest.mark.parametrize("line", ["-h", "--use-tis --help"])
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


def test_a_script_that_never_reads_its_command_line_fails_in_the_end(tmp_path: Path) -> None:
    """A job that it submits over HTTP, say: the run must not look corrected."""
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_text("import sys\nimport slime.utils.arguments\nprint('TRAINED')\nsys.exit(0)\n")
    done = launch(script, "--use-tis")
    assert (done.status, "TRAINED" in done.printed) == (2, True)
    assert "train.py has ended and never read slime's command line" in done.errors


# A whole run ----------------------------------------------------------------------------------------------------------


def test_the_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_bytes(b"\xef\xbb\xbf" + script.read_bytes())
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
    for part in (
        "algorithm 3: REINFORCE + IS",
        "divided as in slime: per rollout",
        "algorithm 3 at token level is biased",
    ):
        assert part in done.printed
    assert "MismatchWarning" not in done.errors


def test_one_block_under_torchrun_and_the_script_s_exit_status(tmp_path: Path) -> None:
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_text(script.read_text() + "    sys.exit(7)\n")
    first, second = (launch(script, "--use-tis", env={"RANK": rank}) for rank in ("0", "1"))
    assert (first.status, second.status) == (7, 7)
    assert "mismatch_plugin on slime" in first.printed and "mismatch_plugin on" not in second.printed
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


def test_a_host_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import miles.utils.arguments")
    done = launch(tmp_path / "train.py", "--use-tis")
    (line,) = done.errors.splitlines()
    assert line.startswith("mismatch_plugin: miles cannot be imported here (No module named 'miles'): install it in")
    assert (done.status, "PYTHONPATH" in line) == (2, True)
