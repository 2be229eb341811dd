"""Sampling masks through the hook: what they take away from the ratio, and whose gradient is left.

In `test_layouts` half of the samples are filtered.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.hooks.megatron_core import MegatronLoss, make_batch
from mismatch_plugin.log_probs import vocab_parallel_log_probs
from mismatch_plugin.parallel.groups import ParallelGroups

V, TOP_P = 5, 0.75
EXACT: dict[str, Any] = {
    "use_rollout_log_probs": True,
    "use_tis": True,
    "tis": {"level": "sequence", "upper_bound": math.inf},
    "aggregation": "seq-mean-token-sum",
    "denominator": "original",
    "metrics": "off",
}


def tables() -> tuple[Tensor, Tensor]:
    """Logits [1 + V, V] after the prompt and after each first token, of the sampler and of the trainer."""
    generator = torch.Generator().manual_seed(3)
    rollout = 1.5 * torch.randn(1 + V, V, generator=generator, dtype=torch.float64)
    return rollout, rollout + 0.4 * torch.randn(1 + V, V, generator=generator, dtype=torch.float64)


ROLLOUT, THETA = tables()


def nucleus(row: Tensor) -> list[int]:
    """Ids that top-p keeps: the fewest most likely ones that reach it."""
    mass, order = row.softmax(-1).sort(descending=True)
    return order[: int((mass.cumsum(-1) < TOP_P).sum()) + 1].tolist()


KEPT = [nucleus(row) for row in ROLLOUT]
assert all(1 < len(kept) < V for kept in KEPT)  # the filters cut something everywhere


def filtered(logits: Tensor) -> Tensor:
    """Log-probs over the kept ids of the sampler, −inf elsewhere."""
    dropped = torch.ones_like(logits, dtype=torch.bool)
    for row, kept in zip(dropped, KEPT, strict=True):
        row[kept] = False
    return logits.masked_fill(dropped, -math.inf).log_softmax(-1)


RESPONSES = [(a, b) for a in KEPT[0] for b in KEPT[1 + a]]
REWARD = torch.randn(V, V, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def log_likelihood(table: Tensor) -> Tensor:
    """[responses] of a table of log-probs."""
    return torch.stack([table[0, a] + table[1 + a, b] for a, b in RESPONSES])


def everything(masks: bool) -> list[Sample]:
    """Every response that the filtered sampler can give, with its probability times its reward as advantage."""
    drawn, mu = filtered(ROLLOUT), log_likelihood(filtered(ROLLOUT)).exp()
    return [
        Sample(
            prompt_ids=[0],
            response_ids=[a, b],
            advantages=float(chance * REWARD[a, b]),
            rollout_log_probs=[float(drawn[0, a]), float(drawn[1 + a, b])],
            behaviour_log_probs=[float(drawn[0, a]), float(drawn[1 + a, b])] if masks else None,
            kept_ids=[KEPT[0], KEPT[1 + a]] if masks else None,
        )
        for (a, b), chance in zip(RESPONSES, mu, strict=True)
    ]


def hooked(samples: list[Sample], theta: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of −loss by the table of logits, ρ of each response) through the hook's loss_func."""
    theta = theta.clone().requires_grad_()
    batch = make_batch(samples, dtype=torch.float64)
    model = SimpleNamespace(calculate_per_token_loss=True, finalize_model_grads_func=None)
    hook = MegatronLoss(mp.MismatchConfig(**EXACT), model, ParallelGroups())
    hook.start([batch])
    unread = torch.zeros(V, dtype=torch.float64)
    logits = torch.cat([torch.stack([theta[0], theta[1 + s.response_ids[0]], unread]) for s in samples])
    loss, _, _ = hook.loss_func(batch, logits[None].clone())  # over which the gradient is written
    loss.backward()
    assert theta.grad is not None
    log_probs = vocab_parallel_log_probs(
        logits.detach(), batch.targets, rows=batch.rows, sampling_mask=batch.sampling_mask
    ).log_probs
    packed = batch.packed.replace(old_log_probs=log_probs)
    return -theta.grad, mp.correct(packed, mp.MismatchConfig(**EXACT)).weights[::2]


def test_mean_ratio_is_the_kept_mass_without_masks_and_one_with_them() -> None:
    """Sequence level, so the kept mass of a whole response: Σ π_θ over what can be drawn, at least p² for μ itself."""
    mu = log_likelihood(filtered(ROLLOUT)).exp()
    for table in (ROLLOUT, THETA):
        mass = float(log_likelihood(table.log_softmax(-1)).exp().sum())
        assert float((mu * hooked(everything(masks=False), table)[1]).sum()) == pytest.approx(mass, rel=1e-12)
        assert float((mu * hooked(everything(masks=True), table)[1]).sum()) == pytest.approx(1.0, rel=1e-12)
    assert TOP_P**2 <= float(log_likelihood(ROLLOUT.log_softmax(-1)).exp().sum()) < 0.9


def test_the_gradient_is_that_of_the_policy_filtered_as_the_sampler_was() -> None:
    """J(θ) = Σ_y π^M_θ(y) R(y), the kept sets fixed: with masks the corrected loss's gradient is ∇J to rounding.
    Without them it is the gradient of Σ over the kept responses of π_θ(y) R(y), which also moves mass out of them."""

    def gradient(log_probs_of: Any) -> Tensor:
        theta = THETA.clone().requires_grad_()
        reward = torch.stack([REWARD[a, b] for a, b in RESPONSES])
        (log_likelihood(log_probs_of(theta)).exp() * reward).sum().backward()
        assert theta.grad is not None
        return theta.grad

    whole = gradient(lambda theta: theta.log_softmax(-1))
    torch.testing.assert_close(hooked(everything(masks=True), THETA)[0], gradient(filtered), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(hooked(everything(masks=False), THETA)[0], whole, rtol=1e-10, atol=1e-12)
    assert float((gradient(filtered) - whole).abs().max()) > 0.01
    dropped = [[i for i in range(V) if i not in kept] for kept in KEPT]
    assert all(float(row[out].abs().max()) == 0.0 for row, out in zip(gradient(filtered), dropped, strict=True))
