"""The bias of `prefix_is` and `token_is` on a decision process whose policy gradient is known exactly.

Every action's log-ratio log π/μ is −d, 0 or d, so a product of ratios is e^(k d) for a whole number k: the distribution
of (state, k) under μ is carried from step to step, and no mean below is sampled. The weights are `mp.correct`'s; the
reference are unbounded ones of prefixes, which `test_loss_enumeration` shows to be exact.
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

STATES, ACTIONS = 4, 6


class Process:
    """π and μ over six actions in a few states, `steps` long, KL(μ‖π) = KL(π‖μ) = kl in every state; a reward for each
    action. share: of the actions' probability under π that has a log-ratio at all."""

    def __init__(self, steps: int, kl: float, share: float) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        self.steps = steps
        low, high = 0.0, 40.0
        while high - low > 1e-12:  # KL = share · d tanh(d / 2)
            d = (low + high) / 2
            low, high = (d, high) if share * d * math.tanh(d / 2) < kl else (low, d)
        self.d = low
        order = torch.tensor([1, 1, -1, -1, 0, 0])
        self.k = torch.stack([order[torch.randperm(ACTIONS, generator=generator)] for _ in range(STATES)])
        inner, self.pi = random(STATES, ACTIONS) + 0.2, torch.zeros(STATES, ACTIONS, dtype=torch.float64)
        mass = {1: share / (1 + math.exp(-self.d)), -1: share / (1 + math.exp(self.d)), 0: 1 - share}
        for k, probability in mass.items():
            of = inner * (self.k == k)
            self.pi += probability * of / of.sum(1, keepdim=True)
        self.mu = self.pi * torch.exp(-self.d * self.k.double())
        moves = random(STATES, ACTIONS, STATES) ** 3
        self.moves = moves / moves.sum(-1, keepdim=True)
        reward = torch.randn(STATES, ACTIONS, generator=generator, dtype=torch.float64)
        value, self.advantages = torch.zeros(STATES, dtype=torch.float64), list[Tensor]()
        for _ in range(steps):  # Q^π − V^π of every step, the last first
            action_value = reward + self.moves @ value
            value = (self.pi * action_value).sum(1)
            self.advantages.insert(0, action_value - value[:, None])

    def products(self) -> Iterator[Tensor]:
        """Of every step, μ's probability of (state, action, k of the product up to and with the action)."""
        reached = torch.zeros(STATES, 2 * self.steps + 1, dtype=torch.float64)
        reached[0, self.steps] = 1.0
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

    def gradient(self, config: mp.MismatchConfig) -> tuple[Tensor, float]:
        """(expected policy gradient by the logits of π, effective sample size of the tokens' weights as a share)."""
        weights, sums = self.weights(config), torch.zeros(2, dtype=torch.float64)
        own, total = weights[self.steps + self.k, 0], torch.zeros_like(self.pi)
        for t, (product, advantage) in enumerate(zip(self.products(), self.advantages, strict=True)):
            mass = product.sum(-1) * own if config.tis.level == "token" else product @ weights[:, t]
            total += mass * advantage - (mass * advantage).sum(1, keepdim=True) * self.pi
            of = product.sum((0, 1))
            sums += torch.stack([of @ weights[:, t], of @ weights[:, t] ** 2])
        return total, float(sums[0] ** 2 / sums[1] / self.steps)


UNBOUNDED = quiet_preset("prefix_is").replace(tis={"upper_bound": math.inf, "bound_growth": 0.0})
RULE: Rule = next(rule for rule in RULES if rule.preset == "prefix_is")


@pytest.mark.parametrize("share", [1.0, 0.06])
def test_prefix_is_has_less_bias_than_token_is_wherever_it_is_recommended(share: float) -> None:
    """(KL, steps) at the edges of the rule's region and inside, to T = 200; and as far again, as the page says."""
    low, high = RULE.kl
    inside = [(low, 200), (0.0025, 200), (0.02, 25), (0.02, 5), (high, 5), (high, 2)]
    assert max(kl * steps for kl, steps in inside) == pytest.approx(RULE.kl_length)
    for kl, steps in [*inside, (0.005, 200), (0.02, 50), (high, 10)]:
        process = Process(steps, kl, share)
        true, _ = process.gradient(UNBOUNDED)
        found = {name: process.gradient(quiet_preset(name)) for name in ("token_is", "prefix_is")}
        token, ours = (float((gradient - true).norm()) for gradient, _ in found.values())
        assert ours < (0.3 if kl * steps >= 0.5 else 0.7) * token, (kl, steps)
        assert found["prefix_is"][1] > (0.4 if kl * steps <= RULE.kl_length else 0.2)


def test_beyond_the_rules_length_few_tokens_have_much_of_the_weight() -> None:
    """So other weights are recommended there, and without advantages of tokens."""
    assert Process(200, 3 * RULE.kl_length / 200, 1.0).gradient(quiet_preset("prefix_is"))[1] < 0.2
    inside = Figures(k3_kl=0.0025, ess=0.99, max_length=200, credit=CREDIT)
    outside = [{"max_length": 201}, {"k3_kl": 0.9 * RULE.kl[0]}, {"k3_kl": RULE.kl[1]}, {"credit": 0.9 * CREDIT}]
    for changes in ({}, *outside):
        found = recommend(replace(inside, **changes))
        assert (found is not None and found.preset == "prefix_is") == (not changes), changes
