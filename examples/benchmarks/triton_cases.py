"""Cases of vocab-parallel log-probs and how the Triton twin is judged on them, on whatever device it runs.

`gpu.py` runs them on a GPU, the tests in Triton's interpreter. Each is compared with the torch
Function and with textbook autograd in float64.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.log_probs import Backend, RaggedSamplingMask, triton_arithmetic, vocab_parallel_log_probs
from mismatch_plugin.log_probs.arguments import Call

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = 6


@dataclass(frozen=True)
class Case:
    """What to compute; `what` names the options as in `make`."""

    what: str
    columns: int
    dtype: str = "fp32"
    entropy: str = "grad"

    def __str__(self) -> str:
        return f"{self.what}-{self.columns}-{self.dtype}-{self.entropy}"


WHATS = (
    "plain", "cold", "padded", "ignored", "rows", "ragged", "strided", "offset", "forbidden",
    "rows ragged cold padded ignored strided",
)  # fmt: skip
# 1, 61: less than a tile; 4097: an uneven part of one; 16384: tiles to the last column; others: tiles and a rest.
CASES = [
    *itertools.starmap(Case, itertools.product(["plain"], [1, 61, 4097, 16384, 20001], ["fp32", "bf16"])),
    *itertools.starmap(Case, itertools.product(["plain"], [4097], ["fp16"], ["none", "detached", "grad"])),
    *itertools.starmap(Case, itertools.product(WHATS[1:], [61], ["fp32"], ["none", "detached", "grad"])),
    *itertools.starmap(Case, itertools.product(WHATS[1:], [8208], ["fp32", "bf16"])),
    *itertools.starmap(Case, itertools.product(["plain", "ragged"], [8197], ["bf16"], ["none"])),
]


def make(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """(logits [T, V], targets [R], upstream [2, R], options). The upstream varies and starts with 0."""
    torch.manual_seed(0)
    what, columns, dtype = case.what.split(), case.columns, DTYPES[case.dtype]
    logits = (torch.randn(ROWS, columns) * 3).to(dtype)
    targets, upstream = torch.randint(0, columns, (ROWS,)), torch.randn(2, ROWS)
    upstream[:, 0] = 0.0
    if columns == 61:  # at the edges of the shards of `check_shards`
        targets = torch.tensor([19, 20, 21, 51, 52, 0])
    options: dict[str, Any] = {"entropy": case.entropy}
    if "offset" in what:  # e^1e4 overflows. The temperature makes the unit 1, exact without a fused multiply-add too.
        logits, options["temperature"] = logits + 1e4, math.log2(math.e)
        logits[3, ::2] *= -1.0
    if "forbidden" in what:
        logits[:, 1::2] = -math.inf
        targets = targets // 2 * 2
    if "cold" in what:
        options["temperature"] = 0.6
    if "padded" in what:
        options["vocab_size"] = max(1, columns - 7)
        logits[:, options["vocab_size"] :] = math.nan
        targets = targets % options["vocab_size"]
    if "ignored" in what:
        targets[[1, 4]] = torch.tensor([-100, -1])
        upstream[:, 1], logits[1] = math.nan, math.nan
    if "rows" in what:
        logits = torch.cat([logits, torch.full((3, columns), math.nan, dtype=dtype)])
        options["rows"] = torch.tensor([4, 0, 5, 1, 2, 3])
        logits[[4, 0, 5, 1, 2, 3]] = logits[:ROWS].clone()
    if "ragged" in what:  # a target without ids, one with its target only, doubles, more ids than a program's block
        counts = torch.tensor([3, 0, 700, 1, 40, 9])
        ids = torch.randint(0, columns, (int(counts.sum()),))
        ids[703] = targets[3]
        options["sampling_mask"] = RaggedSamplingMask(ids.to(device), torch.cat([torch.tensor([0]), counts.cumsum(0)]))
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    logits = logits.to(device)
    if "strided" in what:
        wide = torch.full((len(logits), 2 * columns + 5), math.nan, dtype=dtype, device=device)
        logits = wide[:, 3 : 3 + 2 * columns : 2].copy_(logits)
    return logits, targets.to(device), upstream.to(device), options


def run(case: Case, device: str, backend: Backend, **more: Any) -> list[Tensor]:
    """[log-probs, entropy if asked for, gradient]."""
    logits, targets, upstream, options = make(case, device)
    result = vocab_parallel_log_probs(logits.requires_grad_(), targets, backend=backend, **{**options, **more})
    return results(result, logits, upstream)


def results(result: tuple[Tensor, Tensor | None], logits: Tensor, upstream: Tensor) -> list[Tensor]:
    """The outputs and the gradient they give for the upstream."""
    outputs = [value for value in result if value is not None]
    differentiable = [(value, up) for value, up in zip(outputs, upstream, strict=False) if value.requires_grad]
    gradient = torch.autograd.grad([value for value, _ in differentiable], logits, [up for _, up in differentiable])[0]
    return [*(value.detach() for value in outputs), gradient]


def textbook(case: Case, device: str) -> list[Tensor]:
    """The same by autograd through log_softmax in float64, over copied rows and kept columns."""
    logits, targets, upstream, options = make(case, device)
    size, rows = options.get("vocab_size", case.columns), options.get("rows", torch.arange(ROWS, device=device))
    mask: RaggedSamplingMask | None = options.get("sampling_mask")
    computed = targets >= 0
    kept = torch.zeros(ROWS, case.columns, dtype=torch.bool, device=device)
    kept[:, :size] = True
    for i, (begin, end) in enumerate(itertools.pairwise([] if mask is None else mask.offsets.tolist())):
        if mask is not None and begin < end:
            kept[i] = kept[i] & torch.zeros_like(kept[i]).index_fill_(0, mask.token_ids[begin:end], True)
    kept[torch.arange(ROWS, device=device), targets.clamp_min(0)] = True
    exact = logits.double().requires_grad_()
    x = exact[rows] / options.get("temperature", 1.0)
    log_p = torch.where(kept & computed[:, None], x, -math.inf).log_softmax(-1)
    log_probs = torch.where(computed, log_p.gather(1, targets.clamp_min(0)[:, None])[:, 0], 0.0)
    entropy = torch.where(computed, -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1), 0.0)
    entropies = {"none": None, "detached": entropy.detach(), "grad": entropy}
    return results((log_probs, entropies[case.entropy]), exact, upstream.nan_to_num().double())


def compare(actual: list[Tensor], expected: list[Tensor], rounding: float) -> None:
    """1e-6 for values; for the gradient 1e-6 of its largest element, and its own rounding."""
    assert len(actual) == len(expected)
    for value, other in zip(actual[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(value.double(), other.double(), rtol=1e-6, atol=1e-6)
    largest = float(expected[-1].abs().max()) if expected[-1].numel() else 0.0
    torch.testing.assert_close(
        actual[-1].double(), expected[-1].double(), rtol=max(rounding, 1e-6), atol=1e-6 * max(1.0, largest)
    )


def _rounding(dtype: str) -> float:
    """Of a gradient that was rounded to the logits' dtype, the interpreter's truncation included."""
    return 0.0 if dtype == "fp32" else torch.finfo(DTYPES[dtype]).eps


def check(case: Case, device: str) -> None:
    """Raises AssertionError where the twin differs from torch or from float64, or in place from out of place."""
    rounding = _rounding(case.dtype)
    ours = run(case, device, "triton")
    compare(ours, run(case, device, "torch"), rounding)
    compare(ours, textbook(case, device), rounding)
    # An element that nobody wrote would still be its logit.
    for ours_value, other in zip(ours, run(case, device, "triton", inplace_gradient=True), strict=True):
        assert torch.equal(ours_value, other)
    assert case.dtype == "fp32" or ours[0].dtype == torch.float32
    assert ours[-1].dtype == DTYPES[case.dtype]


def check_shards(what: str, dtype: str, device: str, bounds: tuple[int, ...] = (0, 20, 21, 21, 52, 61)) -> None:
    """The twin's parts over uneven shards, as ranks would hold them, against one process."""
    case = Case(what, bounds[-1], dtype)
    logits, targets, upstream, options = make(case, device)
    size = options.get("vocab_size", case.columns)
    shards = []
    for begin, end in itertools.pairwise(bounds):
        call = Call(
            targets, min(max(size - begin, 0), end - begin), begin, options.get("rows"),
            options.get("temperature", 1.0), options.get("sampling_mask"), entropy="grad",
        )  # fmt: skip
        shards.append(triton_arithmetic.prepare(logits[:, begin:end], call))
    statistics = torch.stack([triton_arithmetic.local_statistics(shard) for shard in shards])
    log_probs, entropy, shift, total = triton_arithmetic.finish(statistics, shards[0].call)
    assert entropy is not None
    gradients = [triton_arithmetic.gradient(shard, shift, total, entropy, *upstream) for shard in shards]
    whole = run(case, device, "triton")
    compare([log_probs, entropy, torch.cat(gradients, 1)], whole, _rounding(dtype))


SHARDED = ("plain", "cold", "padded", "ignored", "rows", "ragged", "offset", "forbidden")
