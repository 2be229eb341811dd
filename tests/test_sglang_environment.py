"""ci/sglang_cpu.sh and those built on it judge what they find before they install anything.

`make test-sglang` runs the installation.
"""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from ci.sglang_cpu.check import faults

CI = Path(__file__).resolve().parent.parent / "ci"
SCRIPT = CI / "sglang_cpu.sh"
WHOLE = ("slime_cpu.sh", "verl_whole_cpu.sh")
REQUIREMENTS = SCRIPT.parent / "sglang_cpu" / "requirements.txt"


def _run(
    directory: Path, python: Path | str = "python3", script: str = SCRIPT.name
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(python)}
    return subprocess.run(
        ["bash", str(CI / script), str(directory)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )


def _stand_in(path: Path, body: str) -> Path:
    """A Python of which only the exit status counts."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_every_requirement_is_pinned_and_torch_is_left_to_the_constraints() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    names = [line.partition("==")[0] for line in lines]
    assert "sglang" in names and "torch" not in names
    assert not [name for name in names if "cuda" in name or name.startswith("nvidia")]


def test_faults_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "probe-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    (folder / "RECORD").write_text("probe.py,,\n__pycache__/probe.cpython-311.pyc,,\nprobe-1.0.dist-info/METADATA,,\n")
    (tmp_path / "probe.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    pytest_pin = f"pytest=={metadata.version('pytest')}"
    assert faults(f"# a comment\n{pytest_pin}\nprobe==1.0\n") == []  # byte code may be missing
    assert faults("probe==1.1") == ["probe is 1.0, not 1.1"]
    assert faults("absent-thing==1") == ["absent-thing is not installed"]
    (tmp_path / "probe.py").unlink()
    assert faults("probe==1.0") == ["probe has lost 1 of 2 files, probe.py among them"]


@pytest.mark.parametrize("script", [SCRIPT.name, *WHOLE, "nemo_rl_cpu.sh"])
@pytest.mark.parametrize("name", ["notes.txt", "pyvenv.cfg"])
def test_what_was_not_made_here_is_never_removed(tmp_path: Path, name: str, script: str) -> None:
    (tmp_path / name).write_text("mine")
    done = _run(tmp_path, script=script)
    assert done.returncode == 2 and "was not made by this" in done.stderr
    assert (tmp_path / name).read_text() == "mine"


def test_too_old_a_python_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "half-made").touch()
    old = _stand_in(tmp_path / "old", '[ "$1" = --version ] && echo Python 3.9.2\n[ "$1" = --version ]')
    done = _run(tmp_path / "venv", old)
    assert done.returncode == 2 and "Python 3.9.2 is too old for sglang" in done.stderr
    assert (tmp_path / "venv" / "half-made").exists()


@pytest.mark.parametrize(
    ("stamp", "reason"), [(None, "it is half made"), ("of another release", "it was made from other files")]
)
def test_half_made_and_outdated_environments_are_made_again(tmp_path: Path, stamp: str | None, reason: str) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in ("pyvenv.cfg", "rest", "half-made" if stamp is None else "lib"):
        (venv / name).touch()
    if stamp is not None:
        (venv / "made-from").write_text(stamp)
    # Passes the version check, then fails to make an environment: what was there must be gone, and no stamp left.
    broken = _stand_in(tmp_path / "broken", '[ "$1" = -c ]')
    done = _run(venv, broken)
    assert done.returncode != 0 and reason in done.stdout
    assert [file.name for file in venv.iterdir()] == ["half-made"]


@pytest.mark.parametrize("script", WHOLE)
def test_an_environment_that_lacks_the_rest_is_made_again(tmp_path: Path, script: str) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in ("pyvenv.cfg", "rest", "made-from"):  # SGLang's part had ended
        (venv / name).touch()
    done = _run(venv, _stand_in(tmp_path / "broken", '[ "$1" = -c ]'), script)
    assert done.returncode != 0 and "it is half made" in done.stdout
    assert [file.name for file in venv.iterdir()] == ["half-made"]
