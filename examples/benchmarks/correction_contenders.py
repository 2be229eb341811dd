"""Importance weights, rejection and metrics of ragged batches, and a whole policy loss: this package and others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import mismatch_plugin as mp
from examples.benchmarks.log_prob_contenders import OURS
from examples.benchmarks.measuring import Contender, checkout, file_of

LOWER, UPPER, TRUNCATE, VETO = 0.99, 1.01, 2.0, 1e-4


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
    def config(self) -> mp.MismatchConfig:
        """As this package's."""
        tis = {"level": self.level, "mode": "truncate", "upper_bound": TRUNCATE, "batch_normalize": self.normalize}
        rejection = {"criteria": [f"sequence_mean:ratio:{LOWER}:{UPPER}"]} if self.geometric else {}
        veto = {"veto_threshold": VETO} if self.veto else {}
        weights = {} if self.level is None else {"use_tis": True, "tis": tis}
        return mp.MismatchConfig.model_validate({"metrics": self.metrics, "rs": {**rejection, **veto}, **weights})

    @property
    def verls(self) -> dict[str, Any]:
        """As arguments of verl's helper, whose bounds act on 1/ρ. It has no veto."""
        weights = {"rollout_is": self.level, "rollout_is_threshold": TRUNCATE}
        rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": f"{1 / UPPER!r}_{1 / LOWER!r}"}
        return {**weights, "rollout_is_batch_normalize": self.normalize, **(rejection if self.geometric else {})}

    @property
    def slimes(self) -> SimpleNamespace:
        """As slime's arguments."""
        weights = {"use_tis": True, "tis_level": self.level, "tis_mode": "truncate", "tis_upper_bound": TRUNCATE}
        weights |= {"tis_lower_bound": None, "tis_batch_normalize": self.normalize}
        rejection = {"use_rs": self.geometric, "rs_level": "geometric", "rs_lower_bound": LOWER}
        veto = {"rs_upper_bound": UPPER, "rs_veto_threshold": VETO if self.veto else None}
        return SimpleNamespace(**weights, **rejection, **veto)


FULL_SETTING = Setting("sequence TIS + rejection + veto", "sequence", geometric=True, veto=True)
SETTINGS = (
    Setting("token TIS", "token"),
    Setting("token TIS + batch normalisation", "token", normalize=True),
    Setting("geometric rejection", None, geometric=True),
    FULL_SETTING,
    Setting("everything, all metrics", "token", normalize=True, geometric=True, veto=True, metrics="full"),
    Setting("prefix TIS, no metrics", "prefix", metrics="off"),
)


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
    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Train and rollout log-probs and the mask, [T]."""
        packed = self.packed
        assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
        return packed.old_log_probs, packed.rollout_log_probs, packed.loss_mask

    @cached_property
    def rows(self) -> list[tuple[Tensor, ...]]:
        """The same, one triple a sequence."""
        return list(zip(*map(self.packed.unpack, self.values), strict=True))

    def flat(self, weights: Any, keep: Any) -> list[Tensor]:
        """Weights of accepted tokens and which are accepted, of padded tensors or of lists, as [T] each."""
        lengths = self.packed.lengths
        weights, keep = (torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]) for x in (weights, keep))
        return [weights * keep, keep]


def packed(batch: Batch, setting: Setting) -> list[Contender]:
    """From packed tensors or one tensor a sequence to weights, acceptance and metrics on the host.

    slime's metrics are tensors with a value for every token; the loop forms no metrics, and would be slower with them.
    """
    config, unpack = setting.config, batch.packed.unpack

    def ours() -> Any:
        result = mp.correct(batch.packed, config)
        return unpack(result.weights), unpack(result.keep), result.statistics.metrics()

    def slime() -> Callable[[], Any]:
        compute = file_of(checkout("SLIME_SRC") / "examples/train_infer_mismatch_helper/mis.py").compute_mis_weights
        if setting.level in (None, "prefix"):
            raise ImportError("it has no such setting")
        train, rollout, masks = map(unpack, batch.values)
        values = {"train_log_probs": train, "rollout_log_probs": rollout, "loss_masks": [m.int() for m in masks]}
        return partial(compute, setting.slimes, **values)

    makes = {
        OURS: lambda: ours,
        "slime's compute_mis_weights": slime,
        "a plain loop, no metrics": lambda: partial(plain_loop, batch.rows, setting),
    }
    return [Contender(name, make, results=lambda found: batch.flat(*found[:2])) for name, make in makes.items()]


def plain_loop(rows: list[tuple[Tensor, ...]], setting: Setting) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and acceptance, one sequence after the other."""
    weights, keep = [], []
    for train, rollout, mask in rows:
        l = torch.where(mask, train - rollout, 0.0).double()  # noqa: E741  # as in the formulas
        total = {"token": l, "sequence": l.sum(), "prefix": l.cumsum(0), None: l.new_zeros(())}[setting.level]
        weights.append(total.clamp(-20, 20).exp().clamp(max=TRUNCATE) * mask)
        kept = mask
        if setting.geometric:
            mean = l.sum() / mask.sum().clamp(min=1)
            kept = kept & (mean >= math.log(LOWER)) & (mean <= math.log(UPPER))
        if setting.veto:
            kept = kept & ~(l < math.log(VETO)).any()
        keep.append(kept)
    if setting.normalize:
        masks = [mask for _, _, mask in rows]
        tokens, total = (torch.stack([value.sum() for value in values]).sum() for values in (masks, weights))
        weights = [weight * (tokens / total) for weight in weights]
    return weights, keep


