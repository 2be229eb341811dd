"""README.md is true: its generated blocks are current and complete, and its Python runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from ci.readme import BLOCKS, README, block_names, main, render
from mismatch_plugin import MismatchConfig, add_arguments
from mismatch_plugin.core.metrics import METRICS
from mismatch_plugin.fields import leaf_fields
from mismatch_plugin.presets import PRESETS

TEXT = README.read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_blocks_are_current():
    assert render(TEXT) == TEXT, "run: make readme"


def test_every_table_has_a_block():
    assert sorted(block_names(TEXT)) == sorted(BLOCKS)


def test_python_blocks_run():
    assert CODE
    names: dict[str, object] = {}
    for code in CODE:
        exec(compile(code, str(README), "exec"), names)


def test_nothing_is_left_out():
    # Taken from the code and not from the tables, so that a table that lost a row is found.
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    names = [field.path for field in leaf_fields(MismatchConfig)]
    names += [flag for action in parser._actions for flag in action.option_strings]
    names += [metric.name for metric in METRICS]
    names += [name for entry in PRESETS for name in (entry.name, *entry.aliases)]
    assert [name for name in names if f"`{name}`" not in TEXT] == []


def test_the_recommended_presets_exist():
    table = TEXT.split("## Which setting to choose")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    named = [name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row[1])]
    known = {name for entry in PRESETS for name in (entry.name, *entry.aliases)}
    assert len(rows) >= 8 and len(named) >= len(rows)
    assert set(named) <= known


def test_pictures_are_there():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert pictures and all((README.parent / picture).is_file() for picture in pictures)


def test_links_inside_the_page_lead_somewhere():
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+(.*)$", TEXT, re.M)
    }
    assert [link for link in re.findall(r"\]\(#([\w-]+)\)", TEXT) if link not in headings] == []


def test_stale_block_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "README.md"
    page.write_text(TEXT.replace("| 2 | decoupled PPO |", "| 2 | deceptive PPO |"), encoding="utf-8")
    assert main(["--check", str(page)]) == 1
    output = capsys.readouterr().out
    assert "-| 2 | deceptive PPO" in output and "+| 2 | decoupled PPO" in output
    assert main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == TEXT
    assert main(["--check", str(page)]) == 0


def test_unknown_block_is_refused():
    with pytest.raises(ValueError, match="'nonsense' is unknown"):
        render("<!-- generated: nonsense -->\n<!-- end -->")
