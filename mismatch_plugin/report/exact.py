"""Seed-free tables: what each setting's expected gradient is, with every response of a tiny problem listed.

Tabular policies (one logit vector a prefix), vocabulary 4, responses of 4 tokens: 256 responses. `mp.policy_loss` gives
the coefficient of every ∇ log π_θ(token), the package's own and no copy of its formulas. Summed over all responses
with their rollout probability this is the exact expectation: no sampling, no seeds to choose. Many problems are packed
into one call. The problems are random, drawn with fixed generators 0, 1, …; averages over them are given.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.files import read_json_object, write_whole
from mismatch_plugin.report.data import describe
from mismatch_plugin.report.table import Table

VOCABULARY, LENGTH = 4, 4
UPPER_BOUND = 2.0
UNTRUNCATED = "untruncated"
LEVELS = ("token", "sequence", "geometric")
MODES = (UNTRUNCATED, "truncate", "clip", "mask")
TRUE_GRADIENT = "true gradient"
ESTIMATORS = ("0", "1", *(f"{a}:{level}:{mode}" for a in (2, 3) for level in LEVELS for mode in MODES))
LEARNERS = (
    *(TRUE_GRADIENT, "0", "1"),
    *("2:token:truncate", "2:sequence:untruncated", "2:sequence:truncate", "2:sequence:mask"),
    *("3:token:truncate", "3:sequence:untruncated", "3:sequence:truncate", "3:sequence:mask"),
)


class Mismatch(NamedTuple):
    """Deviation of the logits' noise: rollout against old policy, and old against current policy."""

    rollout: float
    old: float = 0.0


class Engine(NamedTuple):
    """How rollout logits come from the weights: noise added, rounded to multiples, or from so many steps ago."""

    noise: float = 0.0
    rounding: float = 0.0
    stale: int = 0


MISMATCHES = {
    "mild": Mismatch(0.05),
    "medium": Mismatch(0.3),
    "strong": Mismatch(1.0),
    "strong, θ moved": Mismatch(1.0, 0.5),
}
ENGINES = {
    "in sync": Engine(),
    "noise 1": Engine(noise=1.0),
    "rounded to 4": Engine(rounding=4.0),
    "stale 64": Engine(stale=64),
}


@dataclass(frozen=True)
class ExactBias:
    """bias and deviation by estimator and mismatch, both relative to ‖∇J‖; kl (nat a token) and ess by mismatch."""

    bias: dict[str, dict[str, float]]
    deviation: dict[str, dict[str, float]]
    kl: dict[str, float]
    ess: dict[str, float]
    problems: int


@dataclass(frozen=True)
class ExactDynamics:
    """J after `steps` steps, by estimator and engine; the best possible J is 2."""

    final: dict[str, dict[str, float]]
    steps: int
    problems: int


