"""Run one function on N processes connected by gloo, over many cases in one launch.

    results = launch(function, cases, world_size=4)      # results[case][rank]

`function(case)` is a module-level function; in it `torch.distributed` is initialised, and nothing else is. Cases and
results must be picklable. Processes are forked from a server that imported torch and megatron-core once per session, so
a launch costs a fraction of a second. They see no GPU, use one thread each, and never outlive the caller, however that
one dies.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver
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


def launch(
    function: Callable[[Any], Any], cases: Sequence[Any], world_size: int, *, timeout: float = 60.0
) -> list[list[Any]]:
    """`function(case)` for every case in order, on every rank.

    Args:
        timeout: seconds for one case, after which a rank writes its stack and ends (more for the first one).

    Returns:
        results[case][rank].

    Raises:
        RuntimeError: a rank raised, died or took too long. The message holds what is known of every rank; no process
            is left then either.
    """
    context = multiprocessing.get_context("forkserver")
    # The server must have been started with them, since torch reads them when it is imported.
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        context.set_forkserver_preload(_PRELOAD + (_PRELOAD_MEGATRON if importlib.util.find_spec("megatron") else []))
        forkserver.ensure_running()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        processes, pipes = [], []
        try:
            for rank, log in enumerate(logs):
                ours, theirs = context.Pipe()
                arguments = (function, list(cases), rank, world_size, store.port, timeout, str(log), theirs)
                processes.append(context.Process(target=_work, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            results, errors = _collect(pipes, len(cases))
            if errors:
                raise RuntimeError(
                    f"{len(errors)} of {world_size} ranks failed:\n{_told(cases, logs, results, errors)}"
                )
            for pipe in pipes:  # nobody closes a connection before everybody is done
                pipe.send_bytes(b"exit")
            for process in processes:
                process.join(_GRACE_S)
            return [list(ranks) for ranks in zip(*results, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Any], number: int) -> tuple[list[list[Any]], dict[int, str]]:
    """(results of each rank, what ended a rank). After a first failure the others, who often wait for that rank, get a
    moment to fail too."""
    results: list[list[Any]] = [[] for _ in pipes]
    errors: dict[int, str] = {}
    while True:
        working = [rank for rank in range(len(pipes)) if rank not in errors and len(results[rank]) < number]
        waiting = {pipes[rank]: rank for rank in working}
        ready: list[Any] = connection.wait(list(waiting), _GRACE_S if errors else None) if waiting else []
        if not ready:
            break
        for pipe in ready:
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                succeeded, value = False, "its process ended"
            if succeeded:
                results[waiting[pipe]].append(value)
            else:
                errors[waiting[pipe]] = value
    return results, errors


def _told(cases: Sequence[Any], logs: list[Path], results: list[list[Any]], errors: dict[int, str]) -> str:
    """What every rank was doing: first those that failed, in the order in which they did."""
    parts = []
    for rank in sorted(range(len(logs)), key=[*errors, *range(len(logs))].index):
        done = len(results[rank])
        doing = f"in case {done}, {cases[done]!r}" if done < len(cases) else "done with all cases"
        lines = logs[rank].read_text(errors="replace").splitlines() if logs[rank].exists() else []
        parts += [f"--- rank {rank}, {doing}", errors.get(rank, "no error"), *lines[-40:]]
    return "\n".join(parts)


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
        threading.Thread(target=_die_with_parent, daemon=True).start()
        os.environ.update(_ENVIRONMENT)
        torch.set_num_threads(1)
        try:
            store = TCPStore("127.0.0.1", port, is_master=False)
            faulthandler.dump_traceback_later(_START_S + timeout, exit=True, file=stream)
            wait = timedelta(seconds=_START_S + 2 * timeout)  # the stack comes first
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
            for case in cases:
                pipe.send_bytes(pickle.dumps((True, function(case))))
                faulthandler.dump_traceback_later(timeout, exit=True, file=stream)
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        faulthandler.cancel_dump_traceback_later()
        pipe.recv_bytes()
        os._exit(0)  # gloo's threads and half-closed connections need no orderly end


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
