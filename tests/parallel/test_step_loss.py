"""`step_loss`: one optimizer step of a loop of one's own is the same however micro-batches and ranks cut it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mismatch_plugin as mp
from tests.distributed.launch import launch

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

LENGTHS = (3, 7, 2, 9, 5, 1, 4, 6)
WHOLE, CUT = [range(8)], [range(3), range(3, 4), range(4, 8)]
SHARES = [CUT[:1], CUT[1:]]


class Data(NamedTuple):
    """Log-probs of eight responses, [T] float64 each, and one advantage a response."""

    rollout: list[Tensor]
    old: list[Tensor]
    current: list[Tensor]
    advantages: list[float]


def data() -> Data:
    random = torch.Generator().manual_seed(0)

    def near(rows: list[Tensor], spread: float) -> list[Tensor]:
        noise = [spread * torch.randn(len(row), generator=random, dtype=torch.float64) for row in rows]
        return [(row + each).clamp(max=-0.001) for row, each in zip(rows, noise, strict=True)]

    rollout = [-0.1 - 2.0 * torch.rand(n, generator=random, dtype=torch.float64) for n in LENGTHS]
    old = near(rollout, 0.4)
    return Data(rollout, old, near(old, 0.2), torch.randn(8, generator=random).tolist())


def parts_of(
    config: mp.MismatchConfig, cut: Any, leaves: list[Tensor], factor: float | None = None, plant: str = ""
) -> list[mp.PolicyLoss]:
    """`policy_loss` of every micro-batch."""
    rollout, old, _, advantages = data()
    results = []
    for number, ids in enumerate(cut):
        packed = mp.PackedSequences.from_lists(
            rollout_log_probs=[rollout[i] for i in ids],
            old_log_probs=[old[i] for i in ids],
            ref_log_probs=[rollout[i] for i in ids],
            loss_masks=[[1] * LENGTHS[i] for i in ids],
            advantages=[advantages[i] for i in ids],
        )
        if plant == "no rollout" or (plant == "no rollout once" and number == 1):
            packed = packed.replace(rollout_log_probs=None)
        if plant == "invalid" and number == 1 and packed.rollout_log_probs is not None:
            packed.rollout_log_probs[2] = torch.nan  # found in the loss, as on a device
        results.append(mp.policy_loss(torch.cat([leaves[i] for i in ids]), packed, config, batch_factor=factor))
    return results


def made(**settings: Any) -> mp.MismatchConfig:
    return mp.MismatchConfig.build(settings)


def step(config: mp.MismatchConfig, cut: Any, accumulate: bool = False) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, gradient of every log-prob, metrics)."""
    leaves = [row.clone().requires_grad_() for row in data().current]
    results = parts_of(config, cut, leaves)
    for result in results if accumulate else ():
        result.undivided.backward()
    ended = mp.step_loss(results)
    if accumulate:
        ended.scale_gradients(leaves)  # type: ignore[arg-type]
    else:
        ended.loss.backward()
    return ended.loss.item(), torch.cat([given(leaf.grad) for leaf in leaves]), ended.metrics()


