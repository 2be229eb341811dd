"""Benchmark: importance weights, rejection and metrics of ragged batches, by setting, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from examples.benchmarks.correction_cases import (
    SETTING_ROWS,
    Batch,
    Run,
    Setting,
    ours,
    ours_in_verl,
    ours_padded,
)
from examples.benchmarks.correction_incumbents import loop, slime, slime_unreduced, verl
from examples.benchmarks.counting import count, launches
from examples.benchmarks.log_prob_cases import OURS
from examples.benchmarks.machine import Case, measure
from examples.benchmarks.results import MEASURED, Row, Section, noted
from examples.benchmarks.sources import SLIME

NOTES = [
    "/ ours: a contender's time divided by that of mismatch_plugin on packed data; above 1 ours is ahead. Metrics are "
    "formed on the host, ours at level basic (every setting; 'all metrics': full), theirs what they always have.",
    "Each contender gets the data in its own form: packed, padded [N, longest], one tensor a sequence. Making that "
    "form is outside the clock, except: 'padded and back' is from_padded, correct, to_padded of weights and mask; "
    "'verl hook' is all that our hook does in verl's driver, from its batch to its weights and mask.",
    "verl's helper has no veto; slime's code rejects nothing without weights. slime's metrics are tensors with a value "
    "for every token: 'metrics averaged' adds the mean over sequences that slime's loss takes of each.",
    "Time: medians of calls in turns. On CPU user + system time of the process (with several threads the wall time); "
    "on CUDA that of events.",
    "Kernels: operations dispatched that are no views, as on a device (on CPU the package goes shorter ways of its "
    "own); on CUDA what the device was made to do. Syncs: operations for "
    "which the host waits; the transfer of the finished sums at the end counts as one on CUDA and is none on CPU. "
    "Memory: the most bytes of tensors made and alive at once, a token.",
    "Deviation: largest difference of a weight from ours; tokens on whose acceptance the two differ.",
]
_OF_SLIME = "" if SLIME.there else ", as described"
PADDED, IN_VERL = f"{OURS}, padded and back", f"{OURS}'s verl hook"
CONTENDERS: dict[str, Callable[[Batch, Setting], Run]] = {
    OURS: ours,
    PADDED: ours_padded,
    IN_VERL: ours_in_verl,
    "verl's helper": verl,
    f"slime's compute_mis_weights{_OF_SLIME}": slime_unreduced,
    f"slime's, metrics averaged{_OF_SLIME}": slime,
    "loop over the sequences": loop,
}


def problems(device: torch.device, quick: bool) -> list[tuple[Batch, Sequence[Setting]]]:
    """All settings on one batch of a million tokens, and the first on few long and many short responses, too."""
    middle, others = ((32, 40), ((8, 40),)) if quick else ((512, 3072), ((64, 24576), (4096, 384)))
    return [(Batch(*middle, device), SETTING_ROWS), *((Batch(*size, device), SETTING_ROWS[:1]) for size in others)]


def section(device: torch.device, quick: bool, repeats: int, tell: Callable[[str], object]) -> Section:
    """All contenders on all of `problems`. `tell` hears of each before it starts."""
    rows: list[Row] = []
    for batch, settings in problems(device, quick):
        for setting in settings:
            tell(f"{setting.name}: {batch.sequences} sequences of at most {batch.longest} tokens")
            rows += _rows(batch, setting, device, repeats)
    facts = {"slime": SLIME.source()}
    return Section("correction", "Correction and metrics of ragged sequences", rows, facts, NOTES)


def _rows(batch: Batch, setting: Setting, device: torch.device, repeats: int) -> list[Row]:
    rows: list[Row] = []
    runs: dict[str, Run] = {}
    weights, keep, _ = ours(batch, setting)()
    expected = torch.cat(weights) * torch.cat(keep), torch.cat(keep)
    tokens = len(batch.packed.loss_mask)
    size = {"sequences": batch.sequences, "longest": batch.longest, "tokens": tokens}
    for name, make in CONTENDERS.items():
        row: Row = {"name": name, "setting": setting.name, **size}
        rows.append(row)
        with noted(row):
            run = make(batch, setting)
            found, kept, metrics = run()
            accepted = torch.cat(kept)
            deviation = float((torch.cat(found) * accepted - expected[0]).abs().max())
            differing = int((accepted != expected[1]).sum())
            row |= {"metrics": len(metrics), "deviation": deviation, "differing": differing}
            runs[name] = run
    timings = measure([Case(name, run) for name, run in runs.items()], device, repeats)
    for row in (row for row in rows if row["status"] == MEASURED):
        name, timing = row["name"], timings[row["name"]]
        row |= {"ms": timing.ms, "wall_ms": timing.wall_ms, "time_ours": timing.ms / timings[OURS].ms}
        counts = count(runs[name])
        row |= {"kernels": counts.total, "syncs": len(counts.syncs), "bytes_a_token": counts.peak / tokens}
        if device.type == "cuda":
            row["kernels"] = launches(runs[name])
    return rows
