"""Log-probs and entropy from vocabulary-sharded logits: the arithmetic of `torch_arithmetic` in Triton, for CUDA.

Arguments, results, dtypes, edge cases, the one all-gather and the legend are those of `torch_arithmetic`. Also:

* Bytes: the forward reads each logit once, the backward reads it once and writes its gradient once: 2 + 4 bytes a logit
  in bf16, entropy included. Rows of ignored targets and rows that were not picked are not read: only their gradient of
  zero is written. Of a row with ragged ids only those ids are read.
* Memory: the gradient and a few floats a target; with ragged ids 4 bytes an id more, and about 40 for a moment.
* Launches: two in the forward and two in the backward, whatever T and V are; some tiny ones more for picked rows and
  for ragged ids.

A row is never split among programs. One program reads 131072 columns in some tens of microseconds: with few rows the
call costs no more than its launches, and with many the device is full.

Without a GPU the kernels run in Triton's interpreter, where TRITON_INTERPRET=1 was set before Triton was imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mismatch_plugin.log_probs import triton_kernels
from mismatch_plugin.log_probs.arguments import Call

kernels: Any = triton_kernels  # A launch has other arguments than the kernel's signature says.

INTERPRETED = not isinstance(kernels.statistics_kernel, triton.JITFunction)
"""Whether the kernels run on the CPU, by Triton's interpreter."""

_VECTOR_BYTES = 16
"""The widest load of a thread: one line of a tile of `statistics_kernel`."""

FORWARD_BLOCK, BACKWARD_BLOCK = 8192, 4096
"""Columns that a program has in hand: enough loads on the way to hide their latency, few enough registers that several
programs share a multiprocessor (in bf16: 40 to 48 a thread)."""

MOST_WARPS = 8

_ROW_BLOCK = 256
"""Targets of one program in the kernels that see a few floats of each."""

_KEPT_BLOCK = 512
"""Ragged ids that a program has in hand."""

_NO_COLUMN = 2**31 - 1

FUSION = True
"""Products and sums that may become one instruction do: left out, it would depend on the release of Triton."""


class Inputs(NamedTuple):
    """What the kernels read, prepared on the device."""

    logits_TV: Tensor
    call: Call
    kept_K: Tensor | None
    """int32 columns of this shard, ascending in a row; what is elsewhere, or there already, is `_NO_COLUMN`."""
    offsets_R1: Tensor | None


def prepare(logits_TV: Tensor, call: Call) -> Inputs:
    """What the kernels want of a call. Host syncs: none."""
    if call.sampling_mask is None:
        return Inputs(logits_TV.detach(), call, None, None)
    offsets_R1, target_K, column_K = call.sampling_mask.on_shard(call, elsewhere=_NO_COLUMN)
    # Sorted, as an id that is there twice must count once.
    sorted_K = target_K.mul_(_NO_COLUMN + 1).add_(column_K).sort().values
    kept_K = (sorted_K & _NO_COLUMN).to(torch.int32)
    kept_K[1:].masked_fill_(sorted_K[1:] == sorted_K[:-1], _NO_COLUMN)
    return Inputs(logits_TV.detach(), call, kept_K, offsets_R1)


def local_statistics(inputs: Inputs) -> Tensor:
    """[4, R] of this shard: maximum·unit, Σ e, Σ e·z (0 if the entropy is not asked for) and the target's z."""
    logits_TV, call = inputs.logits_TV, inputs.call
    targets_R, rows_R = call.targets_R, call.rows_R
    statistics_4R = logits_TV.new_empty((4, len(targets_R)), dtype=torch.float32)
    if len(targets_R) == 0:
        return statistics_4R
    line = _VECTOR_BYTES // logits_TV.element_size()
    block = min(FORWARD_BLOCK, max(32 * line, triton.next_power_of_2(call.columns)))
    with torch.cuda.device_of(logits_TV):
        kernels.statistics_kernel[(len(targets_R),)](
            logits_TV, logits_TV.stride(0), rows_R, targets_R, call.unit, inputs.kept_K, inputs.offsets_R1,
            statistics_4R, len(targets_R), call.vocab_start, call.columns, logits_TV.shape[1],
            ENTROPY=call.entropy != "none", LINES=block // line, LINE=line, num_warps=_warps(block),
            enable_fp_fusion=FUSION,
        )  # fmt: skip
    return statistics_4R


def finish(statistics_P4R: Tensor, call: Call) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(log_probs, entropy, shift, Σ e), each [R], of the whole vocabulary: the same bits on every rank."""
    targets_R = call.targets_R
    log_probs_R, shift_R, total_R = statistics_P4R.new_empty((3, len(targets_R))).unbind(0)
    entropy_R = None if call.entropy == "none" else torch.empty_like(log_probs_R)
    if len(targets_R):
        with torch.cuda.device_of(statistics_P4R):
            kernels.finish_kernel[(triton.cdiv(len(targets_R), _ROW_BLOCK),)](
                statistics_P4R, targets_R, log_probs_R, entropy_R, shift_R, total_R, len(targets_R),
                RANKS=len(statistics_P4R), BLOCK=_ROW_BLOCK, enable_fp_fusion=FUSION,
            )  # fmt: skip
    return log_probs_R, entropy_R, shift_R, total_R


def gradient(
    inputs: Inputs,
    shift_R: Tensor,
    total_R: Tensor,
    entropy_R: Tensor | None,
    grad_log_probs_R: Tensor | None,
    grad_entropy_R: Tensor | None,
) -> Tensor:
    """dL/dlogits [T, V] of this shard in the logits' dtype, in a new tensor or in the logits' own storage."""
    logits_TV, call = inputs.logits_TV, inputs.call
    targets_R, rows_R = call.targets_R, call.rows_R
    gradient_TV = logits_TV if call.inplace_gradient else torch.empty_like(logits_TV)
    (tokens, width), count = logits_TV.shape, len(targets_R)
    if tokens == 0 or width == 0:
        return gradient_TV
    coefficients_R4 = shift_R.new_empty((count, 4))
    with_slope = grad_entropy_R is not None
    target_of_row_T = values_K = target_values_R = None
    if rows_R is not None:
        target_of_row_T = torch.full((tokens,), -1, device=logits_TV.device)
        target_of_row_T.index_copy_(0, rows_R, torch.arange(count, device=logits_TV.device))
    with torch.cuda.device_of(logits_TV):
        if count:
            kernels.coefficients_kernel[(triton.cdiv(count, _ROW_BLOCK),)](
                call.unit, shift_R, total_R, entropy_R,
                grad_log_probs_R, 0 if grad_log_probs_R is None else grad_log_probs_R.stride(0),
                grad_entropy_R, 0 if grad_entropy_R is None else grad_entropy_R.stride(0),
                coefficients_R4, count, BLOCK=_ROW_BLOCK, enable_fp_fusion=FUSION,
            )  # fmt: skip
        if inputs.kept_K is not None and count:
            values_K, target_values_R = logits_TV.new_empty(len(inputs.kept_K)), logits_TV.new_empty(count)
            kernels.kept_gradient_kernel[(count,)](
                logits_TV, logits_TV.stride(0), rows_R, targets_R, inputs.kept_K, inputs.offsets_R1, call.unit,
                coefficients_R4, values_K, target_values_R, call.vocab_start, call.columns,
                SLOPE=with_slope, BLOCK=_KEPT_BLOCK, enable_fp_fusion=FUSION,
            )  # fmt: skip
        block = min(BACKWARD_BLOCK, max(256, triton.next_power_of_2(width)))
        blocks = triton.cdiv(width, block)
        kernels.gradient_kernel[(tokens * blocks,)](
            logits_TV, logits_TV.stride(0), gradient_TV, gradient_TV.stride(0), target_of_row_T, targets_R,
            inputs.offsets_R1, call.unit, coefficients_R4, call.vocab_start, call.columns, width,
            SLOPE=with_slope, BLOCKS=blocks, BLOCK=block, num_warps=_warps(block), enable_fp_fusion=FUSION,
        )  # fmt: skip
        if values_K is not None:
            kernels.kept_write_kernel[(count,)](
                gradient_TV, gradient_TV.stride(0), rows_R, targets_R, inputs.kept_K, inputs.offsets_R1,
                values_K, target_values_R, call.vocab_start, call.columns, BLOCK=_KEPT_BLOCK,
                enable_fp_fusion=FUSION,
            )  # fmt: skip
    return gradient_TV


def _warps(block: int) -> int:
    """16 columns a thread, more where that would be more than `MOST_WARPS`."""
    return max(1, min(MOST_WARPS, block // 512))
