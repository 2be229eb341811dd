"""The launcher: flags with other dashes than two, and a host that is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_plugin.launch.command_line import read_command_line
from tests.hooks.contracts.launch_trees import launch


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("-use-tis", "--use-tis"),
        ("-use_tis", "--use-tis"),
        ("\u2013use-tis", "--use-tis"),
        ("\u2014use-tis", "--use-tis"),
        ("--use\u2011tis", "--use-tis"),
        ("\u2014tis-levle=token", "--tis-level"),
    ],
)
def test_a_flag_of_ours_with_other_dashes_is_refused(flag: str, meant: str) -> None:
    """The host would pass over it, and the run would go uncorrected."""
    with pytest.raises(ValueError, match=f"^{flag.partition('=')[0]} is unknown: did you mean {meant}\\?"):
        read_command_line(["--lr", "1", flag], ("--use-tis",))


@pytest.mark.parametrize("token", ["-1", "-u", "\u22121e-3", "\u2014", "-rs-7b", "-tis-clip", "-Duse=1", "-np"])
def test_other_tokens_with_one_dash_are_the_host_s(token: str) -> None:
    assert read_command_line(["--x", token], ("--tis-clip",)).host_argv == ("--x", token)


@pytest.mark.parametrize(
    ("source", "host"),
    [("import miles.utils.arguments", "miles"), ("from nemo_rl.algorithms.grpo import setup", "nemo-rl")],
)
def test_a_host_that_is_not_installed_is_named(source: str, host: str, tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "train.py"
    (script.parent / "configs").mkdir(parents=True)
    (script.parent / "configs" / "grpo_math_1B.yaml").write_text("loss_fn: {}\n")
    script.write_text(source)
    done = launch(script, "--use-tis")
    assert done.status == 2
    (line,) = done.errors.splitlines()
    assert line.startswith(f"mismatch_plugin: {host} cannot be imported here (No module named '{source.split()[1][:5]}")
    assert "PYTHONPATH" in line
