"""What each rank does for `test_log_probs_tp.py`: its vocabulary shard of inputs that every process makes alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.counting import OperationCounter
from mismatch_plugin.log_probs import RaggedSamplingMask, vocab_parallel_linear_log_probs, vocab_parallel_log_probs

TOKENS, HIDDEN, COLUMNS = 12, 6, 52
FROM_LOGITS = (
    *("even", "padded", "cold", "ignored", "rows", "ragged", "apart", "forbidden", "detached", "inplace", "no_tokens"),
    *("float32", "bfloat16"),
)
FROM_HIDDEN = ("even", "padded", "cold", "rows", "ragged", "detached", "float32", "sequence", "sequence_rows")


@dataclass
class Inputs:
    """The whole vocabulary's, as one process would have them. upstream: [2, R], of log-probs and entropy."""

    logits: Tensor
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor
    options: dict[str, Any] = field(default_factory=lambda: {"entropy": "grad"})


def make(name: str) -> Inputs:
    torch.manual_seed(0)
    tokens = 0 if name == "no_tokens" else TOKENS
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name, torch.float64)
    logits = (torch.randn(tokens, COLUMNS, dtype=torch.float64) * 3).to(dtype)
    hidden, weight = torch.randn(tokens, HIDDEN).to(dtype) * 2, torch.randn(COLUMNS, HIDDEN).to(dtype)
    targets = torch.randint(0, COLUMNS, (tokens,))
    targets[4:8] = torch.tensor([12, 13, 25, 26])[: len(targets[4:8])]  # the edges of shards
    upstream = torch.randn(2, tokens, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    upstream[:, :1] = 0.0
    inputs = Inputs(logits, hidden, weight, targets, upstream)
    if name == "padded":  # tp 4: the last rank has nothing but padding
        inputs.options["vocab_size"], inputs.targets = 30, targets % 30
    elif name == "cold":
        inputs.options["temperature"] = 0.6
    elif name == "ignored":
        targets[[0, 4]], logits[0] = -100, math.nan
        logits[4, ::3] = math.inf
    elif "rows" in name:
        picked = [9, 2, 4, 3] + [2, 11] * (name == "sequence_rows")
        inputs.options["rows"] = torch.tensor(picked)
        logits[[0, 1, 5]] = math.nan
        inputs.targets, inputs.upstream = targets[: len(picked)], upstream[:, : len(picked)]
    elif name == "ragged":
        counts = torch.randint(0, 9, (tokens,))  # unfiltered rows, and shards without a kept id
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        inputs.options["sampling_mask"] = RaggedSamplingMask(torch.randint(0, COLUMNS, (int(offsets[-1]),)), offsets)
    elif name == "apart":  # the first shards vanish next to the last: their sums must neither overflow nor count
        logits[:, :20] -= 1e4
        logits[3:, 40:] += 1e4
    elif name == "forbidden":  # a whole shard of −inf
        logits[:, :26] = -math.inf
        inputs.targets = targets % 26 + 26
    elif name == "detached":
        inputs.options["entropy"] = "detached"
    elif name == "inplace":
        inputs.options["inplace_gradient"] = True
    return inputs


def outcome(compute: Callable[..., Any], leaves: Sequence[Tensor], upstream: Tensor, **options: Any) -> dict[str, Any]:
    """Log-probs, entropy, gradients of the leaves, and the collectives of both directions."""
    given = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with OperationCounter() as forward:
        log_probs, entropy = compute(*given, **options)
    loss = (log_probs * upstream[0]).sum()
    if entropy is not None and entropy.requires_grad:
        loss = loss + (entropy * upstream[1]).sum()
    with OperationCounter() as backward:
        gradients = [gradient.clone() for gradient in torch.autograd.grad(loss, given)]
    return {
        "log_probs": log_probs.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "gradients": gradients,
        "forward": forward.sent,
        "backward": backward.sent,
        "unchanged": all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(given, leaves, strict=True)),
    }


def from_logits(inputs: Inputs, group: Any = None, **more: Any) -> dict[str, Any]:
    """Of this rank's columns of the logits."""
    logits = inputs.logits if group is None else inputs.logits.chunk(group.size(), 1)[group.rank()]
    more |= {"targets": inputs.targets, "tp_group": group}
    return outcome(vocab_parallel_log_probs, [logits], inputs.upstream, **{"block_rows": 4, **inputs.options, **more})


def from_hidden(inputs: Inputs, group: Any, sequence_parallel: bool) -> dict[str, Any]:
    """Of this rank's rows of the head, and of all hidden states or its part of them."""
    rank, size = group.rank(), group.size()
    hidden, weight = inputs.hidden, inputs.weight.chunk(size)[rank]
    if sequence_parallel:
        hidden = hidden.chunk(size)[rank]
    more = {"targets": inputs.targets, "tp_group": group, "sequence_parallel": sequence_parallel, "chunk_rows": 5}
    return outcome(vocab_parallel_linear_log_probs, [hidden, weight], inputs.upstream, **inputs.options, **more)


def run(case: tuple[str, str]) -> dict[str, Any]:
    """One case on this rank, over the world as the tensor-parallel group."""
    kind, name = case
    if kind == "logits":
        return from_logits(make(name), dist.group.WORLD)
    return from_hidden(make(name), dist.group.WORLD, name.startswith("sequence"))


def run_megatron(case: tuple[str, int]) -> dict[str, Any]:
    """{"torch", "megatron"}: the same by both backends; "refused": the message for a group that is not Megatron's."""
    from megatron.core import parallel_state

    name, tp_size = case
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    try:
        group = cast(Any, parallel_state.get_tensor_model_parallel_group())
        inputs = make("float32" if name != "bfloat16" else name)
        inputs.options = {}
        if name == "prepared":
            inputs.options = {"rows": torch.tensor([9, 2, 4, 3]), "temperature": 0.6}
            inputs.targets, inputs.upstream = inputs.targets[:4], inputs.upstream[:, :4]
            inputs.targets[1], inputs.logits[[1, 2]] = -100, math.nan
        results: dict[str, Any] = {
            backend: from_logits(inputs, group, backend=backend) for backend in ("torch", "megatron")
        }
        try:
            # The default group holds the same ranks if tp is the world, and is still another group.
            from_logits(inputs, dist.group.WORLD, backend="megatron")
        except ValueError as error:
            results["refused"] = str(error)
        return results
    finally:
        parallel_state.destroy_model_parallel()