def in_driver(batch: Batch, setting: Setting) -> list[Contender]:
    """What verl's driver does with its padded batch: by our hook, checks included, and by verl's own helper."""
    names = ("old_log_probs", "rollout_log_probs", "response_mask")  # [N, longest], the mask in int64
    train, rollout, mask = batch.values
    padded = dict(zip(names, map(batch.packed.to_padded, (train, rollout, mask.long())), strict=True))

    def ours() -> Callable[[], Any]:
        from mismatch_plugin.hooks.verl import correct_rollout_batch

        config = setting.config

        def run() -> Any:
            data: dict[str, Tensor] = {**padded}
            _, metrics = correct_rollout_batch(SimpleNamespace(batch=data), config)
            return data.get("rollout_is_weights", data["response_mask"]), data["response_mask"], metrics

        return run

    def verl() -> Callable[[], Any]:
        # This package is one of its plugins; what is meant is verl as it comes.
        with patch.dict(os.environ, {"VERL_USE_EXTERNAL_PLUGINS": "none"}):
            from verl.trainer.ppo import rollout_corr_helper as helper  # pyright: ignore
        correct = partial(helper.compute_rollout_correction_and_rejection_mask, **setting.verls)

        def run() -> Any:
            found, kept, metrics = correct(*padded.values())
            weights = padded["response_mask"] if found is None else found.batch["rollout_is_weights"]
            return weights, kept, metrics

        return run

    makes = {f"{OURS}'s verl hook": ours, "verl's helper": verl}
    return [Contender(name, make, results=lambda found: batch.flat(*found[:2])) for name, make in makes.items()]


def of_loss(batch: Batch) -> list[Contender]:
    """PPO-clip with token TIS, forward and backward, with metrics on the host."""
    config = Setting("token TIS", "token").config
    generator = torch.Generator().manual_seed(1)
    old, rollout, mask = batch.values
    advantages = torch.randn(len(old), generator=generator).to(old.device)
    packed = batch.packed.replace(advantages=advantages)
    log_probs = (old + 0.1 * torch.randn(len(old), generator=generator).to(old.device)).requires_grad_()

    def ours(level: str) -> list[Tensor]:
        result = mp.policy_loss(log_probs, packed, config.replace(metrics=level))
        loss = result.loss_sum / result.denominator
        result.statistics.metrics()
        return [loss.detach(), *torch.autograd.grad(loss, log_probs)]

    def plain() -> list[Tensor]:
        loss, _ = plain_loss(log_probs, old, rollout, mask, advantages)
        return [loss.detach(), *torch.autograd.grad(loss, log_probs)]

    makes = {OURS: partial(ours, "basic"), f"{OURS}, metrics off": partial(ours, "off"), "twenty plain lines": plain}
    return [Contender(name, lambda run=run: run) for name, run in makes.items()]


def plain_loss(
    log_probs: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, advantages: Tensor
) -> tuple[Tensor, list[float]]:
    """The same loss as one would write it for one packed batch, without checks, and nine figures."""
    tokens = mask.sum()
    l = torch.where(mask, old - rollout, 0.0).clamp(-20, 20)  # noqa: E741  # as in the formulas
    rho = l.exp()
    ratio = (log_probs - old).clamp(-20, 20).exp()
    clipped = ratio.clamp(0.8, 1.2)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -torch.where(mask, rho.clamp(max=TRUNCATE) * surrogate, 0.0).sum() / tokens
    with torch.no_grad():
        inside = rho.masked_fill(~mask, 0.0)
        mean, squares = inside.sum() / tokens, inside.square().sum() / tokens
        deviation, ess = (squares - mean.square()).clamp(min=0).sqrt(), mean.square() / squares
        above, clipped = ((value & mask).sum() / tokens for value in (rho > TRUNCATE, ratio != clipped))
        kl, k3 = -l.sum() / tokens, torch.where(mask, rho - 1 - l, 0.0).sum() / tokens
        figures = torch.stack([mean, deviation, ess, inside.max(), above, kl, k3, clipped, loss])
    return loss, figures.tolist()
