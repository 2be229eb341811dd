"""How much of what an optimizer changed arrives in the dtype that is sent: bfloat16 rounds small steps away."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Delivered(NamedTuple):
    """Of one update, with i the intended change of the float32 weights and d that of their roundings.

    changed: share of elements with d ≠ 0. cosine: Σ i·d / √(Σ i² · Σ d²). norm_ratio: √(Σ d² / Σ i²).
    """

    changed: float
    cosine: float
    norm_ratio: float


def sums(before: Tensor, after: Tensor, dtype: torch.dtype, weight: float = 1.0) -> Tensor:
    """[5] float64: elements, those that differ in `dtype`, Σ i², Σ d², Σ i·d, each times `weight`. No host sync."""
    intended = (after - before).double()
    delivered = after.to(dtype).double() - before.to(dtype).double()
    count = torch.full((), intended.numel(), dtype=torch.float64, device=intended.device)
    found = (count, (delivered != 0).sum(), intended.square().sum(), delivered.square().sum())
    return weight * torch.stack([*found, (intended * delivered).sum()])


def of_sums(total: Tensor) -> Delivered | None:
    """Of summed `sums`; None where nothing was to change. One host sync."""
    count, changed, intended, delivered, product = total.tolist()
    if not intended:
        return None
    cosine = product / (intended * delivered) ** 0.5 if delivered else 0.0
    return Delivered(changed / count, cosine, (delivered / intended) ** 0.5)


def sampled(tensor: Tensor, most: int) -> Tensor:
    """At most 2 · `most` of its elements, evenly spread, flat."""
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // most)]
