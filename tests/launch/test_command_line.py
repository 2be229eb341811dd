"""The launcher's line: which script and host it is, which tokens are ours, which are refused, how the script runs."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser
from pathlib import Path
from typing import Any, get_args

import pytest

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.fields import leaf_fields
from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.hooks.base import Given, peek
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.launch.__main__ import host_of, main, prepare
from mismatch_plugin.launch.command_line import help_text, named_host, read_command_line, script_position
from mismatch_plugin.launch.script import Target
from tests.hooks.contracts.launch_trees import ROOT, launch, ray_tree

# Tokens ---------------------------------------------------------------------------------------------------------------

_HOST_FLAGS = ("--tis-clip", "--tis-clip-low", "--use-tis")


def _read(line: str) -> Given:
    return read_command_line(line.split(), _HOST_FLAGS)


def test_our_flags_are_taken_and_the_rest_stays_as_it_is() -> None:
    line = "--lr 1e-6 --use-tis --tis-level=geometric --n -1 --mismatch-entropy-coef -0.1 a=b --x --use-tis"
    given = _read(line)
    assert given.host_argv == ("--lr", "1e-6", "--n", "-1", "a=b", "--x")
    assert given.settings == {"use_tis": True, "tis": {"level": "geometric"}, "terms": {"entropy_coef": -0.1}}
    assert given.flags == ("--use-tis", "--tis-level", "--mismatch-entropy-coef")
    behind = _read("--use-tis -- --lr 1 -x -- use-tis")
    assert (behind.host_argv, behind.settings) == (("--", "--lr", "1", "-x", "--", "use-tis"), {"use_tis": True})
    criteria = _read("--rs-criterion token:k2:0.5 --rs-criterion sequence_max:k3:0.5").settings["rs"]["criteria"]
    assert [criterion["statistic"] for criterion in criteria] == ["k2", "k3"]


def test_underscores_are_dashes_in_every_flag() -> None:
    """Also in those of the launcher itself; what the host gets keeps its spelling."""
    line = "--mismatch_host slime --use_tis --tis_level=sequence --tis_upper_bound 3 --mismatch_explain_only --num_x 1"
    given = _read(line)
    assert (given.host, given.explain_only, given.host_argv) == ("slime", True, ("--num_x", "1"))
    assert given.settings == {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 3.0}}
    assert given.flags == ("--use-tis", "--tis-level", "--tis-upper-bound")
    assert named_host(line.split()) == "slime" and "--use_tis" not in help_text("usage", "description")
    places = {"train.py --use-tis": 0, "--use_tis --tis_level token train.py": 3, "--mismatch-host=slime -m a.b c": 1}
    assert {text: script_position(text.split()) for text in places} == places


_NUMBERS = [
    field.meta["flag"]
    for field in leaf_fields(MismatchConfig)
    if field.meta.get("flag") and float in (field.annotation, *get_args(field.annotation))
]
REFUSED: dict[str, str] = {
    # The value would go to the host, which may pass over it, and the switch would be on.
    "--use-tis false": "is a switch and takes no value",
    "--mismatch-dry-run True --lr 1": "is a switch and takes no value",
    "--mismatch_dry_run 1 --lr 1": "is a switch and takes no value",
    # No host's parser would read them there, and the run would go uncorrected.
    "--lr 1 -- --use-tis": "--use-tis stands behind --, where it would not be read",
    "--use-tis -- x --tis_level=geometric": "--tis_level=geometric stands behind --",
    "-- --mismatch-host slime": "--mismatch-host stands behind --",
    "--use-tis -- --tis-levle token": "--tis-levle is unknown: did you mean --tis-level?",
    "--tis_levle token": "--tis_levle is unknown: did you mean --tis-level?",
    "--tis-level token --tis_level sequence": "--tis_level sequence contradicts --tis-level token",
    "--tis-upper=3": "--tis-upper is unknown: did you mean --tis-upper-bound?",
    "--mismatch-colour red": "--mismatch-colour is unknown",
    "--use-rollout-logprob": "--use-rollout-logprob is unknown: did you mean --use-rollout-log",
    "--use-tis --tis-mode": "Argument --tis-mode: expected one argument.",
    "--use-tis --tis-mode cap": "Argument --tis-mode: invalid choice: 'cap'",
    "--tis-mode clip": "--tis-mode clip changes no weight without --use-tis",
    # With other dashes the host would pass over it, and the run would go uncorrected.
    "--lr 1 -use_tis": "-use_tis is unknown: did you mean --use-tis?",
    "\u2014use-tis": "\u2014use-tis is unknown: did you mean --use-tis?",
    "--use\u2011tis": "did you mean --use-tis?",
    # What is meant may be the host's.
    "--tis_clip=3": "--tis_clip is unknown: did you mean --tis-clip?",
    "--tis-clp 3": "--tis-clp is unknown: did you mean --tis-clip?",
    **{f"--use-tis --use-rs {flag} nan": f"{flag} is nan: it should be" for flag in _NUMBERS},
    "--use-tis --use-rs --rs-upper-bound nan": "upper_bound is nan: it should be",
}


@pytest.mark.parametrize("line", REFUSED)
def test_misspelt_and_contradictory_flags_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[line])):
        _read(line)


@pytest.mark.parametrize(
    "token",
    [
        *("--tensor-model-parallel-size", "--rollout-top-p", "--use-rl", "--lr", "--test-mode", "--tis-clip"),
        *("-1", "-u", "\u22121e-3", "\u2014", "-rs-7b", "-tis-clip", "-Duse=1", "-np"),
    ],
)
def test_other_tokens_are_the_host_s(token: str) -> None:
    assert _read(f"{token} 1").host_argv == (token, "1")


def test_peek_sees_defaults_and_what_was_typed() -> None:
    table: dict[str, dict[str, Any]] = {
        "--loss-type": {"default": "policy_loss"},
        "--eps-clip": {"type": float, "default": 0.2},
    }
    values, typed = peek(["--eps-clip=0.3", "--other", "1", "--eps", "9"], table)
    assert (values.loss_type, values.eps_clip, typed) == ("policy_loss", 0.3, {"eps_clip"})


# Script and host ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (b"from slime.utils.arguments import parse_args", "slime"),
        (b"import os\nif os:\n    from miles.utils.arguments import parse_args", "miles"),
        (b"from megatron.rl import rl_utils", "megatron-lm"),
        (b"import verl.trainer.main_ppo", "verl"),
        (b"from nemo_rl.algorithms.grpo import setup", "nemo-rl"),
        (b"\xef\xbb\xbfimport slime", "slime"),  # a byte order mark, and a declared encoding
        (b"# coding: latin-1\n# \xe9\nimport megatron.rl\n", "megatron-lm"),
        (b"import slimes", "imports no host that is known: say which it is, --mismatch-host slime|miles"),
        (b"import subprocess", "or, if it only starts a trainer, put the launcher where the trainer itself is"),
        (b"import slime, miles", "imports slime and miles: say which it is"),
        (b"#!/bin/bash\nray job submit -- python3 train.py --x\n", "is no Python script"),
        (b"ray job submit -- python3 train.py --x\n", "put the launcher inside it, before that one"),
    ],
)
def test_the_host_is_what_the_script_imports_or_it_is_asked_for(source: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_bytes(source)
    if found in HOSTS:
        assert host_of(path.name, Target(str(path), False, path).imports()).name == found
        return
    with pytest.raises(ValueError, match=re.escape(found)):
        prepare([str(path), "--use-tis"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--use-tis", "no training script is given"),
        ("nowhere.py", "training script nowhere.py does not exist"),
        ("-m", "-m names no module"),
        ("-m no_such_package.train", "module no_such_package.train is not found"),
        ("--mismatch-host slim HERE", "--mismatch-host 'slim' is unknown: did you mean slime"),
    ],
)
def test_no_script_or_no_host(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.replace("HERE", __file__).split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_before_a_script_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # no word is broken at a hyphen
    main(["--use-tis", "--help"])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("usage: python -m mismatch_plugin.launch [--mismatch-host NAME] TRAIN_SCRIPT ARGS…")
    page = " ".join(printed.out.split())
    assert "found by what the script imports" in page and all(name in page for name in HOSTS)
    for action in add_arguments(ArgumentParser(add_help=False))._actions:
        if action.help != SUPPRESS:  # the spellings with underscores
            assert all(f"{flag} " in page or f"{flag}," in page for flag in action.option_strings)
            assert " ".join((action.help or "").replace("%%", "%").split()) in page


# A whole run ----------------------------------------------------------------------------------------------------------


def test_the_script_runs_as_python_would_run_it_and_its_exit_status_is_kept(tmp_path: Path) -> None:
    """Under torchrun one rank prints the block."""
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_bytes(b"\xef\xbb\xbf" + script.read_bytes() + b"    sys.exit(7)\n")
    line = "--num-rollout 7 --use-tis --unknown-to-slime 1"
    done, other = (launch(script, line, env={"RANK": rank}) for rank in ("0", "1"))
    assert (done.status, other.status) == (7, 7), done.errors
    assert done.given is not None and other.given is not None
    assert done.given["argv"][:4] == [str(script), "--num-rollout", "7", "--unknown-to-slime"]
    assert (done.given["path"], done.given["name"]) == (str(script.parent), "__main__")
    assert done.given["args"]["num_rollout"] == 7 and done.given["args"] == other.given["args"]
    assert done.printed.index("mismatch_plugin on slime:") < done.printed.index("BEFORE PARSING")
    assert done.printed.count("mismatch_plugin on slime:") == 1 and "mismatch_plugin on" not in other.printed


def test_explain_only_prints_the_block_and_exits_0(tmp_path: Path) -> None:
    done = launch(ray_tree(tmp_path / "tree", "slime"), "--use-tis --use-rollout-log-probs --mismatch-explain-only")
    assert (done.status, done.given, "MismatchWarning" in done.errors) == (0, None, False)
    parts = ("algorithm 3: REINFORCE + IS", "divided as in slime: per rollout", "at token level is biased")
    assert [part for part in parts if part not in done.printed] == []


def test_a_module_runs_as_python_m_would(tmp_path: Path) -> None:
    script = tmp_path / "tree" / "slime" / "train.py"
    ray_tree(tmp_path / "tree", "slime").rename(script)
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path / 'tree'}"}
    done = launch(Path("-m"), "slime.train --use-tis --num-rollout 3", env=env)
    assert done.given is not None, done.errors
    assert done.given["argv"][:3] == [str(script), "--num-rollout", "3"]
    assert done.given["args"]["use_tis"] is True


def test_a_host_that_is_not_installed_is_named_and_help_behind_a_script_names_ours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import miles.utils.arguments")
    done = launch(tmp_path / "train.py", "--use-tis --help")
    (line,) = done.errors.splitlines()
    assert line.startswith("mismatch_plugin: miles cannot be imported here (No module named 'miles'): install it in")
    assert (done.status, "PYTHONPATH" in line) == (2, True)
    assert line.endswith("(The plugin's own flags: python -m mismatch_plugin.launch --help)")
