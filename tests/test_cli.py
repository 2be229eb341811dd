"""The command answers, and says what the tables say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mismatch_plugin
from mismatch_plugin.cli import app
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.explain.account import explain_table
from mismatch_plugin.report.presets import preset_table, presets_table


def output_of(*arguments: str, status: int = 0, columns: int = 200) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert result.exit_code == status, result.output
    return result.output


def test_version_and_help_import_nothing_heavy_and_name_the_commands():
    heavy = ("explain.account", "report.presets")
    names = (*(f"mismatch_plugin.{name}" for name in heavy), "matplotlib", "transformers", "aiohttp", "megatron")
    code = f"import sys, mismatch_plugin.cli; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr
    assert output_of("--version") == f"mismatch-plugin {mismatch_plugin.__version__}\n"
    said = output_of("--help")
    assert all(name in said for name in ("explain", "presets", "compare", "inspect", "patch", "judge a dump"))


@pytest.mark.parametrize(
    ("line", "said"), [("explain --mode chop", "--mode is no flag"), ("presets no_such_preset", "no_such_preset")]
)
def test_what_is_unknown_is_refused(line: str, said: str):
    assert said in output_of(*line.split(), status=2)


def test_explain_is_the_example():
    assert output_of("explain", "--markdown") == explain_table().to_markdown()
    screen = output_of("explain", columns=80)
    assert "sequence: mask" in screen and "2.12" in screen and max(map(len, screen.splitlines())) <= 80
    assert all(note in " ".join(screen.split()) for note in explain_table().notes)


def test_presets_are_listed_and_each_shows_all_its_settings():
    listed = output_of("presets")
    assert output_of("presets", "--markdown") == presets_table().to_markdown()
    for entry in PRESETS:
        assert entry.name in listed
        table, shown = preset_table(entry.name), output_of("presets", entry.names.split()[-1])
        assert [field for field in table.column("field") if field not in shown] == []
        assert table.notes[-1] in shown
    flags = preset_table("decoupled_token_icepop").notes[-1]  # stay on one line
    assert len(flags) > 80 and flags in output_of("presets", "decoupled_token_icepop", columns=80)


PLANTED = """
import os, sys
from mismatch_plugin import cli

@cli.app.command()
def planted(code: str) -> None:
    exec(code)

for code in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv[1:] = ["planted", code]
        cli.main()
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""
ENDS = {
    "pass": (0, ""),
    "raise __import__('typer').Exit(1)": (1, ""),  # as of a fault
    "raise KeyboardInterrupt": (130, ""),
    "__import__('torch').empty(1 << 55)": (4, "stopped, there is not enough memory: give fewer files or samples."),
    "{}['a\x1b']": (4, "stopped by an error of ours, KeyError at <string>:1: 'a\\x1b'"),
    "open('/no such')": (4, "stopped: [Errno 2] No such file or directory: '/no such'."),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on Linux")
def test_status_1_is_a_fault_and_what_does_not_end_has_another_with_one_sentence():
    command = [sys.executable, "-c", PLANTED, *ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stderr.splitlines()
    told = [line for line in lines if line not in ("", "Aborted.", "Aborted!")]  # typer's, at an interrupt
    expected = [[f"mismatch-plugin: {said}"] * bool(said) + [f"status {number}"] for number, said in ENDS.values()]
    assert told == [line for lines in expected for line in lines]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on Linux")
def test_a_verdict_that_nobody_could_read_is_no_fault(tmp_path: Path):
    record = {"prompt_ids": [1], "response_ids": [1] * 200, "rollout_log_probs": [0.5] * 200}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    command = [sys.executable, "-m", "mismatch_plugin", "inspect", str(tmp_path / "records.jsonl"), "--brief"]
    reader, closed = os.pipe()
    os.close(reader)
    for stdout, said in (
        (os.open("/dev/full", os.O_WRONLY), "mismatch-plugin: stopped: [Errno 28] No space left on device.\n"),
        (closed, "mismatch-plugin: stopped, since nobody reads its output any more.\n"),
    ):
        done = subprocess.run(command, stdout=stdout, stderr=-1, text=True, timeout=300, check=False)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (4, said)
