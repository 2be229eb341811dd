"""Log-probs and entropy from vocabulary-sharded logits: the arithmetic, in eager torch on CPU or CUDA.

The contract of every argument stands in `logits.vocab_parallel_log_probs`; nothing is validated here.

Legend: T rows of logits, R targets (R = T unless rows are picked), B rows of one block, V columns of this shard,
W of them inside the vocabulary, P ranks of the tensor-parallel group.

Everything is in base 2: e = 2^z with z = x·log2(e)/temperature − shift. So temperature and change of base are one
multiply-add, and `exp2` is the fastest exponential on CPU and GPU alike. `shift` is the scaled maximum, so z ≤ 0.
Logits of −inf are ordinary: probability 0. A NaN or +inf logit makes its own row NaN, unless that is ignored;
here also a logit that the sampling mask left out, at which the Triton kernels do not look.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor

from mismatch_plugin.log_probs.arguments import Call

ZERO_EXPONENT = -1e4
"""2^-1e4 is 0 in every dtype, while -1e4 · 0 is 0 where −inf · 0 would be NaN."""

_CPU_BLOCK = 2**16
"""Elements of a block on CPU: 256 KiB of float32, so that logits, exponents and exponentials stay in a core's cache."""

_DEVICE_BLOCK = 2**24
"""Elements of a block elsewhere: 64 MiB of float32, so that kernels outlast their launch."""


