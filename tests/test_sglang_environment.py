"""ci/sglang_cpu.sh and those built on it judge what they find before they install anything.

`make test-sglang` runs the installation.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent / "ci"
SGLANG, WHOLE = "sglang_cpu.sh", ("slime_cpu.sh", "verl_whole_cpu.sh")


def run(directory: Path, script: str, python: str | None = None) -> subprocess.CompletedProcess[str]:
    """python: the body of a shell script in its place, of which only the exit status counts."""
    stand_in = directory.parent / "stand-in"
    stand_in.write_text(f"#!/bin/sh\n{python}\n")
    stand_in.chmod(0o755)
    environment = {**os.environ, "PYTHON": "python3" if python is None else str(stand_in)}
    command = ["bash", str(CI / script), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def test_every_requirement_is_pinned_and_torch_is_left_to_the_constraints() -> None:
    text = (CI / "sglang_cpu" / "requirements.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    names = [line.partition("==")[0] for line in lines]
    assert "sglang" in names and "torch" not in names
    assert not [name for name in names if "cuda" in name or name.startswith("nvidia")]


@pytest.mark.parametrize("script", [SGLANG, *WHOLE, "nemo_rl_cpu.sh"])
@pytest.mark.parametrize("name", ["notes.txt", "pyvenv.cfg"])
def test_what_was_not_made_here_is_never_removed(tmp_path: Path, name: str, script: str) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / name).write_text("mine")
    done = run(venv, script)
    assert done.returncode == 2 and "was not made by this" in done.stderr
    assert (venv / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("script", "there", "python", "reason", "left"),
    [
        (SGLANG, ["half-made"], '[ "$1" = --version ] && echo Python 3.9.2', "3.9.2 is too old for sglang", True),
        # Passes the version check, then fails to make an environment: what was there must be gone, and no stamp left.
        (SGLANG, ["pyvenv.cfg", "rest", "half-made"], '[ "$1" = -c ]', "it is half made", False),
        (SGLANG, ["pyvenv.cfg", "rest", "lib", "made-from"], '[ "$1" = -c ]', "it was made from other files", False),
        *((script, ["pyvenv.cfg", "rest", "made-from"], '[ "$1" = -c ]', "it is half made", False) for script in WHOLE),
    ],
)
def test_half_made_and_outdated_environments_are_made_again(
    tmp_path: Path, script: str, there: list[str], python: str, reason: str, left: bool
) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in there:
        (venv / name).write_text("of another release" if name == "made-from" and script == SGLANG else "")
    done = run(venv, script, python)
    assert done.returncode != 0 and reason in done.stdout + done.stderr
    assert sorted(file.name for file in venv.iterdir()) == (there if left else ["half-made"])
