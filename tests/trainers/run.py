"""Starts a trainer under a time limit and leaves none of its processes behind: `run`.

A process of its own supervises it, which adopts what the trainer's processes orphan (Ray starts daemons). So it can end
them all, also when the one that asked is itself ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OUT_OF_TIME = 124  # as `timeout` says it
_RUNNING, _ENDING = set["subprocess.Popen[str]"](), threading.Event()
_ADOPT, _END_WITH_PARENT = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Finished:
    """status: the exit status (negative: the signal; `OUT_OF_TIME`)."""

    status: int
    seconds: float
    log: Path

    @property
    def text(self) -> str:
        """What it printed, both streams."""
        return self.log.read_text(errors="replace")


def run(command: Sequence[str], log: Path, *, limit: float, env: Mapping[str, str], cwd: Path) -> Finished:
    """Run a command to its end, at most `limit` seconds. Raises InterruptedError after `end_runs`."""
    if _ENDING.is_set():
        raise InterruptedError(f"not started, since the session ends: {log}")
    words = [sys.executable, __file__, str(os.getpid()), str(log), str(limit), *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=dict(env), cwd=cwd) as supervisor:
        _RUNNING.add(supervisor)
        try:
            said, _ = supervisor.communicate()
        except BaseException:  # it ends what runs, which SIGKILL would not let it
            supervisor.terminate()
            supervisor.wait()
            raise
        finally:
            _RUNNING.discard(supervisor)
    return Finished(log=log, **json.loads(said))


def end_runs() -> None:
    """End all that this process has running, whichever threads wait for it, and start no more."""
    _ENDING.set()
    for supervisor in [*_RUNNING]:
        supervisor.terminate()


def descendants(root: int) -> list[int]:
    """All processes below one, as /proc has them now."""
    found = list[int]()
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _end_all() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # a parent with threads sends it more than once
        signal.signal(number, signal.SIG_IGN)
    while below := descendants(os.getpid()):
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _supervise(parent: int, log: str, limit: float, command: Sequence[str]) -> dict[str, float]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_ADOPT, 1, 0, 0, 0)
    libc.prctl(_END_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    if os.getppid() != parent:  # it ended before it could be asked about
        sys.exit(1)
    start = time.monotonic()
    try:
        with open(log, "wb") as file:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        while (status := child.poll()) is None and time.monotonic() - start < limit:
            time.sleep(0.1)
        seconds = time.monotonic() - start
    finally:
        _end_all()
    return {"status": OUT_OF_TIME if status is None else status, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(_supervise(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:])))
