"""The batched problem in small, and rollouts of a long response's length, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.lab.batched.model import Shape, Weights, initial_weights, map_weights
from mismatch_plugin.lab.settings import LabSettings

SHAPE = Shape(layers=2, hidden=16, heads=4, ffn=24, vocab=14, max_length=14)
SMALL = {
    "task": "reverse6",
    "hidden": 16,
    "heads": 4,
    "kv_groups": 4,
    "ffn": 24,
    "position": "learned_absolute",
    "engine": "batched",
    "steps": 4,
    "prompts_per_batch": 8,
    "samples_per_prompt": 4,
    "mini_batches": 4,
    "lr": 4e-3,
    "warm_up_target": 0.3,
    "warm_up_steps": 40,
    "warm_up_batch": 64,
    "warm_up_lr": 1e-2,
    "eval_every": 2,
    "eval_prompts": 16,
}


def small(**changes: Any) -> LabSettings:
    """The problem, with changes."""
    return LabSettings.model_validate({**SMALL, **changes})


def weights_of(*seeds: int, shape: Shape = SHAPE) -> Weights:
    """Initial weights, and norms other than 1, so that a forgotten one shows."""
    weights = initial_weights(shape, seeds)
    return {name: weight + 0.3 * torch.sin(weight.cumsum(-1)) for name, weight in weights.items()}


def run_of(weights: Weights, n: int) -> Weights:
    """Run n's weights, without the run dimension."""
    return map_weights(weights, lambda weight: weight[n])


def random_ids(*size: int, vocab: int = SHAPE.vocab, seed: int = 0) -> Tensor:
    """Token ids."""
    return torch.randint(vocab, size, generator=torch.Generator().manual_seed(seed))
