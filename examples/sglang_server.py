"""A real SGLang server on CPU, for tests and small comparisons: started, waited for, and always ended.

    with start_cpu_server("tiny-model", dtype="bfloat16") as server:
        urllib.request.urlopen(server.url + "/health")

`ci/sglang_cpu.sh` makes the environment that it runs in. By hand: `python -m examples.sglang_server MODEL_DIR`
(MISMATCH_SGLANG_PYTHON names its Python; options that are not listed go to SGLang).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

ServerDtype = Literal["float32", "bfloat16", "float16"]

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
# The server, and in its process group a shell that kills the group as soon as the pipe to the owner closes. SGLang's
# own processes do not see an owner that dies while they start, and the kernel's signal comes when a thread ends too.
_WITH_OWNER = 'exec 3<&0 2>&1; { read -r _ <&3; kill -KILL 0; } & exec "$@" 3<&- </dev/null'


class ServerError(RuntimeError):
    """The server did not start, or ended by itself. The message ends with the last lines of its log."""


class CpuServer:
    """A running server. url: `http://127.0.0.1:PORT`. log: the file with all that it printed. process_group: the id of
    the group of the server and all its children."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url, self.log, self.process_group = url, log, process.pid
        self._process, self._stopped = process, False

    @property
    def ended_by_itself(self) -> bool:
        """True if it is gone although nobody called `stop`."""
        return self._process.poll() is not None and not self._stopped

    def log_tail(self, lines: int = 40) -> str:
        """The last lines that it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Kill the server and every process that it started, whatever they are doing. Idempotent."""
        if not self._stopped:
            self._stopped = self._process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process_group, signal.SIGKILL)
            self._process.communicate()

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, whatever the environment says
        try:
            with opener.open(self.url + "/health", timeout=5.0):
                return True
        except (OSError, http.client.HTTPException):
            return False

    def _ended(self, what: str) -> ServerError:
        return ServerError(f"the SGLang server {what}, exit code {self._process.returncode}:\n{self.log_tail()}")


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

    model_dir: a checkpoint with `config.json`, weights, and a tokenizer unless `arguments` has `--skip-tokenizer-init`.
    python: as `find_python` takes it. port: 0 takes a free one. dtype: of weights, activations and KV cache; logits are
    float32 before their softmax in each. arguments: further ones of `sglang.launch_server`; given twice, the last
    counts. log: the file it prints to; None: a temporary one, gone with the server. timeout: seconds until the server
    must answer (an idle machine with two cores takes 14 to 27).

    Raises FileNotFoundError where there is no environment (it says how to make one) or no model, ServerError if the
    server did not come up, or ended by itself before the block did.
    """
    interpreter = find_python(python)
    model = Path(model_dir).resolve()
    if not (model / "config.json").is_file():
        raise FileNotFoundError(f"{model} holds no config.json: give the folder of a checkpoint.")
    command = [str(interpreter), "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", dtype]
    command += ["--host", "127.0.0.1", *_ARGUMENTS, *arguments]
    with tempfile.TemporaryDirectory(prefix="mismatch-sglang-", ignore_cleanup_errors=True) as scratch:
        server = _start(command, port, Path(log or f"{scratch}/server.log"), scratch, timeout)
        try:
            yield server
        except Exception as error:
            if not server._answers():  # connections break some time before the exit can be seen
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server._process.wait(60.0)
            if server.ended_by_itself:
                raise server._ended("ended by itself") from error
            raise
        else:
            if server.ended_by_itself:
                raise server._ended("ended by itself")
        finally:
            server.stop()


def find_python(python: str | os.PathLike[str] | None = None) -> Path:
    """The Python of an environment made by `ci/sglang_cpu.sh`: the one given, else what MISMATCH_SGLANG_PYTHON names,
    else `.venv-sglang/bin/python`. Raises FileNotFoundError."""
    # Not resolved: a virtual environment is found by its own link to Python.
    chosen = Path(python or os.environ.get("MISMATCH_SGLANG_PYTHON") or ".venv-sglang/bin/python").absolute()
    if not os.access(chosen, os.X_OK):
        raise FileNotFoundError(
            f"there is no SGLang environment at {chosen}: make one with ci/sglang_cpu.sh (in a checkout, "
            "`make sglang`), and name its Python in MISMATCH_SGLANG_PYTHON if it is elsewhere."
        )
    return chosen


def _start(command: list[str], port: int, log: Path, scratch: str, timeout: float) -> CpuServer:
    """Start and wait, again with another port where somebody took the free one meanwhile."""
    # Sockets and other files that the server leaves behind go into `scratch`.
    environment = {**os.environ, **_ENVIRONMENT, "TMPDIR": scratch}
    environment.pop("PYTHONPATH", None)  # the server's environment is whole without ours
    for left in (2, 1, 0):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            chosen = str(port or probe.getsockname()[1])
        words = ["sh", "-c", _WITH_OWNER, "sh", *command, "--port", chosen]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=output, env=environment, cwd=scratch, start_new_session=True
            )
        server = CpuServer(process, f"http://127.0.0.1:{chosen}", log)
        deadline = time.monotonic() + timeout
        try:
            while not server._answers():
                if server.ended_by_itself:
                    raise server._ended("did not start")
                if time.monotonic() > deadline:
                    raise ServerError(f"the SGLang server did not answer within {timeout:g} s:\n{server.log_tail()}")
                time.sleep(0.2)
            return server
        except BaseException as error:
            server.stop()
            if port or not left or "address already in use" not in str(error).lower():
                raise
    raise AssertionError("unreachable")


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m examples.sglang_server", description=__doc__)
    parser.add_argument("model_dir", help="folder of a checkpoint")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--dtype", choices=get_args(ServerDtype), default="float32", help="(default: %(default)s)")
    options, arguments = parser.parse_known_args()
    with contextlib.suppress(KeyboardInterrupt), start_cpu_server(**vars(options), arguments=arguments) as server:
        print(f"{server.url} serves {options.model_dir} in {options.dtype}; Ctrl-C ends it", flush=True)
        while not server.ended_by_itself:
            time.sleep(0.5)


if __name__ == "__main__":
    main()
