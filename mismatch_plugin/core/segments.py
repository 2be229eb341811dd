"""Sums and maxima over the sequences of a packed tensor, and back to its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.core.host import SequenceSums, on_host
from mismatch_plugin.limits import SAFETY_BOUND


class Column(NamedTuple):
    """[T] values to be summed over sequences, 0 at padding. `name` is the sum's, `squares` that of the squares' sum."""

    name: str | None
    values_T: Tensor
    squares: str | None = None


def histogram(values: Tensor, bins: int, low: float, high: float) -> Tensor:
    """[bins] as torch.histc, which deterministic mode refuses on CUDA: there by index_add. No host sync."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.histc(values, bins, low, high)
    inside = (values >= low) & (values <= high)
    place = values.sub(low).mul_(bins / (high - low)).clamp_(0, bins - 1).long()
    return torch.zeros(bins, dtype=values.dtype, device=values.device).index_add_(0, place, inside.to(values.dtype))


def segment_sum(values_T: Tensor, offsets: Tensor) -> Tensor:
    """Σ over each sequence: [T] → [N]. Two kernels, deterministic; an empty sequence gives 0.

    In float64 (a float32 sum over a long response loses three digits); bool is counted in float32, exact to 16 million.
    """
    wide = values_T.float() if values_T.dtype == torch.bool else values_T.double()
    return torch.segment_reduce(wide, "sum", offsets=offsets, unsafe=True)


def segment_sums(columns: Iterable[Column], offsets: Tensor) -> tuple[list[str], Tensor]:
    """Names and sums of every column: [K, N] float64. Each column is freed once it is summed.

    As `segment_sum`, but widened, and squared, in one buffer for all columns: fresh memory is slow to touch.
    """
    names: list[str] = []
    sums: list[Tensor] = []
    buffer: Tensor | None = None
    on_cpu = SequenceSums(offsets) if on_host(offsets) else None

    def add(name: str, wide: Tensor) -> None:
        names.append(name)
        sums.append(torch.segment_reduce(wide, "sum", offsets=offsets, unsafe=True))

    for name, values, squares in columns:
        if on_cpu is not None and on_host(values):
            plain, squared = on_cpu.add(values, squares is not None)
            found = [(name, plain), (squares, squared)]
            names += [each for each, _ in found if each is not None]
            sums += [total for each, total in found if each is not None and total is not None]
            continue
        if buffer is None:
            buffer = torch.empty_like(values, dtype=torch.float64)
        wide = buffer.view(torch.float32)[: len(values)] if values.dtype == torch.bool else buffer
        wide.copy_(values)
        if name is not None:
            add(name, wide)
        if squares is not None:
            add(squares, wide.square_())
    return names, torch.stack(sums) if sums else offsets.new_empty((0, len(offsets) - 1), dtype=torch.float64)


def segment_max(values_T: Tensor, offsets: Tensor) -> Tensor:
    """Maximum over each sequence: [T] → [N]. One kernel; an empty sequence gives −inf."""
    return torch.segment_reduce(values_T, "max", offsets=offsets, unsafe=True)


def spread(values_N: Tensor, sequence_index_T: Tensor) -> Tensor:
    """Each sequence's value at each of its tokens: [N] → [T]. One kernel."""
    return values_N.index_select(0, sequence_index_T)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(l, −20, 20)): the safety bound. Two kernels."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()
