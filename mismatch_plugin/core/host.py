"""Faster ways on the CPU, where to look at a value costs nothing: on a device it would be a host sync.

They give the same: what needs one token bit for bit, sums up to the last digit of float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_TILE = 2**16
"""Tokens whose float64 values (512 KiB) stay in a core's cache between being widened, summed, squared and summed."""

ENABLED = True
"""False sends CPU tensors the way of a device's, for tests that compare the two."""


def on_host(values: Tensor) -> bool:
    """Whether these ways may be taken: a CPU tensor, and nothing that counts, records or compiles the operations."""
    transformed = torch._C._are_functorch_transforms_active()  # torch.func
    watched = is_in_torch_dispatch_mode() or torch.compiler.is_compiling() or transformed
    return ENABLED and values.device.type == "cpu" and not watched and type(values) in (Tensor, torch.nn.Parameter)


class SequenceSums:
    """Σ over each sequence of [T] columns, in float64: `segment_reduce` there is four times slower."""

    def __init__(self, offsets: Tensor) -> None:
        begins, ends = offsets[:-1].numpy(), offsets[1:].numpy()
        filled = np.flatnonzero(ends > begins)  # reduceat takes no empty ones
        self.count, self.tiles = len(begins), []
        while len(filled):
            start = begins[filled[0]]
            here = filled[: max(1, int(np.searchsorted(ends[filled], start + _TILE, "right")))]
            self.tiles.append((slice(int(start), int(ends[here[-1]])), here, begins[here] - start))
            filled = filled[len(here) :]
        self.buffer = np.empty(max((tile.stop - tile.start for tile, _, _ in self.tiles), default=0))

    def add(self, values_T: Tensor, squares: bool) -> tuple[Tensor, Tensor | None]:
        """([N] Σ, [N] Σ of the squares where asked)."""
        values = (values_T.float() if values_T.dtype == torch.bfloat16 else values_T).detach().numpy()
        sums, squared = np.zeros(self.count), np.zeros(self.count) if squares else None
        for tile, sequences, begins in self.tiles:
            part = values[tile]
            if part.dtype == np.bool_:
                sums[sequences] = np.add.reduceat(part.view(np.uint8), begins, dtype=np.int32)
                if squared is not None:
                    squared[sequences] = sums[sequences]
                continue
            wide = self.buffer[: len(part)]
            np.copyto(wide, part)
            sums[sequences] = np.add.reduceat(wide, begins)
            if squared is not None:
                squared[sequences] = np.add.reduceat(np.square(wide, out=wide), begins)
        return torch.from_numpy(sums), None if squared is None else torch.from_numpy(squared)
