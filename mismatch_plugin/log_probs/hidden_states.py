"""Log-probs and entropy from hidden states and the head's weight: the logits never exist as a whole.

A chunk of rows at a time becomes logits, which `torch_arithmetic` or `triton_arithmetic` reads and, in the backward,
where they are computed again, overwrites with their gradient. Legend of `torch_arithmetic`, and H: the hidden size,
C: the rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion

from mismatch_plugin.config.settings import LogProbBackend as Backend
from mismatch_plugin.log_probs.arguments import (
    Entropy,
    Layout,
    LogProbs,
    RaggedSamplingMask,
    check_choice,
    check_devices,
    check_rows,
    check_sampling_mask,
    check_tensors,
    checked_backend,
    checked_temperature,
    declare_outputs,
    gather_statistics,
    keep_arguments,
    kept_arguments,
    shard,
)
from mismatch_plugin.log_probs.backends import choose_arithmetic
from mismatch_plugin.log_probs.torch_arithmetic import default_block_rows

CPU_CHUNK, DEVICE_CHUNK = 2**22, 2**27
"""Logits of a chunk if the caller does not choose: 16 MiB of float32 on CPU, 256 MiB of bfloat16 elsewhere."""

_WEIGHT_BLOCK = 2**24
"""Elements of the weight's gradient that one product makes before it is added in float32: 64 MiB."""


_MM_HAS_OUT_DTYPE = TorchVersion(torch.__version__) >= "2.8"
"""Without it the factors of that product are widened first."""


@dataclass(frozen=True, eq=False)
class Head:
    """What a call fixes next to its tensors."""

    layout: Layout
    arithmetic: Any
    chunk_rows: int
    sequence_parallel: bool


