"""Log-probs and entropy as trainers compute them: slime's, verl's and NeMo-RL's own code, or as it is described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.results import NotHereError
from examples.benchmarks.sources import NEMO_RL, PACKAGES, SLIME, package_file

Group = dist.ProcessGroup | None
NEMO_CHUNK = 1024
"""Rows of a chunk, as in NeMo-RL's examples (logprob_chunk_size)."""


def slime(entropy: bool, group: Group) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
    """slime's `_VocabParallelLogProbEntropy`, or what does the same operations in the same order."""
    function: Any = SlimeAsDescribed
    if SLIME.there:
        function = SLIME.module("slime.utils.ppo_utils")._VocabParallelLogProbEntropy

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        log_probs, entropies = function.apply(logits, targets, None, group, entropy, entropy)
        return log_probs[:, 0], entropies if entropy else None

    return compute


class SlimeAsDescribed(torch.autograd.Function):
    """One softmax for both, made in place in a copy of the logits; it and the logits are kept for the backward.

    Forward: row maxima with their places (all-reduce), a shifted copy, the target's value of it, exp in place, sums
    (all-reduce), division in place, Σ p·x with its product in memory (on CUDA without; all-reduce), the target's value
    all-reduced.
    Backward: (Σ p·x − x)·p·g_H in new memory; −p in place, +1 at the targets, ·g in place, and both added.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, keep: None, group: Group, entropy: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        rows, width = logits.shape
        start = width * (dist.get_rank(group) if dist.is_initialized() else 0)
        absent = (targets < start) | (targets >= start + width)
        column = (targets - start).masked_fill(absent, 0)
        order = torch.arange(rows, device=logits.device)
        highest = _reduced(logits.max(-1, keepdim=True).values, dist.ReduceOp.MAX, group)
        p = logits - highest
        chosen = p[order, column].masked_fill_(absent, 0.0)[:, None]
        total = _reduced(p.exp_().sum(-1, keepdim=True), dist.ReduceOp.SUM, group)
        p.div_(total)
        found, mean = logits.new_zeros(0), logits.new_zeros(0)
        if entropy:
            product = torch.einsum("ij,ij->i", p, logits)[:, None] if p.is_cuda else (p * logits).sum(-1, keepdim=True)
            mean = _reduced(product, dist.ReduceOp.SUM, group)
            found = (highest + total.log() - mean)[:, 0]
        chosen = _reduced(chosen, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(p, absent, column, mean, logits if entropy else logits.new_empty(0))
        return chosen - total.log(), found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p, absent, column, mean, logits = ctx.saved_tensors
        of_entropy = None
        if mean.numel():
            of_entropy = (mean - logits).mul_(p).mul_(grads[1][:, None])
        grad = p.neg_()
        grad[torch.arange(len(grad), device=grad.device), column] += (~absent).to(grad.dtype)
        grad.mul_(grads[0].reshape(-1, 1))
        return (grad if of_entropy is None else grad.add_(of_entropy)), None, None, None, None, None


def _reduced(values: Tensor, how: Any, group: Group) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values, op=how, group=group)
    return values


def verl() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
    """As its Megatron engine: the logits cloned, vocab_parallel_entropy of them, and of the clone the cross entropy."""
    from examples.benchmarks.machine import version
    from examples.benchmarks.workers import megatron_groups

    if version("verl") is None:
        raise NotHereError(PACKAGES)
    megatron_groups(model=False)
    functions = package_file("verl", "utils/megatron/tensor_parallel.py")

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        copy = logits.clone()
        entropies = functions.vocab_parallel_entropy(logits)
        return functions.vocab_parallel_log_probs_from_logits(copy[:, None], targets[:, None])[:, 0], entropies

    return compute


def nemo_rl(entropy: bool, group: Group) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
    """NeMo-RL's ChunkedDistributedLogprob, and next to it ChunkedDistributedEntropy (which gives Σ p ln p)."""
    if NEMO_RL.there:
        from examples.benchmarks.workers import megatron_groups

        if not dist.is_initialized():
            megatron_groups(model=False)  # it reduces over a group, of one rank too
        module = NEMO_RL.module("nemo_rl.distributed.model_utils")
        of_targets, of_rows = module.ChunkedDistributedLogprob, module.ChunkedDistributedEntropy
    else:
        of_targets, of_rows = NemoLogProbAsDescribed, NemoEntropyAsDescribed

    def compute(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        width = logits.shape[-1]
        start = width * (dist.get_rank(group) if dist.is_initialized() else 0)
        log_probs = of_targets.apply(logits[None], targets[None], start, start + width, NEMO_CHUNK, group, False)[0]
        return log_probs, -of_rows.apply(logits[None], NEMO_CHUNK, group, False)[0] if entropy else None

    return compute


def _log_softmax(logits: Tensor, group: Group) -> Tensor:
    """Of a chunk, in float32, with the maxima and the sums reduced."""
    shifted = logits - _reduced(logits.amax(-1, keepdim=True), dist.ReduceOp.MAX, group)
    return shifted - _reduced(shifted.exp().sum(-1, keepdim=True), dist.ReduceOp.SUM, group).log()


class NemoLogProbAsDescribed(torch.autograd.Function):
    """Log-softmax of a chunk of rows at a time, in float32; the backward computes it again.

    The gradient of a chunk is (one-hot − p)·g, with a one-hot of int64, copied into zeros of the logits' size.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, last: int, size: int, group: Group, forward_only: bool
    ) -> Tensor:
        absent = (targets < first) | (targets >= last)
        column = (targets - first).masked_fill(absent, 0)
        parts = []
        for begin in range(0, logits.shape[1], size):
            chunk = slice(begin, begin + size)
            log_p = _log_softmax(logits[:, chunk].float(), group)
            chosen = log_p.gather(-1, column[:, chunk, None])[..., 0].masked_fill_(absent[:, chunk], 0.0)
            parts.append(_reduced(chosen, dist.ReduceOp.SUM, group))
        ctx.save_for_backward(logits, absent, column)
        ctx.size, ctx.group = size, group
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, absent, column = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for begin in range(0, logits.shape[1], ctx.size):
            chunk = slice(begin, begin + ctx.size)
            p = _log_softmax(logits[:, chunk].float(), ctx.group).exp()
            hot = torch.nn.functional.one_hot(column[:, chunk], logits.shape[-1]) * (~absent[:, chunk, None])
            out[:, chunk].copy_(hot.float().sub_(p).mul_(grads[0][:, chunk, None]))
        return out, None, None, None, None, None, None


class NemoEntropyAsDescribed(torch.autograd.Function):
    """Σ p ln p a chunk at a time; the backward computes it again, with a gradient in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int, group: Group, forward_only: bool) -> Tensor:
        parts = []
        for begin in range(0, logits.shape[1], size):
            log_p = _log_softmax(logits[:, begin : begin + size].float(), group)
            parts.append(_reduced((log_p.exp() * log_p).sum(-1), dist.ReduceOp.SUM, group))
        ctx.save_for_backward(logits)
        ctx.size, ctx.group = size, group
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        out = torch.empty_like(logits, dtype=torch.float32)
        for begin in range(0, logits.shape[1], ctx.size):
            chunk = slice(begin, begin + ctx.size)
            log_p = _log_softmax(logits[:, chunk].float(), ctx.group)
            p = log_p.exp()
            total = _reduced((p * log_p).sum(-1, keepdim=True), dist.ReduceOp.SUM, ctx.group)
            out[:, chunk].copy_(p.mul_(log_p - total)).mul_(grads[0][:, chunk, None])
        return out, None, None, None
