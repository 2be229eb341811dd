"""The machine a benchmark runs on, its clock, its memory: what every figure is measured with."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import mismatch_plugin

_PACKAGES = ("torch", "triton", "megatron-core", "verl", "liger-kernel", "transformer-engine", "trl", "numpy")
_LEAST_MS = 50.0
_CLOCK_MS = 1e-3  # the CPU clock ticks: on a busy machine a short call may take none of it
"""A repetition on the CPU calls a fast function so often that it takes at least this long."""


@dataclass(frozen=True)
class Case:
    """One contender. `prepare` runs before every call, outside the clock."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Medians over the repetitions, milliseconds a call: the time that is compared (`clock` names it), the wall time,
    and of the CPU time the system's part: pages that are fetched for new memory, for the most part.
    """

    ms: float
    wall_ms: float
    system_ms: float = 0.0


def clock(kind: str, threads: int) -> str:
    """What `ms` is on such a device."""
    return "CUDA events" if kind == "cuda" else "user + system" if threads == 1 else "wall time"


def measure(
    cases: Sequence[Case], device: torch.device, repeats: int, calls: int | None = None, warm: bool = False
) -> dict[str, Timing]:
    """Time the cases in turns (one call of each, and again), so that a busy machine slows all of them alike.

    CPU time is not entered by other jobs' turns, but the page faults of new memory are in it. Two calls of each before
    warm up.
    calls: of a case in one repetition; None: as many as fill 50 ms on CPU, one on CUDA. warm: each was called already.
    """
    fill = {}
    for case in cases:
        if not warm:
            case.prepare()
            case.run()  # the first call loads and compiles
        fill[case.name] = _calls(case, device) if calls is None else calls
    taken: dict[str, list[tuple[float, ...]]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            pairs = [_once(case, device) for _ in range(fill[case.name])]
            taken[case.name].append(tuple(map(statistics.fmean, zip(*pairs, strict=True))))
    return {
        name: Timing(*(max(statistics.median(values), _CLOCK_MS) for values in zip(*pairs, strict=True)))
        for name, pairs in taken.items()
    }


def _calls(case: Case, device: torch.device) -> int:
    _, wall_ms, _ = _once(case, device)
    return max(1, min(100, int(_LEAST_MS / max(wall_ms, 1e-3)))) if device.type == "cpu" else 1


def _once(case: Case, device: torch.device) -> tuple[float, float, float]:
    case.prepare()
    if device.type == "cuda":
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start = time.perf_counter()
        begin.record()
        case.run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), 1e3 * (time.perf_counter() - start), 0.0
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    case.run()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    spent = after.ru_utime - before.ru_utime + system
    return 1e3 * (spent if torch.get_num_threads() == 1 else wall), 1e3 * wall, 1e3 * system


def copy_bandwidth(device: torch.device, megabytes: int, repeats: int) -> float:
    """GB/s of copying a tensor, bytes read and bytes written added: the limit of a kernel that is bound by memory."""
    source = torch.ones(megabytes * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    timing = measure([Case("copy", lambda: target.copy_(source))], device, repeats)["copy"]
    return 2 * source.nbytes / timing.ms / 1e6


def describe(device: torch.device) -> dict[str, str | int]:
    """Machine and versions, for the head of a result."""
    versions = {name: version(name) or "not installed" for name in _PACKAGES}
    about: dict[str, str | int] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 1,
        "clock": clock(device.type, torch.get_num_threads()),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "mismatch-plugin": mismatch_plugin.__version__,
    }
    return {**about, **versions}


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process uses now (CUDA: of the device). The peak of `peak_since` starts anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with contextlib.suppress(AttributeError):  # glibc: give back what is free but kept, or it would hide what follows
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is in use
    except OSError:
        return _resident("VmHWM")
    return _resident("VmRSS")


def peak_since(device: torch.device) -> int:
    """The most bytes used since the last `memory_in_use`."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int:
    # Not getrusage where it can be helped: its peak includes that of the process that started this one.
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
