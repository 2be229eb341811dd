"""The corrections that are compared, the ragged batches, and this package's way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp

LOWER, UPPER, TRUNCATE, VETO = 0.99, 1.01, 2.0, 1e-4

Run = Callable[[], tuple[list[Tensor], list[Tensor], dict[str, float]]]
"""Weights and accepted masks, one tensor a sequence, and the metrics on the host."""


@dataclass(frozen=True)
class Setting:
    """One correction. level: of the truncated weights, None for weights of 1. geometric: whether a sequence is rejected
    whose geometric mean ratio is outside [LOWER, UPPER]. metrics: our level of them."""

    name: str
    level: str | None
    normalize: bool = False
    geometric: bool = False
    veto: bool = False
    metrics: str = "basic"

    @property
    def ours(self) -> dict[str, Any]:
        """As this package's configuration."""
        settings: dict[str, Any] = {"metrics": self.metrics, "rs": {}, "use_tis": self.level is not None}
        if self.level is not None:
            tis = {"level": self.level, "mode": "truncate", "upper_bound": TRUNCATE}
            settings["tis"] = {**tis, "batch_normalize": self.normalize}
        if self.geometric:
            settings["rs"]["criteria"] = [f"sequence_mean:ratio:{LOWER}:{UPPER}"]
        if self.veto:
            settings["rs"]["veto_threshold"] = VETO
        return settings

    @property
    def verls(self) -> dict[str, Any]:
        """As arguments of verl's helper, whose bounds act on 1/ρ. It has no veto."""
        rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": f"{1 / UPPER!r}_{1 / LOWER!r}"}
        weights = {"rollout_is_threshold": TRUNCATE, "rollout_is_batch_normalize": self.normalize}
        return {"rollout_is": self.level, **weights, **(rejection if self.geometric else {})}

    @property
    def slimes(self) -> SimpleNamespace:
        """As slime's arguments."""
        weights = {
            "use_tis": True,
            "tis_level": self.level,
            "tis_mode": "truncate",
            "tis_batch_normalize": self.normalize,
        }
        rejection = {
            "use_rs": self.geometric,
            "rs_level": "geometric",
            "rs_veto_threshold": VETO if self.veto else None,
        }
        bounds = {"tis_lower_bound": None, "rs_lower_bound": LOWER, "rs_upper_bound": UPPER}
        return SimpleNamespace(tis_upper_bound=TRUNCATE, **weights, **rejection, **bounds)


FULL_SETTING = Setting("sequence TIS + rejection + veto", "sequence", geometric=True, veto=True)
SETTING_ROWS = (
    Setting("token TIS", "token"),
    Setting("token TIS + batch norm", "token", normalize=True),
    Setting("geometric rejection", None, geometric=True),
    FULL_SETTING,
    Setting("everything, all metrics", "token", normalize=True, geometric=True, veto=True, metrics="full"),
)
"""From the commonest to everything."""

SETTINGS: dict[str, Any] = FULL_SETTING.ours
"""Sequence-level truncated weights, one geometric criterion, the veto; metrics of level basic: for the other parts."""


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

    def cut(self, padded: Tensor) -> list[Tensor]:
        """[N, longest] as one tensor a sequence (views)."""
        return [row[:length] for row, length in zip(padded, self.packed.lengths, strict=True)]


def ours(batch: Batch, setting: Setting = FULL_SETTING) -> Run:
    """`correct` on packed data, and its statistics formed on the host."""
    packed, config = batch.packed, mp.MismatchConfig(**setting.ours)

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        result = mp.correct(packed, config)
        return packed.unpack(result.weights), packed.unpack(result.keep), result.statistics.metrics()

    return run


def ours_padded(batch: Batch, setting: Setting) -> Run:
    """From padded tensors and back to them: `from_padded`, `correct`, and weights and masks by `to_padded`."""
    (train, rollout, mask), lengths = batch.padded, batch.packed.lengths
    config = mp.MismatchConfig(**setting.ours)

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        packed = mp.PackedSequences.from_padded(
            loss_masks=mask, lengths=lengths, rollout_log_probs=rollout, old_log_probs=train
        )
        result = mp.correct(packed, config)
        weights, keep = packed.to_padded(result.weights), packed.to_padded(result.keep)
        return batch.cut(weights), batch.cut(keep), result.statistics.metrics()

    return run


def ours_in_verl(batch: Batch, setting: Setting) -> Run:
    """Our hook in verl's driver: from verl's batch to its weights and mask."""
    from mismatch_plugin.hooks.verl.driver import correct_rollout_batch

    train, rollout, mask = batch.padded
    config = mp.MismatchConfig(**setting.ours)

    def run() -> tuple[list[Tensor], list[Tensor], dict[str, float]]:
        data = {"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask}
        _, metrics = correct_rollout_batch(SimpleNamespace(batch=data), config)
        keep = data["response_mask"]
        return batch.cut(data.get("rollout_is_weights", keep)), batch.cut(keep), metrics

    return run
