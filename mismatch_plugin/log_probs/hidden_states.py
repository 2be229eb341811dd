"""Log-probs and entropy from hidden states and the head's weight: the logits never exist as a whole.

A chunk of rows at a time becomes logits, which `torch_arithmetic` or `triton_arithmetic` reads and, in the backward,
where they are computed again, overwrites with their gradient. Legend of `torch_arithmetic`, and H: the hidden size,
C: the rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion

from mismatch_plugin.config.settings import LogProbBackend as Backend
from mismatch_plugin.log_probs.arguments import Call, Entropy, LogProbs, RaggedSamplingMask, checked_call
from mismatch_plugin.log_probs.backends import choose_arithmetic
from mismatch_plugin.log_probs.torch_arithmetic import default_block_rows

_CPU_CHUNK, _DEVICE_CHUNK = (2**22, 2**25), 2**27
"""Logits of a chunk if the caller does not choose: 2^15 a hidden unit on CPU, within 16 to 128 MiB of float32, for the
weight is read again for every chunk; 256 MiB of bfloat16 elsewhere."""

_WEIGHT_BLOCK = 2**24
"""Elements of the weight's gradient that one product makes before it is added in float32: 64 MiB."""


_MM_HAS_OUT_DTYPE = TorchVersion(torch.__version__) >= "2.8"
"""Without it the factors of that product are widened first."""


