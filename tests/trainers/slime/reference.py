"""What slime should have logged: the same batches, as slime dumped them, through `mp.policy_loss` and torch's own Adam.

The model is transformers' Qwen3 in float32, so π_θ, gradient norms and the weights of later steps come from neither
slime nor Megatron-LM. π_old is the dump's, and compared with that model's at a rollout's first step; at the second θ is
no longer the π_old.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from tests.trainers.reference import TOLERANCE
from tests.trainers.slime.trainer import Trained
from tests.trainers.whole import largest

NORMALISER = {"aggregation": "seq-mean-token-mean", "denominator": "original"}
LARGE_TERMS = 1e-4
"""Agreement of algorithm 3's loss with sequence weights: A·log π·w is ten times as large as a PPO term. Weights that
differ by 1e-7, relative, change it by 1e-5 after an Adam step or two."""
_SIDES = ("", "_lower", "_high_side", "_low_side")
_ITS_OWN = ("pg_loss", "ppo_kl", "ref_kl", *(f"pg_clipfrac{side}" for side in _SIDES))
_NO_ADVANTAGES = ("accepted_by_advantage_negative", "accepted_by_advantage_positive")
UNTRACKED = frozenset(f"rollout_corr/{name}" for name in (*_ITS_OWN, *_NO_ADVANTAGES))
"""Metrics that slime's tracker need not have: slime logs the first by its own names, and its TIS function, where
algorithms 0 and 2 are measured, gets no advantages."""
OLD = "the largest log π_θ − log π_old"
"""Of a token: rounding at a rollout's first step."""
Sample = Mapping[str, Any]


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
    """slime's trainer again, from its first weights. checkpoint: in HF's form."""

    lr = 1e-3
    always_defers = False
    """No mean weight is known before the step, under algorithm 2 neither."""
    grad_norm = 1e-4
    """Agreement of the gradient's norm, relative."""
    small = 0.1
    """Metrics below it agree to 5e-4 of it, others to 5e-4 of themselves."""
    untracked: frozenset[str] | None = UNTRACKED
    """Metrics that its tracker may lack; None: any."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.lr)

    def log_probs(self, sample: Sample) -> Tensor:
        """[response] log π_θ, with gradient."""
        tokens, response = sample["tokens"], sample["response_lengths"]
        logits = self.logits(tokens)[-response - 1 : -1].log_softmax(-1)
        return logits.gather(-1, tokens[-response:, None])[:, 0]

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[None]).logits[0]

    def step(self, samples: Sequence[Sample], config: mp.MismatchConfig) -> dict[str, float]:
        """Loss as slime logs it, norm of the gradient before clipping, OLD, and the plugin's metrics, all at θ; then θ
        moves as slime's does (gradient clipped to norm 1)."""
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
        return {OLD: old, "loss": logged.item(), "grad_norm": norm.item(), **result.statistics.metrics()}


def difference(name: str, theirs: float, mine: float, small: float) -> float:
    """Absolute of a loss or log-prob, relative of a norm and of a metric. NaN equals NaN."""
    if theirs == mine or (math.isnan(theirs) and math.isnan(mine)):
        return 0.0
    if name == "grad_norm":
        return abs(theirs / mine - 1)
    return abs(theirs - mine) / (1.0 if name in ("loss", OLD) else max(small, abs(mine)))


def check(
    run: Trained,
    config: mp.MismatchConfig,
    reference: Reference,
    bound: float = TOLERANCE,
    steps: Iterable[Sequence[Sample]] | None = None,
) -> tuple[float, float]:
    """(the largest difference of a step's loss, of its gradient's norm), each step of a run from dumps held to bounds.

    The first value that differs is named: the weights, and all that comes after it, follow. bound: of the loss at later
    steps. steps: the samples of each, default those that the run dumped.
    """
    assert run.finished.status == 0, run.text[-4000:]
    rollouts = range(run.job.rollouts)
    steps = [step for rollout in rollouts for step in run.steps_of(rollout)] if steps is None else [*steps]
    assert sorted(run.steps) == [*range(len(steps))]
    losses, norms = [0.0], [0.0]
    for number, samples in enumerate(steps):
        wanted, logged = reference.step(samples, config), {OLD: 0.0, **run.steps[number]}
        if number % (len(steps) // len(rollouts)):
            del wanted[OLD]  # θ has moved
        tracked = {name: run.tracked[f"train/{name}"][number] for name in wanted if f"train/{name}" in run.tracked}
        bounds = {OLD: 2e-4, "loss": bound if number else TOLERANCE, "grad_norm": reference.grad_norm}
        for name, mine in wanted.items():
            theirs = logged[name] if name in bounds else tracked.get(name, mine)
            apart = difference(name, theirs, mine, reference.small)
            said = f"step {number}: {name} is {theirs:.6g} in the trainer and {mine:.6g} in the reference"
            assert apart < bounds.get(name, 5e-4), said
            losses.append(apart if name == "loss" else 0.0)
            norms.append(apart if name == "grad_norm" else 0.0)
        missing = wanted.keys() - tracked.keys() - bounds.keys()
        assert len(tracked) > 20 and (reference.untracked is None or missing <= reference.untracked), missing
    return largest(losses), largest(norms)
