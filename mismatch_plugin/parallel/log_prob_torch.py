"""Log-probs and entropy from vocabulary-sharded logits: the arithmetic, in eager torch on CPU or CUDA.

The door, with the contract of every argument, is `log_probs.vocab_parallel_log_probs`; nothing is validated here.

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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

ZERO_EXPONENT = -1e4
"""2^-1e4 is 0 in every dtype, while -1e4 · 0 is 0 where −inf · 0 would be NaN."""

_CPU_BLOCK = 2**20
"""Elements of a block on CPU: 4 MiB of float32: small enough for the cache, large enough to hide the calls."""

_DEVICE_BLOCK = 2**24
"""Elements of a block elsewhere: 64 MiB of float32, so that kernels outlast their launch."""

OVERWRITTEN = (
    "inplace_gradient=True has overwritten the logits with their gradient in the first backward: a second backward "
    "through the same log-probs needs inplace_gradient=False."
)


@dataclass(frozen=True, eq=False)
class RaggedSamplingMask:
    """The token ids that the sampler's filters (top-p, top-k, min-p) left to choose from, for each target.

    token_ids: [K] int64 or int32, global ids, on the device of the logits; target i's are [offsets[i], offsets[i + 1]).
    offsets: [R + 1] int64 on the *CPU* (pin it to copy it asynchronously): the host slices by it, so reading it from a
        device would be a host sync. A target without ids was sampled unfiltered.
    """

    token_ids: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """What a call fixes next to its tensors."""

    tp_group: dist.ProcessGroup | None
    vocab_start: int
    """Global id of this shard's first column."""
    columns: int
    """W: the leading columns of this shard that are inside the vocabulary; the rest is padding."""
    entropy: str
    inplace_gradient: bool
    block_rows: int


