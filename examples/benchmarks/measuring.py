"""How the benchmark compares: contenders in turns on one clock, their memory and counts, and fresh processes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from examples.benchmarks.counting import OperationCounter, count, launches

_LEAST_MS = 50.0
"""A repetition on the CPU calls a fast contender so often that it takes at least this long."""
Run = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One way to do what a case is about.

    make: imports what it needs and returns the call that is timed; raises ImportError where it cannot. prepare: runs
    before every call, outside the clock. results: the tensors that must equal those of the case's first contender; by
    default a list that the call returned. over: the contender whose time its ratio is to; None: the first. counted:
    whether its operations can be counted, which compiled code's cannot.
    """

    name: str
    make: Callable[[], Run]
    prepare: Run = lambda: None
    results: Callable[[Any], Sequence[Tensor]] = lambda found: found if isinstance(found, list) else ()
    over: str | None = None
    counted: bool = True


Row = dict[str, Any]
"""One contender in one case. status: why it has no figures, where it has none.

ms: median over the repetitions. ratio, lowest, highest: median and extremes of its time divided by the reference's in
the same repetition. extra_mib: the most memory beyond what is there before a call; memory_ratio: over the first one's.
kernels, syncs, collectives, sent_bytes: of one call. deviation: the largest difference of a result from the first
contender's, divided by that result's largest value.
"""


def measure(
    case: str, contenders: Sequence[Contender], device: torch.device, repeats: int, calls: int = 0, memory: bool = False
) -> list[Row]:
    """A row of each contender: do all compute the same, what do they take, what do they make torch do.

    calls: of each in one repetition; 0: as many as fill 50 ms on the CPU, one on CUDA.
    """
    rows, runs, expected = [], {}, None
    for contender in contenders:
        row: Row = {"case": case, "contender": contender.name}
        rows.append(row)
        try:
            run = contender.make()
            contender.prepare()
            results = contender.results(run())
        except Exception as error:  # a compiler that is not there, a package that has changed
            row["status"] = str(error) if isinstance(error, ImportError) else f"failed: {error!r:.160}"
            continue
        expected = [value.clone() for value in results] if expected is None else expected
        if results:
            row["deviation"] = max(map(_deviation, results, expected))
        runs[contender.name] = contender, row, run
        del results
    del expected
    turns = {name: (run, contender.prepare) for name, (contender, _, run) in runs.items()}
    times = take_turns(turns, device, repeats, calls)
    for contender, row, run in runs.values():
        if contender.counted:
            contender.prepare()
            counts = count(run)
            row |= {"kernels": counts.total, "syncs": len(counts.syncs)} | sent(counts)
        if device.type == "cuda":
            row["kernels"] = launches(run)
        if memory and (device.type == "cuda" or sys.platform == "linux"):
            contender.prepare()
            row["extra_mib"] = extra_bytes(run, device) / 2**20
    for name, (contender, row, _) in runs.items():
        over = contender.over or next(iter(runs))
        ratios = [own / other for own, other in zip(times[name], times[over], strict=True)]
        row |= {"ms": statistics.median(times[name]), "ratio": statistics.median(ratios)}
        row |= {"lowest": min(ratios), "highest": max(ratios)}
        if rows[0].get("extra_mib"):
            row["memory_ratio"] = row["extra_mib"] / rows[0]["extra_mib"]
    return rows


def sent(counts: OperationCounter) -> Row:
    """How many collectives one call does, and the bytes that this rank puts into them; nothing where there are none."""
    return {"collectives": len(counts.sent), "sent_bytes": sum(n for _, n in counts.sent)} if counts.sent else {}


def _deviation(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-300))


def take_turns(
    runs: dict[str, tuple[Run, Run]], device: torch.device, repeats: int, calls: int = 0
) -> dict[str, list[float]]:
    """Milliseconds a call in each repetition, of (run, prepare) by name, called once before.

    One after the other, and again, so that a busy machine slows all of them alike. On CUDA the time is that of events;
    on CPU the user and system time of this process and of those it waited for, with several threads the wall time.
    """
    fill = {}
    for name, (run, prepare) in runs.items():
        spent = _once(run, prepare, device)
        often = 1 if device.type == "cuda" else max(1, min(100, int(_LEAST_MS / max(spent, 1e-3))))
        fill[name] = calls or often
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, prepare) in runs.items():
            spent = statistics.fmean(_once(run, prepare, device) for _ in range(fill[name]))
            taken[name].append(max(spent, 1e-3))  # the clock ticks: on a busy machine a short call may take none of it
    return taken


def _once(run: Run, prepare: Run, device: torch.device) -> float:
    prepare()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)
    start = _cpu_clock()
    run()
    return 1e3 * (_cpu_clock() - start)


def _cpu_clock() -> float:
    if torch.get_num_threads() > 1:
        return time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in used)


def copy_bandwidth(device: torch.device, megabytes: int, repeats: int) -> float:
    """GB/s of copying a tensor, bytes read and bytes written added: the limit of a kernel that is bound by memory."""
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    times = take_turns({"copy": (lambda: target.copy_(source), lambda: None)}, device, repeats)["copy"]
    return 2 * source.nbytes / statistics.median(times) / 1e6


def extra_bytes(run: Run, device: torch.device) -> int:
    """The most bytes that one call takes beyond what is in use before it: on CUDA the device's, on Linux resident."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # glibc: give back what is free but kept, or it would hide what follows
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is in use
    before = _resident("VmRSS")
    run()
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def describe(device: torch.device) -> dict[str, Any]:
    """Machine and versions."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    name = torch.cuda.get_device_name() if device.type == "cuda" else found[1] if found else platform.machine()
    about: dict[str, Any] = {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    for package in ("torch", "triton", "megatron-core", "verl", "trl", "liger-kernel", "transformer-engine"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package)
    return about


def in_processes(function: Callable[..., Any], size: int, *arguments: Any, threads: int = 1) -> list[Any]:
    """What function(*arguments) returns in each of `size` new processes, in rank order; over gloo if there are several.

    The function is one at the top of a module. Raises what a rank raised, or BrokenProcessPool where one died.
    """
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, get_context("spawn")) as pool:
        return list(pool.map(partial(_work, function, size, threads, folder, arguments), range(size)))


def _work(function: Callable[..., Any], size: int, threads: int, folder: str, arguments: Any, rank: int) -> Any:
    warnings.simplefilter("ignore")  # of the libraries that take part
    torch.set_num_threads(threads)
    if size == 1:
        return function(*arguments)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    try:
        answer = function(*arguments)
        dist.barrier()  # a rank that is done must not close connections that a slower one still reads from
    finally:
        dist.destroy_process_group()
    return answer


def megatron_groups(model: bool = False) -> None:
    """megatron-core's parallel state, tensor parallel over all processes.

    model: with stand-ins for CUDA, which its model needs on a CPU. They slow down every call of torch in this process.
    """
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        return
    size = dist.get_world_size() if dist.is_initialized() else 1
    if model or torch.cuda.is_available():
        from tests.megatron_cpu import initialize_parallel

        initialize_parallel(tp=size)
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def checkout(variable: str) -> Path:
    """The folder that an environment variable names: a repository whose code is in no package."""
    folder = Path(os.environ.get(variable, "")).resolve()
    if variable not in os.environ or not folder.is_dir():
        raise ImportError(f"{variable} names no checkout")
    return folder


def file_of(path: Path) -> Any:
    """One file as a module of its own, without the package around it."""
    spec = importlib.util.spec_from_file_location(f"_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
