"""Benchmark: cost against tokens, sequences, vocabulary, cp and tp: measured here, by formula for larger machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import mismatch_plugin as mp
from examples.benchmarks.communication import COLUMNS, LINKS
from examples.benchmarks.correction_cases import SETTINGS, Batch, ours
from examples.benchmarks.counting import count
from examples.benchmarks.log_prob_cases import ours as our_log_probs
from examples.benchmarks.log_probs import Problem, step_of
from examples.benchmarks.machine import Case, measure
from examples.benchmarks.results import MEASURED, Row, Section
from examples.benchmarks.workers import in_processes
from mismatch_plugin.parallel.context import shard
from mismatch_plugin.parallel.groups import ParallelGroups

MEMORY = 4.08e12
"""Bytes a second that a kernel gets of an H200's memory (85 % of 4.8 TB/s): an assumption of the extrapolation."""
LAUNCH = 5e-6
"""Seconds that one eager kernel keeps the host busy: an assumption too."""
FLOPS = 4.0e14
"""Model operations a second (40 % of an H200's 989 TFLOP/s in bf16): what the share of the step is set against."""
NOTES = [
    "Measured: log-probs with entropy, forward and backward, and correct with its metrics, on this machine; for tp and "
    "cp the CPU time of one rank of processes connected by gloo. Fit: least squares of ms = a + b x over the points of "
    "one series.",
    "By formula, a micro-batch of R targets in N sequences on one rank, V columns over tp ranks, 2-byte logits: "
    "log-probs 3 passes · 2 R V / tp / B_mem; their all-gather (tp − 1)(a + 16 R / b) on NVLink; correction "
    "max(c R / B_mem, k · t_launch), with c bytes a token and k kernels as counted here of `policy_loss` forward and "
    "backward (eager; a pass over the data before the step, where a setting needs one, is left out); its SUM over cp "
    f"2 (cp − 1)(a + 8 · {len(COLUMNS)} N / (cp b)) on InfiniBand; once a step three reductions over dp · cp on a "
    "tree, of n = 3, S and M numbers, 2 log2(dp cp) (a + 8 n / b) each.",
    f"B_mem = {MEMORY / 1e12:g} TB/s, t_launch = {LAUNCH * 1e6:g} us, a and b as in communication. Share: of that sum "
    f"plus the model's own 6 P R / (tp · {FLOPS / 1e12:g} TFLOP/s) for P parameters of a pipeline stage, "
    "attention left out, nothing overlapping. Nothing of these rows is measured.",
]


def section(device: torch.device, quick: bool, repeats: int, _: object) -> Section:
    """The measured series with their fits, then the extrapolation."""
    rows: list[Row] = []
    points = (1, 2, 4) if quick else (1, 2, 4, 8)
    tokens, vocab, longest = (16, 256, 24) if quick else (512, 8192, 512)
    problems = {
        "log-probs, tokens": {tokens * p: Problem(tokens * p, vocab) for p in points},
        "log-probs, vocabulary": {vocab * p: Problem(tokens, vocab * p) for p in points},
    }
    for series, by_size in problems.items():
        makes = {x: partial(_log_probs, problem, device) for x, problem in by_size.items()}
        rows += _series(series, makes, device, repeats)
    batches = {
        "correction, sequence length": {longest * p: Batch(32, longest * p, device) for p in points},
        "correction, sequences": {32 * p: Batch(32 * p, longest, device) for p in points},
    }
    for series, by_size in batches.items():
        rows += _series(series, {x: partial(ours, batch) for x, batch in by_size.items()}, device, repeats)
    if device.type == "cpu":
        for ranks in (2,) if quick else (2, 4):
            for series, ms in in_processes(ms_of_rank, ranks, tokens, vocab, longest, repeats)[0].items():
                rows.append({"name": series, "x": ranks, "status": MEASURED, "ms": ms, "fit": None})
    batch = batches["correction, sequences"][32]
    packed, config = batch.packed, mp.MismatchConfig(**SETTINGS)
    assert packed.old_log_probs is not None
    log_probs = packed.old_log_probs.clone().requires_grad_()
    packed = packed.replace(advantages=torch.randn_like(packed.old_log_probs))
    counts = count(lambda: mp.policy_loss(log_probs, packed, config).loss_sum.backward())
    facts = {"kernels": counts.total, "bytes a token": counts.tensor_bytes / len(packed.loss_mask)}
    statistics = mp.policy_loss(log_probs, packed, config).statistics
    sizes = len(statistics.sum_names), len(statistics.maximum_names)
    rows += [extrapolate(*case, facts["kernels"], facts["bytes a token"], sizes) for case in JOBS]
    return Section("scaling", "Scaling", rows, facts, NOTES)