def vocab_parallel_linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    vocab_size: int | None = None,
    sampling_mask: RaggedSamplingMask | None = None,
    rows: Tensor | None = None,
    chunk_rows: int | None = None,
    backend: Backend = "auto",
) -> LogProbs:
    """`vocab_parallel_log_probs(hidden @ weight.T, targets, …)` without ever holding logits of more than a chunk.

    Memory of logits: chunk_rows · V · bytes of the hidden states' dtype, whatever T is, in forward and backward; kept
    in between are the inputs and three floats a target. Cost: a fourth product with the weight (logits, logits again
    in the backward, d hidden, d weight) where the path over whole logits has three.

    Args:
        hidden: [T, H] of the last norm, in bf16, fp16, fp32 or fp64; the same on every rank of `tp_group`, or with
            `sequence_parallel` this rank's [T / tp, H].
        weight: [V, H] this rank's rows of the head (or of the embedding that is tied to it), in the same dtype.
        targets, tp_group, temperature, entropy, vocab_size, sampling_mask: as in `vocab_parallel_log_probs`: targets
            are [T] ids, or [R] with `rows`. Hidden states of ignored targets should be finite: as in any linear layer,
            0 · NaN is NaN in the gradient of the weight.
        rows: [R] int64: targets[i] is predicted by hidden[rows[i]], of the gathered T rows. Others cost nothing; a row
            may be there more than once.
        sequence_parallel: hidden is sharded over `tp_group` along T: gathered here, its gradient reduce-scattered.
        chunk_rows: targets of a chunk. None: 2^15 · H logits on CPU (16 to 128 MiB in float32), elsewhere 2^27.
        backend: "auto", "torch" or "triton", as there.

    Returns `LogProbs(log_probs, entropy)`, [R] each, with the dtypes of `vocab_parallel_log_probs` on these logits:

        found = vocab_parallel_linear_log_probs(hidden, head.weight, tokens, entropy="grad", temperature=0.7)
        loss = -(advantages * found.log_probs).sum() - 1e-3 * found.entropy.sum()

    d hidden is in its dtype. d weight is summed in float32 (float64 for float64) over the chunks; where Megatron's DDP
    has given the weight a float32 `main_grad`, it is added there and `grad_added_to_main_grad` set, as Megatron's own
    fused accumulation does.
    Collectives: one all-gather of 4 floats a target in the forward; in the backward one SUM of d hidden, [R, H]. With
    `sequence_parallel` an all-gather of hidden in both, and a reduce-scatter of [T, H] for that SUM. Host syncs: none;
    with a ragged mask on a device each chunk's offsets are copied there from memory that is not pinned.
    Raises: as `vocab_parallel_log_probs`; ValueError for another library's backend.
    Source: chunked heads as in Liger Kernel (https://arxiv.org/abs/2410.10989) and Cut Cross-Entropy
        (https://arxiv.org/abs/2411.09009), here with entropy, sampling masks and Megatron's shards.
    """
    tp_size = 1 if tp_group is None else tp_group.size()
    width = weight.shape[:1].numel()
    call = checked_call(
        hidden, targets, name="hidden", tokens=hidden.shape[:1].numel() * (tp_size if sequence_parallel else 1),
        width=width, backend=backend, rows=rows, temperature=temperature, sampling_mask=sampling_mask,
        tp_group=tp_group, vocab_size=vocab_size, entropy=entropy, inplace_gradient=True,
        block_rows=default_block_rows(hidden, width),
    )  # fmt: skip
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend={backend!r} needs whole logits, which do not exist here: use auto, torch or triton.")
    if weight.ndim != 2 or weight.shape[1:] != hidden.shape[1:] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)} for {hidden.dtype} {list(hidden.shape)} hidden states: "
            f"[V, H] in the dtype of hidden [T, H] is needed."
        )
    if sequence_parallel and tp_group is None:
        raise ValueError("sequence_parallel=True has no group to gather over: pass tp_group.")
    elements = _DEVICE_CHUNK
    if hidden.device.type == "cpu":
        elements = min(max(2**15 * hidden.shape[1], _CPU_CHUNK[0]), _CPU_CHUNK[1])
    chunk_rows = chunk_rows or max(1, elements // max(1, width))
    arithmetic = choose_arithmetic(hidden, backend)
    shards = tp_group if sequence_parallel and tp_size > 1 else None
    return LogProbs(*LinearLogProbs.apply(hidden, weight, call, arithmetic, chunk_rows, shards))


class LinearLogProbs(torch.autograd.Function):
    """(log_probs [R], entropy [R] or None); gradients go to hidden states and weight.

    shards: the group over whose ranks the hidden states are sharded along T; None: they are whole.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, call: Call, arithmetic: Any, chunk_rows: int, shards: Any
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        statistics_4R = hidden_TH.new_empty((4, len(call.targets_R)), dtype=dtype)
        for chunk, logits_CV, _ in _chunks(_gathered(hidden_TH, shards), weight_VH, call, chunk_rows):
            statistics_4R[:, chunk] = arithmetic.local_statistics(arithmetic.prepare(logits_CV, call.part(chunk)))
        log_probs_R, entropy_R, shift_R, total_R = arithmetic.finish(call.gather(statistics_4R), call)
        call.save(ctx, entropy_R, hidden_TH, weight_VH, shift_R, total_R)
        ctx.arithmetic, ctx.chunk_rows, ctx.shards = arithmetic, chunk_rows, shards
        return log_probs_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # once_differentiable hides the names
        ctx: Any, *grads_R: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, *per_target = ctx.saved_tensors[:5]
        call: Call = ctx.call
        hidden_TH = _gathered(hidden_TH, ctx.shards)
        with_hidden, with_weight = ctx.needs_input_grad[:2]
        grad_RH = hidden_TH.new_empty((len(call.targets_R), hidden_TH.shape[1])) if with_hidden else None
        main_grad = _main_grad(weight_VH)
        total_VH = main_grad
        if with_weight and total_VH is None:
            total_VH = torch.zeros_like(weight_VH, dtype=per_target[0].dtype)
        for chunk, logits_CV, hidden_CH in _chunks(hidden_TH, weight_VH, call, ctx.chunk_rows):
            inputs = ctx.arithmetic.prepare(logits_CV, call.part(chunk))
            rows = [None if values_R is None else values_R[chunk] for values_R in (*per_target, *grads_R)]
            gradient_CV = ctx.arithmetic.gradient(inputs, *rows)  # in the place of the logits
            if grad_RH is not None:
                torch.mm(gradient_CV, weight_VH, out=grad_RH[chunk])
            if with_weight and total_VH is not None:
                _add_product(total_VH, gradient_CV, hidden_CH)
        grad_hidden = None if grad_RH is None else _reduced(grad_RH, hidden_TH, call, ctx.shards)
        grad_weight = None
        if with_weight and total_VH is not None:
            grad_weight = total_VH.to(weight_VH.dtype) if main_grad is None else _already_added(weight_VH)
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(hidden_TH: Tensor, weight_VH: Tensor, call: Call, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(targets, their logits [C, V], their hidden states [C, H]) of each chunk.

    All chunks have their logits in one buffer: they live until the next."""
    hidden_TH, weight_VH = hidden_TH.detach(), weight_VH.detach()
    count = len(call.targets_R)
    logits_SV = hidden_TH.new_empty((min(size, count), len(weight_VH)))
    for begin in range(0, count, size):
        chunk = slice(begin, min(begin + size, count))
        hidden_CH = hidden_TH[chunk] if call.rows_R is None else hidden_TH[call.rows_R[chunk]]
        yield chunk, torch.mm(hidden_CH, weight_VH.t(), out=logits_SV[: chunk.stop - begin]), hidden_CH


def _gathered(hidden_TH: Tensor, shards: dist.ProcessGroup | None) -> Tensor:
    """[T, H]: all of them, by an all-gather where they are sharded over the sequence."""
    if shards is None:
        return hidden_TH
    gathered_TH = hidden_TH.new_empty((len(hidden_TH) * shards.size(), hidden_TH.shape[1]))
    dist.all_gather_into_tensor(gathered_TH, hidden_TH.detach().contiguous(), group=shards)
    return gathered_TH


def _reduced(grad_RH: Tensor, hidden_TH: Tensor, call: Call, shards: dist.ProcessGroup | None) -> Tensor:
    """d hidden as the input was: summed over the shards of the vocabulary, and scattered where it was gathered."""
    if shards is None and call.tp_group is not None and call.tp_group.size() > 1:
        dist.all_reduce(grad_RH, group=call.tp_group)
    grad_TH = grad_RH if call.rows_R is None else torch.zeros_like(hidden_TH).index_add_(0, call.rows_R, grad_RH)
    if shards is None:
        return grad_TH
    scattered_TH = grad_TH.new_empty((len(grad_TH) // shards.size(), grad_TH.shape[1]))
    dist.reduce_scatter_tensor(scattered_TH, grad_TH, group=shards)
    return scattered_TH


def _main_grad(weight_VH: Tensor) -> Tensor | None:
    """Megatron's gradient buffer of a parameter, where gradients are to be added in float32."""
    main_grad = getattr(weight_VH, "main_grad", None)
    wide = isinstance(main_grad, Tensor) and main_grad.dtype in (torch.float32, torch.float64)
    return main_grad if wide and hasattr(weight_VH, "grad_added_to_main_grad") else None


def _already_added(weight_VH: Any) -> Tensor:
    """What Megatron's hooks want to see of a gradient that is in `main_grad`: zeros where autograd adds to it."""
    weight_VH.grad_added_to_main_grad = True
    # A tied embedding's own gradient is added to this one, and then counts (`zero_out_wgrad`).
    return torch.zeros_like(weight_VH) if getattr(weight_VH, "zero_out_wgrad", False) else torch.empty_like(weight_VH)


def _add_product(total_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
    """total += gradientᵀ · hidden with float32 sums, in blocks of the vocabulary so that no second [V, H] exists."""
    if total_VH.dtype == gradient_CV.dtype:
        total_VH.addmm_(gradient_CV.t(), hidden_CH)
        return
    for begin in range(0, len(total_VH), size := max(1, _WEIGHT_BLOCK // total_VH.shape[1])):
        block, left = total_VH[begin : begin + size], gradient_CV[:, begin : begin + size].t()
        if gradient_CV.is_cuda and _MM_HAS_OUT_DTYPE:
            block += torch.mm(left, hidden_CH, out_dtype=total_VH.dtype)
        else:
            block.addmm_(left.to(total_VH.dtype), hidden_CH.to(total_VH.dtype))
