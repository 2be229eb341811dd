"""The launcher's line: which script and host it is, which tokens are ours, which are refused, how the script runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mismatch_plugin.hooks.base import Given
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.launch.__main__ import host_of, main, prepare
from mismatch_plugin.launch.command_line import Target, help_text, read_command_line
from tests.hooks.contracts.launch_trees import ROOT, launch, ray_tree

# Tokens ---------------------------------------------------------------------------------------------------------------


def _read(line: str) -> Given:
    return read_command_line(line.split(), ("--tis-clip", "--tis-clip-low", "--use-tis"))


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


def test_underscores_are_dashes_in_every_flag(tmp_path: Path) -> None:
    """Also in those of the launcher itself, before and behind the script; what the host gets keeps its spelling."""
    words = ["--use_tis", "--tis_level=sequence", "--tis_upper_bound", "3", "--mismatch_explain_only"]
    assert "--use_tis" not in help_text("usage", "description")
    script = tmp_path / "mine.py"
    script.write_text("pass\n")
    for line in ([*words, "--mismatch_host", "slime", str(script)], [str(script), *words, "--mismatch-host=slime"]):
        target, host, given, plan = prepare([*line, "--num_x", "1"])
        assert (target.name, host.name, plan.argv[:2]) == (str(script), "slime", ("--num_x", "1"))
        assert given.explain_only and given.flags == ("--use-tis", "--tis-level", "--tis-upper-bound")
        assert given.settings == {"use_tis": True, "tis": {"level": "sequence", "upper_bound": 3.0}}


REFUSED = {
    # The value would go to the host, which may pass over it, and the switch would be on.
    "--use-tis false": "is a switch and takes no value",
    # No host's parser would read them there, and the run would go uncorrected.
    "--use-tis -- x --tis_level=geometric": "--tis_level=geometric stands behind --",
    "-- --mismatch-host slime": "--mismatch-host stands behind --",
    "--use-tis -- --tis-levle token": "--tis-levle is unknown: did you mean --tis-level?",
    "--use-tsi --tis-level token": "--use-tsi is unknown: did you mean --use-tis?",
    "--tis-level token --tis_level sequence": "--tis-level sequence contradicts --tis-level token, give it once.",
    "--use-tis --tis-upper-bound nan": "--tis-upper-bound is nan: it should be",
    # With other dashes the host would pass over it, and the run would go uncorrected.
    "--lr 1 -use_tis": "-use_tis is unknown: did you mean --use-tis?",
    # What is meant may be the host's.
    "--tis_clip=3": "--tis_clip is unknown: did you mean --tis-clip?",
}


@pytest.mark.parametrize("line", REFUSED)
def test_misspelt_and_contradictory_flags_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[line])):
        _read(line)


def test_other_tokens_are_the_host_s() -> None:
    tokens = ["--tensor-model-parallel-size", "--rollout-top-p", "--use-rl", "--lr", "--test-mode", "--tis-clip"]
    tokens += ["-1", "-u", "\u22121e-3", "\u2014", "-rs-7b", "-tis-clip", "-Duse=1", "-np"]
    assert _read(" ".join(tokens)).host_argv == tuple(tokens)


# Script and host ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (b"from slime.utils.arguments import parse_args", "slime"),
        (b"import os\nif os:\n    from miles.utils.arguments import parse_args", "miles"),
        (b"# coding: latin-1\n# \xe9\nfrom megatron.rl import rl_utils", "megatron-lm"),
        (b"from nemo_rl.algorithms.grpo import setup", "nemo-rl"),
        (b"import trl", "TRL takes the plugin without the launcher: put mismatch_plugin.hooks.trl.Corr"),
        (b"import slimes", "imports no host that is known: say which it is, --mismatch-host slime|miles"),
        (b"import slime, miles", "imports slime and miles: say which it is"),
        (b"ray job submit -- python3 train.py --x\n", "is no Python script (invalid syntax"),
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
        ("-m no_such_package.train", "module no_such_package.train is not found"),
        ("--mismatch-host slim HERE", "host 'slim' is unknown: did you mean slime"),
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
    page = " ".join(printed.out.split())
    assert "named by --mismatch-host: slime, miles, megatron-lm, verl, nemo-rl. " in page  # the others have own doors
    assert "--tis-upper-bound" in page


# A whole run ----------------------------------------------------------------------------------------------------------


def test_the_script_runs_as_python_would_run_it_and_its_exit_status_is_kept(tmp_path: Path) -> None:
    """Under torchrun one rank prints the block."""
    script = ray_tree(tmp_path / "tree", "slime")
    script.write_bytes(b"\xef\xbb\xbf" + script.read_bytes() + b"    sys.exit(7)\n")
    line = "--num-rollout 7 --use-tis --unknown-to-slime 1"
    done, other = (launch(script, line, env={"RANK": rank}) for rank in ("0", "1"))
    assert (done.status, other.status) == (7, 7), done.errors
    given = done.given or {}
    assert given["argv"][:4] == [str(script), "--num-rollout", "7", "--unknown-to-slime"]
    assert (given["path"], given["name"], given["args"]["num_rollout"]) == (str(script.parent), "__main__", 7)
    assert other.given and given["args"] == other.given["args"]
    assert done.printed.index("mismatch_plugin on slime:") < done.printed.index("BEFORE PARSING")
    assert done.printed.count("mismatch_plugin on slime:") == 1 and "mismatch_plugin on" not in other.printed


def test_a_module_runs_as_python_m_would(tmp_path: Path) -> None:
    script = tmp_path / "tree" / "slime" / "train.py"
    ray_tree(tmp_path / "tree", "slime").rename(script)
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path / 'tree'}"}
    done = launch(Path("-m"), "slime.train --use-tis --num-rollout 3", env=env)
    assert done.given is not None, done.errors
    assert done.given["argv"][:3] == [str(script), "--num-rollout", "3"] and done.given["args"]["use_tis"] is True


def test_explain_only_prints_the_block_and_a_host_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import miles.utils.arguments")
    line = "--use-tis --use-rollout-log-probs"
    done = launch(tmp_path / "train.py", f"{line} --mismatch-explain-only")
    assert (done.status, done.given, "MismatchWarning" in done.errors) == (0, None, False)
    parts = ("algorithm 3: REINFORCE + IS", "divided as in miles: per rollout", "at token level is biased")
    assert [part for part in parts if part not in done.printed] == []
    done = launch(tmp_path / "train.py", line)
    (said,) = done.errors.splitlines()
    assert said.startswith("mismatch_plugin: miles cannot be imported here (No module named 'miles'): install it in")
    assert done.status == 2
