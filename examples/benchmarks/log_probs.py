"""Benchmark: log-probs and entropy from logits, forward and backward, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmarks import machine
from examples.benchmarks.counting import count, launches
from examples.benchmarks.log_prob_cases import COMPILED, IN_PLACE, OURS, Compute, Contender, contenders, plain, sharded
from examples.benchmarks.machine import Case, Timing, copy_bandwidth, measure
from examples.benchmarks.results import MEASURED, Row, Section, noted
from examples.benchmarks.workers import in_processes

PASSES = 3
"""Over the logits, at least: read for the sums, read for the probabilities, write the gradient."""
NOTES = [
    "Forward and backward with a random gradient for every token; logits are drawn with deviation 3. / ours: a "
    "contender's figure divided by that of mismatch_plugin, and of what overwrites the logits (megatron-core, liger, "
    "transformer-engine) by that of mismatch_plugin with the gradient in place, which does so too; above 1 ours is "
    "ahead.",
    "Time: medians of calls in turns. On CPU user + system time of the process: the system's part is mostly pages of "
    "new memory. On CUDA events. First call: seconds of wall time with all loading and compiling, outside of that.",
    "Extra memory: the most beyond the logits, divided by the size of the gradient, which must exist unless it "
    "overwrites the logits. In a process of its own (CPU: resident memory).",
    "GB/s: three passes over the logits (read, read, write the gradient), which is the least that a backward pass with "
    "vocabulary parallelism needs, divided by the time; and as a share of the bandwidth of a copy in the same run.",
    "Tensor bytes: of all tensors that kernels read and write, a logit; on CPU only. Blocks that stay in a cache count "
    "here too. Kernels: operations dispatched that are no views; on CUDA what the device was made to do. Of compiled "
    "code neither can be counted on CPU.",
    "Error: largest deviation of the gradient from that of float64, divided by the largest gradient.",
    "Contenders that overwrite the logits get fresh ones before every call, outside the clock. megatron-core, liger "
    "and transformer-engine have no entropy. torch's lines, compiled or not, and TRL's need the whole vocabulary on "
    "one rank, so that none of them is in the rows of tp 2.",
    "tp 2: what one of two processes connected by gloo takes, each with half of the vocabulary; on CPU only.",
]


@dataclass(frozen=True)
class Problem:
    """Size of the logits."""

    tokens: int
    vocab: int
    dtype: str = "float32"

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits [T, V], targets [T], and the gradients of log-prob and entropy [T]."""
        generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, self.dtype)
        logits = torch.empty(self.tokens, self.vocab, dtype=dtype, device=device).normal_(0, 3, generator=generator)
        targets = torch.randint(0, self.vocab, (self.tokens,), generator=generator, device=device)
        grads = torch.randn(2, self.tokens, generator=generator, device=device)
        return logits, targets, grads[0], grads[1]


def problems(device: torch.device, quick: bool) -> tuple[Problem, ...]:
    """Those that suit the machine."""
    if quick:
        return (Problem(48, 512),)
    if device.type == "cpu":
        return (Problem(2048, 32768), Problem(256, 151936), Problem(2048, 8192))
    sizes = ((8192, 131072), (8192, 151936), (32768, 32768))
    return tuple(Problem(tokens, vocab, "bfloat16") for tokens, vocab in sizes)


def section(device: torch.device, quick: bool, repeats: int, tell: Callable[[str], object]) -> Section:
    """All contenders on all problems. `tell` hears of each before it starts."""
    rows: list[Row] = []
    bandwidth = copy_bandwidth(device, 16 if quick else 256, repeats)
    for problem in problems(device, quick):
        tell(f"{problem.tokens} tokens, vocabulary {problem.vocab}, {problem.dtype}")
        rows += _rows(problem, device, repeats, bandwidth)
        if device.type == "cpu":
            rows += _sharded_rows(problem, repeats, bandwidth)
    facts = {"copy GB/s": bandwidth}
    return Section("log_probs", "Log-probs and entropy from logits", rows, facts, NOTES)


def _rows(problem: Problem, device: torch.device, repeats: int, bandwidth: float) -> list[Row]:
    source, targets, g, h = problem.tensors(device)
    logits = source.clone().requires_grad_()
    cases: dict[str, Case] = {}
    rows: list[Row] = []
    for contender in contenders():
        row = _named(contender, problem)
        rows.append(row)
        with noted(row):
            compute = contender.compute(device)
            row["error"] = _error(contender, compute, device, problem.dtype)
            case = _case(_key(row), contender, compute, logits, source, targets, g, h)
            start = time.perf_counter()
            case.prepare()
            case.run()
            row["first_s"] = time.perf_counter() - start
            cases[_key(row)] = case
    timings = measure(list(cases.values()), device, repeats, warm=True)
    here = [row for row in rows if row["status"] == MEASURED]
    for row in here:
        case, timing = cases[_key(row)], timings[_key(row)]
        case.prepare()
        row |= speed(timing, source.nbytes, bandwidth)
        if row["name"] != COMPILED:
            counts = count(case.run)
            row |= {"syncs": len(counts.syncs), "kernels": counts.total}
            row["bytes_a_logit"] = counts.tensor_bytes / source.numel() if device.type == "cpu" else None
        if device.type == "cuda":
            case.prepare()
            row["kernels"] = launches(case.run)
    peaks = _peaks([(row["name"], row["entropy"]) for row in here], problem, device)
    for row, peak in zip(here, peaks, strict=True):
        row |= {"status": f"time only: {peak}"} if isinstance(peak, str) else {"extra_peak": peak / source.nbytes}
    return against_ours(rows)


