"""What each rank does for `test_log_probs_tp.py`: its rows of the head, and of hidden states its part or all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.log_probs import RaggedSamplingMask, vocab_parallel_linear_log_probs
from tests.distributed.log_probs_worker import CollectiveRecorder

TOKENS, HIDDEN, VOCAB = 12, 6, 52
NAMES = ("even", "uneven", "padded", "rows", "ragged", "mask", "detached", "float32", "sequence", "sequence_rows")
_UNEVEN = {1: (52,), 2: (40, 12), 4: (20, 1, 0, 31)}


def make(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    """(hidden [T, H], weight [V, H], targets, upstream [2, R], options), whole, the same in every process."""
    torch.manual_seed(NAMES.index(name))
    dtype = torch.float32 if name == "float32" else torch.float64
    hidden, weight = torch.randn(TOKENS, HIDDEN, dtype=dtype) * 2, torch.randn(VOCAB, HIDDEN, dtype=dtype)
    targets, options = torch.randint(0, VOCAB, (TOKENS,)), {"entropy": "grad", "chunk_rows": 5}
    if name == "padded":  # tp 4: the last rank has nothing but padding
        options["vocab_size"], targets = 30, targets % 30
    elif name in ("rows", "sequence_rows"):
        options["rows"], targets = torch.tensor([9, 2, 4, 3, 11, 2]), targets[:6]
    elif name == "ragged":
        counts = torch.randint(0, 9, (TOKENS,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        options["sampling_mask"] = RaggedSamplingMask(torch.randint(0, VOCAB, (int(offsets[-1]),)), offsets)
    elif name == "mask":
        options["sampling_mask"] = torch.rand(TOKENS, VOCAB) < 0.1
    elif name == "detached":
        options["entropy"] = "detached"
    upstream = torch.randn(2, len(targets), dtype=dtype)
    upstream[:, :1] = 0.0
    return hidden, weight, targets, upstream, options


def widths(name: str, world_size: int) -> tuple[int, ...]:
    return _UNEVEN[world_size] if name == "uneven" else (VOCAB // world_size,) * world_size


def run(name: str) -> dict[str, Any]:
    """Results, both gradients of this rank's part, and the collectives of both directions."""
    size, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight, targets, upstream, options = make(name)
    part, start = widths(name, size), sum(widths(name, size)[:rank])
    weight = weight[start : start + part[rank]].clone().requires_grad_()
    if isinstance(mask := options.get("sampling_mask"), Tensor):
        options["sampling_mask"] = mask[:, start : start + part[rank]]
    if name == "uneven":
        options["vocab_start"] = start
    if name.startswith("sequence"):
        options["sequence_parallel"] = True
        hidden = hidden.chunk(size)[rank].clone()
    hidden.requires_grad_()
    group = dist.group.WORLD if size > 1 else None
    options = options if group is not None else {k: v for k, v in options.items() if k != "sequence_parallel"}
    with CollectiveRecorder() as forward:
        log_probs, entropy = vocab_parallel_linear_log_probs(hidden, weight, targets, tp_group=group, **options)
    assert entropy is not None
    loss = (log_probs * upstream[0]).sum()
    if entropy.requires_grad:
        loss = loss + (entropy * upstream[1]).sum()
    with CollectiveRecorder() as backward:
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    found = {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "hidden": grad_hidden, "weight": grad_weight}
    return found | {"forward": forward.collectives, "backward": backward.collectives}
