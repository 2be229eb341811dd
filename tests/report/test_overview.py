"""The first screen: which setting comes first, what is said above its picture, and the table of final values."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from mismatch_plugin.report.data import read_run_folder
from mismatch_plugin.report.overview import final_table, focus, headline, what_did_not_help
from mismatch_plugin.report.statistics import SettingSummary, summarise
from tests.report.synthetic import ENDS, MISMATCH, SEEDS, write_comparison, write_run


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> list[SettingSummary]:
    return summarise(read_run_folder(write_comparison(tmp_path_factory.mktemp("whole"), check=False)))


def test_the_setting_where_algorithm_0_collapses_comes_first(summaries: list[SettingSummary]):
    chosen = focus(summaries)
    assert chosen is not None and chosen.setting == "stale32"
    # Bypass collapses in int2 and not in stale32: what counts is algorithm 0.
    assert focus([s for s in summaries if s.setting != "stale32"]).setting == "int2"  # type: ignore[union-attr]
    assert focus([]) is None


def test_headline_counts_collapsed_runs(summaries: list[SettingSummary]):
    of = {summary.setting: headline(summary) for summary in summaries}
    assert of["stale32"] == (
        "Algorithm 0 collapses in 12 of 12 runs; 1 bypass PPO, 2 token truncate and 2 IcePop in none"
    )
    assert of["control"] == "Algorithm 0 collapses in none of 12 runs"


def test_headline_where_all_collapse(tmp_path: Path):
    for variant in ("0", "0:dual_clip"):
        write_run(tmp_path, "stale32", variant, 100)
    (summary,) = summarise(read_run_folder(tmp_path))
    assert headline(summary) == "Algorithm 0 collapses in 1 of 1 runs; least often of the others 0 dual clip, in 1 of 1"
    for variant, end in (("0", 0.1), ("0:dual_clip", 0.1), ("1", 0.1), ("1", 0.9)):
        write_run(tmp_path, "stale32", variant, 101 + (end == 0.9), (0.95, end))
    (summary,) = summarise(read_run_folder(tmp_path))
    assert headline(summary).endswith("least often of the others 1 bypass PPO, in 1 of 2")


def test_headline_without_algorithm_0(tmp_path: Path):
    write_run(tmp_path, "stale32", "1", 100)
    (summary,) = summarise(read_run_folder(tmp_path))
    assert headline(summary) == "No finished run of algorithm 0"


def test_final_table_marks_gain_and_harm(summaries: list[SettingSummary]):
    table = final_table(summaries)
    assert table.headers == ("algorithm", *ENDS)
    rows = {row[0]: row[1:] for row in table.rows}
    # int2: 1 of (0.2, 0.01); stale32: collapsed runs in brackets; – where a variant was not run.
    assert rows["0 PPO"] == ("0.98", "0.90", "0.80", "0.10 (12/12)", "0.88")
    assert rows["1 bypass PPO"] == ("0.98", "0.01 ▼ (12/12)", "0.80", "0.90 ▲", "0.01 ▼ (12/12)")
    assert rows["2 sequence truncate"] == ("–", "–", "–", "0.03 ▼ (12/12)", "–")
    assert rows["0 dual clip"][3] == "0.10 (12/12)"
    assert len(rows) == len(MISMATCH) and table.rows[0][0] == "0 PPO"
    assert table.notes[0] == f"Mean exact match at the end over {len(SEEDS)} seeds, finished runs only."


def test_final_table_begins_with_algorithm_0_and_has_titles(tmp_path: Path):
    write_run(tmp_path, "int2", "1", 100)
    write_run(tmp_path, "int2", "0", 100)
    (tmp_path / "run.json").write_text('{"settings": ["int2"], "variants": ["1", "0"], "seeds": [100]}')
    table = final_table(summarise(read_run_folder(tmp_path)), {"int2": "Two bits"})
    assert [row[0] for row in table.rows] == ["0 PPO", "1 bypass PPO"]
    assert table.headers == ("algorithm", "Two bits")
    assert table.notes[0].startswith("Mean exact match at the end over 1 seed,")


def test_final_table_fits_on_a_terminal(summaries: list[SettingSummary]):
    console = Console(width=80, record=True)
    console.print(final_table(summaries).to_rich())
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("(12/12)") == 5  # no column is left out


def test_what_did_not_help(summaries: list[SettingSummary]):
    of = {summary.setting: what_did_not_help(summary) for summary in summaries}
    assert of["stale32"] == (
        "Lower than algorithm 0: 2 sequence truncate (−0.07); no significant difference: 0 dual clip (0.00)."
    )
    assert of["control"].startswith("No significant difference: 1 bypass PPO (0.00)")
    assert of["int2"].startswith("Lower than algorithm 0: 1 bypass PPO (−0.89); no significant difference: 2 token")


def test_what_could_not_be_found_is_not_called_useless(tmp_path: Path):
    """With three seeds no difference of two can be significant: +0.8 (less the noise) is no failure to help."""
    for variant in ("0", "1", "2:token:truncate"):
        for seed in (100, 101, 102):
            write_run(tmp_path, "stale32", variant, seed)
    (summary,) = summarise(read_run_folder(tmp_path))
    assert what_did_not_help(summary) == "Too few seeds to tell: 1 bypass PPO (+0.79) and 2 token truncate (+0.50)."


@pytest.mark.parametrize(
    ("seeds", "variants", "said"), [(1, "1", True), (5, "1", True), (6, "1", False), (6, "12", True)]
)
def test_missing_marks_say_nothing_with_few_seeds(seeds: int, variants: str, said: bool, tmp_path: Path):
    """Five seeds: the smallest p is 2/32 = .062; six: .031, and .062 among two comparisons."""
    for variant in ("0", *variants):
        for seed in range(100, 100 + seeds):
            write_run(tmp_path, "stale32", "2:token:truncate" if variant == "2" else variant, seed)
    notes = final_table(summarise(read_run_folder(tmp_path))).notes
    assert any(note.startswith("With so few seeds no difference can be significant") for note in notes) is said


def test_missing_marks_of_equal_runs_are_no_matter_of_seeds(tmp_path: Path):
    for seed in (100, 101):
        write_run(tmp_path, "control", "0", seed)
    assert not any("so few" in note for note in final_table(summarise(read_run_folder(tmp_path))).notes)