class Responses:
    """All responses of the given length, and the row of the table that each of their tokens is drawn from."""

    def __init__(self, length: int) -> None:
        v = VOCABULARY
        self.length = length
        self.tokens_SL = torch.tensor(list(itertools.product(range(v), repeat=length)))
        starts = [sum(v**i for i in range(t)) for t in range(length)]
        prefixes = torch.zeros_like(self.tokens_SL)
        for t in range(1, length):
            prefixes[:, t] = prefixes[:, t - 1] * v + self.tokens_SL[:, t - 1]
        self.rows_SL = prefixes + torch.tensor(starts)
        self.rows = sum(v**i for i in range(length))
        ordered = (self.tokens_SL[:, 1:] >= self.tokens_SL[:, :-1]).double()
        self.reward_S = ordered.mean(1) + ordered.prod(1)  # share of neighbours in order, and 1 more if all are

    def log_probs(self, logits_PRV: Tensor) -> Tensor:
        """[P, S, L]: log-probability of every token of every response, for P policies."""
        return logits_PRV.log_softmax(-1)[:, self.rows_SL, self.tokens_SL]

    def expected_reward(self, logits_PRV: Tensor) -> Tensor:
        """J of each policy, [P]."""
        return self.log_probs(logits_PRV).sum(-1).exp() @ self.reward_S

    def true_gradient(self, logits_PRV: Tensor) -> Tensor:
        """∇J by differentiating J itself; no policy-gradient theorem is used."""
        logits_PRV = logits_PRV.detach().requires_grad_()
        return torch.autograd.grad(self.expected_reward(logits_PRV).sum(), logits_PRV)[0]

    def score_norms(self, logits_PRV: Tensor) -> Tensor:
        """‖∇ log π(token)‖² with respect to its row of logits, [P, S, L]: 1 − 2 p_token + Σ p²."""
        p = logits_PRV.softmax(-1)
        return 1.0 - 2.0 * p[:, self.rows_SL, self.tokens_SL] + p.square().sum(-1)[:, self.rows_SL]

    def random(self, problems: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and two directions of noise, [P, R, V] each, from the generators 0, 1, …"""
        drawn = []
        for seed in range(problems):
            generator = torch.Generator().manual_seed(seed)
            shape = (3, self.rows, VOCABULARY)
            parts = [torch.randn(shape[1:], generator=generator, dtype=torch.float64) for _ in range(shape[0])]
            drawn.append(torch.stack(parts))
        logits, first, second = torch.stack(drawn, dim=1).unbind(0)
        return logits, first, second


@cache
def settings_of(label: str) -> mp.MismatchConfig:
    """The configuration that a label such as `2:sequence:mask` stands for; untruncated is an infinite upper bound."""
    number, *rest = label.split(":")
    algorithm = int(number)
    fields: dict[str, Any] = {"use_rollout_log_probs": bool(algorithm & 1), "use_tis": bool(algorithm & 2)}
    if rest:
        level, mode = rest
        free = mode == UNTRUNCATED
        bound = math.inf if free else UPPER_BOUND
        fields["tis"] = {"level": level, "mode": "truncate" if free else mode, "upper_bound": bound}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        return mp.MismatchConfig(**fields, aggregation="seq-mean-token-sum", denominator="original", metrics="off")


class Batch:
    """Responses sampled by `rollout`, to be trained on: [P, S, L] log-probs, and the package's packed form of them."""

    def __init__(self, responses: Responses, rollout_PSL: Tensor, old_PSL: Tensor) -> None:
        self.probability_PS = rollout_PSL.sum(-1).exp()
        reward = responses.reward_S.expand_as(self.probability_PS)
        advantage = reward - (self.probability_PS * reward).sum(-1, keepdim=True)
        self.packed = mp.PackedSequences(
            loss_mask=torch.ones(rollout_PSL.numel(), dtype=torch.bool),
            lengths=(responses.length,) * advantage.numel(),
            rollout_log_probs=rollout_PSL.flatten(),
            old_log_probs=old_PSL.flatten(),
            advantages=advantage.unsqueeze(-1).expand_as(rollout_PSL).flatten(),
        ).prepared()

    def coefficients(self, log_probs_PSL: Tensor, config: mp.MismatchConfig) -> Tensor:
        """[P, S, L]: what multiplies ∇ log π_θ(token) in the policy's ascent direction: −∂loss/∂log π_θ."""
        leaf = log_probs_PSL.detach().flatten().requires_grad_()
        loss = mp.policy_loss(leaf, self.packed, config).loss_sum
        return -torch.autograd.grad(loss, leaf)[0].view_as(log_probs_PSL)


def expected_gradient(responses: Responses, logits_PRV: Tensor, batch: Batch, label: str) -> tuple[Tensor, Tensor]:
    """(E g [P, R, V], coefficients [P, S, L]) of one estimator."""
    logits_PRV = logits_PRV.detach().requires_grad_()
    log_probs = responses.log_probs(logits_PRV)
    c = batch.coefficients(log_probs, settings_of(label))
    weighted = batch.probability_PS.unsqueeze(-1) * c
    return torch.autograd.grad(log_probs, logits_PRV, weighted)[0], c


def exact_bias(
    mismatches: Mapping[str, Mismatch] = MISMATCHES,
    estimators: Sequence[str] = ESTIMATORS,
    problems: int = 40,
    length: int = LENGTH,
) -> ExactBias:
    """Bias ‖E g − ∇J‖/‖∇J‖ and one-sample deviation √(E‖g‖² − ‖E g‖²)/‖∇J‖, means over the problems."""
    responses = Responses(length)
    logits, first, second = responses.random(problems)
    norms, true = responses.score_norms(logits), responses.true_gradient(logits)
    length_of_true = true.flatten(1).norm(dim=1)
    bias: dict[str, dict[str, float]] = {label: {} for label in estimators}
    deviation: dict[str, dict[str, float]] = {label: {} for label in estimators}
    kl, ess = {}, {}
    for name, gap in mismatches.items():
        old = logits + gap.old * second
        rollout_PSL = responses.log_probs(old + gap.rollout * first)
        batch = Batch(responses, rollout_PSL, responses.log_probs(old))
        mu = batch.probability_PS
        log_ratio = (responses.log_probs(logits) - rollout_PSL).sum(-1)
        kl[name] = float(-(mu * log_ratio).sum(-1).mean()) / length
        ess[name] = float((1.0 / (mu * (2.0 * log_ratio).exp()).sum(-1)).mean())
        for label in estimators:
            mean, c = expected_gradient(responses, logits, batch, label)
            second_moment = (mu * (c.square() * norms).sum(-1)).sum(-1)
            variance = second_moment - mean.flatten(1).square().sum(-1)
            bias[label][name] = float(((mean - true).flatten(1).norm(dim=1) / length_of_true).mean())
            deviation[label][name] = float((variance.clamp(min=0.0).sqrt() / length_of_true).mean())
    return ExactBias(bias, deviation, kl, ess, problems)


def exact_dynamics(
    engines: Mapping[str, Engine] = ENGINES,
    estimators: Sequence[str] = LEARNERS,
    problems: int = 8,
    steps: int = 240,
    mini_batches: int = 4,
    learning_rate: float = 2.0,
    length: int = LENGTH,
) -> ExactDynamics:
    """J after so many steps along each estimator's exact expected gradient, mean over the problems.

    Every `mini_batches` steps the rollout and old policies are renewed. All engines and problems run side by side.
    """
    responses = Responses(length)
    logits, noise, _ = responses.random(problems)
    start = logits.repeat(len(engines), 1, 1)
    final: dict[str, dict[str, float]] = {}
    for label in estimators:
        past = [start]
        batch: Batch | None = None
        for step in range(steps):
            theta = past[-1]
            if step % mini_batches == 0 and label != TRUE_GRADIENT:
                parts = []
                for i, engine in enumerate(engines.values()):
                    rows = past[max(0, step - engine.stale)][i * problems : (i + 1) * problems]
                    rows = (rows / engine.rounding).round() * engine.rounding if engine.rounding else rows
                    parts.append(rows + engine.noise * noise)
                batch = Batch(responses, responses.log_probs(torch.cat(parts)), responses.log_probs(theta))
            gradient = (
                responses.true_gradient(theta)
                if batch is None
                else expected_gradient(responses, theta, batch, label)[0]
            )
            past.append(theta + learning_rate * gradient)
        reward = responses.expected_reward(past[-1]).view(len(engines), problems).mean(1)
        final[label] = dict(zip(engines, reward.tolist(), strict=True))
    return ExactDynamics(final, steps, problems)


def exact_bias_table(result: ExactBias) -> Table:
    """Bias of every estimator under every mismatch, and deviation of one sample, as text."""
    names = list(result.kl)
    headers = ("algorithm", *(f"bias, {name}" for name in names), *(f"deviation, {name}" for name in names))
    rows = [
        (
            describe(label),
            *(_small(result.bias[label][name]) for name in names),
            *(f"{result.deviation[label][name]:.1f}" for name in names),
        )
        for label in result.bias
    ]
    gaps = "; ".join(
        f"{name}: KL {result.kl[name]:.2g} nat a token, effective sample size {result.ess[name]:.2f}" for name in names
    )
    notes = (
        "Bias is the distance of the expected gradient from the true one, ‖E g − ∇J‖/‖∇J‖: 0 is exact, 1 is as far "
        "off as not moving. Deviation is that of a one-response estimate, in units of ‖∇J‖.",
        f"Means over {result.problems} random problems: vocabulary {VOCABULARY}, every response of {LENGTH} tokens "
        f"listed, upper bound {UPPER_BOUND:g}, lower {1 / UPPER_BOUND:g}. {gaps}.",
        "θ is the old policy, except under “θ moved”, where both differ as after several mini-batches.",
    )
    return Table("Bias of the expected gradient", headers, tuple(rows), notes=notes)


def exact_dynamics_table(result: ExactDynamics) -> Table:
    """J at the end by estimator and engine, as text."""
    engines = list(next(iter(result.final.values())))
    rows = [(_name(label), *(f"{row[engine]:.3f}" for engine in engines)) for label, row in result.final.items()]
    notes = (
        f"Expected reward, at most 2, after {result.steps} steps along the exact expected gradient: four mini-batches "
        f"a rollout, mean of {result.problems} random problems. No sampling noise: what stalls here stalls by bias.",
        "Rollout logits are the trained ones with fixed noise of deviation 1, rounded to multiples of 4, or those of "
        "64 steps ago.",
    )
    return Table("Training on the expected gradient", ("algorithm", *engines), tuple(rows), notes=notes)


def cached_tables(folder: Path) -> list[Table]:
    """Both tables, computed once a run folder and version of this package (`exact.json`)."""
    bias = _cached(folder / "exact_bias.json", exact_bias, ExactBias)
    dynamics = _cached(folder / "exact_dynamics.json", exact_dynamics, ExactDynamics)
    return [exact_bias_table(bias), exact_dynamics_table(dynamics)]


def _cached(path: Path, compute: Callable[[], Any], kind: Callable[..., Any]) -> Any:
    try:
        stored = read_json_object(path)
        if stored.pop("version") == mp.__version__:
            return kind(**stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: threads that wait for each other only cost time
    try:
        result = compute()
    finally:
        torch.set_num_threads(threads)
    write_whole(path, json.dumps({"version": mp.__version__, **asdict(result)}))
    return result


def _name(label: str) -> str:
    return label if label == TRUE_GRADIENT else describe(label)


def _small(value: float) -> str:
    """Three digits; powers of ten where that would be 0."""
    return f"{value:.3f}" if value >= 5e-4 else f"{value:.0e}"
