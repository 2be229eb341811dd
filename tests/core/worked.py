"""What the tests of core share: sequences of given ratios, and metrics without their prefix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp


def config(**settings: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig.model_validate(settings)


def weighted(level: str = "token", mode: str = "truncate", **tis: Any) -> dict[str, Any]:
    return {"use_tis": True, "tis": {"level": level, "mode": mode, **tis}}


def logs(rows: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64).log() for row in rows]


def of_log_ratios(
    rows: list[list[float]], masks: list[list[int]] | None = None, rollout: float = -1.0, **fields: Any
) -> mp.PackedSequences:
    """Sequences of these log-ratios, in float64; π_rollout is as far below `rollout` as the largest asks for."""
    values = [torch.tensor(row, dtype=torch.float64) for row in rows]
    sampler = [torch.full_like(row, rollout) - (row.clamp(min=0).amax() if len(row) else 0.0) for row in values]
    return mp.PackedSequences.from_lists(
        old_log_probs=[base + row for base, row in zip(sampler, values, strict=True)],
        rollout_log_probs=sampler,
        loss_masks=[[1] * len(row) for row in rows] if masks is None else masks,
        **fields,
    )


def metrics_of(
    packed: mp.PackedSequences, settings: mp.MismatchConfig | None = None, **fields: Any
) -> dict[str, float]:
    found = mp.correct(packed, config(**fields) if settings is None else settings).statistics.metrics()
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}
