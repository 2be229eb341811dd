"""`compare --trainer megatron --engine sglang`, with a server that is there and with one that it starts itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch_plugin.rollout.server import CpuServer


def _compare(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'mismatch-plugin'; from mismatch_plugin.cli import main; main()"
    command = [sys.executable, "-c", code, "compare", "--trainer", "megatron", "--engine", "sglang", "--seeds", "1"]
    command += ["--output", str(folder)]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=500)


def _runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Folder of a run -> what it wrote each optimizer step."""
    found = {}
    for path in sorted(folder.rglob("metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.parent.relative_to(folder))] = [line for line in lines if line["step"]]
    return found


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a comparison that started its own server, and what it said."""
    folder = tmp_path_factory.mktemp("compare") / "run"
    done = _compare(folder, "--start-server", "--algorithms", "0,2:token:truncate", "--steps", "8", "--no-exact")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_it_starts_a_server_in_bfloat16_and_trains_on_it(started: tuple[Path, str]) -> None:
    folder, said = started
    assert "starting SGLang on CPU" in said and (folder / "report.html").exists()
    assert json.loads((folder / "run.json").read_text())["lab"]["engine"] == "sglang"
    runs = _runs(folder)
    assert list(runs) == ["bfloat16/0/seed0", "bfloat16/2_token_truncate/seed0"]
    for steps in runs.values():
        assert [step["weight_version"] for step in steps] == [0] * 4 + [4] * 4
        largest = max(
            abs(step["metrics"][f"rollout_corr/rollout_is_{end}"] - 1) for step in steps for end in ("min", "max")
        )
        assert 1e-3 < largest < 0.5


def test_a_finished_comparison_is_resumed_without_a_server(started: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = started
    options = ("--start-server", "--algorithms", "0,2:token:truncate", "--steps", "8", "--no-exact", "--resume")
    again = _compare(folder, *options)
    assert again.returncode == 0 and "starting SGLang" not in again.stdout, again.stdout + again.stderr


def test_the_server_at_a_url_decides_the_precision(float32_server: CpuServer, tmp_path: Path) -> None:
    url = ("--url", float32_server.url, "--no-exact", "--algorithms", "2:token:truncate", "--steps", "4")
    done = _compare(tmp_path / "run", *url)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = _runs(tmp_path / "run").items()
    assert run[0] == "control/2_token_truncate/seed0"
    assert all(step["metrics"]["rollout_corr/rollout_is_max"] == pytest.approx(1.0, abs=1e-4) for step in run[1])
    refused = _compare(tmp_path / "other", *url, "--settings", "bfloat16")
    assert refused.returncode == 2 and not (tmp_path / "other").exists()
    assert "the server computes in float32" in " ".join(refused.stderr.replace("│", " ").split())