def given(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


NORMALIZED = [
    {"use_rollout_log_probs": bypass, "use_tis": True, "terms": terms, "aggregation": aggregation}
    | {"tis": {"level": level, "mode": mode, "batch_normalize": True, "batch_normalize_scope": scope}}
    for bypass, scope, level, mode, aggregation, terms in (
        (False, "auto", "token", "truncate", "token-mean", {}),
        (False, "step", "token", "mask", "seq-mean-token-mean", {"kl_coef": 0.1, "kl_importance_weighted": True}),
        (False, "auto", "sequence", "clip", "seq-mean-token-mean", {}),
        (True, "auto", "token", "mask", "token-mean", {"kl_coef": 0.1, "kl_importance_weighted": True}),
        (True, "step", "sequence", "clip", "token-mean", {}),
        (True, "auto", "token", "truncate", "seq-mean-token-mean", {}),
    )
]
PLAIN = [{}, {"use_rollout_log_probs": True}, {"rs": {"criteria": ["token:k1:1.2"]}, "terms": {"kl_coef": 0.1}}]


@pytest.mark.parametrize("settings", [*NORMALIZED, *PLAIN], ids=str)
def test_micro_batches_are_one_step(settings: dict[str, Any]) -> None:
    """The step's mean weight and denominators, in loss, gradients and metrics; also where gradients accumulate."""
    config = made(**settings)
    loss, gradient, metrics = step(config, WHOLE)
    leaves = [row.clone().requires_grad_() for row in data().current]
    (alone,) = parts_of(config, WHOLE, leaves)
    alone.loss.backward()
    own = alone.loss.item(), torch.cat([given(leaf.grad) for leaf in leaves]), metrics
    others = [own, step(config, CUT)]
    if config.other_terms and (config.normalizes or config.rejects):
        with pytest.raises(ValueError, match=r"a KL term cannot be accumulated: .* divides the policy term alone"):
            step(config, CUT, accumulate=True)
    else:
        others.append(step(config, CUT, accumulate=True))
    for other, theirs, figures in others:
        assert other == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(theirs, gradient, rtol=1e-12, atol=1e-15)
        assert figures == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    if not config.terms.kl_coef:
        assert metrics["rollout_corr/pg_loss"] == pytest.approx(loss, rel=1e-9), "the mean weight divides it"


def test_a_micro_batch_alone_is_normalised_by_its_own_mean_and_says_so() -> None:
    """A scope of the step that no micro-batch can know: merged without `step_loss`, the metrics would be of another."""
    config = made(use_tis=True, tis={"batch_normalize": True})
    one, two, _ = (result.statistics for result in parts_of(config, CUT, data().current))
    assert one.metrics()
    with pytest.raises(ValueError, match=r"2 micro-batches were each divided by their own mean .*mp\.step_loss"):
        one.merge(two).metrics()
    one, two, _ = (result.statistics for result in parts_of(config, CUT, data().current, 1.1))
    assert one.merge(two).metrics(), "the step's mean was handed in"
    own = made(use_tis=True, tis={"batch_normalize": True, "batch_normalize_scope": "micro_batch"})
    one, two, _ = (result.statistics for result in parts_of(own, CUT, data().current))
    assert one.merge(two).metrics(), "each has its own there"
    assert abs(step(own, CUT)[0] - step(own, WHOLE)[0]) > 1e-3, "which is another step"
    with pytest.raises(ValueError, match="rollout_batch needs a host that weighs rollouts"):
        mp.step_loss(parts_of(config.replace(tis={"batch_normalize_scope": "rollout_batch"}), CUT, data().current))


def test_a_step_without_accepted_tokens_is_zero_and_connected() -> None:
    config = made(use_tis=True, tis={"batch_normalize": True}, rs={"criteria": ["token:tv:2:3"]})
    loss, gradient, metrics = step(config, CUT)
    assert loss == 0.0 and not gradient.any() and metrics["rollout_corr/all_rejected"] == 1.0
    assert step(config, CUT, accumulate=True)[0] == 0.0
    (one,) = parts_of(made(aggregation="seq-mean-token-mean"), [range(1)], data().current)
    for given in (one, [one], iter([one])):  # of one response
        assert float(mp.step_loss(given).loss) == pytest.approx(float(one.loss))
    with pytest.raises(ValueError, match="no micro-batch was given to this step"):
        mp.step_loss([])


def on_ranks(settings: dict[str, Any]) -> tuple[float, Tensor, dict[str, float]]:
    """A rank's loss and gradient, as DDP would average them, and the metrics."""
    leaves = [row.clone().requires_grad_() for row in data().current]
    ended = mp.step_loss(parts_of(made(**settings), SHARES[dist.get_rank()], leaves), dist.group.WORLD)
    ended.loss.backward()
    gradient = torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    dist.all_reduce(gradient)
    return ended.loss.item(), gradient / 2, ended.metrics()


def test_ranks_are_one_step() -> None:
    """The mean over ranks is the step: with ranks of other lengths and another number of micro-batches."""
    cases = [*NORMALIZED, *PLAIN]
    for settings, ranks in zip(cases, launch(on_ranks, cases, 2), strict=True):
        loss, gradient, metrics = step(made(**settings), WHOLE)
        assert sum(rank[0] for rank in ranks) / 2 == pytest.approx(loss, rel=1e-12)
        for _, theirs, figures in ranks:
            torch.testing.assert_close(theirs, gradient, rtol=1e-12, atol=1e-15)
            assert figures == pytest.approx(metrics, rel=1e-9, abs=1e-12)


DIFFERENT = {
    "nothing": ["on rank 1: no micro-batch was given to this step"] * 2,
    "other metrics": ["rank 0 has metrics = 'full', rank 1 has metrics = 'basic'"] * 2,
    "no rollout": ["rank 0 has train@tokens, rank 1 has no train@tokens"] * 2,
    "no rollout once": ["on rank 1: statistics cannot be merged: one has "] * 2,
    "invalid": ["invalid log-probs on another rank: 1 of kind nan", "sequence 0, position 2 "],
}


def refusal(plant: str) -> str:
    """What is said where rank 1 has something else."""
    rank, config = dist.get_rank(), made(use_tis=plant == "invalid", metrics="full")
    plant = plant if rank else ""
    if plant == "other metrics":
        config = config.replace(metrics="basic")
    results = parts_of(config, SHARES[rank] if plant != "nothing" else [], data().current, plant=plant)
    try:
        mp.step_loss(results, dist.group.WORLD).metrics()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_refused_on_all() -> None:
    """Otherwise vectors of different lengths meet in one all-reduce, or a rank raises alone and the others wait."""
    for plant, ranks in zip(DIFFERENT, launch(refusal, list(DIFFERENT), 2), strict=True):
        for said, words in zip(ranks, DIFFERENT[plant], strict=True):
            assert words in said, (plant, said)
