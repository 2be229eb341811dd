"""The same correction with its metrics: by this package, by verl's helper, and by a loop over the sequences."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from examples.benchmarks.machine import version
from examples.benchmarks.results import NotHereError
from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP

LOWER, UPPER, TRUNCATE, VETO = 0.99, 1.01, 2.0, 1e-4
SETTINGS: dict[str, Any] = {
    "use_tis": True,
    "tis": {"level": "sequence", "mode": "truncate", "upper_bound": TRUNCATE},
    "rs": {"criteria": [f"sequence_mean:ratio:{LOWER}:{UPPER}"], "veto_threshold": VETO},
}
"""Sequence-level truncated weights, one geometric criterion, the veto; metrics of level basic."""

Run = Callable[[], tuple[list[Tensor], list[Tensor], dict[str, float]]]
"""Weights and accepted masks, one tensor a sequence, and the metrics on the host."""


@dataclass(frozen=True)
class Batch:
    """Ragged responses of `longest`/3 to `longest` tokens, in the form that each contender takes as its own."""

    sequences: int
    longest: int
    device: torch.device

    @cached_property
    def packed(self) -> mp.PackedSequences:
        """Flat, with its offsets made."""
        generator = torch.Generator().manual_seed(0)
        lowest = max(1, self.longest // 3)
        lengths = torch.randint(lowest, self.longest + 1, (self.sequences,), generator=generator).tolist()
        tokens = sum(lengths)
        rollout = -3.0 * torch.rand(tokens, generator=generator)
        train = rollout + 0.05 * torch.randn(tokens, generator=generator)
        # Sequences that drift a little are what a geometric criterion rejects.
        drift = torch.repeat_interleave(0.01 * torch.randn(self.sequences, generator=generator), torch.tensor(lengths))
        position = torch.cat([torch.arange(length) for length in lengths])
        packed = mp.PackedSequences(
            loss_mask=position % 256 >= 24,  # tool output now and then
            lengths=tuple(lengths),
            rollout_log_probs=rollout,
            old_log_probs=(train + drift).clamp(max=0.0),
        )
        return packed.to(self.device).prepared()

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Train and rollout log-probs and the mask, [N, longest]."""
        packed = self.packed
        values = (packed.old_log_probs, packed.rollout_log_probs, packed.loss_mask.float())
        train, rollout, mask = (packed.to_padded(value) for value in values if value is not None)
        return train, rollout, mask

    @cached_property
    def rows(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The same, one triple a sequence."""
        packed = self.packed
        values = (packed.old_log_probs, packed.rollout_log_probs, packed.loss_mask)
        return list(zip(*(packed.unpack(value) for value in values if value is not None), strict=True))


def ours(batch: Batch) -> Run:
    """`correct`, and its statistics formed on the host."""
    packed, config = batch.packed, mp.MismatchConfig(**SETTINGS)

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        result = mp.correct(packed, config)
        return packed.unpack(result.weights), packed.unpack(result.keep), result.statistics.metrics()

    return run


def verl(batch: Batch) -> Run:
    """verl's own helper on padded tensors. It has no veto, and its bounds act on 1/ρ."""
    if version("verl") is None:
        raise NotHereError("not installed")
    before = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"  # this package is one of them; what is meant is verl as it comes
    try:
        from verl.trainer.ppo import rollout_corr_helper  # pyright: ignore
    except ImportError as error:
        raise NotHereError(f"cannot be imported: {error}") from error
    finally:
        if before is None:
            del os.environ["VERL_USE_EXTERNAL_PLUGINS"]
        else:
            os.environ["VERL_USE_EXTERNAL_PLUGINS"] = before
    (train, rollout, mask), lengths = batch.padded, batch.packed.lengths

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        weights, accepted, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            train,
            rollout,
            mask,
            rollout_is="sequence",
            rollout_is_threshold=TRUNCATE,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=f"{1 / UPPER!r}_{1 / LOWER!r}",
        )
        weights_NL = weights.batch["rollout_is_weights"]
        cut = [[row[:n] for row, n in zip(rows, lengths, strict=True)] for rows in (weights_NL, accepted)]
        return cut[0], cut[1], metrics

    return run


def loop(batch: Batch) -> Run:
    """One sequence after the other, some eighty small operations each; the metrics of all meet at the end."""
    rows = batch.rows

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        weights, kept, found, names = [], [], [], ()
        for train, rollout, mask in rows:
            weight, keep, metrics = _one_sequence(train, rollout, mask)
            weights.append(weight)
            kept.append(keep)
            found.append(torch.stack(list(metrics.values())))
            names = tuple(metrics)
        table = torch.stack(found)
        summary = torch.cat([table.mean(0), table.amax(0), table.amin(0)]).tolist()
        parts = (f"{name}_{how}" for how in ("mean", "max", "min") for name in names)
        return weights, kept, dict(zip(parts, summary, strict=True))

    return run


def _one_sequence(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    ones = mask.float()
    count = ones.sum().clamp(min=1)
    fill = (rollout == 0.0) & (train < -ZERO_FILL_GAP)
    wrong = (
        (rollout <= FLOOR) | (rollout > POSITIVE_TOLERANCE) | fill | rollout.isnan() | ~(train <= POSITIVE_TOLERANCE)
    )
    l = torch.where(mask & ~wrong, train - rollout, 0.0)  # noqa: E741  # as in the formulas
    total = l.sum()
    mean = total / count
    sequence_ratio = total.clamp(-20, 20).exp()
    weight = sequence_ratio.clamp(max=TRUNCATE)
    outside = (mean < math.log(LOWER)) | (mean > math.log(UPPER))
    vetoed = (l < math.log(VETO)).any()
    keep = ones * ~(outside | vetoed)
    ratio = l.clamp(-20, 20).exp() * ones
    mean_ratio = ratio.sum() / count
    clamped = ratio.clamp(1 / TRUNCATE, TRUNCATE) * ones
    squares = clamped.square().sum() / count
    metrics = {
        "ratio": mean_ratio,
        "std": (squares - (clamped.sum() / count).square()).clamp(min=0).sqrt(),
        "ess": (clamped.sum() / count).square() / squares,
        "high": ((ratio > TRUNCATE) & mask).sum() / count,
        "low": ((ratio < 1 / TRUNCATE) & mask).sum() / count,
        "kl": -mean,
        "k3": ((ratio - 1.0 - l) * ones).sum() / count,
        "chi2": ((ratio.square() - 1.0) * ones).sum() / count,
        "chi2_seq": sequence_ratio.square() - 1.0,
        "training_ppl": (-(train * ones).sum() / count).exp(),
        "rollout_ppl": (-(rollout * ones).sum() / count).exp(),
        "ppl_ratio": (-mean).exp(),
        "invalid": (wrong & mask).sum().float(),
        "masked": outside.float(),
        "vetoed": vetoed.float(),
        "accepted": keep.sum() / count,
        "weight": weight,
    }
    return weight * ones, keep, metrics