def _log_probs(problem: Problem, device: torch.device) -> Callable[[], object]:
    logits, targets, g, h = problem.tensors(device)
    compute = our_log_probs(True).make()
    return partial(step_of, compute, logits.requires_grad_(), targets, g, h)


def _series(
    name: str, makes: dict[int, Callable[[], Callable[[], object]]], device: torch.device, repeats: int
) -> list[Row]:
    timings = measure([Case(str(x), make()) for x, make in makes.items()], device, repeats)
    values = [timings[str(x)].ms for x in makes]
    slope, constant = np.polyfit(list(makes), values, 1)
    return [
        {"name": name, "x": x, "status": MEASURED, "ms": ms, "fit": float(constant + slope * x)}
        for x, ms in zip(makes, values, strict=True)
    ]


def ms_of_rank(tokens: int, vocab: int, longest: int, repeats: int) -> dict[str, float]:
    """CPU milliseconds of one rank, with the vocabulary or the tokens split over all. For a process of its own."""
    world, ranks = dist.group.WORLD, dist.get_world_size()
    device = torch.device("cpu")
    logits, _, g, h = Problem(4 * tokens, 4 * vocab // ranks).tensors(device)
    targets = torch.randint(0, 4 * vocab, (4 * tokens,), generator=torch.Generator().manual_seed(0))
    compute = our_log_probs(True, group=world).make()
    groups = ParallelGroups(cp=world)
    packed = shard(Batch(128, 4 * longest, device).packed, "zigzag", ranks, groups.cp_rank).prepared()
    config = mp.MismatchConfig(**SETTINGS)
    cases = (
        Case("log-probs, tp", partial(step_of, compute, logits.requires_grad_(), targets, g, h)),
        Case("correction, cp", lambda: mp.correct(packed, config, groups).statistics.metrics()),
    )
    # Without `calls` the clock says how often to call, which ranks that wait for each other must not ask.
    return {case.name: measure([case], device, repeats, calls=3)[case.name].ms for case in cases}


JOBS: Sequence[tuple[str, dict[str, int]]] = (
    ("8 GPUs, 8B model", {"R": 32768, "N": 16, "V": 131072, "tp": 8, "cp": 1, "dp": 1, "P": 8_000_000_000}),
    ("64 GPUs, 32B model", {"R": 32768, "N": 8, "V": 151936, "tp": 8, "cp": 2, "dp": 4, "P": 32_000_000_000}),
    ("1M-token context, 1024 GPUs", {"R": 65536, "N": 1, "V": 151936, "tp": 8, "cp": 16, "dp": 8, "P": 32_000_000_000}),
    (
        "100k GPUs, 340B model in 8 stages",
        {"R": 16384, "N": 16, "V": 151936, "tp": 8, "cp": 2, "dp": 784, "P": 42_000_000_000},
    ),
)
"""Name, and R targets of a rank's micro-batch, N sequences, vocabulary V, parallel sizes, P parameters of a stage."""


def extrapolate(name: str, job: dict[str, int], kernels: int, token_bytes: float, statistics: tuple[int, int]) -> Row:
    """The formula of the notes for one of `JOBS`; statistics: S and M."""
    nvlink, infiniband = LINKS[0], LINKS[1]
    targets, tp, cp, ranks = job["R"], job["tp"], job["cp"], job["dp"] * job["cp"]
    terms = {
        "log-probs": 3 * 2 * targets * job["V"] / tp / MEMORY,
        "tp all-gather": nvlink.all_gather(16 * targets, tp),
        "correction": max(token_bytes * targets / MEMORY, kernels * LAUNCH),
        "cp SUM": infiniband.all_reduce(8 * len(COLUMNS) * job["N"], cp),
        "step's statistics": sum(infiniband.tree(8 * size, ranks) for size in (9, *statistics)) if ranks > 1 else 0.0,
    }
    model = 6 * job["P"] * targets / tp / FLOPS
    row: Row = {"name": name, "status": "by formula", **job, **{f"us, {n}": 1e6 * v for n, v in terms.items()}}
    return {**row, "us, all": 1e6 * sum(terms.values()), "share": sum(terms.values()) / (model + sum(terms.values()))}
