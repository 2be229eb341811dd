"""What each rank does for `test_log_probs_tp.py`: its vocabulary shard of inputs that every process makes alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mismatch_plugin.log_probs import RaggedSamplingMask, vocab_parallel_log_probs

TOKENS, COLUMNS = 11, 52
NAMES = (
    *("even", "uneven", "padded", "temperature", "ignored", "rows", "ragged", "mask", "apart", "forbidden", "detached"),
    *("inplace", "no_tokens", "float32", "bfloat16"),
)
_UNEVEN = {2: (40, 12), 4: (20, 1, 0, 31)}


@dataclass
class Inputs:
    """The whole vocabulary's, as one process would have them."""

    logits: Tensor
    targets: Tensor
    upstream: Tensor
    options: dict[str, Any] = field(default_factory=dict)


def make(name: str) -> Inputs:
    torch.manual_seed(NAMES.index(name))
    tokens = 0 if name == "no_tokens" else TOKENS
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name, torch.float64)
    logits = (torch.randn(tokens, COLUMNS, dtype=torch.float64) * 3).to(dtype)
    targets = torch.randint(0, COLUMNS, (tokens,))
    upstream = torch.randn(tokens, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    upstream[:1] = 0.0
    options: dict[str, Any] = {"entropy": "detached" if name == "detached" else "grad", "block_rows": 4}
    inputs = Inputs(logits, targets, upstream, options)
    if name == "padded":  # tp 4: the last rank has nothing but padding
        options["vocab_size"], inputs.targets = 30, targets % 30
    elif name == "temperature":
        options["temperature"] = torch.rand(tokens, dtype=dtype) + 0.5
    elif name == "ignored":
        targets[[0, 4]], logits[0] = -100, math.nan
        logits[4, ::3] = math.inf
    elif name == "rows":
        options["rows"] = torch.tensor([9, 2, 4, 3])
        logits[[0, 1, 5]] = math.nan
        inputs.targets, inputs.upstream = targets[:4], upstream[:4]
    elif name == "ragged":
        counts = torch.randint(0, 9, (tokens,))  # unfiltered rows, and shards without a kept id
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        options["sampling_mask"] = RaggedSamplingMask(torch.randint(0, COLUMNS, (int(offsets[-1]),)), offsets)
    elif name == "mask":
        options["sampling_mask"] = torch.rand(tokens, COLUMNS) < 0.1
    elif name == "apart":  # the first shards vanish next to the last: their sums must neither overflow nor count
        logits[:, :20] -= 1e4
        logits[3:, 40:] += 1e4
    elif name == "forbidden":  # a whole shard of −inf
        logits[:, :26] = -math.inf
        inputs.targets = targets % 26 + 26
    elif name == "inplace":
        options["inplace_gradient"] = True
    return inputs


def shard_widths(name: str, world_size: int) -> tuple[int, ...]:
    return _UNEVEN[world_size] if name == "uneven" else (COLUMNS // world_size,) * world_size


class CollectiveRecorder(TorchDispatchMode):
    """(operation, bytes of its largest tensor) of every collective, whichever function it was called by."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            size = max(x.numel() * x.element_size() for x in tree_leaves(args) if isinstance(x, Tensor))
            self.collectives.append((func.__name__, size))
        return func(*args, **(kwargs or {}))


def forward_backward(inputs: Inputs, **arguments: Any) -> dict[str, Any]:
    """Log-probs, entropy and the gradient, with the collectives of both directions."""
    logits = inputs.logits.clone().requires_grad_()
    with CollectiveRecorder() as forward:
        log_probs, entropy = vocab_parallel_log_probs(logits, inputs.targets, **{**inputs.options, **arguments})
    loss = (log_probs * inputs.upstream).sum()
    if entropy is not None and entropy.requires_grad:
        loss = loss + (entropy * inputs.upstream.flip(0) * 0.3).sum()
    with CollectiveRecorder() as backward:
        gradient = torch.autograd.grad(loss, logits)[0]
    return {
        "log_probs": log_probs.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "gradient": gradient.clone(),
        "forward": forward.collectives,
        "backward": backward.collectives,
        "unchanged": torch.equal(logits.nan_to_num(), inputs.logits.nan_to_num()),
    }


def shard(inputs: Inputs, start: int, width: int) -> Inputs:
    options = dict(inputs.options)
    mask = options.get("sampling_mask")
    if isinstance(mask, Tensor):
        options["sampling_mask"] = mask[:, start : start + width]
    return Inputs(inputs.logits[:, start : start + width], inputs.targets, inputs.upstream, options)


def run(name: str, prepare: Callable[[Inputs], Inputs] = lambda inputs: inputs, **more: Any) -> dict[str, Any]:
    """One case on this rank, over the world as the tensor-parallel group."""
    widths, rank = shard_widths(name, dist.get_world_size()), dist.get_rank()
    start = sum(widths[:rank])
    arguments = more | ({"vocab_start": start} if name == "uneven" else {})
    return forward_backward(shard(prepare(make(name)), start, widths[rank]), tp_group=dist.group.WORLD, **arguments)


def run_megatron(case: tuple[str, int]) -> dict[str, Any]:
    """{"torch", "megatron"}: the same by both backends; "refused": the message for a group that is not Megatron's."""
    from megatron.core import parallel_state

    name, tp_size = case
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    try:
        group = cast(Any, parallel_state.get_tensor_model_parallel_group())
        width = COLUMNS // tp_size
        inputs = shard(make("float32" if name != "bfloat16" else name), group.rank() * width, width)
        inputs.options = {}
        if name == "prepared":
            inputs.options = {"rows": torch.tensor([9, 2, 4, 3]), "temperature": torch.rand(4) + 0.5}
            inputs.targets, inputs.upstream = inputs.targets[:4], inputs.upstream[:4]
            inputs.targets[1], inputs.logits[[1, 2]] = -100, math.nan
        results: dict[str, Any] = {
            backend: forward_backward(inputs, tp_group=group, backend=backend) for backend in ("torch", "megatron")
        }
        try:
            # The default group holds the same ranks if tp is the world, and is still another group.
            forward_backward(inputs, tp_group=dist.group.WORLD, backend="megatron")
        except ValueError as error:
            results["refused"] = str(error)
        return results
    finally:
        parallel_state.destroy_model_parallel()
