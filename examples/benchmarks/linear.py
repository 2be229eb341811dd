"""Benchmark: log-probs from hidden states and the head's weight, with and without logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.benchmarks import machine
from examples.benchmarks.log_prob_cases import OURS
from examples.benchmarks.log_probs import against_ours
from examples.benchmarks.machine import Case, measure, version
from examples.benchmarks.results import NotHereError, Row, Section, noted
from examples.benchmarks.workers import in_processes
from mismatch_plugin.parallel.log_probs import vocab_parallel_linear_log_probs, vocab_parallel_log_probs

NOTES = [
    "Forward and backward from hidden states [T, H] and the head's weight [V, H], with a random gradient for every "
    "token, to the gradients of both. With entropy where the contender has it.",
    "/ ours: a contender's figure divided by that of mismatch_plugin from hidden states with the same entropy; above 1 "
    "ours is ahead. Time: medians of calls in turns; on CPU user + system time, on CUDA events.",
    "Extra memory: the most beyond hidden states and weight, in MiB, the gradients of both among it; in a process of "
    "its own (CPU: resident memory). Logits: what logits of all tokens take, once.",
    "From hidden states costs four products of the head (logits, logits again, d hidden, d weight) in the place of "
    "three. torch's F.linear_cross_entropy in chunks has one loss for all tokens (reduction sum): no log-prob and no "
    "gradient of a single token, and three products; a policy loss cannot be made of it. Without chunks it is the path "
    "over logits.",
]
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, targets, gradient of the log-probs, of the entropies) → what backward is called on."""


def _weighted(result: Any, g: Tensor, h: Tensor) -> Tensor:
    total = (result.log_probs * g).sum()
    return total if result.entropy is None else total + (result.entropy * h).sum()


def _ours(kind: Any, hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor, h: Tensor) -> Tensor:
    return _weighted(vocab_parallel_linear_log_probs(hidden, weight, targets, entropy=kind), g, h)


def _whole(kind: Any, inplace: bool, hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor, h: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return _weighted(vocab_parallel_log_probs(logits, targets, entropy=kind, inplace_gradient=inplace), g, h)


def _torch(chunked: bool, hidden: Tensor, weight: Tensor, targets: Tensor, g: Tensor, h: Tensor) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        raise NotHereError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    if not chunked:
        return (F.linear_cross_entropy(hidden, weight, targets, reduction="none") * -g).sum()
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


def _liger() -> Compute:
    if not torch.cuda.is_available():
        raise NotHereError("needs CUDA")
    if version("liger-kernel") is None:
        raise NotHereError("not installed: pip install liger-kernel")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda hidden, weight, targets, g, h: loss(weight, hidden, targets)


def contenders() -> dict[tuple[str, bool], Callable[[], Compute]]:
    """(name, whether with entropy) → what makes its function."""
    made: dict[tuple[str, bool], Callable[[], Compute]] = {}
    for entropy in (True, False):
        kind = "grad" if entropy else "none"
        made[OURS, entropy] = lambda kind=kind: partial(_ours, kind)
        made["hidden @ weight.T, then ours from logits", entropy] = lambda kind=kind: partial(_whole, kind, False)
        made["the same, gradient in place", entropy] = lambda kind=kind: partial(_whole, kind, True)
    made["torch F.linear_cross_entropy", False] = lambda: partial(_torch, False)
    made["torch F.linear_cross_entropy, chunks, one loss", False] = lambda: partial(_torch, True)
    made["liger fused linear, one loss", False] = _liger
    return made


def sizes(device: torch.device, quick: bool) -> tuple[list[int], int, int]:
    """Tokens; vocabulary; hidden size."""
    if quick:
        return [16, 32], 512, 16
    return ([256, 1024, 4096], 32768, 256) if device.type == "cpu" else ([2048, 8192, 32768], 131072, 4096)


def tensors(device: torch.device, tokens: int, vocab: int, hidden: int) -> tuple[Tensor, ...]:
    """Hidden states and weight with gradient, targets, and the two gradients; logits have a deviation of 3."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    states = torch.empty(tokens, hidden, dtype=dtype, device=device).normal_(generator=generator)
    weight = torch.empty(vocab, hidden, dtype=dtype, device=device).normal_(0, 3 / hidden**0.5, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    g, h = torch.randn(2, tokens, generator=generator, device=device)
    return states.requires_grad_(), weight.requires_grad_(), targets, g, h


def section(device: torch.device, quick: bool, repeats: int, tell: Callable[[str], object]) -> Section:
    """All contenders at growing numbers of tokens."""
    rows: list[Row] = []
    counts, vocab, hidden = sizes(device, quick)
    for tokens in counts:
        tell(f"{tokens} tokens, vocabulary {vocab}, hidden size {hidden}")
        rows += _rows(device, (tokens, vocab, hidden), max(2, repeats // 2))
    facts = {"vocabulary": vocab, "hidden size": hidden, "dtype": "float32" if device.type == "cpu" else "bfloat16"}
    return Section("linear", "Log-probs from hidden states", rows, facts, NOTES)


def _rows(device: torch.device, size: tuple[int, int, int], repeats: int) -> list[Row]:
    values = tensors(device, *size)
    rows, cases = [], {}
    for (name, entropy), make in contenders().items():
        logits = size[0] * size[1] * values[0].element_size()
        row: Row = {"name": name, "entropy": entropy, "tokens": size[0], "logits_mib": logits / 2**20}
        rows.append(row)
        with noted(row):
            case = Case(f"{name} {entropy}", partial(step_of, make(), *values))
            case.run()
            cases[name, entropy] = row, case
    timings = measure([case for _, case in cases.values()], device, repeats, calls=1, warm=True)
    peaks = in_processes(extra_peaks, 1, list(cases), size, str(device))[0]
    for (row, case), peak in zip(cases.values(), peaks, strict=True):
        timing = timings[case.name]
        row |= {"ms": timing.ms, "wall_ms": timing.wall_ms, "system_ms": timing.system_ms, "extra_peak": peak / 2**20}
    return against_ours(rows)


def step_of(compute: Compute, hidden: Tensor, weight: Tensor, *rest: Tensor) -> None:
    """One forward and backward."""
    compute(hidden, weight, *rest).backward()
    hidden.grad = weight.grad = None


def extra_peaks(names: list[tuple[str, bool]], size: tuple[int, int, int], device_name: str) -> list[int]:
    """Bytes beyond the inputs that one forward and backward of each takes at most. For a process of its own."""
    device = torch.device(device_name)
    values, peaks = tensors(device, *size), []
    for name in names:
        run = partial(step_of, contenders()[name](), *values)
        run()
        before = machine.memory_in_use(device)
        run()
        peaks.append(max(0, machine.peak_since(device) - before))
    return peaks
