"""`mismatch-plugin compare` stopped half-way, by Ctrl-C and by a kill: nothing is lost, and --resume ends it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mismatch_plugin.lab import command, workers
from mismatch_plugin.lab.compare import hold

needs_lab = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("megatron", "transformers", "matplotlib")), reason="needs [lab]"
)
OPTIONS = "--algorithms 0,1 --settings control --seeds 1 --steps 40 --workers 1"
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


def wait_for_silence(folder: Path) -> None:
    deadline, before = time.monotonic() + SECONDS, -1
    while (now := sum(path.stat().st_size for path in folder.rglob("metrics.jsonl"))) != before:
        assert time.monotonic() < deadline, "a worker goes on without its parent"
        before = now
        time.sleep(3.0)
    assert not any(folder.rglob("done.json"))


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
    process.kill()
    process.communicate(timeout=SECONDS)
    wait_for_silence(folder)  # its workers end with it

    process = start(folder)
    said = process.communicate(timeout=SECONDS)[0]
    assert process.returncode == 0, said
    outcomes = [json.loads(path.read_text()) for path in sorted(folder.rglob("done.json"))]
    assert [outcome["status"] for outcome in outcomes] == ["finished", "finished"]
    assert [outcome["step"] for outcome in outcomes] == [40, 40]
    assert [len(path.read_text().splitlines()) for path in sorted(folder.rglob("metrics.jsonl"))] == [41, 41]


def test_what_it_took_is_said() -> None:
    minutes, cpu, memory = map(float, re.findall(r"[\d.]+(?= )", command._cost(90.0)))
    assert minutes == 1.5 and cpu >= 0 and memory > 0.01


def test_two_comparisons_do_not_write_to_one_folder(tmp_path: Path) -> None:
    first = hold(tmp_path)
    with pytest.raises(ValueError, match="another compare is writing to"):
        hold(tmp_path)
    first.close()
    hold(tmp_path).close()


def test_a_lock_whose_holder_was_killed_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 0.01)
    lock = threading.Lock()
    lock.acquire()
    with workers._warming(lock):
        assert lock.locked()
    assert lock.locked()  # it is still the other one's
    lock.release()
    with workers._warming(lock):
        assert lock.locked()
    assert not lock.locked()
