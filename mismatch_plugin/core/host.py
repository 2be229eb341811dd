"""Faster ways on the CPU, where to look at a value costs nothing: on a device it would be a host sync.

They give the same: what needs one token bit for bit, sums up to the last digit of float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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
