"""Log-probs and entropy of the trained tokens, from logits sharded over the vocabulary: one function, its backends.

The torch reference is in `torch_arithmetic`, its Triton twin for CUDA in `triton_arithmetic`, the adapters to other
libraries in `backends`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mismatch_plugin.config.settings import LogProbBackend as Backend
from mismatch_plugin.log_probs.arguments import Call, Entropy, LogProbs, RaggedSamplingMask, checked_call
from mismatch_plugin.log_probs.backends import choose_arithmetic, megatron_log_probs, transformer_engine_log_probs
from mismatch_plugin.log_probs.torch_arithmetic import default_block_rows

BORROWED = {"megatron": megatron_log_probs, "transformer-engine": transformer_engine_log_probs}
"""Backends that are another library's cross entropy: log-probs alone, out of place, over unpadded shards."""


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    vocab_size: int | None = None,
    sampling_mask: RaggedSamplingMask | None = None,
    rows: Tensor | None = None,
    inplace_gradient: bool = False,
    block_rows: int | None = None,
    backend: Backend = "auto",
) -> LogProbs:
    """log p(target) and the entropy of p = softmax(logits / temperature) over the vocabulary [0, vocab_size).

        log_probs_i = x_y − ln Σ_j e^{x_j}      entropy_i = − Σ_j p_j ln p_j
        with x = logits[rows_i] / temperature and y = targets_i

    With a sampling mask both sums run over the kept ids only: the distribution the token was really drawn from.

    Args:
        logits: [T, V] this rank's columns, as many on every rank, in rank order; bf16, fp16, fp32 or fp64. Never
            changed without `inplace_gradient`. Copied if columns do not lie one after the other, or rows overlap.
        targets: [R] int64 or int32, global ids on the device of the logits. Negative (such as −100) means ignored:
            result 0, gradient exactly 0, and NaN logits there do no harm; but they are computed. An id that is not in
            the vocabulary has log-prob −inf.
        tp_group: the tensor-parallel group over which the vocabulary is sharded. None: not sharded.
        temperature: what the sampler divided the logits by.
        entropy: "none"; "detached", as a metric; "grad", as a loss term. It takes no second pass over the logits.
        vocab_size: the real vocabulary. Columns beyond it are excluded and get gradient 0: Megatron pads, the rollout
            engine does not, and padding in the sum is a mismatch. None: every column counts.
        sampling_mask: kept ids per target. The gradient outside is 0. The target always counts as kept.
        rows: [R] int64 on the device of the logits: targets[i] is predicted by logits[rows[i]]. Made on the host with
            the batch (from the loss mask), it makes prompt and tool rows free: they are not read, and their gradient is
            exactly 0. Each row at most once, which is asserted on a device, without a host sync. None: R = T, row i
            predicts target i.
        inplace_gradient: the backward writes the gradient into the storage of the logits. That saves its memory, but
            nobody may read the logits afterwards, and a second backward raises.
        block_rows: rows per block of backend "torch"; None: about 256 KiB of float32 on CPU, 64 MiB elsewhere. With the
            gradient and a few floats a target, two blocks are all the memory taken (one more with rows, one more with a
            mask). Backend "triton" has no blocks and takes no such memory.
        backend: "auto" is "triton" where Triton can be imported and the logits are on CUDA and not float64, else
            "torch". "megatron" (megatron-core's `vocab_parallel_cross_entropy`) and "transformer-engine" (its
            `parallel_cross_entropy`) give log-probs only. Each refuses what it cannot do. `--mismatch-log-prob-backend`
            has the same names.

    Sums, results and everything per row are float32 (float64 for float64 logits); the gradient has the logits' dtype.
    Collectives: one all-gather of 4 floats a target in the forward, none in the backward. Host syncs: none.
    Raises: ValueError if an argument does not fit (of what is on a device, only `rows` are looked at, and asserted
        there); RuntimeError if a backend is missing.
    Source: the online softmax of Milakov & Gimelshein 2018 (https://arxiv.org/abs/1805.02867), sharded as in
        Megatron-LM.
    """
    width = logits.shape[-1]
    call = checked_call(
        logits, targets, name="logits", tokens=len(logits), width=width, backend=backend, rows=rows,
        temperature=temperature, sampling_mask=sampling_mask, tp_group=tp_group, vocab_size=vocab_size, entropy=entropy,
        inplace_gradient=inplace_gradient, block_rows=block_rows or default_block_rows(logits, width),
    )  # fmt: skip
    if backend in BORROWED:
        tp_size = 1 if tp_group is None else tp_group.size()
        refused = {
            f"entropy={entropy!r}": entropy != "none",
            "a sampling_mask": sampling_mask is not None,
            "inplace_gradient=True": inplace_gradient,
            f"padding (vocab_size={vocab_size})": vocab_size not in (None, width * tp_size),
            f"{logits.dtype} logits": logits.dtype == torch.float64,
        }
        for what, asked in refused.items():
            if asked:
                raise ValueError(f"backend={backend!r} cannot do {what}: use backend='torch'.")
        return LogProbs(BORROWED[backend](logits, call), None)
    if logits.stride(1) != 1 or logits.stride(0) < width:
        logits = logits.contiguous()
    return LogProbs(*LogProbsFunction.apply(logits, call, choose_arithmetic(logits, backend)))


class LogProbsFunction(torch.autograd.Function):
    """(log_probs [R], entropy [R] or None); the gradient goes to the logits only. Collectives: one all-gather forward.

    Keeps the inputs (no copies) and three floats a target; the exponentials are computed again in backward.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, call: Call, arithmetic: Any) -> tuple[Tensor, Tensor | None]:
        statistics_4R = arithmetic.local_statistics(arithmetic.prepare(logits_TV, call))
        log_probs_R, entropy_R, shift_R, total_R = arithmetic.finish(call.gather(statistics_4R), call)
        call.save(ctx, entropy_R, logits_TV, shift_R, total_R)
        ctx.arithmetic, ctx.overwritten = arithmetic, False
        return log_probs_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # once_differentiable hides the names
        ctx: Any, grad_log_probs_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(
                "inplace_gradient=True has overwritten the logits with their gradient in the first backward: a second "
                "backward through the same log-probs needs inplace_gradient=False."
            )
        logits_TV, shift_R, total_R, entropy_R = ctx.saved_tensors[:4]
        ctx.overwritten = ctx.call.inplace_gradient
        inputs = ctx.arithmetic.prepare(logits_TV, ctx.call)
        gradient_TV = ctx.arithmetic.gradient(inputs, shift_R, total_R, entropy_R, grad_log_probs_R, grad_entropy_R)
        if ctx.overwritten:  # autograd does not see what a kernel writes; others that saved the logits must learn of it
            torch.autograd.graph.increment_version(logits_TV)
        return gradient_TV, None, None
