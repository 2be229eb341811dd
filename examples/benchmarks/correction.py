"""Benchmark: importance weights, rejection and metrics of ragged batches, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from examples.benchmarks.correction_cases import Batch, Run, loop, ours, verl
from examples.benchmarks.counting import count, launches
from examples.benchmarks.machine import Case, measure
from examples.benchmarks.results import MEASURED, Row, Section, noted

NOTES = [
    "Sequence-level truncated weights, one geometric criterion, metrics of level basic formed on the host; ours also "
    "the veto, which verl's helper does not have. Each contender gets the data in its own form: packed, padded, one "
    "tensor a sequence. Making that form is outside the clock.",
    "Time: on CPU the process's own user CPU time (with several threads the wall time), medians of calls in turns; on "
    "CUDA that of events.",
    "Kernels: operations dispatched that are no views; on CUDA what the device was made to do. Syncs: operations for "
    "which the host waits; the transfer of the finished sums at the end counts as one on CUDA and is none on CPU. "
    "Memory: the most bytes of tensors made and alive at once, a response token.",
    "Deviation: largest difference of a weight from ours; tokens on whose acceptance the two differ.",
]
CONTENDERS: dict[str, Callable[[Batch], Run]] = {
    "mismatch_plugin": ours,
    "verl's helper": verl,
    "loop over the sequences": loop,
}


def batches(device: torch.device, quick: bool) -> list[Batch]:
    """About a million tokens each: from few long responses to many short ones."""
    sizes = ((8, 40), (32, 40)) if quick else ((64, 24576), (256, 6144), (512, 3072), (1024, 1536), (4096, 384))
    return [Batch(sequences, longest, device) for sequences, longest in sizes]


def section(device: torch.device, quick: bool, repeats: int, tell: Callable[[str], object]) -> Section:
    """All contenders on all batches. `tell` hears of each before it starts."""
    rows: list[Row] = []
    for batch in batches(device, quick):
        tell(f"{batch.sequences} sequences of at most {batch.longest} tokens")
        rows += _rows(batch, device, repeats)
    return Section("correction", "Correction and metrics of ragged sequences", rows, {}, NOTES)


def _rows(batch: Batch, device: torch.device, repeats: int) -> list[Row]:
    rows: list[Row] = []
    runs: dict[str, Run] = {}
    expected = ours(batch)()
    tokens = int(batch.packed.loss_mask.sum())
    size = {"sequences": batch.sequences, "longest": batch.longest, "tokens": len(batch.packed.loss_mask)}
    for name, make in CONTENDERS.items():
        row: Row = {"name": name, **size}
        rows.append(row)
        with noted(row):
            run = make(batch)
            weights, keep, metrics = run()
            deviation = max(float((a - b).abs().max()) for a, b in zip(weights, expected[0], strict=True))
            differing = sum(int((a != b).sum()) for a, b in zip(keep, expected[1], strict=True))
            row |= {"metrics": len(metrics), "deviation": deviation, "differing": differing}
            runs[name] = run
    timings = measure(list(itertools.starmap(Case, runs.items())), device, repeats)
    for row in (row for row in rows if row["status"] == MEASURED):
        name, timing = row["name"], timings[row["name"]]
        row |= {"ms": timing.ms, "wall_ms": timing.wall_ms, "times_ours": timing.ms / timings["mismatch_plugin"].ms}
        counts = count(runs[name])
        row |= {"kernels": counts.total, "syncs": len(counts.syncs), "bytes_a_token": counts.peak / tokens}
        if device.type == "cuda":
            row["kernels"] = launches(runs[name])
    return rows
