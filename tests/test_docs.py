"""The pages are true: generated blocks are current and complete, links and pictures are there."""

from __future__ import annotations

import argparse
import math
import re
from statistics import NormalDist

import pytest

import ci.trainers
from ci.docs import BLOCKS, PAGES, ROOT, block_names, render
from examples.wandb_workspace import PANELS
from mismatch_plugin import MismatchConfig, __version__, add_arguments
from mismatch_plugin.config.fields import leaf_fields
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.core.metrics.registry import METRICS

README = ROOT / "README.md"
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
KNOWN = {name for entry in PRESETS for name in entry.names.split()}


def test_blocks_are_current_and_every_table_has_one():
    assert [path.name for path, text in TEXTS.items() if render(text) != text] == [], "run: make docs"
    assert sorted(name for text in TEXTS.values() for name in block_names(text)) == sorted(BLOCKS)
    with pytest.raises(ValueError, match="'nonsense' is unknown"):
        render("<!-- generated: nonsense -->\n<!-- end -->")


def test_the_readme_is_short_and_names_every_page_and_the_two_commands():
    assert len(TEXTS[README].encode()) <= 8192
    assert [path.name for path in PAGES if path != README and f"(docs/{path.name})" not in TEXTS[README]] == []
    assert "make compare" in TEXTS[README] and "make test" in TEXTS[README]


def test_the_newest_entry_of_the_changelog_is_of_this_version():
    entries = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert entries[0] == __version__ and len(set(entries)) == len(entries)


def test_no_setting_flag_metric_or_preset_is_left_out():
    # Taken from the code and not from the tables, so that a table that lost a row is found.
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    names = [*KNOWN, *(field.path for field in leaf_fields(MismatchConfig)), *(metric.name for metric in METRICS)]
    flags = [flag for action in parser._actions for flag in action.option_strings]
    names += [flag for flag in flags if "_" not in flag]  # typed either way
    text = "\n".join(TEXTS.values())
    assert [name for name in names if f"`{name}`" not in text] == []


def test_what_to_watch_are_metrics():
    """The panels of the quickstart, and those of the W&B workspace, which are the same."""
    table = TEXTS[ROOT / "docs" / "quickstart.md"].split("## What to watch")[1]
    watched = {name for names in PANELS.values() for name in names}
    assert watched <= {metric.name for metric in METRICS}
    assert watched == set(re.findall(r"`rollout_corr/(\w+)`", table))


def test_the_recommended_presets_exist():
    table = TEXTS[ROOT / "docs" / "settings.md"].split("## Which setting to choose")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    rows = [row for row in rows if not row[0].startswith("| in addition: ")]
    named = [name for row in rows for name in re.findall(r"^`([a-z0-9_]+)`", row[3])]
    assert len(rows) >= 8 and len(named) >= len(rows) and set(named) <= KNOWN


def test_what_the_questions_say_of_long_responses():
    """Normal log-ratios, KL 0.001 per token: over 8,192 tokens their sum S is N(−8.2, 16.4), the weight min(e^S, 2)."""
    total = NormalDist(-8.192, math.sqrt(2 * 8.192))

    def below(power: int) -> float:
        """E of e^(power S) where S is below the cut."""
        moved = NormalDist(total.mean + power * total.variance, total.stdev)
        return math.exp(power * total.mean + power**2 * total.variance / 2) * moved.cdf(math.log(2.0))

    above = 1 - total.cdf(math.log(2.0))
    weight, square = below(1) + 2 * above, below(2) + 4 * above
    said = f"weight, cut at 2, is {weight:.2f} and the effective sample size {100 * weight**2 / square:.0f} %"
    assert said in TEXTS[ROOT / "docs" / "faq.md"].replace("\n", " ")


def test_links_lead_somewhere_and_docs_hold_pages_and_pictures_only():
    lost, count = [], 0
    for page, text in TEXTS.items():
        headings = re.findall(r"^#+(.*)$", text, re.M)
        anchors = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in headings}
        for file, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", text):
            count += not file.startswith("http")
            if file.startswith("http"):
                continue
            if not (page.parent / file).exists() or (not file and anchor not in anchors):
                lost.append((page.name, file, anchor))
    assert count > 20 and lost == []
    assert {path.suffix for path in (ROOT / "docs").rglob("*") if path.is_file()} <= {".md", ".png"}


def test_the_page_of_trainers_has_every_column_of_every_trainer():
    assert {path.stem for path in ci.trainers.FOLDER.glob("*.json")} == set(ci.trainers.NAMES)
    for record in ci.trainers.measured().values():
        assert record["columns"].keys() == ci.trainers.COLUMNS.keys() and record["commits"] and record["shimmed"]
