"""AdamW over N independent runs at once; each run's gradient is clipped by its own norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mismatch_plugin.lab.batched.model import Weights


class BatchedAdamW:
    """torch's AdamW, which works element by element and so on each run by itself, after megatron's clipping:
    gradients times min(1, clip_grad / (norm + 1e-6)).

    `live` [N] says which runs go on. A run whose gradient norm is not finite stops for good: its weights stay.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        clip_grad: float = 1.0,
    ) -> None:
        self.weights, self.clip_grad = list(weights.values()), clip_grad
        self.adamw = torch.optim.AdamW(self.weights, lr=lr, betas=betas, weight_decay=weight_decay, foreach=True)
        self.live = torch.ones(len(self.weights[0]), dtype=torch.bool)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> Tensor:
        """One step; returns the gradient norms before clipping, [N]."""
        # Rows of dimension 1: sums over dimension 0 would add up in an order that depends on the number of runs.
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients], dim=1).sum(1).sqrt()
        self.live &= norms.isfinite()
        scale = (self.clip_grad / (norms + 1e-6)).clamp(max=1.0)
        stopped = (~self.live).nonzero()[:, 0]
        before = [weight[stopped] for weight in self.weights]
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient * scale.view(-1, *[1] * (gradient.dim() - 1))
        self.adamw.step()
        for weight, kept in zip(self.weights, before, strict=True):
            weight[stopped] = kept
        return norms
