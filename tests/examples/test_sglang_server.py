"""Starting and ending a server process, with a stand-in program in the place of SGLang: no orphan, no silent failure.

The stand-in is what `python` names, so it gets the same command line. What it does stands in its model's config.json.
The real server is started in tests/sglang.
"""

from __future__ import annotations

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
    import http.server, json, os, subprocess, sys, threading, time
    option = dict(zip(sys.argv, sys.argv[1:]))
    folder = option["--model-path"]
    config = json.load(open(folder + "/config.json"))
    tried = open(folder + "/tried", "a")
    tried.write(option["--port"] + " " + option["--dtype"] + "\\n")
    tried.close()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(folder + "/group", "w") as file:
        file.write(str(os.getpgrp()))
    if config["does"] == "exit":
        sys.exit("weights are broken")
    if config["does"] == "port" and len(open(folder + "/tried").readlines()) < 3:
        sys.exit("[Errno 98] error while attempting to bind: Address already in use")
    if config["does"] == "hang":
        time.sleep(600)

    def end():
        print("out of memory", flush=True)
        os._exit(3)

    class Handler(http.server.BaseHTTPRequestHandler):
        dying = False

        def do_GET(self):
            if self.path == "/end":
                end()
            if self.path == "/end_slowly" or Handler.dying:
                if not Handler.dying:
                    threading.Timer(1.0, end).start()
                Handler.dying = True
                return  # closes the connection without an answer, and those that come until it has ended
            self.send_response(200)
            self.end_headers()

    http.server.HTTPServer(("127.0.0.1", int(option["--port"])), Handler).serve_forever()
"""
DEADLINE_S = 60


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(textwrap.dedent(STAND_IN).format(python=sys.executable))
    path.chmod(0o755)
    return path


Start = Callable[..., AbstractContextManager[CpuServer]]


@pytest.fixture
def start(stand_in: Path, tmp_path: Path) -> Start:
    """`start(does, …)`: a server whose model makes it do that; its folder is tmp_path / does."""

    def started(does: str, **options: Any) -> AbstractContextManager[CpuServer]:
        folder = tmp_path / does
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"does": does}))
        return start_cpu_server(folder, **{"python": stand_in, **options})

    return started


def _tried(folder: Path) -> list[str]:
    return (folder / "tried").read_text().splitlines()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _gone(group: int) -> bool:
    """Whether the group vanishes; a killed process that nobody waits for takes a moment."""
    deadline = time.monotonic() + DEADLINE_S
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _alive(group)


def test_it_answers_and_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    with start("serve", dtype="bfloat16", arguments=["--extra", "1"]) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        assert not server.ended_by_itself and _alive(server.process_group)
        port = server.url.rpartition(":")[2]
    assert _tried(tmp_path / "serve") == [f"{port} bfloat16"]
    assert _gone(server.process_group)  # its child too
    server.stop()


def test_an_error_in_the_block_ends_it_too(start: Start) -> None:
    with pytest.raises(LookupError) as caught, start("serve") as server:
        raise LookupError(server.process_group)
    assert _gone(*caught.value.args)


def test_two_servers_get_two_ports(start: Start) -> None:
    with start("serve") as one, start("serve") as two:
        assert one.url != two.url
        assert [httpx.get(server.url + "/health").status_code for server in (one, two)] == [200, 200]


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("exit", r"did not start, exit code 1:\n(.*\n)*weights are broken"),
        ("hang", "did not answer within 2 s:\n"),
    ],
)
def test_a_server_that_does_not_start_shows_its_log(start: Start, tmp_path: Path, does: str, says: str) -> None:
    with pytest.raises(ServerError, match=says), start(does, timeout=60.0 if does == "exit" else 2.0):
        pass
    assert len(_tried(tmp_path / does)) == 1


@pytest.mark.parametrize("how", ["end", "end_slowly"])
def test_a_server_that_dies_under_the_block_is_reported_with_its_log(how: str, start: Start) -> None:
    says = r"ended by itself, exit code 3:\n(.*\n)*out of memory"
    with pytest.raises(ServerError, match=says) as caught, start("serve") as server:
        httpx.get(f"{server.url}/{how}")
    assert isinstance(caught.value.__cause__, httpx.TransportError)


def test_a_port_taken_meanwhile_is_changed(start: Start, tmp_path: Path) -> None:
    with start("port") as server:
        ports = [line.split()[0] for line in _tried(tmp_path / "port")]
        assert len(set(ports)) == 3 and server.url.endswith(f":{ports[-1]}")
    (tmp_path / "port" / "tried").unlink()
    with pytest.raises(ServerError, match="Address already in use"), start("port", port=int(ports[0])):
        pass  # but not one that was asked for
    assert _tried(tmp_path / "port") == [f"{ports[0]} float32"]


@pytest.mark.parametrize("does", ["serve", "hang"])  # killed while it serves, and while it starts
def test_it_ends_when_its_owner_is_killed(does: str, stand_in: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from examples.sglang_server import start_cpu_server\n"
        "with start_cpu_server(sys.argv[1], python=sys.argv[2]):\n"
        "    print('serves', flush=True); time.sleep(600)"
    )
    (tmp_path / "config.json").write_text(json.dumps({"does": does}))
    owner = subprocess.Popen([sys.executable, "-c", code, tmp_path, stand_in], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    if does == "serve":
        assert owner.stdout.readline() == "serves\n"
    file, deadline = tmp_path / "group", time.monotonic() + DEADLINE_S
    while not (file.is_file() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    group = int(file.read_text())
    assert _alive(group)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert _gone(group)


def test_what_is_missing_is_said_before_anything_starts(
    start: Start, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISMATCH_SGLANG_PYTHON", str(tmp_path / "absent" / "python"))
    says = r"absent/python: make one with ci/sglang_cpu\.sh"
    with pytest.raises(FileNotFoundError, match=says), start("serve", python=None):
        pass
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"), start_cpu_server(tmp_path, python=stand_in):
        pass
    monkeypatch.setenv("MISMATCH_SGLANG_PYTHON", str(stand_in))
    with start("serve", python=None):
        assert len(_tried(tmp_path / "serve")) == 1
