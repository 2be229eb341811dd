"""Proof by enumeration: on a problem small enough to list every response, which gradient each setting gives.

Vocabulary V, at most L tokens, tabular policies with one logit vector a prefix. The loss is summed over *all*
responses with the rollout probability μ(y) as a factor on the advantage, so its gradient is the exact expectation, and
can be held against ∇J(π) = Σ_y π(y) R(y) ∇ log π(y), which this file computes by itself.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

EOS = 0
UNBOUNDED = {"upper_bound": math.inf}
SUM = {"aggregation": "seq-mean-token-sum", "denominator": "original", "metrics": "off"}
OBJECTIVES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce")


class Problem:
    """Every response of a small problem, with three tabular policies and a reward."""

    def __init__(self, vocabulary: int, length: int, early_eos: bool, gap: float = 0.4) -> None:
        generator = torch.Generator().manual_seed(0)
        found: set[tuple[int, ...]] = set()
        for tokens in itertools.product(range(vocabulary), repeat=length):
            cut = tokens.index(EOS) + 1 if early_eos and EOS in tokens else length
            found.add(tokens[:cut])
        self.responses = sorted(found)
        prefixes = sorted({r[:i] for r in self.responses for i in range(len(r))})
        self.row = {prefix: i for i, prefix in enumerate(prefixes)}
        shape = (len(prefixes), vocabulary)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        self.rollout = noise(1.0)
        self.old = self.rollout + noise(gap)
        self.theta = self.old + noise(gap)
        self.reward = torch.randn(len(self.responses), generator=generator, dtype=torch.float64)

    def token_log_probs(self, logits: Tensor) -> list[Tensor]:
        table = logits.log_softmax(-1)
        rows = [[self.row[r[:i]] for i in range(len(r))] for r in self.responses]
        return [table[row, list(r)] for row, r in zip(rows, self.responses, strict=True)]

    def sequence_log_probs(self, logits: Tensor) -> Tensor:
        return torch.stack([row.sum() for row in self.token_log_probs(logits)])

    def mu(self) -> Tensor:
        return self.sequence_log_probs(self.rollout).exp()

    def true_gradient(self, logits: Tensor) -> Tensor:
        """∇J(π) by differentiating J = Σ_y π(y) R(y) itself, no policy-gradient theorem used."""
        logits = logits.clone().requires_grad_()
        return gradient_of((self.sequence_log_probs(logits).exp() * self.reward).sum(), logits)

    def action_values(self, logits: Tensor) -> list[Tensor]:
        """Q^π(s_t, a_t) at every token of every response: the expected reward once the token is there."""
        probability, rows = self.sequence_log_probs(logits).exp(), []
        for response in self.responses:
            values = []
            for t in range(len(response)):
                same = [i for i, other in enumerate(self.responses) if other[: t + 1] == response[: t + 1]]
                values.append((probability[same] * self.reward[same]).sum() / probability[same].sum())
            rows.append(torch.stack(values))
        return rows

    def packed(self, old: Tensor, values: list[Tensor] | None = None) -> mp.PackedSequences:
        """Every response, with μ(y) R(y) as the advantage at every token, or μ(y) times these values."""
        values = (
            [r.expand(len(y)) for r, y in zip(self.reward, self.responses, strict=True)] if values is None else values
        )
        return mp.PackedSequences.from_lists(
            rollout_log_probs=self.token_log_probs(self.rollout),
            loss_masks=[torch.ones(len(r)) for r in self.responses],
            old_log_probs=self.token_log_probs(old),
            advantages=[p * row for p, row in zip(self.mu(), values, strict=True)],
        )

    def gradient(self, config: mp.MismatchConfig, theta: Tensor, values: list[Tensor] | None = None) -> Tensor:
        """−∇ of the package's loss, summed over all responses."""
        theta = theta.clone().requires_grad_()
        result = mp.policy_loss(torch.cat(self.token_log_probs(theta)), self.packed(self.old, values), config)
        counts = sum(map(len, self.responses)) if config.aggregation == "token-mean" else len(self.responses)
        assert int(result.denominator) == counts
        return -gradient_of(result.loss_sum, theta)


def gradient_of(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value, leaf, retain_graph=True)[0]


PROBLEMS = {"fixed length": Problem(3, 4, early_eos=False), "early EOS": Problem(4, 3, early_eos=True)}


def config(flags: int, **fields: object) -> mp.MismatchConfig:
    return mp.MismatchConfig(use_rollout_log_probs=bool(flags & 1), use_tis=bool(flags & 2), **{**SUM, **fields})


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.fixture(params=PROBLEMS, name="problem")
def _problem(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]


