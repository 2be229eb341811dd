"""Fresh processes: for peak memory, which a process can tell only of itself, and for ranks connected by gloo."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

_TIMEOUT_S = 600


def in_processes(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What function(*arguments) returns in each of `size` new processes of one thread, in rank order.

    The function stands at the top of a module. With more than one process torch.distributed is initialised over gloo.
    Raises RuntimeError where a rank raises or dies.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_work, args=(function, rank, size, folder, pairs[rank][1], arguments), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in pairs:
            sender.close()
        try:
            return [_receive(receiver, rank) for rank, (receiver, _) in enumerate(pairs)]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()


def _receive(receiver: Connection, rank: int) -> Any:
    try:
        if not receiver.poll(_TIMEOUT_S):
            raise RuntimeError(f"rank {rank} of a benchmark did not answer in {_TIMEOUT_S} s.")
        error, value = receiver.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} of a benchmark died: there may be too little memory.") from None
    if error is not None:
        raise RuntimeError(f"rank {rank} of a benchmark raised {error}")
    return value


def _work(
    function: Callable[..., Any], rank: int, size: int, folder: str, sender: Connection, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        store = FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        answer = (None, function(*arguments))
    except Exception as error:
        answer = (f"{type(error).__name__}: {error}", None)
    sender.send(answer)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def megatron_alone() -> None:
    """megatron-core's parallel state for this process alone, on CPU with the lab's stand-ins for CUDA."""
    from megatron.core import parallel_state

    from mismatch_plugin.lab.model import initialize_parallel

    if not parallel_state.is_initialized():
        initialize_parallel()
