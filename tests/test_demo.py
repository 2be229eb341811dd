"""`mismatch-plugin demo`: the first thing that a person runs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from typer.testing import CliRunner

from mismatch_plugin.cli import app


def test_the_demo_names_the_server_that_kept_old_weights(tmp_path: Path) -> None:
    """Finding the planted fault is success: exit status 0. A folder that is there is not written into."""
    folder = tmp_path / "demo"
    done = CliRunner().invoke(app, ["demo", str(folder)], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    first = done.output.splitlines()[0]
    assert first.startswith("FAULT FOUND: stale_server;"), first
    assert "Responses of http://rollout-1:30000 (192 samples) lie" in done.output
    assert (folder / "rollouts_inspect" / "report.html").exists()
    assert done.output.rstrip().endswith("mismatch-plugin inspect DUMP")
    again = CliRunner().invoke(app, ["demo", str(folder)], env={"COLUMNS": "400", "TERM": "dumb"})
    assert again.exit_code == 2 and "is there already" in again.output


def test_the_demo_s_dump_is_small() -> None:
    assert (files("mismatch_plugin.diagnose") / "demo.jsonl.xz").stat().st_size < 400_000  # type: ignore[attr-defined]
