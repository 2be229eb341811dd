"""Following a run that is being written: each step once, the verdict at the end, whatever the file does meanwhile."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import mismatch_plugin as mp
from mismatch_plugin.cli import app
from mismatch_plugin.diagnose.follow import Tail, follow, sparkline, step_line
from mismatch_plugin.report.log import to_json, write_step

CONFIG = mp.preset("token_is")


def metrics(k3_kl: float = 5e-4, kl: float = 1e-4) -> dict[str, float]:
    return {
        "rollout_corr/kl": kl,
        "rollout_corr/k3_kl": k3_kl,
        "rollout_corr/rollout_is_ratio_mean": math.exp(-kl),
        "rollout_corr/accepted_token_fraction": 1.0,
        "rollout_corr/tokens": 4096.0,
    }


def settings(file: Path) -> tuple[mp.MismatchConfig, bool]:
    return CONFIG, True


def run_for(path: Path, seconds: float, terminal: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, height=40, highlight=False, markup=False)
    return follow(path, settings, console, interval=0.05, seconds=seconds), out.getvalue()


def test_a_run_that_is_written_meanwhile_is_told_step_by_step(tmp_path: Path) -> None:
    def train() -> None:
        for step in range(3, 8):
            time.sleep(0.1)
            write_step(tmp_path / "run", CONFIG, {"step": step, **metrics()})

    thread = threading.Thread(target=train)
    thread.start()
    status, said = run_for(tmp_path / "run", 3.0)  # which is not there yet
    thread.join()
    lines = said.splitlines()
    assert [line.split(":")[0] for line in lines[:5]] == [f"step {step}" for step in range(3, 8)]
    assert lines[0].startswith("step 3: kl 0.0001, k3_kl 0.0005, rollout_is_ratio_mean 0.9999")
    assert status == 0 and "data: small mismatch" in said and "trend: none in 5 steps" in said


def test_the_exit_status_is_that_of_the_last_verdict(tmp_path: Path) -> None:
    for _ in range(12):
        write_step(tmp_path, CONFIG, metrics())
    assert run_for(tmp_path, 0.0)[0] == 0
    write_step(tmp_path, CONFIG, metrics(kl=0.9, k3_kl=0.6))
    status, said = run_for(tmp_path, 0.0)
    assert status == 1 and "data: large mismatch" in said
    assert said.count("step ") >= 5 and "step 8:" not in said and "step 9:" in said  # of the past the last five


def test_a_run_without_a_step_is_nothing_to_judge(tmp_path: Path) -> None:
    status, said = run_for(tmp_path / "run", 0.1)
    assert status == 2 and "holds no step yet" in said
    write_step(tmp_path / "run", CONFIG, {**metrics(), "rollout_corr/tokens": 0.0})
    status, said = run_for(tmp_path / "run", 0.1)
    assert status == 2 and "nothing to judge: the newest steps hold no response token" in said


def test_growth_and_what_rose_with_it_are_told(tmp_path: Path) -> None:
    grown = 0.0
    for step in range(80):
        grown = 5e-4 * math.exp(0.1 * max(step - 40, 0) + 0.1 * math.sin(step))
        write_step(tmp_path, CONFIG, {"step": step, **metrics(grown), "actor/grad_norm": 40 * grown, "lr": 1e-6})
    _, said = run_for(tmp_path, 0.0)
    assert "trend: k3_kl has grown since step 4" in said and "With it moved actor/grad_norm" in said
    body = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json", "--no-report"]).output)
    assert abs(body["trend"]["began"] - 41) <= 5 and body["trend"]["companions"][0]["metric"] == "actor/grad_norm"
    assert body["trend"]["sentence"].startswith("k3_kl has grown since")
    row = next(row for row in body["metrics"] if row["metric"] == "k3_kl")
    assert row["last step"] == pytest.approx(grown) and isinstance(row["smallest"], float)
    said = CliRunner().invoke(app, ["inspect", str(tmp_path), "--no-report"]).output
    assert "trend: k3_kl has grown since step" in said


@pytest.mark.parametrize(("rate", "status"), [(0.3, 1), (0.05, 0)])
def test_growth_of_more_than_a_hundred_times_fails_a_run(tmp_path: Path, rate: float, status: int) -> None:
    for step in range(40):
        write_step(tmp_path, CONFIG, metrics(1e-4 * math.exp(rate * max(step - 20, 0) + 0.02 * math.sin(step))))
    found, said = run_for(tmp_path, 0.0)
    assert found == status and ("data: large mismatch: k3_kl has grown" in said) == bool(status)


def test_json_spells_what_is_not_finite(tmp_path: Path) -> None:
    write_step(tmp_path, CONFIG, metrics())
    write_step(tmp_path, CONFIG, {**metrics(), "rollout_corr/k3_kl": math.nan})
    body = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json", "--no-report"]).output)
    row = next(row for row in body["metrics"] if row["metric"] == "k3_kl")
    assert row["last step"] == "nan" and row["mean of the last 2"] == 5e-4 and body["trend"] is None


def test_a_terminal_gets_one_screen(tmp_path: Path) -> None:
    for step in range(30):
        write_step(tmp_path, CONFIG, {"step": step, **metrics(5e-4 * (1 + step % 3))})
    status, drawn = run_for(tmp_path, 0.1, terminal=True)
    assert status == 0
    for part in ("30 steps, newest 29", "k3_kl", "data: small mismatch", "correction: holds", "trend:", "last step"):
        assert part in " ".join(drawn.split()), part
    assert "waiting for" in run_for(tmp_path / "none", 0.1, terminal=True)[1]


def test_a_tail_reads_each_line_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.read() == 0
    line = to_json({"step": 1, **metrics()})
    file.write_text(line[:20])
    assert tail.read() == 0  # its writer has not ended the line
    file.write_text(line + "\n" + to_json({"loss": 1.0}) + "\n" + line[:20] + "\n\n")  # the third was cut by a kill
    assert (tail.read(), tail.numbers) == (1, [1.0])
    with file.open("a") as lines:
        lines.write(to_json({"metrics": metrics(), "reward": 0.5}) + "\n")
    assert (tail.read(), tail.numbers, tail.others[1]) == (1, [1.0, 2.0], {"reward": 0.5})
    assert tail.read() == 0
    file.write_text(line + "\n")  # another run in its place
    assert (tail.read(), tail.numbers) == (1, [1.0])
    file.write_text(line + "\n[1]\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is no step"):
        tail.read()


def test_a_longer_file_in_the_place_of_the_old_one_is_read_anew(tmp_path: Path) -> None:
    file, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    file.write_text(to_json({"step": 1, **metrics()}) + "\n")
    tail = Tail(file)
    assert tail.read() == 1
    other.write_text("".join(to_json({"step": step, "a_longer": 1.5, **metrics()}) + "\n" for step in (7, 8)))
    other.replace(file)
    assert (tail.read(), tail.numbers) == (2, [7.0, 8.0])
    assert tail.read() == 0


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps({"prompt_ids": [1], "response_ids": [2]}) + "\n")
    for arguments in (
        [str(tmp_path / "samples.jsonl"), "--follow"],
        ["--follow"],
        [str(tmp_path), "--follow", "--json"],
    ):
        result = CliRunner().invoke(app, ["inspect", *arguments])
        assert result.exit_code == 2 and "--follow watches the folder" in result.output
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--follow-for", "0"])
    assert result.exit_code == 2 and "line 1 is no step" in result.output


def test_the_command_follows(tmp_path: Path) -> None:
    write_step(tmp_path, CONFIG, metrics())
    result = CliRunner().invoke(app, ["inspect", str(tmp_path), "--follow-for", "0.2", "--interval", "0.1"])
    assert result.exit_code == 0 and "step 1: kl 0.0001" in result.output and "trend: none" in result.output


def test_small_pictures() -> None:
    assert sparkline([1.0, 2.0, 4.0, math.nan, 0.0]) == "▁▅█··" and sparkline([3.0, 3.0]) == "▁▁"
    assert len(sparkline([1.0] * 1000)) <= 60 and sparkline([math.nan]) == "·"
    assert step_line(3, {"rollout_corr/kl": math.inf}) == "step 3: kl inf"
