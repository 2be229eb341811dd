"""The bias of `prefix_is` and `token_is` on decision processes whose policy gradient is known exactly.

Every action's log-ratio log π/μ is −d, 0 or d, so a product of ratios is e^(k d) for a whole number k: the distribution
of (state, k) under μ is carried from step to step, and no mean below is sampled. The weights are `mp.correct`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.diagnose.measure import Figures
from mismatch_plugin.diagnose.recommend import CREDIT, RULES, Rule, recommend
from mismatch_plugin.report.presets import quiet_preset

ACTIONS = 6
KINDS = ("mixing", "failing")
SHARES = (1.0, 0.06)
"""Of the actions' probability under π that has a log-ratio at all: from even noise to few tokens far off."""


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


class Process:
    """π and μ over six actions in a few states, `steps` long, KL(μ‖π) = KL(π‖μ) = kl in every state.

    mixing: states forget soon, a reward for each action. failing: an action may lead to a state that is never left; the
    reward is to have avoided it.
    """

    def __init__(self, kind: str, seed: int, steps: int, kl: float, share: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        states = {"mixing": 4, "failing": 5}[kind]
        self.steps, self.kind = steps, kind
        low, high = 0.0, 40.0
        while high - low > 1e-12:  # KL = share · d tanh(d / 2)
            d = (low + high) / 2
            low, high = (d, high) if share * d * math.tanh(d / 2) < kl else (low, d)
        self.d = low
        order = torch.tensor([1, 1, -1, -1, 0, 0])
        self.k = torch.stack([order[torch.randperm(ACTIONS, generator=generator)] for _ in range(states)])
        inner, self.pi = random(generator, states, ACTIONS) + 0.2, torch.zeros(states, ACTIONS, dtype=torch.float64)
        mass = {1: share / (1 + math.exp(-self.d)), -1: share / (1 + math.exp(self.d)), 0: 1 - share}
        for k, probability in mass.items():
            of = inner * (self.k == k)
            self.pi += probability * of / of.sum(1, keepdim=True)
        self.mu = self.pi * torch.exp(-self.d * self.k.double())
        self._dynamics(states, generator)
        self.advantages = self._advantages()

    def _dynamics(self, states: int, generator: torch.Generator) -> None:
        """Sets `moves` [state, action, next], `reward` [state, action], `final` [state] and `start` [state]."""
        self.reward = torch.zeros(states, ACTIONS, dtype=torch.float64)
        self.final, self.start = torch.zeros(states, dtype=torch.float64), torch.zeros(states, dtype=torch.float64)
        self.start[0] = 1.0
        self.moves = random(generator, states, ACTIONS, states) ** 3
        if self.kind == "mixing":
            self.reward = torch.randn(states, ACTIONS, generator=generator, dtype=torch.float64)
        else:
            fails = 2 * random(generator, states, ACTIONS) / self.steps
            self.moves[..., -1] = 0.0
            self.moves *= ((1 - fails) / self.moves.sum(-1))[..., None]
            self.moves[..., -1] = fails
            self.moves[-1], self.final[:-1] = torch.eye(states, dtype=torch.float64)[-1], 1.0
        self.moves /= self.moves.sum(-1, keepdim=True)

    def _advantages(self) -> list[Tensor]:
        """Q^π − V^π of every step, [state, action]."""
        value, found = self.final, list[Tensor]()
        for _ in range(self.steps):
            action_value = self.reward + self.moves @ value
            value = (self.pi * action_value).sum(1)
            found.append(action_value - value[:, None])
        return found[::-1]

    def gradient(self, masses: list[Tensor]) -> Tensor:
        """Σ_t Σ mass_t(s, a) A_t(s, a) ∇log π(a|s), by the logits of π, [state, action]."""
        total = torch.zeros_like(self.pi)
        for mass, advantage in zip(masses, self.advantages, strict=True):
            total += mass * advantage - (mass * advantage).sum(1, keepdim=True) * self.pi
        return total

    def true_gradient(self) -> Tensor:
        """That of E_π[Σ reward + final] itself."""
        logits = self.pi.log().requires_grad_()
        pi, state, total = logits.softmax(1), self.start, torch.zeros((), dtype=torch.float64)
        for _ in range(self.steps):
            mass = state[:, None] * pi
            total = total + (mass * self.reward).sum()
            state = torch.einsum("sa,san->n", mass, self.moves)
        (gradient,) = torch.autograd.grad(total + state @ self.final, logits)
        return gradient

    def products(self) -> Iterator[Tensor]:
        """Of every step, μ's probability of (state, action, k of the product up to and with the action)."""
        reached = torch.zeros(len(self.pi), 2 * self.steps + 1, dtype=torch.float64)
        reached[:, self.steps] = self.start
        for _ in range(self.steps):
            moved = [torch.einsum("sa,sk->sak", self.mu * (self.k == k), reached.roll(k, 1)) for k in (-1, 0, 1)]
            yield sum(moved, torch.zeros(()))
            reached = torch.einsum("sak,san->nk", sum(moved, torch.zeros(())), self.moves)

    def weights(self, config: mp.MismatchConfig) -> Tensor:
        """`mp.correct`'s weight of the t-th token, where the product so far is e^(k d): [2 steps + 1, steps].

        Responses of the first log-ratio k d and no other are at that product in every place. (At token level k is that
        of the first token alone.)
        """
        log_ratio = torch.zeros(2 * self.steps + 1, self.steps, dtype=torch.float64)
        log_ratio[:, 0] = self.d * (torch.arange(2 * self.steps + 1) - self.steps).double()
        packed = mp.PackedSequences(
            loss_mask=torch.ones(log_ratio.numel(), dtype=torch.bool),
            lengths=(self.steps,) * len(log_ratio),
            rollout_log_probs=torch.full_like(log_ratio, -500.0).flatten(),
            old_log_probs=(log_ratio - 500.0).flatten(),
        )
        return mp.correct(packed, config).weights.double().view_as(log_ratio)

    def prefix(self, config: mp.MismatchConfig) -> tuple[Tensor, float]:
        """(expected policy gradient, effective sample size of the tokens' weights as a share)."""
        weights, masses, sums = self.weights(config), list[Tensor](), torch.zeros(2, dtype=torch.float64)
        for t, mass in enumerate(self.products()):
            masses.append(mass @ weights[:, t])
            of = mass.sum((0, 1))
            sums += torch.stack([of @ weights[:, t], of @ weights[:, t] ** 2])
        return self.gradient(masses), float(sums[0] ** 2 / sums[1] / self.steps)

    def token(self, config: mp.MismatchConfig) -> Tensor:
        """The expected policy gradient of token weights."""
        weight = self.weights(config)[self.steps + self.k, 0]
        state, masses = self.start, list[Tensor]()
        for _ in range(self.steps):
            mass = state[:, None] * self.mu
            masses.append(mass * weight)
            state = torch.einsum("sa,san->n", mass, self.moves)
        return self.gradient(masses)


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


UNBOUNDED = quiet_preset("token_is").replace(tis={"level": "prefix", "upper_bound": math.inf})
RULE: Rule = next(rule for rule in RULES if rule.preset == "prefix_is")


def cases() -> list[tuple[float, int]]:
    """(KL, steps) at the edges of the rule's region and inside, to T = 200; and as far again, as the page says."""
    low, high = RULE.kl
    found = [(low, 200), (0.0025, 200), (0.02, 25), (0.02, 5), (high, 5), (high, 2)]
    assert max(kl * steps for kl, steps in found) == pytest.approx(RULE.kl_length)
    return [*found, (0.005, 200), (0.02, 50), (high, 10)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
def test_prefix_is_has_less_bias_than_token_is_wherever_it_is_recommended(kind: str, share: float) -> None:
    for kl, steps in cases():
        process = Process(kind, 0, steps, kl, share)
        true = process.true_gradient()
        token = relative(process.token(quiet_preset("token_is")), true)
        ours, ess = process.prefix(quiet_preset("prefix_is"))
        assert relative(ours, true) < (0.3 if kl * steps >= 0.5 else 0.7) * token, (kl, steps)
        assert ess > (0.4 if kl * steps <= RULE.kl_length else 0.2)


def test_unbounded_weights_have_no_bias() -> None:
    """The reference itself."""
    for kind in KINDS:
        process = Process(kind, 0, 150, 0.02, 1.0)
        assert relative(process.prefix(UNBOUNDED)[0], process.true_gradient()) < 1e-9


def test_beyond_the_rules_length_few_tokens_have_much_of_the_weight() -> None:
    """So other weights are recommended there, and without advantages of tokens."""
    longer = Process("mixing", 0, 200, 3 * RULE.kl_length / 200, 1.0)
    assert longer.prefix(quiet_preset("prefix_is"))[1] < 0.2
    inside = Figures(k3_kl=0.0025, ess=0.99, max_length=200, credit=CREDIT)
    outside = [{"max_length": 201}, {"k3_kl": 0.9 * RULE.kl[0]}, {"k3_kl": RULE.kl[1]}, {"credit": 0.9 * CREDIT}]
    for changes in ({}, *outside):
        found = recommend(replace(inside, **changes))
        assert (found is not None and found.preset == "prefix_is") == (not changes), changes
