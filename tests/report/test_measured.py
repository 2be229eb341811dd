"""Why KL is above 0 where nothing is apart, and where CPU time goes."""

from __future__ import annotations

from pathlib import Path

from mismatch_plugin.report.data import read_run_folder
from mismatch_plugin.report.measured import cpu_seconds, moved_note
from tests.report.synthetic import write_comparison, write_run


def test_a_kl_against_the_moved_policy_is_explained_where_it_shows(tmp_path: Path):
    folder = read_run_folder(write_comparison(tmp_path, check=False, settings=["control", "int2"]))
    note = moved_note(folder, "control")
    assert "KL of algorithm 0: 0)" in note and "above 0: 1 bypass PPO 0.02." in note and "2 token" not in note
    assert moved_note(folder, "int2") == ""  # there the engines are apart


def test_nothing_is_explained_where_all_agree(tmp_path: Path):
    for variant in ("0", "1", "2:token:truncate"):
        write_run(tmp_path, "control", variant, 100, kl=0.0)
    assert moved_note(read_run_folder(tmp_path), "control") == ""
    write_run(tmp_path, "control", "2:token:truncate", 100, kl=0.02)  # π_old did not move: this is no such case
    assert moved_note(read_run_folder(tmp_path), "control") == ""


def test_cpu_time_of_a_run_that_needs_the_pass(tmp_path: Path):
    folder = read_run_folder(write_comparison(tmp_path, check=False, settings=["control", "stale16"]))
    cpu = cpu_seconds(folder, {"control": "In sync"})
    assert cpu is not None
    # 20 steps of .025 + .025 + .05 s; bypass, without the pass, counts for nothing here.
    assert cpu.table.rows == (
        ("In sync", "0.50", "0.50", "1.00", "2.00", "25 %"),
        ("stale16", "0.50", "0.50", "1.00", "2.00", "25 %"),
    )
    assert cpu.sentence == (
        "The old-log-prob pass is 25 % of the CPU time of a run that needs it; 1 bypass PPO skips it."
    )


def test_cpu_time_where_no_run_needs_the_pass_or_none_was_recorded(tmp_path: Path):
    assert cpu_seconds(read_run_folder(tmp_path), {}) is None
    write_run(tmp_path, "control", "1", 100)
    cpu = cpu_seconds(read_run_folder(tmp_path), {})
    assert cpu is not None and cpu.sentence == ""
    assert cpu.table.rows == (("control", "0.50", "0.00", "1.00", "1.50", "–"),)
