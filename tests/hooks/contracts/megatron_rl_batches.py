"""Random micro-batches in Megatron-LM RL's two layouts, and the loss run on them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.hooks.megatron_rl.loss import GrpoTerms, grpo_terms, pack

CLIP = SimpleNamespace(eps_lower=0.2, eps_upper=0.28, kl_beta=0.03, entropy_weight=0.01)
STARTS, LENGTHS, WIDTH = [0, 6, 11], [6, 5, 4], 17  # three sequences and padding in one bin of 17 log-probs
ALGORITHMS: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"use_rollout_log_probs": True},
    "2": {"use_tis": True},
    "3": {"use_rollout_log_probs": True, "use_tis": True},
}


def make_config(**settings: Any) -> mp.MismatchConfig:
    terms = {"kl_coef": CLIP.kl_beta, "kl_type": "k3"}
    ppo = {"eps_clip_low": CLIP.eps_lower, "eps_clip_high": CLIP.eps_upper}
    base: dict[str, Any] = {"denominator": "original", "terms": terms, "ppo": ppo}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)  # what algorithm 3 makes no use of
        return mp.MismatchConfig.build(base | settings)


def random_tensors(shape: tuple[int, int], sequences: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    rollout = -noise(1.0).abs() - 0.05
    old = rollout + noise(0.4)
    mask = (torch.rand(shape, generator=generator, dtype=torch.float64) < 0.7).to(dtype)
    tensors = {"rollout": rollout, "old": old, "current": old + noise(0.3), "ref": old + noise(0.2)}
    return {name: value.clamp(max=-1e-3).to(dtype) for name, value in tensors.items()} | {
        "mask": mask,
        "advantages": torch.randn(sequences, generator=generator, dtype=torch.float64).to(dtype),
    }


def rows(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return random_tensors((3, 9), 3, dtype), {"seq_starts": None, "seq_lengths": None}


def one_bin(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Megatron masks the slots between sequences: they predict the first token of the next one.

    Its starts end in the start of the padding (sequence_packing_utils.py, `seq_starts.append(current_pos)`).
    """
    data = random_tensors((1, WIDTH), 3, dtype)
    for start, length in zip([*STARTS[1:], WIDTH + 1], LENGTHS, strict=True):
        data["mask"][0, start - 1 : start] = 0.0
        assert length > 1
    data["mask"][0, STARTS[-1] + LENGTHS[-1] - 1 :] = 0.0
    return data, {"seq_starts": [*STARTS, STARTS[-1] + LENGTHS[-1]], "seq_lengths": LENGTHS}


LAYOUTS = {"rows": rows, "bin": one_bin}


def whole_sequences(data: dict[str, Tensor], place: dict[str, Any]) -> list[tuple[int, slice]]:
    """Where each sequence lies: its row, and its log-probs in it."""
    if place["seq_starts"] is None:
        return [(row, slice(None)) for row in range(data["old"].shape[0])]
    pairs = zip(place["seq_starts"], place["seq_lengths"], strict=False)
    return [(0, slice(start, start + length - 1)) for start, length in pairs]


def run_loss(
    config: mp.MismatchConfig, data: dict[str, Tensor], place: dict[str, Any]
) -> tuple[GrpoTerms, Tensor, Statistics]:
    """(terms, gradient of the masked sum as Megatron's loss_func forms it, statistics)."""
    current = data["current"].clone().requires_grad_()
    packed = pack(
        config,
        old=data["old"],
        rollout=data.get("rollout"),
        advantages=data["advantages"],
        loss_mask=data["mask"],
        **place,
    )
    weights = config.terms.model_copy(update={"entropy_coef": CLIP.entropy_weight})
    terms, statistics = grpo_terms(current, data["ref"], packed, config.model_copy(update={"terms": weights}))
    (terms.loss * data["mask"]).sum().backward()
    assert current.grad is not None
    return terms, current.grad, statistics
