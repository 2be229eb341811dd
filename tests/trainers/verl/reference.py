"""What `mismatch_plugin.policy_loss` says of the micro-batches that a run of verl trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp


@dataclass(frozen=True)
class Step:
    """One optimizer step: all its micro-batches on all ranks, one entry a response."""

    theta: list[Tensor]
    """log π_θ."""
    gradient: list[Tensor]
    """∂(verl's loss)/∂θ, as the trainer's backward pass began with it."""
    rollout: list[Tensor]
    old: list[Tensor]
    mask: list[Tensor]
    """The response mask before any rejection."""
    left: list[Tensor]
    """The response mask that the loss was given."""
    advantages: list[Tensor]
    weights: list[Tensor]
    """The driver's weights; empty in bypass mode."""

    @property
    def log_ratio(self) -> Tensor:
        """log π_old − log π_rollout of the trained tokens [T]."""
        return torch.cat([(o - r)[m.bool()] for o, r, m in zip(self.old, self.rollout, self.mask, strict=True)])


def read_dump(folder: Path) -> list[Step]:
    """The optimizer steps in order."""
    records: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.pt")):
        record = torch.load(file)
        records.setdefault(record["step"], []).append(record)
    return [_step(records[number]) for number in sorted(records)]


def _step(records: list[dict[str, Any]]) -> Step:
    def rows(name: str) -> list[Tensor]:
        return [row for record in records for row in record.get(name, ())]

    def of_response(values: list[Tensor]) -> list[Tensor]:  # place t holds the log-prob of token t + 1
        return [row[-len(response) - 1 : -1] for row, response in zip(values, rows("responses"), strict=True)]

    return Step(
        of_response(rows("log_probs")), of_response(rows("gradient")), rows("rollout_log_probs"),
        rows("old_log_probs"), rows("loss_mask"), rows("response_mask"), rows("advantages"), rows("rollout_is_weights"),
    )  # fmt: skip


def reference(step: Step, config: mp.MismatchConfig) -> tuple[float, Tensor]:
    """(the loss of the step, its gradient with respect to log π_θ [T]), both by `mp.policy_loss` alone."""
    # One advantage a response (GRPO), which the driver has set to 0 at what it rejected.
    advantages = [given.new_full(given.shape, float(given[given.abs().argmax()])) for given in step.advantages]
    packed = mp.PackedSequences.from_lists(
        loss_masks=step.mask,
        rollout_log_probs=step.rollout,
        old_log_probs=None if config.use_rollout_log_probs else step.old,
        advantages=advantages,
    )
    theta = torch.cat(step.theta).requires_grad_()
    loss = mp.policy_loss(theta, packed, config).loss
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad
