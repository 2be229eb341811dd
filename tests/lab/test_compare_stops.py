"""`mismatch-plugin compare` stopped half-way, by Ctrl-C and by a kill: nothing is lost, and --resume ends it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from tests.report.test_page import write_folder

needs_lab = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("megatron", "transformers", "matplotlib")), reason="needs [lab]"
)
OPTIONS = "--algorithms 0,1 --settings control --seeds 1 --steps 40 --workers 1 --no-exact"
SECONDS = 180


def start(folder: Path) -> subprocess.Popen[str]:
    """In a session of its own, so that a signal reaches it and its workers and not this test.

    A shell that runs these tests in the background has them ignore SIGINT, which children inherit.
    """
    words = f"-m mismatch_plugin compare --resume --output {folder} {OPTIONS}".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("metrics.jsonl"))


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while lines(folder) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.05)


@needs_lab
def test_ctrl_c_then_a_kill_then_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_steps(process, folder, 5)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 130, said
    assert "writing a report of what is there" in said and "--resume" in said
    page = (folder / "report.html").read_text()
    assert "</html>" in page and lines(folder) >= 5

    process = start(folder)
    wait_for_steps(process, folder, 5)  # the unfinished run begins again
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=SECONDS)

    process = start(folder)
    said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, said
    outcomes = [json.loads(path.read_text()) for path in sorted(folder.rglob("done.json"))]
    assert [outcome["status"] for outcome in outcomes] == ["finished", "finished"]
    assert [outcome["step"] for outcome in outcomes] == [40, 40]
    assert [len(path.read_text().splitlines()) for path in sorted(folder.rglob("metrics.jsonl"))] == [41, 41]


@needs_lab
def test_the_end_shows_the_final_values_on_80_columns(tmp_path: Path) -> None:
    """The report's table of final values; every run of the folder has finished, so nothing is trained."""
    folder = write_folder(tmp_path)
    lab: dict[str, object] = {"engine": "transformers", "steps": 12, "task": "reverse", "tp": 1, "pp": 1, "cp": 1}
    lab["of_setting"] = {"control": {}, "stale16": {"staleness": 16}}
    (folder / "run.json").write_text(json.dumps({**json.loads((folder / "run.json").read_text()), "lab": lab}))
    options = ["--algorithms", "0,1,2:token:truncate", "--settings", "control,stale16", "--steps", "12", "--no-exact"]
    result = CliRunner().invoke(
        app, ["compare", "--resume", "--output", str(folder), *options], env={"COLUMNS": "80", "TERM": "dumb"}
    )
    assert result.exit_code == 0, result.output
    said = result.output[result.output.index("Final exact match") :].splitlines()
    rows = {line.split("  ")[0].strip(): line.split() for line in said}
    # Seeds end at 0.40, 0.42, 0.44, 0.46: mean 0.43, error √(0.002/3)/2 = 0.013.
    assert rows["0 PPO"][-3:] == ["0.43", "±", "0.01"]
    assert rows["2 decoupled PPO, token truncate"][-1] == "▲"
    table = said[: next(index for index, line in enumerate(said) if line.startswith("report: "))]
    assert max(map(len, table)) <= 80 and "one standard error over seeds" in " ".join(" ".join(table).split())