def against_ours(rows: list[Row]) -> list[Row]:
    """The rows, with time_ours and memory_ours: their figures divided by ours of the same entropy.

    What overwrites the logits is compared with ours that does, too.
    """
    for row in rows:
        here = {other["name"]: other for other in rows if other["entropy"] == row["entropy"]}
        ours = here.get(IN_PLACE, {}) if row.get("overwrites") else here[OURS]
        for name, key in (("time_ours", "ms"), ("memory_ours", "extra_peak")):
            if ours.get(key) and row.get(key) is not None:
                row[name] = row[key] / ours[key]
    return rows


def speed(timing: Timing, nbytes: int, bandwidth: float) -> Row:
    """Figures of a row whose logits have `nbytes`; bandwidth: GB/s of a copy."""
    floor = PASSES * nbytes / timing.ms / 1e6
    times = {"ms": timing.ms, "wall_ms": timing.wall_ms, "system_ms": timing.system_ms}
    return {**times, "gb_s": floor, "copy_share": floor / bandwidth}


def _peaks(names: list[tuple[str, bool]], problem: Problem, device: torch.device) -> list[int | str]:
    """`extra_peaks` in one process; where that fails (too little memory, most likely) each in its own, or why not."""
    try:
        return in_processes(extra_peaks, 1, names, problem, str(device))[0]
    except RuntimeError as error:
        if len(names) == 1:
            return [str(error)]
        return [peak for name in names for peak in _peaks([name], problem, device)]


def _sharded_rows(problem: Problem, repeats: int, bandwidth: float) -> list[Row]:
    """Two processes with half of the vocabulary each."""
    try:
        return in_processes(rows_of_shard, 2, problem, repeats, bandwidth)[0]
    except RuntimeError as error:
        return [{**_named(contender, problem, tp=2), "status": str(error)} for contender in sharded(None)]


def rows_of_shard(problem: Problem, repeats: int, bandwidth: float) -> list[Row]:
    """A row of each of `sharded`. For one of two processes."""
    device, half = torch.device("cpu"), replace(problem, vocab=problem.vocab // 2)
    source, _, g, h = half.tensors(device)
    _, targets, _, _ = problem.tensors(device)
    logits = source.clone().requires_grad_()
    rows: list[Row] = []
    for contender in sharded(dist.group.WORLD):
        row = _named(contender, problem, tp=2)
        rows.append(row)
        with noted(row):
            case = _case("", contender, contender.compute(device), logits, source, targets, g, h)
        if row["status"] == MEASURED:  # what fails here must end both ranks
            row |= speed(measure([case], device, repeats, calls=1)[""], source.nbytes, bandwidth)
            case.prepare()
            before = machine.memory_in_use(device)
            case.run()
            row["extra_peak"] = max(0, machine.peak_since(device) - before) / source.nbytes
    return against_ours(rows)


def _named(contender: Contender, problem: Problem, tp: int = 1) -> Row:
    size = {"tokens": problem.tokens, "vocab": problem.vocab, "dtype": problem.dtype, "tp": tp}
    named: Row = {"name": contender.name, "entropy": contender.entropy, **size}
    named |= {"overwrites": True} if contender.destroys else {}
    return named if contender.source is None else {**named, "source": contender.source}


def _key(row: Row) -> str:
    return f"{row['name']}, {'with' if row['entropy'] else 'without'} entropy"


def _case(name: str, contender: Contender, compute: Compute, logits: Tensor, source: Tensor, *rest: Tensor) -> Case:
    """One step on the logits, which are `source` again before each where the contender overwrites them."""
    fresh = partial(logits.detach().copy_, source) if contender.destroys else lambda: None
    return Case(name, partial(step_of, compute, logits, *rest), fresh)


def step_of(compute: Compute, logits: Tensor, targets: Tensor, g: Tensor, h: Tensor) -> None:
    """One forward and backward, with gradients g of the log-probs and h of the entropies."""
    log_probs, entropy = compute(logits, targets)
    pairs: list[tuple[Tensor, Tensor]] = [(log_probs, g)] + ([] if entropy is None else [(entropy, h)])
    torch.autograd.backward([value for value, _ in pairs], [grad.to(value.dtype) for value, grad in pairs])
    logits.grad = None


def _error(contender: Contender, compute: Compute, device: torch.device, dtype: str) -> float:
    """Deviation of the gradient from float64 autograd, on a small problem: do all compute the same?"""
    values, targets, g, h = Problem(32, 512, dtype).tensors(device)
    gradients = []
    for function, kind in ((compute, values.dtype), (partial(plain, contender.entropy), torch.float64)):
        logits = values.to(kind, copy=True).requires_grad_()
        chosen, entropy = function(logits, targets)
        loss = (chosen * g).sum() + (0.0 if entropy is None else (entropy * h).sum())
        gradients.append(torch.autograd.grad(loss, logits)[0].double())
    return float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())


def extra_peaks(names: list[tuple[str, bool]], problem: Problem, device_name: str) -> list[int]:
    """Bytes beyond the logits that one forward and backward of each takes at most. For a process of its own."""
    device = torch.device(device_name)
    logits, targets, g, h = problem.tensors(device)
    logits.requires_grad_()
    peaks = []
    for name, entropy in names:
        contender = next(c for c in contenders() if c.name == name and c.entropy == entropy)
        compute = contender.compute(device)
        step_of(compute, logits, targets, g, h)  # what is loaded or compiled at the first call is not meant
        before = machine.memory_in_use(device)
        step_of(compute, logits, targets, g, h)
        peaks.append(max(0, machine.peak_since(device) - before))
    return peaks
