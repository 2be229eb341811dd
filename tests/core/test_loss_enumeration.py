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

EOS = 0

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


class Problem:
    """Every response of a small problem, with three tabular policies and a reward."""

    def __init__(self, vocabulary: int, length: int, early_eos: bool, gap: float, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.responses: list[tuple[int, ...]] = []
        for tokens in itertools.product(range(vocabulary), repeat=length):
            cut = tokens.index(EOS) + 1 if early_eos and EOS in tokens else length
            self.responses.append(tokens[:cut])
        self.responses = sorted(set(self.responses))
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

    def true_gradient(self, logits: Tensor) -> Tensor:
        """∇J(π) by differentiating J = Σ_y π(y) R(y) itself, no policy-gradient theorem used."""
        logits = logits.clone().requires_grad_()
        (self.sequence_log_probs(logits).exp() * self.reward).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def gradient(self, config: mp.MismatchConfig, theta: Tensor, old: Tensor) -> Tensor:
        """−∇ of the package's loss, summed over all responses with μ(y) R(y) as the advantage at every token."""
        theta = theta.clone().requires_grad_()
        mu = self.sequence_log_probs(self.rollout).exp()
        packed = mp.PackedSequences.from_lists(
            rollout_log_probs=self.token_log_probs(self.rollout),
            loss_masks=[torch.ones(len(r)) for r in self.responses],
            old_log_probs=self.token_log_probs(old),
            advantages=list(mu * self.reward),
        )
        result = mp.policy_loss(torch.cat(self.token_log_probs(theta)), packed, config)
        counts = sum(map(len, self.responses)) if config.aggregation == "token-mean" else len(self.responses)
        assert int(result.denominator) == counts
        result.loss_sum.backward()
        assert theta.grad is not None
        return -theta.grad


PROBLEMS = {
    "fixed length": Problem(3, 4, early_eos=False, gap=0.4),
    "early EOS": Problem(4, 3, early_eos=True, gap=0.4),
}
SUM = {"aggregation": "seq-mean-token-sum", "denominator": "original", "metrics": "off"}


def config(flags: int, **fields: object) -> mp.MismatchConfig:
    return mp.MismatchConfig(use_rollout_log_probs=bool(flags & 1), use_tis=bool(flags & 2), **{**SUM, **fields})


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(params=PROBLEMS, name="problem")
def _problem(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]


OBJECTIVES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce")


@pytest.mark.parametrize("on_policy", [True, False])
def test_reinforce_with_untruncated_sequence_weights_is_the_true_gradient(problem: Problem, on_policy: bool) -> None:
    theta = problem.old if on_policy else problem.theta
    settings = config(3, tis={"level": "sequence", "upper_bound": math.inf})
    assert relative(problem.gradient(settings, theta, problem.old), problem.true_gradient(theta)) < 1e-10


def test_decoupled_ppo_at_old_with_untruncated_sequence_weights_is_the_true_gradient(problem: Problem) -> None:
    settings = config(2, tis={"level": "sequence", "upper_bound": math.inf})
    assert relative(problem.gradient(settings, problem.old, problem.old), problem.true_gradient(problem.old)) < 1e-10


def test_all_algorithms_agree_when_the_three_policies_are_one(problem: Problem) -> None:
    problem_gradient = problem.true_gradient(problem.rollout)
    for algorithm in range(4):
        tis = {"tis": {"level": "sequence"}} if algorithm & 2 else {}
        got = problem.gradient(config(algorithm, **tis), problem.rollout, problem.rollout)
        assert relative(got, problem_gradient) < 1e-10, algorithm


@pytest.mark.parametrize("algorithm", [0, 1, 2])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_at_the_anchor_every_objective_has_reinforces_gradient(
    problem: Problem, algorithm: int, aggregation: str
) -> None:
    """r = s = 1 there. In algorithm 2 under sequence weights, which are not 1."""
    theta = problem.rollout if algorithm == 1 else problem.old
    tis = {"tis": {"level": "sequence", "upper_bound": math.inf}} if algorithm == 2 else {}
    found = {
        name: problem.gradient(config(algorithm, objective=name, aggregation=aggregation, **tis), theta, problem.old)
        for name in OBJECTIVES
    }
    for name in OBJECTIVES:
        assert relative(found[name], found["reinforce"]) < 1e-10, name
    if aggregation == "seq-mean-token-sum" and algorithm:
        assert relative(found["reinforce"], problem.true_gradient(theta)) < 1e-10


@pytest.mark.parametrize("name", ["gspo", "cispo", "reinforce"])
def test_objectives_away_from_the_anchor_have_the_gradient_of_their_formula(problem: Problem, name: str) -> None:
    """Algorithm 0 at θ ≠ old, response by response: Σ_y μ(y) R(y) Σ_t c_t ∇ log π_θ(y_t), c by plain Python floats."""
    logits = problem.theta.clone().requires_grad_()
    total, cut = torch.zeros((), dtype=torch.float64), 0
    rows, behind = problem.token_log_probs(logits), problem.token_log_probs(problem.old)
    mus = problem.sequence_log_probs(problem.rollout).exp().tolist()
    for row, anchor, mu, reward in zip(rows, behind, mus, problem.reward.tolist(), strict=True):
        ratios = [math.exp(float(a) - float(b)) for a, b in zip(row.detach(), anchor, strict=True)]
        if name == "reinforce":
            factors = [1.0] * len(ratios)
        elif name == "cispo":
            factors = [min(max(r, 0.9), 1.2) for r in ratios]
        else:
            s = math.prod(ratios) ** (1 / len(ratios))
            factors = [0.0 if (reward > 0 and s > 1.2) or (reward < 0 and s < 0.9) else s] * len(ratios)
        cut += factors[0] in (0.0, 0.9, 1.2)
        total = total + mu * reward * sum(c * t for c, t in zip(factors, row, strict=True))
    total.backward()
    assert logits.grad is not None and (cut > 0) == (name != "reinforce")
    ppo = {} if name == "reinforce" else {"ppo": {"eps_clip_low": 0.1, "eps_clip_high": 0.2}}
    got = problem.gradient(config(0, objective=name, **ppo), problem.theta, problem.old)
    assert relative(got, logits.grad) < 1e-10


def test_without_stop_gradient_the_result_is_wrong(problem: Problem) -> None:
    """What autograd gives when w is differentiated too; it must be far off, or the tests above prove nothing."""
    theta = problem.theta.clone().requires_grad_()
    log_prob = problem.sequence_log_probs(theta)
    weight = (log_prob - problem.sequence_log_probs(problem.rollout)).exp()
    mu = problem.sequence_log_probs(problem.rollout).exp()
    (weight * mu * problem.reward * log_prob).sum().backward()
    assert theta.grad is not None
    assert relative(theta.grad, problem.true_gradient(problem.theta)) > 0.1


def expected_biased_gradient(problem: Problem, algorithm: int, level: str, mode: str, lo: float, hi: float) -> Tensor:
    """Direct formula, response by response: Σ_y μ(y) R(y) Σ_t w_t ∇ log π_θ(y_t), weights by plain Python floats."""
    at = problem.old if algorithm == 2 else problem.theta
    logits = at.clone().requires_grad_()
    rows = problem.token_log_probs(logits)
    rollout = problem.token_log_probs(problem.rollout)
    total = torch.zeros((), dtype=torch.float64)
    for row, behind, reward in zip(rows, rollout, problem.reward, strict=True):
        ratios = [math.exp(float(a) - float(b)) for a, b in zip(row.detach(), behind, strict=True)]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        elif level == "geometric":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        bounded = {
            "truncate": [min(r, hi) for r in ratios],
            "clip": [min(max(r, lo), hi) for r in ratios],
            "mask": [r if lo <= r <= hi else 0.0 for r in ratios],
        }[mode]
        mu = math.exp(float(behind.sum()))
        total = total + mu * float(reward) * sum(w * t for w, t in zip(bounded, row, strict=True))
    total.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("algorithm", [2, 3])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_bounded_weights_have_the_bias_they_must(problem: Problem, algorithm: int, level: str, mode: str) -> None:
    """θ = old for algorithm 2 (its ratio r is 1 there, no clip active), θ ≠ old for algorithm 3."""
    lower = 0.8 if mode != "truncate" else None
    settings = config(algorithm, tis={"level": level, "mode": mode, "lower_bound": lower, "upper_bound": 1.2})
    theta = problem.old if algorithm == 2 else problem.theta
    got = problem.gradient(settings, theta, problem.old)
    assert relative(got, expected_biased_gradient(problem, algorithm, level, mode, 0.8, 1.2)) < 1e-10
    assert relative(got, problem.true_gradient(theta)) > 1e-3  # and it is a bias, not nothing


def test_ppo_without_correction_is_biased_when_the_engines_differ(problem: Problem) -> None:
    """Algorithm 0 at θ = old gives Σ μ R ∇ log π_old: the expectation under the wrong policy."""
    got = problem.gradient(config(0), problem.old, problem.old)
    logits = problem.old.clone().requires_grad_()
    mu = problem.sequence_log_probs(problem.rollout).exp()
    (mu * problem.reward * problem.sequence_log_probs(logits)).sum().backward()
    assert logits.grad is not None
    assert relative(got, logits.grad) < 1e-10
    assert relative(got, problem.true_gradient(problem.old)) > 0.05


def test_bypass_ppo_follows_the_rollout_anchor(problem: Problem) -> None:
    """Algorithm 1: token ratios π_θ/π_rollout, dropped where the clip is active for the reward's sign."""
    logits = problem.theta.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    rows, behind = problem.token_log_probs(logits), problem.token_log_probs(problem.rollout)
    for row, rollout, reward in zip(rows, behind, problem.reward, strict=True):
        mu = math.exp(float(rollout.sum()))
        for token, anchor in zip(row, rollout, strict=True):
            r = math.exp(float(token) - float(anchor))
            if (reward > 0 and r > 1.2) or (reward < 0 and r < 0.8):
                continue
            total = total + mu * float(reward) * r * token
    total.backward()
    assert logits.grad is not None
    assert relative(problem.gradient(config(1), problem.theta, problem.old), logits.grad) < 1e-10
