"""docs/methods.md: its flags are taken, and give the formula that the page says."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from ci.methods import EQUALITIES, METHODS, Equality, Method
from mismatch_plugin.core.loss import token_loss


def _config(flags: str) -> mp.MismatchConfig:
    parser = mp.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.MismatchWarning)
        return mp.MismatchConfig.from_args(parser.parse_args(flags.split()))


@pytest.mark.parametrize("equality", EQUALITIES, ids=lambda equality: f"{equality.method}, {equality.equals}")
def test_the_test_of_an_equality_is_there(equality: Equality) -> None:
    file, name = equality.test.split("::")
    assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


# Every row's formula, written with nothing of ours. It sees the tokens that train, one after the other.


class Batch(NamedTuple):
    """theta: log π_θ, with gradient; old, mu, ref: log π_old, π_rollout, π_ref; a: advantages. [T] each.

    sequences, turns: index of the tokens of each. age: weight versions before the trainer's."""

    theta: Tensor
    old: Tensor
    mu: Tensor
    ref: Tensor
    a: Tensor
    age: Tensor
    sequences: Sequence[Tensor]
    turns: Sequence[Tensor]

    @property
    def l_old(self) -> Tensor:
        return self.old - self.mu

    @property
    def l_theta(self) -> Tensor:
        """Without gradient."""
        return (self.theta - self.mu).detach()

    @property
    def r(self) -> Tensor:
        return (self.theta - self.old).exp()

    def each(self, values: Tensor, what: Callable[[Tensor], Tensor], parts: Sequence[Tensor] | None = None) -> Tensor:
        """`what` of the values of each sequence (or part), at each of its tokens."""
        out = torch.zeros_like(values)
        for part in self.sequences if parts is None else parts:
            out = out.index_put((part,), what(values[part]).expand(len(part)))
        return out

    def means(self, each: Tensor) -> Tensor:
        """Times what makes a mean over all tokens the mean of the responses' means."""
        share = self.each(torch.ones_like(self.a), lambda ones: 1 / ones.sum())
        return each * share * len(self.a) / len(self.sequences)


