"""The command answers, and says what the tables say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import mismatch_plugin
from mismatch_plugin.cli import app
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.explain.example import example_tables, explain_table
from mismatch_plugin.report.presets import preset_table, presets_table

NAMES = [entry.name for entry in PRESETS]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


def test_version():
    result = _run("--version")
    assert result.exit_code == 0
    assert result.output == f"mismatch-plugin {mismatch_plugin.__version__}\n"


def test_help_names_the_commands():
    result = _run("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in ("explain", "presets", "compare", "inspect", "patch"))
    said = result.output.partition("Options")[0]
    assert all(word in said for word in ("presets", "judge a dump", "compare", "patch"))


def test_bench_says_where_it_is_whatever_follows_it():
    """Until 0.1 it was a command of the package."""
    result = _run("bench", "--quick", "--device", "cpu")
    assert result.exit_code == 2 and "make bench" in result.output


def test_module_and_script_are_the_same():
    command = [sys.executable, "-m", "mismatch_plugin", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, _run("--version").output)


def test_version_and_help_import_nothing_heavy():
    heavy = (
        "mismatch_plugin.explain.example",
        "mismatch_plugin.explain.account",
        "mismatch_plugin.report.presets",
        "matplotlib",
        "transformers",
        "aiohttp",
        "megatron",
    )
    code = f"import sys, mismatch_plugin.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_explain_is_the_example_and_can_be_narrowed():
    assert _run("explain", "--markdown").output == "\n".join(table.to_markdown() for table in example_tables())
    result = _run("explain", "--mode", "clip", "--mode", "mask", "--level", "geometric", "--markdown")
    assert result.output == explain_table(["clip", "mask"], ["geometric"]).to_markdown()


def test_explain_on_a_terminal_shows_rows_and_notes():
    output = _run("explain").output
    assert "sequence: mask" in output
    assert "2.12" in output
    assert explain_table().notes[0] in output


def test_footnotes_are_wrapped_at_words_and_flags_stay_on_one_line():
    narrow = {"COLUMNS": "80", "TERM": "dumb"}
    output = CliRunner().invoke(app, ["explain"], env=narrow).output
    assert max(map(len, output.splitlines())) <= 80
    assert all(note in " ".join(output.split()) for table in example_tables() for note in table.notes)
    flags = preset_table("decoupled_token_icepop").notes[-1]
    assert len(flags) > 80
    assert flags in CliRunner().invoke(app, ["presets", "decoupled_token_icepop"], env=narrow).output


@pytest.mark.parametrize(
    ("line", "said"), [("explain --mode chop", "truncate"), ("presets no_such_preset", "no_such_preset")]
)
def test_what_is_unknown_is_refused(line: str, said: str):
    result = _run(*line.split())
    assert result.exit_code == 2
    assert line.split()[-1] in result.output and said in result.output


def test_presets_lists_every_preset():
    output = _run("presets").output
    assert [name for name in NAMES if name not in output] == []
    assert _run("presets", "--markdown").output == presets_table().to_markdown()


@pytest.mark.parametrize("name", NAMES)
def test_one_preset_shows_all_its_settings(name: str):
    result = _run("presets", name)
    assert result.exit_code == 0
    table = preset_table(name)
    assert [field for field in table.column("field") if field not in result.output] == []
    assert table.notes[-1] in result.output


def test_an_alias_shows_its_preset():
    entry = next(entry for entry in PRESETS if entry.aliases)
    assert preset_table(entry.name).notes[-1] in _run("presets", entry.aliases[0]).output


_PLANTED = """
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
_ENDS = {
    "pass": (0, ""),
    "raise __import__('typer').Exit(1)": (1, ""),  # as of a fault
    "raise __import__('typer').Exit(3)": (3, ""),
    "raise KeyboardInterrupt": (130, ""),
    "bytearray(1 << 60)": (4, "stopped, there is not enough memory: give fewer files or samples."),
    "__import__('torch').empty(1 << 55)": (4, "stopped, there is not enough memory: give fewer files or samples."),
    "{}['a\x1b']": (4, "stopped by an error of ours, KeyError at <string>:1: 'a\\x1b'"),
    "raise EOFError('cut')": (4, "stopped by an error of ours, EOFError at <string>:1: cut"),
    "raise ValueError('a\\nb')": (4, "stopped by an error of ours, ValueError at <string>:1: a"),
    "open('/no such')": (4, "stopped: [Errno 2] No such file or directory: '/no such'."),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on Linux")
def test_status_1_is_a_fault_and_what_does_not_end_has_another_with_one_sentence():
    command = [sys.executable, "-c", _PLANTED, *_ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = [
        line for line in done.stderr.splitlines() if line not in ("", "Aborted.", "Aborted!")
    ]  # typer's, at EOFError
    expected = [[f"mismatch-plugin: {said}"] * bool(said) + [f"status {number}"] for number, said in _ENDS.values()]
    assert told == [line for lines in expected for line in lines]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="on Linux")
def test_a_verdict_that_nobody_could_read_is_no_fault(tmp_path: Path):
    record = {"prompt_ids": [1], "response_ids": [1] * 200, "rollout_log_probs": [0.5] * 200}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    command = [sys.executable, "-m", "mismatch_plugin", "inspect", str(tmp_path / "records.jsonl"), "--brief"]
    (tmp_path / "out").touch()
    reader, closed = os.pipe()
    os.close(reader)
    for stdout, status, said in (
        (os.open(tmp_path / "out", os.O_WRONLY), 1, ""),
        (os.open("/dev/full", os.O_WRONLY), 4, "mismatch-plugin: stopped: [Errno 28] No space left on device.\n"),
        (closed, 4, "mismatch-plugin: stopped, since nobody reads its output any more.\n"),
    ):
        done = subprocess.run(command, stdout=stdout, stderr=-1, text=True, timeout=300, check=False)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (status, said)
    assert "probabilities" in (tmp_path / "out").read_text()
