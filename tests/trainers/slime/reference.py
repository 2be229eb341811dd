"""What slime should have logged: the same batches, as slime dumped them, through `mp.policy_loss` and torch's own Adam.

The model is transformers' Qwen3 in float32, so π_θ, gradient norms and the weights of later steps come from neither
slime nor Megatron-LM. π_old is the dump's, and compared with that model's at a rollout's first step; at the second θ is
no longer the π_old.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from tests.trainers.columns import largest
from tests.trainers.slime.trainer import Trained

NORMALISER = {"aggregation": "seq-mean-token-mean", "denominator": "original"}
LARGE_TERMS = 5e-5
"""Agreement of algorithm 3's loss with sequence weights: A·log π·w is ten times as large as a PPO term. Weights that
differ by 1e-7, relative, change it by 1e-5 after an Adam step or two."""
_SIDES = ("", "_lower", "_high_side", "_low_side")
_ITS_OWN = ("pg_loss", "ppo_kl", "ref_kl", *(f"pg_clipfrac{side}" for side in _SIDES))
_NO_ADVANTAGES = ("accepted_by_advantage_negative", "accepted_by_advantage_positive")
UNTRACKED = frozenset(f"rollout_corr/{name}" for name in (*_ITS_OWN, *_NO_ADVANTAGES))
"""Metrics that slime's tracker need not have: slime logs the first by its own names, and its TIS function, where
algorithms 0 and 2 are measured, gets no advantages."""
Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """A step's loss as slime logs it, norm of the gradient before clipping, and the plugin's metrics."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, float]
    old: float
    """The largest |log π_θ − log π_old| of a token: rounding at a rollout's first step. `steps` has 0 at later ones."""


def config_of(flags: Sequence[str], **more: Any) -> mp.MismatchConfig:
    """The settings that flags of ours mean; more: settings by section."""
    parser = argparse.ArgumentParser()
    mp.add_arguments(parser)
    given = mp.MismatchConfig.from_args(parser.parse_args(list(flags))).model_dump(exclude_unset=True)
    return mp.MismatchConfig.build({**given, **NORMALISER, **more})


def steps_of(dump: Mapping[str, Any]) -> list[list[Sample]]:
    """The samples of each optimizer step of a rollout, of all ranks."""
    samples = {sample["rollout_position"]: sample for sample in dump["samples"]}
    sizes = dump["dp_shards"][0]["num_microbatches"]
    steps: list[list[Sample]] = [[] for _ in sizes]
    for shard in dump["dp_shards"]:
        batches = iter(shard["micro_batch_indices"])
        for step, count in zip(steps, shard["num_microbatches"], strict=True):
            step += [samples[shard["partition"][i]] for _ in range(count) for i in next(batches)]
    return steps


def pack(samples: Sequence[Sample], config: mp.MismatchConfig) -> mp.PackedSequences:
    """A step's samples as the plugin takes them; under bypass there are no old log-probs."""
    names = {name: name for name in ("rollout_log_probs", "loss_masks", "advantages")}
    if not config.use_rollout_log_probs:
        names["train_log_probs"] = "log_probs"
    if config.terms.kl_coef:
        names["ref_log_probs"] = "ref_log_probs"
    lists: dict[str, Any] = {mine: [s[theirs] for s in samples] for mine, theirs in names.items()}
    return mp.PackedSequences.from_lists(**lists)


