"""What `tests/parallel/test_agreement.py` runs on every rank: the beginning of a step in which one rank differs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import mismatch_plugin as mp
from mismatch_plugin.hooks.megatron_core import MegatronLoss
from mismatch_plugin.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Grid:
    """A parallel layout. Ranks are numbered as Megatron does: tp changes fastest, then cp, dp, pp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def __str__(self) -> str:
        return " ".join(f"{name}{size}" for name, size in vars(self).items() if size > 1) or "alone"

    def members(self, *along: str) -> list[list[int]]:
        """The groups of ranks that differ in these dimensions alone."""
        sizes = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        places = [dict(zip(sizes, place, strict=True)) for place in product(*map(range, sizes.values()))]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(tuple(v for name, v in place.items() if name not in along), []).append(rank)
        return list(found.values())


@dataclass(frozen=True)
class Case:
    """What `rank` of a layout does unlike the others (`plant`)."""

    grid: Grid
    plant: str
    rank: int

    def __repr__(self) -> str:
        return f"{self.plant} on rank {self.rank} of {self.grid}"


SETTINGS: dict[str, Any] = {"use_tis": True, "metrics": "full", "tis": {"level": "sequence", "batch_normalize": True}}


@cache
def groups_of(grid: Grid) -> ParallelGroups:
    """Made once a process; every rank makes all of them, in the same order."""
    found: dict[str, Any] = {}
    for name in ("tp", "cp", "dp", "dp_cp", "pp"):
        for ranks in grid.members(*name.split("_")):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found[name] = group
    return ParallelGroups(**found)


def batch(sequences: int) -> mp.PackedSequences:
    """Three tokens a sequence."""
    values = [torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)] * sequences
    return mp.PackedSequences.from_lists(
        rollout_log_probs=values,
        loss_masks=[[1, 1, 1]] * sequences,
        advantages=[torch.ones((), dtype=torch.float64)] * sequences,
        old_log_probs=[value + 0.1 for value in values],
        ref_log_probs=values,
        weight_versions=[[7, 7, 7]] * sequences,
    )


def hook_of(config: mp.MismatchConfig, groups: ParallelGroups, per_token: bool = True) -> MegatronLoss:
    model = SimpleNamespace(calculate_per_token_loss=per_token, finalize_model_grads_func=lambda *_, **__: None)
    return MegatronLoss(config, model, groups)


def begin(case: Case) -> dict[str, Any]:
    """`start` of a step of two micro-batches, and where nothing was raised the step itself."""
    plant = case.plant if dist.get_rank() == case.rank else ""
    more = {
        "other configuration": {"ppo": {"eps_clip_high": 0.3}},
        "other report folder": {"report_dir": "runs/elsewhere"},
    }
    config = mp.MismatchConfig(**SETTINGS | more.get(plant, {}))
    full = [batch(2), batch(3)]
    batches = {
        "empty list": [],
        "one micro-batch": full[:1],
        "other sequences": [batch(2), batch(4)],
        "no old log-probs": [packed.replace(old_log_probs=None) for packed in full],
        "no rollout log-probs": [packed.replace(rollout_log_probs=None) for packed in full],
        "no versions": [packed.replace(weight_versions=None) for packed in full],
        "versions once": [full[0], full[1].replace(weight_versions=None)],
    }.get(plant, full)
    groups = groups_of(case.grid)
    hook = hook_of(config, groups, per_token=plant != "mean of micro-batches")
    error, metrics = "", {}
    try:
        hook.start(batches)
        if groups.is_last_stage:
            for packed in batches:
                log_probs = torch.full((len(packed.loss_mask),), -1.0, dtype=torch.float64, requires_grad=True)
                hook.from_log_probs(log_probs, packed)
            metrics = hook.metrics()
    except ValueError as refused:
        error = f"{type(refused).__name__}: {refused}"
    return {"error": error, "metrics": metrics}
