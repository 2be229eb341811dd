"""Run a command until it ends or this process's standard input closes, then end everything it started.

    python -I supervisor.py SCRATCH COMMAND…       (as the leader of a process group of its own)

Whoever holds the other end of standard input owns the command: if that process ends, by SIGKILL too, the pipe closes.
SCRATCH is a folder that the owner removes, or this process if the owner cannot any more.
`server.py` runs this file by its path, since importing the package would cost the supervisor seconds and memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_GRACE_S = 1.0
_OWNER = os.getppid()
_owner_let_go = threading.Event()


def _members() -> Iterator[Path]:
    """`/proc` entries of the other processes of this group. None where there is no `/proc`."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            # pid (name, which may hold anything) state parent group …
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == os.getpgrp() and int(entry.name) != os.getpid() and state != "Z":
                yield entry


def _shared_memory() -> set[Path]:
    """SGLang's files in shared memory that the group has mapped: nothing removes them when it is killed."""
    found = set()
    for entry in _members():
        with contextlib.suppress(OSError):
            lines = (entry / "maps").read_text().splitlines()
            found |= {Path(line.split()[-1]) for line in lines if "/dev/shm/sglang_" in line}
    return found


def end_group(command: subprocess.Popen[bytes]) -> None:
    """Kill the command, then whatever is left of the group, this process included.

    In between its children, which end with it, get a moment: one of them removes its semaphores.
    """
    files = _shared_memory()
    command.kill()
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(True for _ in _members()):
        time.sleep(0.02)
    for file in files:
        file.unlink(missing_ok=True)
    if os.getppid() != _OWNER:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _end_with_owner(command: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    _owner_let_go.set()
    end_group(command)


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        sys.exit("supervisor.py ends its whole process group and must lead one of its own: start it in a new session.")
    process = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    watcher = threading.Thread(target=_end_with_owner, args=(process,), daemon=True)
    watcher.start()
    status = process.wait()
    if _owner_let_go.is_set():
        watcher.join()  # it ends this process
    print(f"the server ended with exit code {status}", flush=True)
    end_group(process)