# Exact ----------------------------------------------------------------------------------------------------------------


def test_untruncated_sequence_weights_give_the_true_gradient(problem: Problem) -> None:
    """REINFORCE wherever π_θ is, decoupled PPO at π_old."""
    for algorithm, theta in ((3, problem.old), (3, problem.theta), (2, problem.old)):
        got = problem.gradient(config(algorithm, tis={"level": "sequence", **UNBOUNDED}), theta)
        assert relative(got, problem.true_gradient(theta)) < 1e-10
        bounded = problem.gradient(config(algorithm, tis={"level": "sequence", "upper_bound": 1.2}), theta)
        assert relative(bounded, problem.true_gradient(theta)) > 1e-3
    without = problem.gradient(config(0), problem.old)
    assert relative(without, problem.true_gradient(problem.old)) > 0.05, "the expectation under the wrong policy"


@pytest.mark.parametrize("algorithm", [2, 3])
def test_prefix_weights_with_action_values_are_the_true_gradient(problem: Problem, algorithm: int) -> None:
    """Per-decision importance sampling: what comes after a token needs no ratio, for Q^π has averaged over it; one
    advantage a response has not."""
    at = problem.old if algorithm == 2 else problem.theta
    values, true = problem.action_values(at), problem.true_gradient(at)
    for level, given in (("prefix", values), ("token", values), ("geometric", values), ("prefix", None)):
        error = relative(problem.gradient(config(algorithm, tis={"level": level, **UNBOUNDED}), at, given), true)
        assert error < 1e-10 if level == "prefix" and given is values else error > 1e-2


@pytest.mark.parametrize("algorithm", [0, 1, 2])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_at_the_anchor_every_objective_has_reinforces_gradient(
    problem: Problem, algorithm: int, aggregation: str
) -> None:
    """r = s = 1 there. In algorithm 2 under sequence weights, which are not 1."""
    theta = problem.rollout if algorithm == 1 else problem.old
    tis = {"tis": {"level": "sequence", **UNBOUNDED}} if algorithm == 2 else {}
    found = {
        name: problem.gradient(config(algorithm, objective=name, aggregation=aggregation, **tis), theta)
        for name in OBJECTIVES
    }
    for name in OBJECTIVES:
        assert relative(found[name], found["reinforce"]) < 1e-10, name
    if aggregation == "seq-mean-token-sum" and algorithm:
        assert relative(found["reinforce"], problem.true_gradient(theta)) < 1e-10


def test_prefix_is_has_less_bias_than_token_is(problem: Problem) -> None:
    """The presets' bounded weights, with action values as advantages."""
    values, true = problem.action_values(problem.old), problem.true_gradient(problem.old)
    error = {}
    for name in ("prefix_is", "token_is"):
        settings = mp.preset(name).replace(**SUM)
        error[name] = relative(problem.gradient(settings, problem.old, values), true)
    assert error["prefix_is"] < 0.3 * error["token_is"], error


# Turns ----------------------------------------------------------------------------------------------------------------


class Conversation:
    """Two turns of two tokens with a tool's token between them; the tool may tell the second turn of the first."""

    def __init__(self, tells: bool, couples: bool) -> None:
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
            loss_masks=[(1, 1, 0, 1, 1)] * len(behind),
            advantages=[row.sum().exp() * reward for row, reward in zip(behind, self.reward, strict=True)],
        )
        current = torch.cat([with_tool(row) for row in self.log_probs(theta)])
        loss = mp.policy_loss(current, packed, config(3, tis={"level": "turn", **UNBOUNDED})).loss_sum
        return -gradient_of(loss, theta)

    def true_gradient(self) -> Tensor:
        """By differentiating Σ_y π(y) R(y) itself."""
        logits = self.theta.clone().requires_grad_()
        rows = torch.stack([row.sum() for row in self.log_probs(logits)])
        return gradient_of((rows.exp() * torch.tensor(self.reward, dtype=torch.float64)).sum(), logits)


@pytest.mark.parametrize(("tells", "couples"), [(False, False), (True, False), (False, True), (True, True)])
def test_turn_weights_are_exact_only_where_turns_know_nothing_of_each_other(tells: bool, couples: bool) -> None:
    """Contexts independent, rewards added up: what the other turn adds averages to 0. Else it stays where the sampler
    left it: an earlier one as the state, a later one in the reward."""
    problem = Conversation(tells, couples)
    error = relative(problem.gradient(), problem.true_gradient())
    assert error > 1e-2 if tells or couples else error < 1e-10