def default_block_rows(inputs: Tensor, width: int) -> int:
    """Rows of a block of so many columns if the caller does not choose."""
    elements = _CPU_BLOCK if inputs.device.type == "cpu" else _DEVICE_BLOCK
    return max(1, elements // max(1, width))


class Blocks:
    """Reads the logits by blocks: picked rows, columns inside the vocabulary, filtered, in the accumulation dtype."""

    def __init__(self, logits_TV: Tensor, call: Call) -> None:
        self.logits_TV, self.call = logits_TV.detach(), call
        self.count = len(call.targets_R)
        self.dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        """Of sums, results and everything per row."""
        self.ignored_R = call.targets_R < 0
        local_R = call.targets_R - call.vocab_start
        self.owned_R = (local_R >= 0) & (local_R < call.columns) & ~self.ignored_R
        self.target_column_R = torch.where(self.owned_R, local_R, 0)

        self.size = min(call.block_rows, max(1, self.count))
        self.scratch_BW = logits_TV.new_empty((self.size, call.columns), dtype=self.dtype)
        if (mask := call.sampling_mask) is not None:
            # One column more than there are: what belongs to other shards is written there, for want of a condition.
            self.penalty_BW1 = self.scratch_BW.new_empty((self.size, call.columns + 1))
            self.offsets: list[int] = mask.offsets.tolist()
            offsets_R1, self.row_K, self.column_K = mask.on_shard(call, elsewhere=call.columns)
            self.start_R1 = torch.where(offsets_R1.diff()[:, None] > 0, -math.inf, 0.0)
            self.sampled_R1 = torch.where(self.owned_R, self.target_column_R, call.columns)[:, None]

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """[R, …] by blocks: views made all at once, which on CPU would otherwise cost as much as what is computed."""
        return values.split(self.size)

    def exponents(self, negative_shift_R1: Tensor, of_maxima: bool = False) -> Iterator[Tensor]:
        """z = x·unit − shift [B, W] of every block, in `scratch_BW`.

        of_maxima: the shift is each row's scaled maximum, found here and written, negated, to negative_shift_R1.
        """
        unit = self.call.unit
        for x_BW, shift_B1 in zip(self._logits(), self.split(negative_shift_R1), strict=True):
            if of_maxima:  # finite even where every logit is −inf: −inf − (−inf) would be NaN
                torch.amax(x_BW, -1, keepdim=True, out=shift_B1).mul_(-unit).clamp_max_(torch.finfo(self.dtype).max)
            # One fused multiply-add: differences are exact even for huge logits.
            yield torch.add(shift_B1, x_BW, alpha=unit, out=self.scratch_BW[: len(x_BW)])

    def target_exponents(self, negative_shift_R: Tensor) -> Tensor:
        """[R]: the target's z, −inf where another shard owns it."""
        row_R = self.call.rows_R
        if row_R is None:
            row_R = torch.arange(self.count, device=self.logits_TV.device)
        x_R = self.logits_TV[row_R, self.target_column_R].to(self.dtype)
        return torch.where(self.owned_R, torch.add(negative_shift_R, x_R, alpha=self.call.unit), -math.inf)

    def _logits(self) -> Iterator[Tensor]:
        """[B, W] in the accumulation dtype, −inf where filtered: views of the logits where that will do."""
        columns, rows_R = self.call.columns, self.call.rows_R
        if rows_R is None:
            parts = iter(self.split(self.logits_TV[:, :columns]))
        else:
            picked_BV = self.logits_TV.new_empty((self.size, self.logits_TV.shape[1]))
            parts = (
                torch.index_select(self.logits_TV, 0, row_B, out=picked_BV[: len(row_B)])[:, :columns]
                for row_B in self.split(rows_R)
            )
        begin = 0
        for x_BW in parts:
            scratch_BW = self.scratch_BW[: len(x_BW)]
            if x_BW.dtype != self.dtype:
                x_BW = scratch_BW.copy_(x_BW)
            if self.call.sampling_mask is not None:
                x_BW = torch.add(x_BW, self._penalty(begin, begin + len(x_BW)), out=scratch_BW)
                begin += len(x_BW)
            yield x_BW

    def _penalty(self, begin: int, end: int) -> Tensor:
        """[B, W] of these targets: 0 for kept columns, −inf for the others. The sampled id is always kept."""
        penalty_BW1 = self.penalty_BW1[: end - begin].copy_(self.start_R1[begin:end])
        ids = slice(self.offsets[begin], self.offsets[end])
        flat = (self.row_K[ids] - begin) * penalty_BW1.shape[1] + self.column_K[ids]
        penalty_BW1.view(-1).index_fill_(0, flat, 0.0)
        return penalty_BW1.scatter_(1, self.sampled_R1[begin:end], 0.0)[:, :-1]

    def select(self, values_R: Tensor) -> Tensor:
        """The values, 0 at ignored targets whatever stood there (NaN included)."""
        return torch.where(self.ignored_R, 0.0, values_R)


prepare = Blocks
"""As `triton_arithmetic.prepare`: what the functions below read."""


def local_statistics(blocks: Blocks) -> Tensor:
    """[4, R] of this shard: maximum·unit, Σ e, Σ e·z and the target's z (−inf where another shard owns it)."""
    with_entropy = blocks.call.entropy != "none"
    statistics_4R = blocks.scratch_BW.new_zeros((4, blocks.count))
    maximum_R, total_R, weighted_R, target_R = statistics_4R.unbind(0)
    if blocks.call.columns == 0:  # all of it is padding
        maximum_R.fill_(torch.finfo(blocks.dtype).min)
        target_R.fill_(-math.inf)
        return statistics_4R
    exp_BW = torch.empty_like(blocks.scratch_BW) if with_entropy else blocks.scratch_BW
    z_blocks = blocks.exponents(maximum_R[:, None], of_maxima=True)
    for z_BW, total_B, weighted_B in zip(z_blocks, blocks.split(total_R), blocks.split(weighted_R), strict=True):
        if with_entropy:
            e_BW = torch.exp2(z_BW.clamp_min_(ZERO_EXPONENT), out=exp_BW[: len(z_BW)])
            torch.sum(e_BW, -1, out=total_B)
            torch.sum(z_BW.mul_(e_BW), -1, out=weighted_B)
        else:
            torch.sum(z_BW.exp2_(), -1, out=total_B)
    target_R.copy_(blocks.target_exponents(maximum_R))
    maximum_R.neg_()
    return statistics_4R


def finish(statistics_P4R: Tensor, call: Call) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(log_probs, entropy, shift, Σ e), each [R], of the whole vocabulary: the same bits on every rank."""
    shift_R, total_R, weighted_R, target_R = _combine(statistics_P4R)
    log2_total_R, ignored_R = total_R.log2(), call.targets_R < 0

    def select(bits_R: Tensor) -> Tensor:
        return torch.where(ignored_R, 0.0, bits_R * math.log(2))

    # Rounding may leave a certain token a hair above 0.
    log_probs_R = select(target_R - log2_total_R).clamp_max_(0.0)
    entropy_R = None
    if call.entropy != "none":
        entropy_R = select(log2_total_R - weighted_R / total_R).clamp_min_(0.0)
    return log_probs_R, entropy_R, shift_R, total_R


def _combine(statistics_P4R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The statistics of the whole vocabulary."""
    if len(statistics_P4R) == 1:
        maximum_R, total_R, weighted_R, target_R = statistics_P4R[0].unbind(0)
        return maximum_R, total_R, weighted_R, target_R
    maximum_PR, total_PR, weighted_PR, target_PR = statistics_P4R.unbind(1)
    maximum_R = maximum_PR.amax(0)
    moved_PR = maximum_PR - maximum_R
    target_R = (target_PR + moved_PR).amax(0)
    scale_PR = moved_PR.exp2()
    total_R = (scale_PR * total_PR).sum(0)
    weighted_R = (scale_PR * (weighted_PR + moved_PR * total_PR)).sum(0)
    return maximum_R, total_R, weighted_R, target_R


def gradient(
    blocks: Blocks,
    shift_R: Tensor,
    total_R: Tensor,
    entropy_R: Tensor | None,
    grad_log_probs_R: Tensor | None,
    grad_entropy_R: Tensor | None,
) -> Tensor:
    """dL/dlogits [T, V] in the logits' dtype, each block written once.

    With g and h the gradients of log-prob and entropy H, dL/dlogit_j is 1 / temperature times
        g·(1[j = target] − p_j) − h·p_j·(ln p_j + H).
    As p = e / total and ln p = ln2·(z − log2 total), that is e·(constant + slope·z), plus g at the target.
    """
    logits_TV, columns, rows_R = blocks.logits_TV, blocks.call.columns, blocks.call.rows_R
    inverse_temperature = 1.0 / blocks.call.temperature
    g_R = torch.zeros_like(total_R) if grad_log_probs_R is None else blocks.select(grad_log_probs_R.to(blocks.dtype))
    constant_R, slope_R = -g_R, None
    if grad_entropy_R is not None and entropy_R is not None:
        h_R = blocks.select(grad_entropy_R.to(blocks.dtype))
        constant_R = constant_R - h_R * (entropy_R - math.log(2) * total_R.log2())
        slope_R = -math.log(2) * h_R * inverse_temperature / total_R
    constant_R = constant_R * inverse_temperature / total_R
    at_target_R = torch.where(blocks.owned_R, g_R * inverse_temperature, 0.0)
    # All bits of a computed row, none of an ignored one: NaN · 0 would be NaN, and `where` is ten times slower.
    bits = torch.int64 if blocks.dtype == torch.float64 else torch.int32
    computed_bits_R = torch.where(blocks.ignored_R, 0, -1).to(bits)

    gradient_TV = logits_TV if blocks.call.inplace_gradient else torch.empty_like(logits_TV)
    direct = rows_R is None and logits_TV.dtype == blocks.dtype
    exp_BW = blocks.scratch_BW if slope_R is None else torch.empty_like(blocks.scratch_BW)

    outs = blocks.split(gradient_TV[:, :columns]) if rows_R is None else blocks.split(rows_R)
    per_row = (values_R[:, None] for values_R in (constant_R, at_target_R, blocks.target_column_R, computed_bits_R))
    slopes = repeat(None) if slope_R is None else blocks.split(slope_R[:, None])
    z_blocks = blocks.exponents(-shift_R[:, None]) if columns else ()
    for z_BW, out, slope_B1, constant_B1, at_target_B1, column_B1, computed_bits_B1 in zip(
        z_blocks, outs, slopes, *(blocks.split(values_R1) for values_R1 in per_row), strict=False
    ):
        result_BW = out if direct else z_BW
        if slope_B1 is None:
            torch.mul(z_BW.exp2_(), constant_B1, out=result_BW)
        else:
            e_BW = torch.exp2(z_BW.clamp_min_(ZERO_EXPONENT), out=exp_BW[: len(z_BW)])
            torch.mul(e_BW, z_BW.mul_(slope_B1).add_(constant_B1), out=result_BW)
        result_BW.scatter_(1, column_B1, result_BW.gather(1, column_B1).add_(at_target_B1))
        result_BW.view(bits).bitwise_and_(computed_bits_B1)
        if rows_R is not None:
            gradient_TV[:, :columns].index_copy_(0, out, result_BW.to(logits_TV.dtype))
        elif not direct:
            out.copy_(result_BW)

    gradient_TV[:, columns:].zero_()
    if rows_R is not None:
        # The rows are distinct, so that the number of the others is known.
        picked_T = torch.zeros(len(logits_TV), dtype=torch.uint8, device=logits_TV.device)
        order_T = picked_T.index_fill_(0, rows_R, 1).argsort()
        gradient_TV.index_fill_(0, order_T[: len(logits_TV) - blocks.count], 0.0)
    return gradient_TV
