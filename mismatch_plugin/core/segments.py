"""Sums and maxima over the sequences of a packed tensor, and back to its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mismatch_plugin.limits import SAFETY_BOUND

HOST_WAYS = True
"""Faster ways on the CPU, where a look at a value costs no sync: the same bit for bit, sums up to float64's last digit.
False sends CPU tensors the way of a device's, for tests that compare the two."""


def on_host(values: Tensor) -> bool:
    """Whether these ways may be taken: a CPU tensor, and nothing that counts, records or compiles the operations."""
    transformed = torch._C._are_functorch_transforms_active()  # torch.func
    watched = is_in_torch_dispatch_mode() or torch.compiler.is_compiling() or transformed
    return HOST_WAYS and values.device.type == "cpu" and not watched and type(values) in (Tensor, torch.nn.Parameter)


class SequenceSums:
    """Σ over each sequence of [T] columns, in float64: `segment_reduce` there is four times slower."""

    def __init__(self, offsets: Tensor) -> None:
        begins, ends = offsets[:-1].numpy(), offsets[1:].numpy()
        self.count, self.filled = len(begins), np.flatnonzero(ends > begins)  # reduceat takes no empty ones
        self.begins, self.wide = begins[self.filled], np.empty(offsets[-1])

    def add(self, values_T: Tensor, squares: bool) -> list[Tensor]:
        """[N] Σ, and [N] Σ of the squares where asked."""
        values = values_T.float() if values_T.dtype == torch.bfloat16 else values_T
        wide = self.wide
        np.copyto(wide, values.detach().numpy())
        sums = np.zeros((1 + squares, self.count))
        if len(self.filled):
            sums[0, self.filled] = np.add.reduceat(wide, self.begins)
            if squares:
                sums[1, self.filled] = np.add.reduceat(np.square(wide, out=wide), self.begins)
        return list(torch.from_numpy(sums))


class Column(NamedTuple):
    """[T] values to be summed over sequences, 0 at padding. `name` is the sum's, `squares` that of the squares' sum."""

    name: str
    values_T: Tensor
    squares: str | None = None


def verdict_columns(verdicts: Mapping[str, Tensor | None]) -> Iterator[Column]:
    """Those that exist; a tensor with several names is one column, and its name is all of them (`named_rows`)."""
    there = {name: verdict for name, verdict in verdicts.items() if verdict is not None}
    for verdict in {id(verdict): verdict for verdict in there.values()}.values():
        yield Column(" ".join(name for name, other in there.items() if other is verdict), verdict)


def named_rows(names: Sequence[str], values_KN: Tensor) -> dict[str, Tensor]:
    """Name → [N], each name of a column with several."""
    rows = zip(names, values_KN.unbind(0), strict=True)
    return {name: row for together, row in rows for name in together.split()}


_TOGETHER = 2**18
"""Tokens times columns that one reduction sums: 2 MiB in float64, all columns of 16,000 tokens."""


def histogram(values: Tensor, bins: int, low: float, high: float) -> Tensor:
    """[bins] as torch.histc, which deterministic mode refuses on CUDA: there by index_add. No host sync."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.histc(values, bins, low, high)
    inside = (values >= low) & (values <= high)
    place = values.sub(low).mul_(bins / (high - low)).clamp_(0, bins - 1).long()
    return torch.zeros(bins, dtype=values.dtype, device=values.device).index_add_(0, place, inside.to(values.dtype))


def segment_sum(values_T: Tensor, offsets: Tensor) -> Tensor:
    """Σ over each sequence: [T] → [N]. Two kernels, deterministic; an empty sequence gives 0. In float64 (float32 would
    lose three digits over a long response); bool is counted in float32, exact to 16 million."""
    wide = values_T.float() if values_T.dtype == torch.bool else values_T.double()
    return torch.segment_reduce(wide, "sum", offsets=offsets, unsafe=True)


def segment_sums(columns: Iterable[Column], offsets: Tensor) -> tuple[list[str], Tensor]:
    """Names and sums of every column and of its squares, in their order (the same on ranks with other tokens): [K, N]
    float64, as `segment_sum`, by one reduction for all that fit _TOGETHER."""
    names: list[str] = []
    sums: dict[str, Tensor] = {}
    waiting: list[Column] = []
    on_cpu = SequenceSums(offsets) if on_host(offsets) else None
    for column in columns:
        name, values, squares = column
        own = [name] if squares is None else [name, squares]
        names += own
        if on_cpu is not None and on_host(values):
            sums |= zip(own, on_cpu.add(values, squares is not None), strict=True)
            continue
        waiting.append(column)
        # A compiled call keeps them together: what hangs on T would be compiled anew for every T.
        if len(waiting) * len(values) >= _TOGETHER and not torch.compiler.is_compiling():
            sums |= _sums_together(waiting, offsets)
            waiting.clear()
    if waiting:
        sums |= _sums_together(waiting, offsets)
    assert len({*names}) == len(names), names
    if not names:
        return names, offsets.new_empty((0, len(offsets) - 1), dtype=torch.float64)
    return names, torch.stack([sums[name] for name in names])


def _sums_together(columns: list[Column], offsets: Tensor) -> dict[str, Tensor]:
    """Name → [N], by one reduction over [K, T], which is summed as K · N sequences."""
    if len(columns) == 1:  # of so many tokens that a table would only cost memory
        name, values, squares = columns[0]
        wide = values.double()
        sums = {name: segment_sum(wide, offsets)}
        if squares is not None:
            sums[squares] = segment_sum(wide.square(), offsets)
        return sums
    columns = sorted(columns, key=lambda column: column.squares is None)
    names: list[str] = []
    rows: list[Tensor] = []
    for dtype in dict.fromkeys(column.values_T.dtype for column in columns):
        alike = [column for column in columns if column.values_T.dtype == dtype]
        wide = torch.stack([column.values_T for column in alike]).double()
        squares = [column.squares for column in alike if column.squares is not None]
        names += [column.name for column in alike] + squares
        rows += [wide, wide[: len(squares)].square()] if squares else [wide]
    table = torch.cat(rows) if len(rows) > 1 else rows[0]
    count, tokens = table.shape
    begins = torch.arange(0, count * tokens, tokens, device=offsets.device) if tokens else offsets.new_zeros(count)
    every = (begins.unsqueeze(1) + offsets).flatten()  # between two rows an empty sequence
    sums = segment_sum(table.flatten(), every)
    return dict(zip(names, sums.as_strided((count, len(offsets) - 1), (len(offsets), 1)).unbind(), strict=True))


def segment_max(values_T: Tensor, offsets: Tensor) -> Tensor:
    """Maximum over each sequence: [T] → [N]. One kernel; an empty sequence gives −inf."""
    return torch.segment_reduce(values_T, "max", offsets=offsets, unsafe=True)


def spread(values_N: Tensor, sequence_index_T: Tensor) -> Tensor:
    """Each sequence's value at each of its tokens: [N] → [T]. One kernel."""
    return values_N.index_select(0, sequence_index_T)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(l, −20, 20)): the safety bound. Two kernels."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()
