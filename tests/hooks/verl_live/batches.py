"""Random padded batches with masks, and verl's own configuration objects."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from verl.trainer.config import RolloutCorrectionConfig
from verl.workers.config import ActorConfig, PolicyLossConfig

ROWS, WIDTH = 5, 9
# Response tokens of each row, with a tool's output in the middle of the second and fourth.
RESPONSES = ("111100000", "110011100", "111111111", "100110000", "110000000")
MASK = torch.tensor([[int(token) for token in response] for response in RESPONSES])


def batch(seed: int, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """log_prob, old and rollout log-probs, advantages and the mask, [5, 9], float64; garbage but finite at padding."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    rollout = -noise(1.0).abs() - 0.05
    old = (rollout + noise(spread)).clamp(max=-1e-3)  # a log-prob is not above 0
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "log_prob": (old + noise(0.2)).clamp(max=-1e-3),
        "advantages": noise(1.0),
        "response_mask": MASK.clone(),
    }


def actor(correction: Any, **settings: Any) -> ActorConfig:
    """verl's actor configuration as its workers hold it."""
    loss = PolicyLossConfig(loss_mode="vanilla", rollout_correction=correction)
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss, **settings)


def correction(**settings: Any) -> dict[str, Any]:
    """verl's rollout_correction block with the defaults of its YAML file."""
    return {**vars(RolloutCorrectionConfig(rollout_is=None)), **settings}


def loss_and_gradient(
    function: Any, data: dict[str, torch.Tensor], **arguments: Any
) -> tuple[float, torch.Tensor, Any]:
    """A policy loss called as verl's ppo_loss calls it: (loss, gradient on log_prob, metrics)."""
    log_prob = data["log_prob"].clone().requires_grad_()
    loss, metrics = function(
        log_prob=log_prob, advantages=data["advantages"], response_mask=data["response_mask"].bool(), **arguments
    )
    loss.backward()
    assert log_prob.grad is not None
    return float(loss.detach()), log_prob.grad, metrics
