"""The Triton kernels of `triton_arithmetic`; formulas, legend and edge cases are those of `torch_arithmetic`.

No atomics: equal inputs give equal bits. Indices of rows are int64, as T · V exceeds 2^31. `tl.fma` is written out,
where a rounding would cost digits of huge logits: whether the compiler fuses is one of its options. Nothing that
depends on the number of rows makes another variant of a kernel: not the count, nor where its few floats a row lie.
"""

# A kernel is written in Triton's language, whose types Python's checkers do not know.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from mismatch_plugin.log_probs.torch_arithmetic import ZERO_EXPONENT

LN2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
NEVER = tl.constexpr(ZERO_EXPONENT)

# Sizes and strides that need no variant of their own where they are 1 or a multiple of 16.
_ANY = ("targets_count", "vocab_start", "g_stride", "h_stride")


def _kernel(*per_row: str) -> Any:
    """`triton.jit`; `per_row` are the tensors whose alignment follows the number of rows."""
    return triton.jit(do_not_specialize=_ANY, do_not_specialize_on_alignment=per_row)


@triton.jit
def _clamped(z):
    """2^z is 0 below, and 0 · −inf would be NaN in its product with z. NaN stays NaN."""
    return tl.maximum(z, NEVER, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add_tile(x, unit, maximum, total, weighted, ENTROPY: tl.constexpr):
    """A tile x [N, L] more in the statistics [N] of its N lines. A line lies within one thread, so nothing waits."""
    before = maximum
    maximum = tl.maximum(before, tl.max(x, 1) * unit)
    moved = _clamped(before - maximum)
    scale = tl.exp2(moved)
    z = tl.fma(x, tl.zeros_like(x) + unit, tl.zeros_like(x) - maximum[:, None])
    if ENTROPY:
        z = _clamped(z)
        e = tl.exp2(z)
        weighted = scale * (weighted + moved * total) + tl.sum(e * z, 1)
    else:
        e = tl.exp2(z)
    total = scale * total + tl.sum(e, 1)
    return maximum, total, weighted


@triton.jit
def _add_alone(x, unit, condition, maximum, total):
    """The first logit x in statistics [N] that are empty: a filter's target counts once, whether it is kept or not."""
    first = (tl.arange(0, maximum.shape[0]) == 0) & condition
    maximum = tl.where(first, tl.maximum(maximum, x * unit), maximum)
    z = tl.where(first, _clamped(tl.fma(total + x, total + unit, -maximum)), NEVER)
    total = tl.exp2(z)
    return maximum, total, total * z


@_kernel("rows", "targets", "offsets", "statistics")
def statistics_kernel(
    logits, stride_t, rows, targets, unit, kept, offsets, statistics, targets_count, vocab_start, columns, width,
    ENTROPY: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """[4, R]: maximum·unit, Σ e, Σ e·z, the target's z; those of 1 certain token if it is ignored."""
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + i)
    if target >= 0:
        row = i
        if rows is not None:
            row = tl.load(rows + i)
        base = logits + row * stride_t
        target -= vocab_start
        owned = (target >= 0) & (target < columns)
        target_x = tl.load(base + target, mask=owned, other=-float("inf")).to(tl.float32)

        BLOCK: tl.constexpr = LINES * LINE
        j = tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
        maximum = tl.full([LINES], LOWEST, tl.float32)
        total = tl.zeros([LINES], tl.float32)
        weighted = tl.zeros([LINES], tl.float32)
        read = columns
        if offsets is not None:
            begin = tl.load(offsets + i)
            count = tl.load(offsets + i + 1) - begin
            read = tl.where(count > 0, 0, columns)
            maximum, total, weighted = _add_alone(target_x, unit, count > 0, maximum, total)
            for start in range(0, count, BLOCK):
                column = tl.load(kept + begin + start + j, mask=start + j < count, other=columns)
                inside = (column < columns) & (column != target)
                x = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
                maximum, total, weighted = _add_tile(x, unit, maximum, total, weighted, ENTROPY)
        # No condition in the main loop: the width of its loads hangs on the alignment of rows alone.
        whole = read // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            x = tl.load(base + (start + j)).to(tl.float32)
            maximum, total, weighted = _add_tile(x, unit, maximum, total, weighted, ENTROPY)
        if whole < read:
            # Padding is read with its neighbours: a limit at `width` keeps loads wide, one at `columns` would not.
            j += whole
            x = tl.load(base + j, mask=j < width, other=0.0).to(tl.float32)
            x = tl.where(j < columns, x, -float("inf"))
            maximum, total, weighted = _add_tile(x, unit, maximum, total, weighted, ENTROPY)

        highest = tl.max(maximum, 0)
        moved = _clamped(maximum - highest)
        scale = tl.exp2(moved)
        tl.store(statistics + i, highest)
        tl.store(statistics + targets_count + i, tl.sum(scale * total, 0))
        tl.store(statistics + 2 * targets_count + i, tl.sum(scale * (weighted + moved * total), 0))
        tl.store(statistics + 3 * targets_count + i, tl.where(owned, tl.fma(target_x, unit, -highest), -float("inf")))
    else:
        tl.store(statistics + i, 0.0)
        tl.store(statistics + targets_count + i, 1.0)
        tl.store(statistics + 2 * targets_count + i, 0.0)
        tl.store(statistics + 3 * targets_count + i, 0.0)


@_kernel("statistics", "targets", "log_probs", "entropy", "shift", "sums")
def finish_kernel(
    statistics, targets, log_probs, entropy, shift, sums, targets_count, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the statistics [P, 4, R] of all ranks: results, and the shift and Σ e of the whole vocabulary."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < targets_count
    computed = tl.load(targets + i, mask=inside, other=-1) >= 0
    highest = tl.full([BLOCK], LOWEST, tl.float32)
    for p in tl.static_range(RANKS):
        highest = tl.maximum(highest, tl.load(statistics + 4 * p * targets_count + i, mask=inside, other=0.0))
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    target = tl.full([BLOCK], -float("inf"), tl.float32)
    for p in tl.static_range(RANKS):
        at = statistics + 4 * p * targets_count + i
        far = tl.load(at, mask=inside, other=0.0) - highest
        moved = _clamped(far)
        scale = tl.exp2(moved)
        local_total = tl.load(at + targets_count, mask=inside, other=1.0)
        total += scale * local_total
        weighted += scale * (tl.load(at + 2 * targets_count, mask=inside, other=0.0) + moved * local_total)
        target = tl.maximum(target, tl.load(at + 3 * targets_count, mask=inside, other=0.0) + far)
    # Rounding may leave a certain token a hair above 0. Both comparisons leave NaN alone.
    value = (target - tl.log2(total)) * LN2
    tl.store(log_probs + i, tl.where(computed, tl.where(value > 0.0, 0.0, value), 0.0), mask=inside)
    if entropy is not None:
        value = (tl.log2(total) - tl.div_rn(weighted, total)) * LN2
        tl.store(entropy + i, tl.where(computed, tl.where(value < 0.0, 0.0, value), 0.0), mask=inside)
    tl.store(shift + i, highest, mask=inside)
    tl.store(sums + i, total, mask=inside)


@_kernel("shift", "sums", "entropy", "g", "h", "coefficients")
def coefficients_kernel(
    unit, shift, sums, entropy, g, g_stride, h, h_stride, coefficients, targets_count, BLOCK: tl.constexpr,
):  # fmt: skip
    """[R, 4]: shift, constant, slope, at_target: dL/dx_j = e·(constant + slope·z) + at_target·1[j = target].

    `g` and `h` are the gradients of log-prob and entropy.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < targets_count
    total = tl.load(sums + i, mask=inside, other=1.0)
    inverse_temperature = unit * LN2
    constant = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    at_target = tl.zeros([BLOCK], tl.float32)
    if g is not None:
        g_i = tl.load(g + i * g_stride, mask=inside, other=0.0)
        constant -= g_i
        at_target = g_i * inverse_temperature
    if h is not None:
        h_i = tl.load(h + i * h_stride, mask=inside, other=0.0)
        constant -= h_i * (tl.load(entropy + i, mask=inside, other=0.0) - LN2 * tl.log2(total))
        slope = tl.div_rn(-LN2 * h_i * inverse_temperature, total)
    constant = tl.div_rn(constant * inverse_temperature, total)
    coefficients += 4 * i
    tl.store(coefficients, tl.load(shift + i, mask=inside), mask=inside)
    tl.store(coefficients + 1, constant, mask=inside)
    tl.store(coefficients + 2, slope, mask=inside)
    tl.store(coefficients + 3, at_target, mask=inside)


@triton.jit
def _gradient(x, unit, coefficients, i, SLOPE: tl.constexpr):
    """Of the logits x [B] of row i, and what the target's has more."""
    coefficients += 4 * i
    shift = tl.load(coefficients)
    constant = tl.load(coefficients + 1)
    at_target = tl.load(coefficients + 3)
    none = tl.zeros_like(x)
    z = tl.fma(x, none + unit, none - shift)
    if SLOPE:
        z = _clamped(z)
        slope = tl.load(coefficients + 2)
        result = tl.exp2(z) * tl.fma(z, none + slope, none + constant)
    else:
        result = tl.exp2(z) * constant
    return result, at_target


@_kernel("target_of_row", "targets", "offsets", "coefficients")
def gradient_kernel(
    logits, stride_t, gradient, gradient_stride_t, target_of_row, targets, offsets, unit, coefficients, vocab_start,
    columns, width, SLOPE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dlogits, each element read and written once; rows with ragged ids get 0, for `kept_write_kernel` to fill.

    Instructions are what bounds it where memory is fast: only a program with the target or with padding looks for it.
    """
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    start = program % BLOCKS * BLOCK
    j = start + tl.arange(0, BLOCK)
    out = gradient + row * gradient_stride_t + j
    i = row
    if target_of_row is not None:
        i = tl.load(target_of_row + row)
    target = tl.load(targets + i, mask=i >= 0, other=-1)
    computed = target >= 0
    if offsets is not None:
        begin = tl.load(offsets + i, mask=i >= 0, other=0)
        computed = computed & (tl.load(offsets + i + 1, mask=i >= 0, other=0) == begin)
    if computed:
        # A limit at `width`, as in the forward.
        x = tl.load(logits + row * stride_t + j, mask=j < width, other=0.0)
        value, at_target = _gradient(x.to(tl.float32), unit, coefficients, i, SLOPE)
        result = value
        target -= vocab_start + start
        has_target = (target >= 0) & (target < BLOCK)
        if has_target | (start + BLOCK > columns):
            at = tl.arange(0, BLOCK) == tl.where(has_target, target, -1).to(tl.int32)
            result = tl.where(j < columns, tl.where(at, value + at_target, value), 0.0)
        tl.store(out, result.to(gradient.dtype.element_ty), mask=j < width)
    else:
        tl.store(out, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=j < width)


@_kernel("rows", "targets", "kept", "offsets", "coefficients", "values", "target_values")
def kept_gradient_kernel(
    logits, stride_t, rows, targets, kept, offsets, unit, coefficients, values, target_values, vocab_start, columns,
    SLOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient at the ragged ids [K] and the targets [R], before `gradient_kernel`, which may write in place."""
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + i)
    begin = tl.load(offsets + i)
    count = tl.load(offsets + i + 1) - begin
    if (target >= 0) & (count > 0):
        row = i
        if rows is not None:
            row = tl.load(rows + i)
        base = logits + row * stride_t
        target -= vocab_start
        for start in range(0, count, BLOCK):
            k = start + tl.arange(0, BLOCK)
            column = tl.load(kept + begin + k, mask=k < count, other=columns)
            x = tl.load(base + column, mask=column < columns, other=0.0).to(tl.float32)
            result, at_target = _gradient(x, unit, coefficients, i, SLOPE)
            result = tl.where(column == target, result + at_target, result)
            tl.store(values + begin + k, result.to(values.dtype.element_ty), mask=k < count)
        owned = (target >= 0) & (target < columns)
        x = tl.load(base + target, mask=owned, other=0.0).to(tl.float32)
        result, at_target = _gradient(x, unit, coefficients, i, SLOPE)
        tl.store(target_values + i, (result + at_target).to(values.dtype.element_ty))


@_kernel("rows", "targets", "kept", "offsets", "values", "target_values")
def kept_write_kernel(
    gradient, stride_t, rows, targets, kept, offsets, values, target_values, vocab_start, columns, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `kept_gradient_kernel` computed, to where it belongs: every element of the gradient at most once."""
    i = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + i)
    begin = tl.load(offsets + i)
    count = tl.load(offsets + i + 1) - begin
    if (target >= 0) & (count > 0):
        row = i
        if rows is not None:
            row = tl.load(rows + i)
        base = gradient + row * stride_t
        target -= vocab_start
        for start in range(0, count, BLOCK):
            k = start + tl.arange(0, BLOCK)
            column = tl.load(kept + begin + k, mask=k < count, other=columns)
            value = tl.load(values + begin + k, mask=k < count, other=0.0)
            tl.store(base + column, value, mask=(column < columns) & (column != target))
        tl.store(base + target, tl.load(target_values + i), mask=(target >= 0) & (target < columns))
