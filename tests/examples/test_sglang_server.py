"""Starting and ending a server process, with a stand-in program in the place of SGLang: no orphan, no silent failure.

The stand-in is what `python` names, so it gets the same command line. What it does stands in its model's config.json.
The real server is started in tests/sglang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.sglang_server import CpuServer, ServerError, start_cpu_server

STAND_IN = """\
    #!{python}
    import http.server, json, os, subprocess, sys, time
    option = dict(zip(sys.argv, sys.argv[1:]))
    folder = option["--model-path"]
    does = json.load(open(folder + "/config.json"))["does"]
    with open(folder + "/tried", "a") as file:
        file.write(option["--port"] + " " + option["--dtype"] + "\\n")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(folder + "/group", "w") as file:
        file.write(str(os.getpgrp()))
    if does == "exit":
        sys.exit("weights are broken")
    if does == "hang":
        time.sleep(600)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    http.server.HTTPServer(("127.0.0.1", int(option["--port"])), Handler).serve_forever()
"""
OWNER = """
import sys, time
from examples.sglang_server import start_cpu_server
with start_cpu_server(sys.argv[1], python=sys.argv[2]):
    time.sleep(600)
"""
DEADLINE_S = 60
Start = Callable[..., AbstractContextManager[CpuServer]]


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(textwrap.dedent(STAND_IN).format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def start(stand_in: Path, tmp_path: Path) -> Start:
    """`start(does, …)`: a server whose model makes it do that."""

    def started(does: str, **options: Any) -> AbstractContextManager[CpuServer]:
        (tmp_path / "config.json").write_text(json.dumps({"does": does}))
        return start_cpu_server(tmp_path, **{"python": stand_in, **options})

    return started


def tried(folder: Path) -> list[str]:
    """Port and dtype of every start; forgets them."""
    lines = (folder / "tried").read_text().splitlines()
    (folder / "tried").unlink()
    return lines


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def gone(group: int) -> bool:
    """Whether the group vanishes; a killed process that nobody waits for takes a moment."""
    deadline = time.monotonic() + DEADLINE_S
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(group)


def test_servers_answer_on_ports_of_their_own_and_leave_nothing_behind(
    start: Start, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISMATCH_SGLANG_PYTHON", str(stand_in))
    with (
        contextlib.suppress(LookupError),
        start("serve", python=None, dtype="bfloat16", arguments=["--extra", "1"]) as one,
        start("serve") as two,
    ):
        assert [httpx.get(server.url + "/health").status_code for server in (one, two)] == [200, 200]
        assert not one.ended_by_itself and alive(one.process_group)
        raise LookupError  # an error in the block ends them too
    ports = [server.url.rpartition(":")[2] for server in (one, two)]
    assert tried(tmp_path) == [f"{ports[0]} bfloat16", f"{ports[1]} float32"] and ports[0] != ports[1]
    assert gone(one.process_group) and gone(two.process_group)  # their children too


@pytest.mark.parametrize(
    ("does", "timeout", "says"),
    [
        ("exit", 60.0, r"did not start, exit code 1:\n(.*\n)*weights are broken"),
        ("hang", 2.0, "did not answer within 2 s:\n"),
    ],
)
def test_a_server_that_does_not_start_shows_its_log(
    start: Start, tmp_path: Path, does: str, timeout: float, says: str
) -> None:
    with pytest.raises(ServerError, match=says), start(does, timeout=timeout):
        pass
    assert len(tried(tmp_path)) == 1


def test_it_ends_when_its_owner_is_killed_while_it_starts(stand_in: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"does": "hang"}))
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path, stand_in])
    file, deadline = tmp_path / "group", time.monotonic() + DEADLINE_S
    while not (file.is_file() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    group = int(file.read_text())
    assert alive(group)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert gone(group)