def vocab_parallel_linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    sampling_mask: Tensor | RaggedSamplingMask | None = None,
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
        targets, tp_group, temperature, entropy, vocab_size, vocab_start, sampling_mask: as in
            `vocab_parallel_log_probs`: targets are [T] ids, or [R] with `rows`. Hidden states of ignored targets should
            be finite: as in any linear layer, 0 · NaN is NaN in the gradient of the weight.
        rows: [R] int64: targets[i] is predicted by hidden[rows[i]], of the gathered T rows. Others cost nothing; a row
            may be there more than once.
        sequence_parallel: hidden is sharded over `tp_group` along T: gathered here, its gradient reduce-scattered.
        chunk_rows: targets of a chunk. None: 2^22 logits on CPU (16 MiB in float32), 2^27 elsewhere (256 MiB in bf16).
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
    tp_rank, tp_size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    check_choice("entropy", entropy, get_args(Entropy))
    if (backend := checked_backend(backend)) not in ("auto", "torch", "triton"):
        raise ValueError(f"backend={backend!r} needs whole logits, which do not exist here: use auto, torch or triton.")
    tokens = hidden.shape[:1].numel() * (tp_size if sequence_parallel else 1)
    check_tensors(hidden, targets, rows, tokens, "hidden", "H")
    check_rows(rows, tokens, distinct=False)  # their gradients are added
    if weight.ndim != 2 or weight.shape[1:] != hidden.shape[1:] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)} for {hidden.dtype} {list(hidden.shape)} hidden states: "
            f"[V, H] in the dtype of hidden [T, H] is needed."
        )
    if sequence_parallel and tp_group is None:
        raise ValueError("sequence_parallel=True has no group to gather over: pass tp_group.")
    sequence_parallel = sequence_parallel and tp_size > 1
    temperature = checked_temperature(temperature, targets)
    check_devices(
        hidden,
        "hidden",
        weight=weight,
        targets=targets,
        rows=rows,
        temperature=temperature,
        sampling_mask=sampling_mask,
    )
    width = len(weight)
    start, columns = shard(width, vocab_size, vocab_start, tp_rank, tp_size)
    check_sampling_mask(sampling_mask, width, targets)
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows} must be at least 1: leave it out for the default.")
    elements = CPU_CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK
    head = Head(
        Layout(tp_group, start, columns, entropy, True, default_block_rows(weight.new_empty(0, width))),
        choose_arithmetic(hidden, backend),
        chunk_rows or max(1, elements // max(1, width)),
        sequence_parallel,
    )
    return LogProbs(*LinearLogProbs.apply(hidden, weight, targets, rows, temperature, sampling_mask, head))


class LinearLogProbs(torch.autograd.Function):
    """(log_probs [R], entropy [R] or None); gradients go to hidden states and weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        rows_R: Tensor | None,
        temperature: float | Tensor,
        sampling_mask: Tensor | RaggedSamplingMask | None,
        head: Head,
    ) -> tuple[Tensor, Tensor | None]:
        arithmetic, layout = head.arithmetic, head.layout
        targets_R = targets_R.contiguous()
        chunks = _Chunks(_gathered(hidden_TH, head), weight_VH, targets_R, rows_R, temperature, sampling_mask, head)
        dtype = torch.float64 if hidden_TH.dtype == torch.float64 else torch.float32
        statistics_4R = hidden_TH.new_empty((4, len(targets_R)), dtype=dtype)
        for chunk, _, logits_CV in chunks:
            statistics_4R[:, chunk] = arithmetic.local_statistics(chunks.inputs(chunk, logits_CV))
        statistics_P4R = gather_statistics(statistics_4R, layout.tp_group)
        log_probs_R, entropy_R, shift_R, total_R = arithmetic.finish(
            statistics_P4R, targets_R, layout.entropy != "none"
        )

        kept_entropy_R = entropy_R if layout.entropy == "grad" else None
        temperature_R, mask = keep_arguments(ctx, temperature, sampling_mask)
        ctx.save_for_backward(
            hidden_TH, weight_VH, targets_R, rows_R, temperature_R, mask, shift_R, total_R, kept_entropy_R
        )
        ctx.head = head
        declare_outputs(ctx, entropy_R, layout)
        return log_probs_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # once_differentiable hides the names
        ctx: Any, grad_log_probs_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_R, rows_R, temperature_R, mask, shift_R, total_R, entropy_R = ctx.saved_tensors
        head: Head = ctx.head
        temperature, sampling_mask = kept_arguments(ctx, temperature_R, mask)
        hidden_TH = _gathered(hidden_TH, head)
        chunks = _Chunks(hidden_TH, weight_VH, targets_R, rows_R, temperature, sampling_mask, head)
        if entropy_R is None:
            grad_entropy_R = None
        with_hidden, with_weight = ctx.needs_input_grad[:2]
        grad_RH = hidden_TH.new_empty((len(targets_R), hidden_TH.shape[1])) if with_hidden else None
        main_grad = _main_grad(weight_VH)
        total_VH = main_grad
        if with_weight and total_VH is None:
            total_VH = torch.zeros_like(weight_VH, dtype=shift_R.dtype)
        for chunk, hidden_CH, logits_CV in chunks:

            def part(values_R: Tensor | None, chunk: slice = chunk) -> Tensor | None:
                return None if values_R is None else values_R[chunk]

            gradient_CV = head.arithmetic.gradient(
                chunks.inputs(chunk, logits_CV), shift_R[chunk], total_R[chunk], part(entropy_R),
                part(grad_log_probs_R), part(grad_entropy_R),
            )  # fmt: skip
            if grad_RH is not None:
                torch.mm(gradient_CV, weight_VH, out=grad_RH[chunk])
            if with_weight and total_VH is not None:
                _add_product(total_VH, gradient_CV, hidden_CH)
        grad_hidden = None if grad_RH is None else _reduced(grad_RH, hidden_TH, rows_R, head)
        grad_weight = None
        if with_weight and total_VH is not None:
            grad_weight = total_VH.to(weight_VH.dtype) if main_grad is None else _already_added(weight_VH)
        return grad_hidden, grad_weight, None, None, None, None, None


class _Chunks:
    """Chunks of targets with their hidden states and logits, in buffers that every chunk uses again."""

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        rows_R: Tensor | None,
        temperature: float | Tensor,
        sampling_mask: Tensor | RaggedSamplingMask | None,
        head: Head,
    ) -> None:
        self.hidden_TH, self.weight_VH = hidden_TH.detach(), weight_VH.detach()
        self.targets_R, self.rows_R, self.temperature, self.head = targets_R, rows_R, temperature, head
        self.sampling_mask = sampling_mask
        self.offsets = sampling_mask.offsets.tolist() if isinstance(sampling_mask, RaggedSamplingMask) else None

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(targets, hidden states [C, H], logits [C, V]) of each chunk. The logits live until the next."""
        count, size = len(self.targets_R), self.head.chunk_rows
        logits_SV = self.hidden_TH.new_empty((min(size, count), len(self.weight_VH)))
        for begin in range(0, count, size):
            chunk = slice(begin, min(begin + size, count))
            hidden_CH = self.hidden_TH[chunk] if self.rows_R is None else self.hidden_TH[self.rows_R[chunk]]
            logits_CV = logits_SV[: chunk.stop - chunk.start]
            yield chunk, hidden_CH, torch.mm(hidden_CH, self.weight_VH.t(), out=logits_CV)

    def inputs(self, chunk: slice, logits_CV: Tensor) -> Any:
        """What the arithmetic reads of this chunk."""
        temperature, mask = self.temperature, self.sampling_mask
        if isinstance(temperature, Tensor):
            temperature = temperature[chunk]
        if isinstance(mask, RaggedSamplingMask) and self.offsets is not None:
            first, last = self.offsets[chunk.start], self.offsets[chunk.stop]
            mask = RaggedSamplingMask(mask.token_ids[first:last], mask.offsets[chunk.start : chunk.stop + 1] - first)
        elif isinstance(mask, Tensor):
            mask = mask[chunk]
        prepare, layout = self.head.arithmetic.prepare, self.head.layout
        return prepare(logits_CV, self.targets_R[chunk], None, temperature, mask, layout)


def _gathered(hidden_TH: Tensor, head: Head) -> Tensor:
    """[T, H]: all of them, by an all-gather where they are sharded over the sequence."""
    if not head.sequence_parallel or head.layout.tp_group is None:
        return hidden_TH
    gathered_TH = hidden_TH.new_empty((len(hidden_TH) * head.layout.tp_group.size(), hidden_TH.shape[1]))
    dist.all_gather_into_tensor(gathered_TH, hidden_TH.detach().contiguous(), group=head.layout.tp_group)
    return gathered_TH


def _reduced(grad_RH: Tensor, hidden_TH: Tensor, rows_R: Tensor | None, head: Head) -> Tensor:
    """d hidden as the input was: summed over the shards of the vocabulary, and scattered where it was gathered."""
    group = head.layout.tp_group
    if group is not None and group.size() > 1 and not head.sequence_parallel:
        dist.all_reduce(grad_RH, group=group)
    grad_TH = grad_RH if rows_R is None else torch.zeros_like(hidden_TH).index_add_(0, rows_R, grad_RH)
    if group is None or not head.sequence_parallel:
        return grad_TH
    scattered_TH = grad_TH.new_empty((len(grad_TH) // group.size(), grad_TH.shape[1]))
    dist.reduce_scatter_tensor(scattered_TH, grad_TH, group=group)
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
    for begin in range(0, len(total_VH), size := max(1, _WEIGHT_BLOCK // max(1, total_VH.shape[1]))):
        block, left = total_VH[begin : begin + size], gradient_CV[:, begin : begin + size].t()
        if gradient_CV.is_cuda and _MM_HAS_OUT_DTYPE:
            block += torch.mm(left, hidden_CH, out_dtype=total_VH.dtype)
        else:
            block.addmm_(left.to(total_VH.dtype), hidden_CH.to(total_VH.dtype))
