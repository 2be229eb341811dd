"""Proof by enumeration for weights of prefixes and turns: when they give the true policy gradient, and how far off they
are otherwise. As `test_loss_enumeration`: every response is listed, with μ(y) as a factor on the advantage.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.loss import token_loss
from tests.core.test_loss_enumeration import PROBLEMS, Problem, config, relative

UNBOUNDED = {"upper_bound": math.inf}


def action_values(problem: Problem, logits: Tensor) -> list[Tensor]:
    """Q^π(s_t, a_t) at every token of every response: the expected reward once the token is there."""
    probability = problem.sequence_log_probs(logits).exp()
    rows = []
    for response in problem.responses:
        values = []
        for t in range(len(response)):
            same = [i for i, other in enumerate(problem.responses) if other[: t + 1] == response[: t + 1]]
            values.append((probability[same] * problem.reward[same]).sum() / probability[same].sum())
        rows.append(torch.stack(values))
    return rows


def gradient_with(problem: Problem, level: str, advantages: list[Tensor], algorithm: int) -> Tensor:
    theta = (problem.old if algorithm == 2 else problem.theta).clone().requires_grad_()
    mu = problem.sequence_log_probs(problem.rollout).exp()
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=problem.token_log_probs(problem.rollout),
        loss_masks=[torch.ones(len(r)) for r in problem.responses],
        old_log_probs=problem.token_log_probs(problem.old),
        advantages=[p * row for p, row in zip(mu, advantages, strict=True)],
    )
    settings = config(algorithm, tis={"level": level, **UNBOUNDED})
    mp.policy_loss(torch.cat(problem.token_log_probs(theta)), packed, settings).loss_sum.backward()
    assert theta.grad is not None
    return -theta.grad


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("algorithm", [2, 3])
def test_prefix_weights_with_action_values_are_the_true_gradient(name: str, algorithm: int) -> None:
    """Per-decision importance sampling: what comes after a token needs no ratio, for Q^π has averaged over it."""
    problem = PROBLEMS[name]
    at = problem.old if algorithm == 2 else problem.theta
    advantages, true = action_values(problem, at), problem.true_gradient(at)
    assert relative(gradient_with(problem, "prefix", advantages, algorithm), true) < 1e-10
    assert relative(gradient_with(problem, "token", advantages, algorithm), true) > 1e-2
    assert relative(gradient_with(problem, "geometric", advantages, algorithm), true) > 1e-2


@pytest.mark.parametrize("name", PROBLEMS)
def test_prefix_weights_with_one_advantage_a_response_leave_the_rest_to_the_sampler(name: str) -> None:
    """Σ_t Σ_y π(y_≤t) μ(y_>t | y_≤t) R(y) ∇ log π(y_t): closer to the truth than token weights, and not it."""
    problem = PROBLEMS[name]
    rewards = [reward.expand(len(r)) for reward, r in zip(problem.reward, problem.responses, strict=True)]
    got, true = gradient_with(problem, "prefix", rewards, 3), problem.true_gradient(problem.theta)
    logits = problem.theta.clone().requires_grad_()
    rollout, total = problem.token_log_probs(problem.rollout), torch.zeros((), dtype=torch.float64)
    for row, behind, reward in zip(problem.token_log_probs(logits), rollout, problem.reward, strict=True):
        for t in range(len(row)):
            probability = math.exp(float(row[: t + 1].detach().sum()) + float(behind[t + 1 :].sum()))
            total = total + probability * float(reward) * row[t]
    total.backward()
    assert logits.grad is not None
    assert relative(got, logits.grad) < 1e-10
    assert relative(got, true) > 1e-2


class Conversation:
    """Two turns of two tokens with a tool's token between them; the tool may tell the second turn of the first."""

    mask = (1, 1, 0, 1, 1)

    def __init__(self, tells: bool, couples: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.responses = list(itertools.product(range(3), repeat=4))
        contexts = [self.contexts(r, tells) for r in self.responses]
        number = {context: n for n, context in enumerate(sorted({c for row in contexts for c in row}))}
        self.rows = [[number[context] for context in row] for row in contexts]

        def noise(*shape: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.rollout = noise(len(number), 3)
        self.theta = self.rollout + noise(len(number), 3, scale=0.5)
        first, second, both = noise(3, 3), noise(3, 3), noise(3, 3, 3, 3)
        self.reward = [float(first[a, b] + second[c, d] + couples * both[a, b, c, d]) for a, b, c, d in self.responses]

    @staticmethod
    def contexts(response: tuple[int, ...], tells: bool) -> list[tuple[object, ...]]:
        """What each token's distribution depends on."""
        a, b, c, _ = response
        told = (a, b) if tells else ()
        return [("1",), ("1", a), ("2", *told), ("2", *told, c)]

    def log_probs(self, logits: Tensor) -> list[Tensor]:
        table = logits.log_softmax(-1)
        return [table[row, list(r)] for row, r in zip(self.rows, self.responses, strict=True)]

    def gradient(self) -> Tensor:
        """−∇ of the package's loss, with turn weights."""
        theta = self.theta.clone().requires_grad_()
        behind = self.log_probs(self.rollout)

        def with_tool(row: Tensor) -> Tensor:
            return torch.cat([row[:2], row.new_full((1,), math.nan), row[2:]])

        packed = mp.PackedSequences.from_lists(
            rollout_log_probs=[with_tool(row) for row in behind],
            loss_masks=[self.mask] * len(behind),
            advantages=[row.sum().exp() * reward for row, reward in zip(behind, self.reward, strict=True)],
        )
        settings = config(3, tis={"level": "turn", **UNBOUNDED})
        current = torch.cat([with_tool(row) for row in self.log_probs(theta)])
        mp.policy_loss(current, packed, settings).loss_sum.backward()
        assert theta.grad is not None
        return -theta.grad

    def expected(self, turns: list[int]) -> Tensor:
        """Σ_k Σ_y π(turn k) ν(the other turn) R(y) ∇ log π(turn k), response by response in plain floats: ν is π in the
        turns that are named, else μ."""
        logits = self.theta.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for row, behind, reward in zip(self.log_probs(logits), self.log_probs(self.rollout), self.reward, strict=True):
            for k in (0, 1):
                own, other = slice(2 * k, 2 * k + 2), slice(2 - 2 * k, 4 - 2 * k)
                beside = row.detach() if 1 - k in turns else behind
                probability = math.exp(float(row.detach()[own].sum()) + float(beside[other].sum()))
                total = total + probability * reward * row[own].sum()
        total.backward()
        assert logits.grad is not None
        return logits.grad

    def true_gradient(self) -> Tensor:
        """By differentiating Σ_y π(y) R(y) itself."""
        logits = self.theta.clone().requires_grad_()
        rows = torch.stack([row.sum() for row in self.log_probs(logits)])
        (rows.exp() * torch.tensor(self.reward, dtype=torch.float64)).sum().backward()
        assert logits.grad is not None
        return logits.grad


def test_turn_weights_are_exact_where_turns_know_nothing_of_each_other() -> None:
    """Contexts independent, rewards added up: what the other turn adds averages to 0, whoever sampled it."""
    problem = Conversation(tells=False)
    assert relative(problem.gradient(), problem.true_gradient()) < 1e-10


@pytest.mark.parametrize(("tells", "couples"), [(True, False), (False, True), (True, True)])
def test_turn_weights_otherwise_have_the_bias_they_must(tells: bool, couples: bool) -> None:
    """The other turn stays where the sampler left it: an earlier one as the state, a later one in the reward."""
    problem = Conversation(tells, couples)
    got, true = problem.gradient(), problem.true_gradient()
    assert relative(problem.expected(turns=[0, 1]), true) < 1e-10
    assert relative(got, problem.expected(turns=[])) < 1e-10
    assert relative(got, true) > 1e-2


def weighted_kl(problem: Problem, kind: str, algorithm: int, tis: dict[str, object], at_old: bool) -> list[Tensor]:
    """(expected value, expected gradient) of `terms.kl_importance_weighted`; (value, gradient) of each state's
    KL(π_θ‖π_ref), and of its KL(π_ref‖π_θ), averaged over the states that π_θ visits."""
    logits = (problem.old if at_old else problem.theta).clone().requires_grad_()
    ref = problem.old + 3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    lengths = tuple(len(r) for r in problem.responses)
    packed = mp.PackedSequences(
        loss_mask=torch.ones(sum(lengths), dtype=torch.bool),
        lengths=lengths,
        rollout_log_probs=torch.cat(problem.token_log_probs(problem.rollout)),
        old_log_probs=torch.cat(problem.token_log_probs(problem.old)),
        ref_log_probs=torch.cat(problem.token_log_probs(ref)),
        advantages=torch.zeros(sum(lengths), dtype=torch.float64),
    )
    terms = {"kl_coef": 1.0, "kl_type": kind, "kl_importance_weighted": True}
    (term,) = token_loss(
        torch.cat(problem.token_log_probs(logits)), packed, config(algorithm, tis=tis, terms=terms)
    ).terms()
    repeats = torch.tensor(lengths)
    mu = problem.sequence_log_probs(problem.rollout).exp().repeat_interleave(repeats)
    visits = problem.sequence_log_probs(logits.detach()).exp().repeat_interleave(repeats)
    states = [problem.row[r[:t]] for r in problem.responses for t in range(len(r))]
    pi, other = logits.log_softmax(-1)[states], ref.log_softmax(-1)[states]
    found = []
    for value in (
        (mu * term.added).sum(),
        (visits * (pi.exp() * (pi - other)).sum(-1)).sum(),
        (visits * (other.exp() * (other - pi)).sum(-1)).sum(),
    ):
        found += [value.detach(), *torch.autograd.grad(value, logits, retain_graph=True)]
    return found


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("algorithm", [2, 3])
@pytest.mark.parametrize("level", ["prefix", "sequence"])
def test_when_a_weighted_kl_is_unbiased(name: str, algorithm: int, level: str) -> None:
    """As `terms.kl_importance_weighted` says, and nowhere else: not for bounded or token weights, nor, in algorithm 2,
    once π_θ is not π_old; not the value of k2, nor where low_var_kl is cut."""
    problem, exact = PROBLEMS[name], {"level": level, **UNBOUNDED}
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        value, gradient, forward, of_forward, _, of_backward = weighted_kl(problem, kind, algorithm, exact, True)
        assert (relative(value, forward) < 1e-10) == (kind in ("k1", "k3"))
        assert (relative(gradient, of_forward) < 1e-10) == (kind == "k2")
        assert (relative(gradient, of_backward) < 1e-10) == (kind == "k3")
        for tis in ({"level": "token", **UNBOUNDED}, {"level": level, "upper_bound": 1.2}):
            value, gradient, forward, of_forward, _, of_backward = weighted_kl(problem, kind, algorithm, tis, True)
            found = (relative(value, forward), relative(gradient, of_forward), relative(gradient, of_backward))
            assert min(found) > 1e-2
    later = weighted_kl(problem, "k2", algorithm, exact, at_old=False)
    assert (relative(later[1], later[3]) < 1e-10) == (algorithm == 3)