def _clip(r: Tensor, a: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return -torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def _ppo(b: Batch) -> Tensor:
    return _clip(b.r, b.a)


def _k3(l_T: Tensor) -> Tensor:
    return l_T.exp() - 1 - l_T


def _bernoulli(log_p: Tensor, log_q: Tensor) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _inside(l_T: Tensor, low: float, high: float) -> Tensor:
    return (l_T >= math.log(low)) & (l_T <= math.log(high))


def _mis(b: Batch) -> tuple[Tensor, Tensor]:
    product = b.each(b.l_old, torch.sum)
    return product.exp() * _ppo(b), _inside(product, 0.5, 2)


def _self_normalised(b: Batch) -> Tensor:
    w = b.l_old.exp().clamp(max=2)
    return w / w.mean() * _ppo(b)


def _prefix(b: Batch) -> Tensor:
    n = b.each(torch.ones_like(b.a), lambda ones: ones.cumsum(0))
    return torch.minimum(b.each(b.l_old, lambda part: part.cumsum(0)).exp(), 5 ** n.sqrt()) * _ppo(b)


def _m2po(b: Batch) -> tuple[Tensor, Tensor]:
    """After a step of the same data; each l² counts as the upper edge of its bin."""
    width = math.asinh(1e20) / 2048
    squares = 2e-8 * ((b.l_old**2 / 2e-8).asinh() / width).ceil().mul(width).sinh()
    means = torch.stack([squares[squares <= value].mean() for value in squares])
    return _ppo(b), squares <= squares[means <= 0.04].amax()


def _a_quarter(b: Batch) -> tuple[Tensor, Tensor]:
    """Of six responses one."""
    mean = b.each(_k3(b.l_old), torch.mean)
    return _ppo(b), (mean <= 0.01) | (mean < mean.amax())


def _trm(b: Batch) -> tuple[Tensor, Tensor]:
    worst, mean = b.each(b.l_old**2 / 2, torch.amax), b.each(_k3(b.l_old), torch.mean)
    return _ppo(b), (worst <= 0.5) & (mean <= 0.01)


def _dppo(b: Batch, near: Tensor) -> Tensor:
    back = torch.where(b.a > 0, b.theta <= b.mu, b.theta >= b.mu)  # the step does not lead further away
    return -b.l_theta.exp().clamp(max=20) * b.a * b.theta * (near | back)


def _opsm(b: Batch) -> Tensor:
    far = b.each(-b.l_theta, torch.mean) > -math.log(0.905)
    return torch.where((b.a < 0) & far, 0, _ppo(b))


def _gspo(b: Batch) -> Tensor:
    s = b.each(b.theta - b.old, torch.mean).exp()
    return b.means(b.each(_clip(s, b.a, 3e-4, 4e-4), torch.mean))


def _sapo(b: Batch) -> Tensor:
    tau = torch.full_like(b.a, 1.05).masked_fill(b.a > 0, 1.0)
    return b.means(-b.a * (4 / tau) / (1 + (-tau * (b.r - 1)).exp()))


def _gmpo(b: Batch) -> Tensor:
    clipped = torch.where(b.a > 0, b.r.log().clamp(max=0.4), b.r.log().clamp(min=-0.4))
    return b.means(-b.each(clipped, torch.mean).exp() * b.a)


def _vespo(b: Batch) -> Tensor:
    w = b.each(b.l_theta, torch.sum).exp()
    phi = torch.where(b.a >= 0, w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp())
    return -phi * b.a * b.theta


def _prime(b: Batch) -> Tensor:
    """As prime-rl writes it; r A has the gradient of sg(r) A log π."""
    difference = b.theta.exp() - b.mu.exp()
    masked = torch.where(b.a > 0, difference > 0.2, difference < -0.2)
    return -(b.theta - b.mu).exp() * b.a * ~masked + 1e-3 * (b.theta - b.mu) ** 2


def _kpop(b: Batch) -> Tensor:
    return (_bernoulli(b.old, b.mu) <= 0.1) & (_bernoulli(b.mu, b.old) <= 0.1)


Formula = Callable[[Batch], "Tensor | tuple[Tensor, Tensor]"]
_FORMULAS: dict[str, Formula] = {
    "PPO": _ppo,
    "Dual clip": lambda b: torch.where(b.a < 0, torch.minimum(_ppo(b), -3 * b.a), _ppo(b)),
    "Decoupled PPO, TIS": lambda b: b.l_old.exp().clamp(max=2) * _ppo(b),
    "Sequence weights, MIS": _mis,
    "Geometric rejection": lambda b: (_ppo(b), _inside(b.each(b.l_old, torch.mean), 1 / 1.001, 1.001)),
    "IcePop": lambda b: torch.where(_inside(b.l_old, 0.5, 5), b.l_old.exp(), 0) * _ppo(b),
    "Self-normalised weights": _self_normalised,
    "REINFORCE + IS": lambda b: -b.each(b.l_theta, torch.sum).exp().clamp(max=2) * b.a * b.theta,
    "Per-decision weights": _prefix,
    "Turn weights": lambda b: b.each(b.l_old, torch.sum, b.turns).exp().clamp(max=2) * _ppo(b),
    "KPop": lambda b: (_ppo(b), _kpop(b)),
    "KPop in AReaL": lambda b: b.l_old.exp() * _ppo(b) * _kpop(b),
    "TRM": _trm,
    "M2PO": _m2po,
    "At most a share": _a_quarter,
    "DPPO-TV": lambda b: _dppo(b, (b.theta.exp() - b.mu.exp()).abs() <= 0.15),
    "DPPO-KL": lambda b: _dppo(b, _bernoulli(b.mu, b.theta) <= 0.05),
    "OPSM": _opsm,
    "GSPO": _gspo,
    "CISPO": lambda b: -b.r.clamp(max=1.2).detach() * b.a * b.theta,
    "SAPO": _sapo,
    "GMPO": _gmpo,
    "VESPO": _vespo,
    "TOPR": lambda b: -b.each(b.l_theta, torch.sum).exp().clamp(max=1).masked_fill(b.a >= 0, 1.0) * b.a * b.theta,
    "REINFORCE without a ratio": lambda b: -b.l_old.exp().clamp(max=2) * b.a * b.theta,
    "prime-rl's default": _prime,
    "prime-rl's default, its own form": _prime,
    "Unbiased KL": lambda b: b.l_old.exp().clamp(max=2) * (_ppo(b) + 1e-3 * (b.theta - b.ref) ** 2 / 2),
    "Group without the rejected": lambda b: (_ppo(b), b.each(_k3(b.l_old), torch.mean) <= 0.01),
    "Limit on staleness": lambda b: (_ppo(b), b.age <= 2),
}
_OTHER_VALUE = {"prime-rl's default"}
"""Its loss has another value and the same gradient."""

_MASKS = ([1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1], [1, 0, 1, 1, 1], [1, 1, 0, 1, 0, 1], [1] * 6, [1, 1, 1, 0, 1])
_SPREADS = (3e-4, 0.03, 0.15, 0.5, 1.0, 0.08)
"""Of log π_old − log π_rollout, a sequence."""


def _draw(seed: int) -> tuple[mp.PackedSequences, Tensor, Batch]:
    """(what ours takes, log π_θ of it, what a formula sees)."""
    random = torch.Generator().manual_seed(seed)
    lengths = [len(mask) for mask in _MASKS]
    mask = torch.tensor([*chain(*_MASKS)]) > 0
    index = torch.repeat_interleave(torch.tensor(lengths))

    def normal() -> Tensor:
        return torch.randn(len(mask), generator=random, dtype=torch.float64)

    mu = torch.rand(len(mask), generator=random, dtype=torch.float64).clamp(0.05, 0.8).log()
    old = (mu + torch.tensor(_SPREADS, dtype=torch.float64)[index] * normal()).clamp(max=-0.02)
    theta = (old + 0.3 * normal()).clamp(max=-0.01)
    mu[-1], old[-1], theta[-1] = math.log(0.15), math.log(0.16), math.log(0.7)  # A < 0: far enough for the dual clip
    ref, a = mu + 0.3 * normal(), torch.tensor([1.0, -0.5, 2.0, -1.5, 0.7, -1.0], dtype=torch.float64)[index]
    age = torch.randint(0, 5, (len(mask),), generator=random)
    fields: dict[str, Any] = {"rollout_log_probs": mu, "old_log_probs": old, "ref_log_probs": ref, "advantages": a}
    fields["rewards"] = torch.zeros(len(lengths))  # what advantages were formed from: `rs.group` wants to see them
    packed = mp.PackedSequences(
        loss_mask=mask, lengths=tuple(lengths), weight_versions=7 - age, trainer_version=7, **fields
    )
    theta.requires_grad_()
    trained, turn = index[mask], ((mask & ~torch.cat([mask.new_zeros(1), mask[:-1]])).cumsum(0) + 100 * index)[mask]
    parts = [[torch.nonzero(of == number).flatten() for number in of.unique()] for of in (trained, turn)]
    batch = Batch(theta[mask], old[mask], mu[mask], ref[mask], a[mask], age[mask], *parts)
    return packed, theta, batch


def _far(packed: mp.PackedSequences, theta: Tensor, batch: Batch) -> tuple[mp.PackedSequences, Tensor, Batch]:
    """The same batch, with log π_rollout and log π_θ of −1 and −7, −0.1 and −19, −12 and −1, and A of 0 and ±1."""
    mu, far, a = batch.mu.clone(), batch.theta.detach().clone(), batch.a.clone()
    for place, (at_mu, at_theta) in enumerate([(-1.0, -7.0), (-0.1, -19.0), (-12.0, -1.0)] * 3):
        mu[place], far[place], a[place] = at_mu, at_theta, place // 3 - 1.0
    mask = packed.loss_mask
    whole = theta.detach().masked_scatter(mask, far).requires_grad_()
    assert packed.rollout_log_probs is not None and packed.advantages is not None
    packed = packed.replace(
        rollout_log_probs=packed.rollout_log_probs.masked_scatter(mask, mu),
        advantages=packed.advantages.masked_scatter(mask, a),
    )
    return packed, whole, batch._replace(theta=whole[mask], mu=mu, a=a)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_formula_of_a_method(method: Method) -> None:
    """Loss and gradient of a row's flags are those of its formula; but for PPO they differ from those of PPO."""
    config = _config(method.flags)
    assert (config == mp.MismatchConfig()) == (method.flags == "")
    if method.name == "Sampling mask":
        assert method.name not in _FORMULAS  # tests/hooks/megatron_core/test_sampling_mask.py
        return
    acts = method.name == "PPO"
    for seed in range(4):
        packed, theta, batch = _draw(seed)
        if "prime-rl" in method.name:  # far tokens: they are pulled back, and masked by the sign of A alone
            packed, theta, batch = _far(packed, theta, batch)
        before = mp.policy_loss(theta, packed, config).statistics.thresholds()
        ours = mp.policy_loss(theta, packed, config, thresholds=before).loss
        formula = _FORMULAS[method.name](batch)
        loss, keep = formula if isinstance(formula, tuple) else (formula, torch.ones_like(batch.a, dtype=torch.bool))
        assert keep.any()
        theirs = torch.where(keep, loss, 0).sum() / keep.sum()
        (gradient,) = torch.autograd.grad(ours, theta)
        (expected,) = torch.autograd.grad(theirs, theta, retain_graph=True)
        if method.name not in _OTHER_VALUE:
            assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-12, abs=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
        (uncorrected,) = torch.autograd.grad(_ppo(batch).mean(), theta)
        acts = acts or not torch.allclose(gradient, uncorrected, rtol=1e-6)
    assert acts


@pytest.mark.parametrize(("kind", "forward"), [("k2", True), ("k3", False)])
def test_whose_gradient_a_weighted_kl_has(kind: str, forward: bool) -> None:
    """All outcomes of one token, by their probability under π_rollout: Σ μ w ∇k(d), w = π_θ/μ."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    mu, ref = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.5, 0.2, 0.3], [0.2, 0.2, 0.6]))
    fields: dict[str, Any] = {"rollout_log_probs": mu, "ref_log_probs": ref, "advantages": torch.zeros_like(mu)}
    packed = mp.PackedSequences(loss_mask=mu < 0, lengths=(1, 1, 1), **fields)
    flags = f"--mismatch-kl-coef 1 --mismatch-kl-type {kind} --mismatch-kl-importance-weighted --use-tis"
    config = _config(f"{flags} --use-rollout-log-probs --tis-upper-bound inf")
    (term,) = token_loss(log_p, packed, config).terms()
    (found,) = torch.autograd.grad((mu.exp() * term.added).sum(), logits, retain_graph=True)
    left, right = (log_p, ref) if forward else (ref, log_p)
    (expected,) = torch.autograd.grad((left.exp() * (left - right)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