def default_block_rows(logits_TV: Tensor) -> int:
    """Rows of a block if the caller does not choose."""
    elements = _CPU_BLOCK if logits_TV.device.type == "cpu" else _DEVICE_BLOCK
    return max(1, elements // max(1, logits_TV.shape[1]))


class VocabParallelLogProbs(torch.autograd.Function):
    """(log_probs [R], entropy [R] or None); the gradient goes to the logits only. Collectives: one all-gather forward.

    Keeps the inputs (no copies) and three floats a target; the exponentials are computed again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_R: Tensor,
        rows_R: Tensor | None,
        temperature: float | Tensor,
        sampling_mask: Tensor | RaggedSamplingMask | None,
        layout: Layout,
    ) -> tuple[Tensor, Tensor | None]:
        blocks = _Blocks(logits_TV, targets_R, rows_R, temperature, sampling_mask, layout)
        with_entropy = layout.entropy != "none"
        shift_R, total_R, weighted_R, target_R = _combine(_local_statistics(blocks, with_entropy), layout.tp_group)
        log2_total_R = total_R.log2()
        # Rounding may leave a certain token a hair above 0.
        log_probs_R = blocks.select((target_R - log2_total_R) * math.log(2)).clamp_max_(0.0)
        entropy_R = None
        if with_entropy:
            entropy_R = blocks.select((log2_total_R - weighted_R / total_R) * math.log(2)).clamp_min_(0.0)

        ragged = isinstance(sampling_mask, RaggedSamplingMask)
        ctx.offsets = sampling_mask.offsets if ragged else None
        mask = sampling_mask.token_ids if ragged else sampling_mask
        ctx.temperature = None if isinstance(temperature, Tensor) else temperature
        temperature_R = temperature if isinstance(temperature, Tensor) else None
        kept_entropy_R = entropy_R if layout.entropy == "grad" else None
        ctx.save_for_backward(logits_TV, targets_R, rows_R, temperature_R, mask, shift_R, total_R, kept_entropy_R)
        ctx.layout = layout
        ctx.overwritten = False
        ctx.set_materialize_grads(False)
        if entropy_R is not None and layout.entropy == "detached":
            ctx.mark_non_differentiable(entropy_R)
        return log_probs_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # once_differentiable hides the names
        ctx: Any, grad_log_probs_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(OVERWRITTEN)
        logits_TV, targets_R, rows_R, temperature_R, mask, shift_R, total_R, entropy_R = ctx.saved_tensors
        temperature = ctx.temperature if temperature_R is None else temperature_R
        sampling_mask = mask if ctx.offsets is None else RaggedSamplingMask(mask, ctx.offsets)
        blocks = _Blocks(logits_TV, targets_R, rows_R, temperature, sampling_mask, ctx.layout)
        ctx.overwritten = ctx.layout.inplace_gradient
        gradient_TV = _gradient(blocks, shift_R, total_R, entropy_R, grad_log_probs_R, grad_entropy_R)
        return gradient_TV, None, None, None, None, None


class _Blocks:
    """Reads the logits by blocks: picked rows, columns inside the vocabulary, filtered, in the accumulation dtype."""

    def __init__(
        self,
        logits_TV: Tensor,
        targets_R: Tensor,
        rows_R: Tensor | None,
        temperature: float | Tensor,
        sampling_mask: Tensor | RaggedSamplingMask | None,
        layout: Layout,
    ) -> None:
        self.logits_TV = logits_TV.detach()
        self.rows_R = rows_R
        self.layout = layout
        self.count = targets_R.shape[0]
        self.dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        """Of sums, results and everything per row."""
        self.unit: float | Tensor  # what a logit is multiplied with to be an exponent of 2: a float or [R]
        if isinstance(temperature, Tensor):
            self.unit = math.log2(math.e) / temperature.detach().to(self.dtype)
        else:
            self.unit = math.log2(math.e) / temperature

        self.ignored_R = targets_R < 0
        local_R = targets_R.to(torch.int64) - layout.vocab_start
        self.owned_R = (local_R >= 0) & (local_R < layout.columns) & ~self.ignored_R
        self.target_column_R = torch.where(self.owned_R, local_R, 0)

        self.size = min(layout.block_rows, max(1, self.count))
        self.scratch_BW = logits_TV.new_empty((self.size, layout.columns), dtype=self.dtype)
        self.picked_BV = None if rows_R is None else logits_TV.new_empty((self.size, logits_TV.shape[1]))
        self.filter = None if sampling_mask is None else _Filter(sampling_mask, self)

    def __iter__(self) -> Iterator[slice]:
        for begin in range(0, self.count, self.size):
            yield slice(begin, min(begin + self.size, self.count))

    def read(self, block: slice) -> Tensor:
        """[B, W] logits in the accumulation dtype: a view of the logits where that will do, else in `scratch_BW`."""
        scratch_BW = self.scratch_BW[: block.stop - block.start]
        if self.rows_R is None or self.picked_BV is None:
            x_BW = self.logits_TV[block, : self.layout.columns]
        else:
            picked_BV = self.picked_BV[: block.stop - block.start]
            torch.index_select(self.logits_TV, 0, self.rows_R[block], out=picked_BV)
            x_BW = picked_BV[:, : self.layout.columns]
        if x_BW.dtype != self.dtype:
            x_BW = scratch_BW.copy_(x_BW)
        return x_BW if self.filter is None else torch.add(x_BW, self.filter.penalty(block), out=scratch_BW)

    def exponent(self, x_BW: Tensor, shift_B: Tensor, block: slice) -> Tensor:
        """z = x·unit − shift, in `scratch_BW`."""
        scratch_BW = self.scratch_BW[: block.stop - block.start]
        if isinstance(self.unit, Tensor):
            return torch.mul(x_BW, self.unit[block, None], out=scratch_BW).sub_(shift_B[:, None])
        # One fused multiply-add: differences are exact even for huge logits.
        return torch.add(-shift_B[:, None], x_BW, alpha=self.unit, out=scratch_BW)

    def select(self, values_R: Tensor) -> Tensor:
        """The values, 0 at ignored targets whatever stood there (NaN included)."""
        return torch.where(self.ignored_R, 0.0, values_R)


class _Filter:
    """The sampling mask as what is added to a block of logits: 0 for kept columns, −inf for the others."""

    def __init__(self, mask: Tensor | RaggedSamplingMask, blocks: _Blocks) -> None:
        # Keeps nothing of `blocks`: a cycle would hold the logits and the scratch until the garbage collector runs.
        self.mask_RV = mask if isinstance(mask, Tensor) else None
        columns = blocks.layout.columns
        # One column more than there are: what belongs to other shards is written there, for want of a condition.
        self.penalty_BW1 = blocks.scratch_BW.new_empty((blocks.size, columns + 1))
        self.target_column_R1 = torch.where(blocks.owned_R, blocks.target_column_R, columns)[:, None]
        if isinstance(mask, RaggedSamplingMask):
            device = mask.token_ids.device
            self.offsets: list[int] = mask.offsets.tolist()
            counts_R = mask.offsets.to(device, non_blocking=True).diff()
            self.row_K = torch.repeat_interleave(
                torch.arange(blocks.count, device=device), counts_R, output_size=mask.token_ids.shape[0]
            )
            local_K = mask.token_ids.to(torch.int64) - blocks.layout.vocab_start
            self.column_K = torch.where((local_K >= 0) & (local_K < columns), local_K, columns)
            self.start_R1 = torch.where(counts_R[:, None] > 0, -math.inf, 0.0)

    def penalty(self, block: slice) -> Tensor:
        """[B, W]. The target is always kept: a sampled token cannot have been outside its own filter."""
        penalty_BW1 = self.penalty_BW1[: block.stop - block.start]
        penalty_BW = penalty_BW1[:, :-1]
        if self.mask_RV is not None:
            penalty_BW.copy_(self.mask_RV[block, : penalty_BW.shape[1]])
            penalty_BW.reciprocal_().neg_().add_(1.0)  # 1 − 1/kept is 0 or −inf, and much faster than log or where
        else:
            penalty_BW1.copy_(self.start_R1[block])
            ids = slice(self.offsets[block.start], self.offsets[block.stop])
            flat = (self.row_K[ids] - block.start) * penalty_BW1.shape[1] + self.column_K[ids]
            penalty_BW1.view(-1).index_fill_(0, flat, 0.0)
        penalty_BW1.scatter_(1, self.target_column_R1[block], 0.0)
        return penalty_BW


def _local_statistics(blocks: _Blocks, with_entropy: bool) -> Tensor:
    """[4, R] of this shard: maximum·unit, Σ e, Σ e·z and the target's z (−inf where another shard owns it)."""
    statistics_4R = blocks.scratch_BW.new_zeros((4, blocks.count))
    lowest = torch.finfo(blocks.dtype).min
    if blocks.layout.columns == 0:  # all of it is padding
        statistics_4R[0].fill_(lowest)
        statistics_4R[3].fill_(-math.inf)
        return statistics_4R
    exp_BW = torch.empty_like(blocks.scratch_BW) if with_entropy else blocks.scratch_BW
    for block in blocks:
        maximum_B, total_B, weighted_B, target_B = statistics_4R[:, block].unbind(0)
        x_BW = blocks.read(block)
        unit = blocks.unit[block] if isinstance(blocks.unit, Tensor) else blocks.unit
        # Finite even where every logit is −inf: −inf − (−inf) would be NaN.
        torch.mul(x_BW.amax(-1), unit, out=maximum_B).clamp_min_(lowest)
        z_BW = blocks.exponent(x_BW, maximum_B, block)
        target_z_B = z_BW.gather(1, blocks.target_column_R[block, None]).squeeze(1)
        target_B.copy_(torch.where(blocks.owned_R[block], target_z_B, -math.inf))
        if with_entropy:
            e_BW = torch.exp2(z_BW.clamp_min_(ZERO_EXPONENT), out=exp_BW[: len(z_BW)])
            torch.sum(e_BW, -1, out=total_B)
            torch.sum(z_BW.mul_(e_BW), -1, out=weighted_B)
        else:
            torch.sum(z_BW.exp2_(), -1, out=total_B)
    return statistics_4R


def gather_statistics(statistics_4R: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """[P, 4, R]: every rank's statistics, by the one all-gather of four floats a target; none without a group."""
    if tp_group is None or tp_group.size() == 1:
        return statistics_4R[None]
    gathered = statistics_4R.new_empty((tp_group.size() * 4, statistics_4R.shape[1]))
    dist.all_gather_into_tensor(gathered, statistics_4R, group=tp_group)
    return gathered.unflatten(0, (-1, 4))


def _combine(statistics_4R: Tensor, tp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The statistics of the whole vocabulary, the same bits on every rank."""
    statistics_P4R = gather_statistics(statistics_4R, tp_group)
    if len(statistics_P4R) == 1:
        maximum_R, total_R, weighted_R, target_R = statistics_4R.unbind(0)
        return maximum_R, total_R, weighted_R, target_R
    maximum_PR, total_PR, weighted_PR, target_PR = statistics_P4R.unbind(1)
    maximum_R = maximum_PR.amax(0)
    moved_PR = maximum_PR - maximum_R
    target_R = (target_PR + moved_PR).amax(0)
    scale_PR = moved_PR.exp2()
    total_R = (scale_PR * total_PR).sum(0)
    weighted_R = (scale_PR * (weighted_PR + moved_PR * total_PR)).sum(0)
    return maximum_R, total_R, weighted_R, target_R


def _gradient(
    blocks: _Blocks,
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
    logits_TV, columns = blocks.logits_TV, blocks.layout.columns
    inverse_temperature = blocks.unit * math.log(2)
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

    if blocks.layout.inplace_gradient:
        gradient_TV = logits_TV
    elif blocks.rows_R is None:
        gradient_TV = torch.empty_like(logits_TV)
    else:
        gradient_TV = torch.zeros_like(logits_TV)
    direct = blocks.rows_R is None and logits_TV.dtype == blocks.dtype
    exp_BW = blocks.scratch_BW if slope_R is None else torch.empty_like(blocks.scratch_BW)

    for block in blocks if columns else ():
        z_BW = blocks.exponent(blocks.read(block), shift_R[block], block)
        result_BW = gradient_TV[block, :columns] if direct else z_BW
        if slope_R is None:
            torch.mul(z_BW.exp2_(), constant_R[block, None], out=result_BW)
        else:
            e_BW = torch.exp2(z_BW.clamp_min_(ZERO_EXPONENT), out=exp_BW[: len(z_BW)])
            torch.mul(e_BW, z_BW.mul_(slope_R[block, None]).add_(constant_R[block, None]), out=result_BW)
        column_B1 = blocks.target_column_R[block, None]
        result_BW.scatter_(1, column_B1, result_BW.gather(1, column_B1) + at_target_R[block, None])
        result_BW.view(bits).bitwise_and_(computed_bits_R[block, None])
        if blocks.rows_R is not None:
            gradient_TV[:, :columns].index_copy_(0, blocks.rows_R[block], result_BW.to(logits_TV.dtype))
        elif not direct:
            gradient_TV[block, :columns].copy_(result_BW)

    gradient_TV[:, columns:].zero_()
    if blocks.layout.inplace_gradient and blocks.rows_R is not None:
        unread_T = logits_TV.new_ones(logits_TV.shape[0], dtype=torch.bool).index_fill_(0, blocks.rows_R, False)
        gradient_TV.masked_fill_(unread_T[:, None], 0.0)
    return gradient_TV
