"""The terminal's summary: three whole screens, which say the verdict first, and what must hold of every screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.data.files import write_samples
from mismatch_plugin.data.sample import Sample
from tests.diagnose.door import noisy, run, text, told

GOLDEN = Path(__file__).with_name("screens")
SPREAD = {"fault": 0.8, "large": 0.06, "normal": 0.01, "undecided": 0.01}
FIRST = {"fault": "FAULT FOUND", "large": "ABOVE NORMAL", "normal": "NORMAL", "undecided": "NOT DECIDED"}


def of_verdict(verdict: str, **fields: Any) -> list[Sample]:
    """Responses whose training side is so noisy."""
    samples = noisy(SPREAD[verdict], 2 if verdict == "undecided" else 60, (20, 47), seed=7, **fields)
    return [one.with_fields(advantages=np.full(len(one), (-1.0, 1.5)[at % 2])) for at, one in enumerate(samples)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which files have short names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verdict", ["normal", "large", "fault"])
def test_the_whole_screen(verdict: str, here: Path) -> None:
    """With MISMATCH_WRITE_SCREENS=1 they are written anew, to be read before they are committed."""
    write_samples(here / "dump.jsonl", of_verdict(verdict))
    output = run("dump.jsonl", "--no-report", "--gate-kl", "0.01", "--flags", "--use-tis", columns=80).output
    shown = "".join(line.rstrip() + "\n" for line in output.splitlines())
    golden = GOLDEN / f"{verdict}.txt"
    if os.environ.get("MISMATCH_WRITE_SCREENS"):
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("verdict", FIRST)
@pytest.mark.parametrize(("width", "charset"), [(80, "utf-8"), (120, "utf-8"), (80, "ascii")])
def test_the_verdict_comes_first_and_nothing_is_wider_than_the_terminal(
    verdict: str, width: int, charset: str, here: Path
) -> None:
    write_samples(here / "dump.jsonl", of_verdict(verdict))
    words = ["inspect", "dump.jsonl", "--host", "slime"]
    result = CliRunner(charset=charset).invoke(app, words, env={"COLUMNS": str(width), "TERM": "dumb"})
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert len(lines) <= 44 and lines[0].startswith(FIRST[verdict] + ": ")
    copied = ("Report: ", "mismatch-plugin inspect", "python -m", "ray job", "RUN")
    wrapped = [line for line in lines if not line.startswith(copied) and "--mismatch" not in line]
    assert charset == "ascii" or max(map(cell_len, wrapped)) <= width
    said = " ".join(" ".join(lines).split())
    assert said.index("Is this normal?") < said.index("size") and lines[-1].endswith("dump_inspect/report.html")
    assert ("Recommended: " in said) == ("kept" in said) == (verdict in ("large", "normal"))
    assert ("fix the fault first" in said) == (verdict == "fault")
    assert ("Inspect a larger dump" in said) == (verdict == "undecided")
    assert ("mean |d log p|" in said) == (charset == "ascii")


def test_flags_are_of_the_dump_s_trainer_or_the_host_and_stay_whole(here: Path) -> None:
    write_samples(here / "dump.jsonl", of_verdict("large"))
    for host in ("slime", "verl", "prime-rl", "python"):
        flags = told("dump.jsonl", "--host", host)["recommendation"]["flags"]
        shown = run("dump.jsonl", "--no-report", "--host", host, columns=80).output
        lines = [line.rstrip() for line in shown.splitlines()]
        assert all(line in lines for line in flags[host].splitlines())
        listed = " ".join(lines).partition(" (--host ")[2].partition(" prints theirs")[0]
        assert " ".join(listed.split()).split(", ") == [other for other in flags if other != host]
    said = text("dump.jsonl", "--no-report")  # nobody's launch line
    assert "Flags for any trainer (--host slime, " in said and "ray job" not in said
