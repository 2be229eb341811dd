"""ci/sglang_cpu.sh and those built on it remove nothing of others. `make test-sglang` runs the installation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent / "ci"


@pytest.mark.parametrize("script", ["sglang_cpu.sh", "slime_cpu.sh", "verl_whole_cpu.sh", "nemo_rl_cpu.sh"])
@pytest.mark.parametrize("name", ["notes.txt", "pyvenv.cfg"])
def test_what_was_not_made_here_is_never_removed(tmp_path: Path, name: str, script: str) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / name).write_text("mine")
    command, environment = ["bash", str(CI / script), str(venv)], {**os.environ, "PYTHON": "python3"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 2 and "was not made by this" in done.stderr
    assert (venv / name).read_text() == "mine"
