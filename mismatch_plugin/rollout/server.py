"""A real SGLang server on CPU, for tests and small comparisons: started, waited for, and always ended.

    with start_cpu_server("tiny-model", dtype="bfloat16") as server:
        httpx.get(server.url + "/health")

`ci/sglang_cpu.sh` makes the environment that it runs in. By hand: `python -m mismatch_plugin.rollout.server MODEL_DIR`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import httpx

from mismatch_plugin.rollout import supervisor

ServerDtype = Literal["float32", "bfloat16", "float16"]

PYTHON_VARIABLE = "MISMATCH_SGLANG_PYTHON"
"""Environment variable that names the Python of the server's environment."""
_DEFAULT_PYTHON = Path(".venv-sglang/bin/python")
_LOG_LINES = 40
_PORT_TAKEN = "address already in use"
_PORT_TRIES = 3
_STOP_S = 10.0
_END_S = 60.0
"""A server that refuses or breaks connections is given so long to end: its exit is seen some time after they break."""

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",  # at the size of these models a second thread costs more than it does
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-radix-cache", "--disable-cuda-graph"),
    *("--skip-server-warmup", "--sleep-on-idle", "--mem-fraction-static", "0.3"),
    *("--max-total-tokens", "16384", "--max-running-requests", "64"),
)


class ServerError(RuntimeError):
    """The server did not start, or ended by itself. The message ends with the last lines of its log."""


class CpuServer:
    """A running server. url: `http://127.0.0.1:PORT`. log: the file with all that it printed."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url, self.log, self._process, self._stopped = url, log, process, False

    @property
    def process_group(self) -> int:
        """Id of the process group of the server and all its children."""
        return self._process.pid

    @property
    def ended_by_itself(self) -> bool:
        """True if it is gone although nobody called `stop`."""
        return self._process.poll() is not None and not self._stopped

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """The last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the server and every process that it started, whatever they are doing. Idempotent."""
        if self._process.poll() is None:
            self._stopped = True
            assert self._process.stdin is not None
            self._process.stdin.close()  # the supervisor ends everything
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


@contextlib.contextmanager
def start_cpu_server(
    model_dir: str | os.PathLike[str],
    *,
    python: str | os.PathLike[str] | None = None,
    port: int = 0,
    dtype: ServerDtype = "float32",
    arguments: Sequence[str] = (),
    log: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
) -> Iterator[CpuServer]:
    """A server on 127.0.0.1 that answers requests; it ends with the block, and with this process however that dies.

    Args:
        model_dir: a checkpoint with `config.json`, weights, and a tokenizer unless `arguments` has
            `--skip-tokenizer-init`.
        python: of an environment made by `ci/sglang_cpu.sh`. None: what MISMATCH_SGLANG_PYTHON names, else
            `.venv-sglang/bin/python`.
        port: 0 takes a free one.
        dtype: of weights, activations and KV cache. Logits are float32 before their softmax in each.
        arguments: further ones of `sglang.launch_server`; given twice, the last counts.
        log: the file it prints to; None: a temporary one, gone with the server.
        timeout: seconds until the server must answer (an idle machine with two cores takes 14 to 27).

    Raises:
        FileNotFoundError: no environment or no model; says how to make the former.
        ServerError: it did not come up, or ended by itself before the block did, with the end of its log.
    """
    interpreter = find_python(python)
    model = Path(model_dir).resolve()
    if not (model / "config.json").is_file():
        raise FileNotFoundError(f"{model} holds no config.json: give the folder of a checkpoint.")
    with tempfile.TemporaryDirectory(prefix="mismatch-sglang-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch, "server.log") if log is None else Path(log)
        command = [str(interpreter), "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", dtype]
        command += ["--host", "127.0.0.1", *_ARGUMENTS, *arguments]
        server = _start(command, port, path, scratch, timeout)
        try:
            yield server
        except Exception as error:
            if _is_gone(server):
                raise ServerError(f"the SGLang server ended by itself:\n{server.log_tail()}") from error
            raise
        else:
            if server.ended_by_itself:
                raise ServerError(f"the SGLang server ended by itself:\n{server.log_tail()}")
        finally:
            server.stop()


def _is_gone(server: CpuServer) -> bool:
    """Whether it ended by itself. Its connections break before its exit can be seen, each in a way of its own, so it is
    asked until it answers, or keeps a connection open, or has ended."""
    deadline = time.monotonic() + _END_S
    while not server.ended_by_itself and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            with contextlib.suppress(httpx.TimeoutException):
                _ask(server)
            return False
        time.sleep(0.1)
    return server.ended_by_itself


def _ask(server: CpuServer) -> httpx.Response:
    return httpx.get(server.url + "/health", timeout=5.0, trust_env=False)


def find_python(python: str | os.PathLike[str] | None = None) -> Path:
    """The Python of the server's environment, as `start_cpu_server` chooses it. Raises FileNotFoundError."""
    # Not resolved: a virtual environment is found by its own link to Python.
    chosen = Path(python or os.environ.get(PYTHON_VARIABLE) or _DEFAULT_PYTHON).absolute()
    if not os.access(chosen, os.X_OK):
        raise FileNotFoundError(
            f"there is no SGLang environment at {chosen}: make one with ci/sglang_cpu.sh (in a checkout, "
            f"`make sglang`), and name its Python in {PYTHON_VARIABLE} if it is elsewhere."
        )
    return chosen


def _start(command: list[str], port: int, log: Path, scratch: str, timeout: float) -> CpuServer:
    """Start and wait, again with another port where somebody took the free one meanwhile."""
    # Sockets and other files that the server leaves behind go into `scratch`.
    environment = {**os.environ, **_ENVIRONMENT, "TMPDIR": scratch}
    environment.pop("PYTHONPATH", None)  # the server's environment is whole without ours
    for left in reversed(range(_PORT_TRIES)):
        chosen = str(port or _free_port())
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, scratch, *command, "--port", chosen],
                stdin=subprocess.PIPE,  # closes when this process dies, which ends the server
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=scratch,
                start_new_session=True,
            )
        server = CpuServer(process, f"http://127.0.0.1:{chosen}", log)
        try:
            _wait(server, timeout)
            return server
        except BaseException as error:
            server.stop()
            taken = isinstance(error, ServerError) and _PORT_TAKEN in server.log_tail().lower()
            if port or not taken or not left:
                raise
    raise AssertionError("unreachable")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(server: CpuServer, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.ended_by_itself:
            raise ServerError(f"the SGLang server did not start:\n{server.log_tail()}")
        with contextlib.suppress(httpx.TransportError):
            if _ask(server).is_success:
                return
        time.sleep(0.2)
    raise ServerError(f"the SGLang server did not answer within {timeout:g} s:\n{server.log_tail()}")


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m mismatch_plugin.rollout.server", description=__doc__)
    parser.add_argument("model_dir", help="folder of a checkpoint")
    parser.add_argument("--python", help=f"Python of the server's environment (default: ${PYTHON_VARIABLE})")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--dtype", choices=get_args(ServerDtype), default="float32", help="(default: %(default)s)")
    options, arguments = parser.parse_known_args()
    chosen = {"python": options.python, "port": options.port, "dtype": options.dtype, "arguments": arguments}
    with contextlib.suppress(KeyboardInterrupt), start_cpu_server(options.model_dir, **chosen) as server:
        print(f"{server.url} serves {options.model_dir} in {options.dtype}; Ctrl-C ends it", flush=True)
        while not server.ended_by_itself:
            time.sleep(0.5)


if __name__ == "__main__":
    main()
