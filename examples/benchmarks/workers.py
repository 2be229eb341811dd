"""Fresh processes: for peak memory, which a process can tell only of itself, and for ranks connected by gloo."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

_TIMEOUT_S = 600


def in_processes(
    function: Callable[..., Any], size: int, *arguments: Any, threads: int = 1, timeout_s: float | None = _TIMEOUT_S
) -> list[Any]:
    """What function(*arguments) returns in each of `size` new processes, in rank order.

    The function is one at the top of a module. With more than one process torch.distributed is initialised over gloo.
    threads: of torch, in each. Raises RuntimeError where a rank raises, dies, or does not answer in time.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_work, args=(function, rank, size, threads, folder, pairs[rank][1], arguments))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in pairs:
            sender.close()
        try:
            return [_receive(receiver, rank, timeout_s) for rank, (receiver, _) in enumerate(pairs)]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()


def _receive(receiver: Connection, rank: int, timeout_s: float | None) -> Any:
    try:
        if not receiver.poll(timeout_s):
            raise RuntimeError(f"rank {rank} of a benchmark did not answer in {timeout_s:g} s.")
        error, value = receiver.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} of a benchmark died: there may be too little memory.") from None
    if error is not None:
        raise RuntimeError(f"rank {rank} of a benchmark raised {error}")
    return value


def _work(
    function: Callable[..., Any],
    rank: int,
    size: int,
    threads: int,
    folder: str,
    sender: Connection,
    arguments: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")  # of the libraries that take part
    torch.set_num_threads(threads)
    if size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        store = FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        answer = (None, function(*arguments))
    except Exception as error:
        answer = (f"{type(error).__name__}: {error}", None)
    except KeyboardInterrupt:  # the one that started this process says so
        os._exit(130)
    sender.send(answer)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def megatron_groups(model: bool = True) -> None:
    """megatron-core's parallel state, tensor parallel over all processes.

    model: with the lab's stand-ins for CUDA, which its model needs on a CPU. They slow down every call of torch in this
    process a little, and what torch.compile made before is made again; its cross entropies do without.
    """
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        return
    size = dist.get_world_size() if dist.is_initialized() else 1
    if model or torch.cuda.is_available():
        from mismatch_plugin.lab.model import initialize_parallel

        initialize_parallel(tp=size)
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
