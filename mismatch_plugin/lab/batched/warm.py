"""Warm weights of the batched problem: one file a seed, megatron's names, the same for both labs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mismatch_plugin.lab.batched.model import Weights
from mismatch_plugin.lab.batched.trainer import warm_up
from mismatch_plugin.lab.settings import LabSettings


def warm_weights(settings: LabSettings, seeds: Sequence[int], cache: Path | None = None) -> Weights:
    """`warm_up` of every seed, [S, …] in their order; what is in the folder `cache` is not trained again.

    A seed's weights do not depend on the seeds that are trained with it, to the last bit on one thread.
    """
    of_seed = {seed: settings.model_copy(update={"seed": seed}) for seed in seeds}
    found = {seed: weights for seed, one in of_seed.items() if (weights := load_warm(one, cache))}
    if missing := [seed for seed in of_seed if seed not in found]:
        trained = warm_up(settings, missing)
        for i, seed in enumerate(missing):
            found[seed] = {name: weight[i].clone() for name, weight in trained.items()}
            save_warm(of_seed[seed], cache, found[seed])
    return {name: torch.stack([found[seed][name] for seed in seeds]) for name in found[seeds[0]]}


def load_warm(settings: LabSettings, cache: Path | None) -> Weights | None:
    """The warm weights of the run's seed, without run dimension, if they are in the folder."""
    file = cache and cache / settings.warm_up_key
    return torch.load(file, weights_only=True) if file and file.exists() else None


def save_warm(settings: LabSettings, cache: Path | None, weights: Mapping[str, Tensor]) -> None:
    """Keep them there; without a folder nothing."""
    if cache is None:
        return
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / settings.warm_up_key
    part = file.with_name(f"{file.name}.{os.getpid()}")
    torch.save(dict(weights), part)
    part.replace(file)  # so that nobody reads half a file