class Reference:
    """slime's trainer again, from its first weights. checkpoint: in HF's form.

    always_defers: no mean weight is known before the step, under algorithm 2 neither.
    """

    always_defers = False

    def __init__(self, checkpoint: Path, lr: float = 1e-3) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def log_probs(self, sample: Sample) -> Tensor:
        """[response] log π_θ, with gradient."""
        tokens, response = sample["tokens"], sample["response_lengths"]
        logits = self.model(tokens[None]).logits[0, -response - 1 : -1].log_softmax(-1)
        return logits.gather(-1, tokens[-response:, None])[:, 0]

    def step(self, samples: Sequence[Sample], config: mp.MismatchConfig) -> Expected:
        """One optimizer step: its loss and gradient at θ, then θ moves as slime's does (gradient clipped to norm 1)."""
        self.optimizer.zero_grad()
        theta = [self.log_probs(s) for s in samples]
        pairs = [(own.detach(), s["log_probs"]) for own, s in zip(theta, samples, strict=True) if "log_probs" in s]
        old = largest([0.0, *(float((own - told).abs().max()) for own, told in pairs)])
        result = mp.policy_loss(torch.cat(theta), pack(samples, config), config)
        logged, factor = result.loss, result.correction.factor
        if not (config.normalizes_step and (self.always_defers or config.use_rollout_log_probs)):
            factor = None
        if factor is not None:  # the mean weight, known only when slime has added loss and gradient up
            logged = logged * factor
        logged.backward()
        if factor is not None:
            for parameter in self.model.parameters():
                parameter.grad /= factor
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return Expected(logged.item(), norm.item(), result.statistics.metrics(), old)

    def steps(self, dumps: Sequence[Mapping[str, Any]], config: mp.MismatchConfig) -> Iterator[Expected]:
        """All steps of a run whose rollouts these dumps are."""
        for dump in dumps:
            for number, samples in enumerate(steps_of(dump)):
                expected = self.step(samples, config)
                yield expected if number == 0 else replace(expected, old=0.0)


@dataclass
class Agreement:
    """Of each step of a run, by name, what slime logged and the reference's value; metrics that the tracker lacks."""

    steps: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    missing: frozenset[str] = frozenset()

    @property
    def loss(self) -> float:
        """The largest difference."""
        return largest(difference("loss", *step["loss"]) for step in self.steps)

    @property
    def grad_norm(self) -> float:
        """The largest difference, relative."""
        return largest(difference("grad_norm", *step["grad_norm"]) for step in self.steps)

    def check(self, loss: float = 1e-5) -> None:
        """Name the first value that differs: the weights, and all that comes after it, follow."""
        for number, step in enumerate(self.steps):
            bounds = {_OLD: 1e-4, "loss": loss if number else min(loss, 1e-5), "grad_norm": 1e-4}
            for name, (theirs, mine) in step.items():
                said = f"step {number}: {name} is {theirs:.6g} in slime and {mine:.6g} in the reference"
                assert difference(name, theirs, mine) < bounds.get(name, 5e-4), said
            assert len(step) > 33, step.keys()
        assert self.missing <= UNTRACKED, self.missing - UNTRACKED


_OLD = "the largest log π_θ − log π_old"


def difference(name: str, theirs: float, mine: float) -> float:
    """Absolute of a loss or log-prob, relative of a norm, and of a metric (below 0.05 to that). NaN equals NaN."""
    if theirs == mine or (math.isnan(theirs) and math.isnan(mine)):
        return 0.0
    if name == "grad_norm":
        return abs(theirs / mine - 1)
    return abs(theirs - mine) / (1.0 if name in ("loss", _OLD) else max(0.05, abs(mine)))


def agreement(run: Trained, config: mp.MismatchConfig, checkpoint: Path) -> Agreement:
    """Compare every step that a run from dumps logged, and the plugin's metrics in slime's tracker. It starts at 0."""
    dumps, found = [run.dump(rollout) for rollout in range(run.job.rollouts)], Agreement()
    for step, mine in enumerate(Reference(checkpoint).steps(dumps, config)):
        tracked = {name: run.tracked[f"train/{name}"][step] for name in mine.metrics if f"train/{name}" in run.tracked}
        found.missing |= mine.metrics.keys() - tracked.keys()
        theirs = {name: run.steps[step][name] for name in ("loss", "grad_norm")}
        wanted = {"loss": mine.loss, "grad_norm": mine.grad_norm, **mine.metrics}
        pairs = {name: (value, wanted[name]) for name, value in {**theirs, **tracked}.items()}
        found.steps.append({_OLD: (mine.old, 0.0), **pairs})
    return found
