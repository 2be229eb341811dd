"""Run one function on N processes connected by gloo, over many cases in one launch.

    results = launch(function, cases, world_size=4)      # results[case][rank]

`function(case)` is a module-level function; in it `torch.distributed` is initialised, and nothing else is. Cases and
results must be picklable. Processes are forked from a server that imported torch and megatron-core once per session, so
a launch costs a fraction of a second. They see no GPU, use one thread each, and never outlive the caller, however that
one dies. An exception, a crash or a hang on any rank raises `LaunchError` with every rank's traceback or stack.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # more threads than cores makes gloo runs several times slower
    "CUDA_VISIBLE_DEVICES": "",  # the same test on every machine
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # no look-up of the host's name
    "PYTHONWARNINGS": "ignore",  # megatron-core warns of a missing Transformer Engine in five places
}
_PRELOAD = ["torch.distributed"]
_PRELOAD_MEGATRON = ["megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.pipeline_parallel"]
_START_S = 60.0  # a busy machine forks, imports the function's module and connects slowly
_GRACE_S = 1.0
_LOG_LINES = 40


class LaunchError(RuntimeError):
    """A rank raised, died, or made no progress. The message holds what every rank was doing."""


def launch(
    function: Callable[[Any], Any], cases: Sequence[Any], world_size: int, *, timeout: float = 60.0
) -> list[list[Any]]:
    """`function(case)` for every case in order, on every rank.

    Args:
        timeout: seconds without any rank finishing a case, after which everything is killed (more for the first one).

    Returns:
        results[case][rank].

    Raises:
        LaunchError: as described above; no process is left then either.
    """
    context = multiprocessing.get_context("forkserver")
    # The server must have been started with them, since torch reads them when it is imported.
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        context.set_forkserver_preload(_PRELOAD + (_PRELOAD_MEGATRON if importlib.util.find_spec("megatron") else []))
        forkserver.ensure_running()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                log = Path(folder) / f"rank{rank}.log"
                arguments = (function, list(cases), rank, world_size, store.port, timeout, str(log), theirs)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()
                ranks.append(_Rank(rank, process, ours, log))
            _collect(ranks, cases, timeout)
            return [list(results) for results in zip(*(rank.results for rank in ranks), strict=True)]
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()


class _Rank:
    """The parent's view of one process."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Any, log: Path) -> None:
        self.rank, self.process, self.pipe, self.log = rank, process, pipe, log
        self.results: list[Any] = []
        self.error: str | None = None

    def receive(self) -> None:
        """Take one message: a case's result, or the error that ended the process."""
        try:
            succeeded, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(_GRACE_S)
            succeeded, value = False, f"process ended with exit code {self.process.exitcode}"
        if succeeded:
            self.results.append(value)
        else:
            self.error = value

    def describe(self, cases: Sequence[Any]) -> str:
        done = len(self.results)
        doing = f"in case {done}, {cases[done]!r}" if done < len(cases) else "done with all cases"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        parts = [f"--- rank {self.rank}, {doing}", self.error or "no error, but its stack was", *lines[-_LOG_LINES:]]
        return "\n".join(parts)


def _collect(ranks: list[_Rank], cases: Sequence[Any], timeout: float) -> None:
    """Receive until every rank has a result for every case, then let the processes end."""
    deadline = time.monotonic() + _START_S + timeout
    while working := [rank for rank in ranks if rank.error is None and len(rank.results) < len(cases)]:
        failed = any(rank.error for rank in ranks)
        by_pipe = {rank.pipe: rank for rank in working}
        ready = connection.wait(list(by_pipe), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            by_pipe[pipe].receive()
        if not ready:
            raise _error(ranks, cases, "see below" if failed else f"no progress for {timeout:g} s")
        if not failed:
            # After a first failure the others, who often wait for that rank, get a moment to fail too.
            grace = any(rank.error for rank in ranks)
            deadline = time.monotonic() + (_GRACE_S if grace else timeout)
    if any(rank.error for rank in ranks):
        raise _error(ranks, cases, "see below")
    for rank in ranks:  # nobody closes a connection before everybody is done
        rank.pipe.send_bytes(b"exit")
    for rank in ranks:
        rank.process.join(_GRACE_S)


def _error(ranks: list[_Rank], cases: Sequence[Any], why: str) -> LaunchError:
    for rank in ranks:
        if rank.error is None and rank.process.pid is not None:
            os.kill(rank.process.pid, signal.SIGUSR1)  # makes faulthandler write its stack to the log
    time.sleep(0.3)
    ordered = sorted(ranks, key=lambda rank: (rank.error is None, len(rank.results)))
    details = "\n".join(rank.describe(cases) for rank in ordered)
    return LaunchError(
        f"{sum(rank.error is not None for rank in ranks)} of {len(ranks)} ranks failed, {why}:\n{details}"
    )


def _work(
    function: Callable[[Any], Any],
    cases: list[Any],
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    log: str,
    pipe: Any,
) -> None:
    """The process of one rank."""
    with open(log, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        faulthandler.enable(stream)
        faulthandler.register(signal.SIGUSR1, stream, all_threads=False)
        threading.Thread(target=_die_with_parent, daemon=True).start()
        os.environ.update(_ENVIRONMENT)
        torch.set_num_threads(1)
        try:
            store = TCPStore("127.0.0.1", port, is_master=False)
            wait = timedelta(seconds=2 * timeout)  # the parent's watchdog comes first
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
            for case in cases:
                pipe.send_bytes(pickle.dumps((True, function(case))))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        pipe.recv_bytes()
        os._exit(0)  # gloo's threads and half-closed connections need no orderly end


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
