"""One setting's results as a table, and the cross-check with another trainer."""

from __future__ import annotations

from pathlib import Path

from mismatch_plugin.report.data import read_run_folder
from mismatch_plugin.report.results import cross_check, results_table
from mismatch_plugin.report.statistics import summarise
from tests.report.synthetic import CROSS_CHECK, write_comparison, write_run


def test_results_of_a_setting(tmp_path: Path):
    folder = read_run_folder(write_comparison(tmp_path, check=False, settings=["stale32"]))
    (summary,) = summarise(folder)
    rows = {row[0]: row[1:] for row in results_table(summary, "Very stale").rows}
    assert rows["0 PPO"][0].startswith("0.100 ± 0.00") and rows["0 PPO"][1:5] == ("–",) * 4
    final, difference, interval, p, effect, _, collapsed = rows["1 bypass PPO"]
    assert final == "0.900 ± 0.005"  # 0.9 (1 ± 0.02), half of the seeds each: 0.018 · √(12/11) / √12
    assert difference == "+0.800 ▲" and interval.startswith("+0.7") and " to +0.8" in interval
    assert p == "0.002"  # 2/2^12, the smallest of five comparisons, times five: 0.0024
    assert float(effect) > 10 and collapsed == "0 of 12"
    assert rows["2 sequence truncate"][1] == "−0.070 ▼" and rows["2 sequence truncate"][6] == "12 of 12"
    assert rows["0 dual clip"][1] == "0.000" and rows["0 dual clip"][6] == "12 of 12"


def test_a_cross_check_that_agrees(tmp_path: Path):
    write_comparison(tmp_path, settings=["stale32"])
    write_run(tmp_path, "stale32", "0", 100, grad_norm=900.0)  # the median over seeds is that of the others
    folder = read_run_folder(tmp_path)
    check = cross_check(folder, summarise(folder))
    assert check is not None
    assert check.sentences == (
        "Very stale, 2 token truncate minus algorithm 0: +0.500 in the batched lab, +0.341 through megatron-core. "
        "Agrees in sign: yes.",
    )
    # 0.05 (1 + 0.02), 0.4 (1 − 0.02): one seed, so no error.
    zero, token = check.table.rows
    assert zero[:2] == ("Very stale", "0 PPO") and zero[3:] == ("12 of 12", "300", "0.051", "1 of 1", "300")
    assert token[1] == "2 token truncate" and token[3:] == ("0 of 12", "2", "0.392", "0 of 1", "2")


def test_a_cross_check_that_does_not_agree_and_none(tmp_path: Path):
    write_comparison(tmp_path, settings=["stale32"])
    write_run(tmp_path / "megatron", "stale32", "2:token:truncate", 100, (0.8, 0.01))
    folder = read_run_folder(tmp_path)
    check = cross_check(folder, summarise(folder))
    assert check is not None and check.sentences[0].endswith("Agrees in sign: no.")
    other = write_comparison(tmp_path / "other", check=False, settings=["stale16"])
    folder = read_run_folder(other)
    assert cross_check(folder, summarise(folder)) is None
    missing = write_comparison(tmp_path / "third", check=False, settings=["stale16"], cross_check=CROSS_CHECK)
    folder = read_run_folder(missing)
    assert cross_check(folder, summarise(folder)) is None and not folder.complete
