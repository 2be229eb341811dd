"""What NeMo-RL's `grpo.setup` and its log-probs need in order to run without a GPU."""

from __future__ import annotations

from typing import Any

import torch


def own_policy_and_engine(module: Any) -> None:
    """`setup` makes both by these names of its module."""
    from tiny_engine import TinyEngine
    from tiny_policy import TinyPolicy

    module.Policy = TinyPolicy
    module.VllmGeneration = TinyEngine


def tensors_stay(module: Any) -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
