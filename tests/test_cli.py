"""The command answers, and says what the tables say."""

from __future__ import annotations

import subprocess
import sys

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
    assert all(name in result.output for name in ("explain", "presets", "compare", "inspect", "check", "patch"))
    said = result.output.partition("Options")[0]
    assert all(word in said for word in ("presets", "check", "judge a run", "compare", "patch"))


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
