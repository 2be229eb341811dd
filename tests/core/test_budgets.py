"""Budgets of criteria: by hand, against sorting, against AReaL's M2PO, and what they may never do."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.rejection import token_statistic
from tests.fixtures import method_peers as peers
from tests.fixtures.rejection_peers import BATCHES, make
from tests.plain import budget_bounds

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


def batch(seed: int, sequences: int = 20, scale: float = 0.2) -> mp.PackedSequences:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (sequences,), generator=generator).tolist()
    rollout = [-3.0 * torch.rand(n, generator=generator, dtype=torch.float64) - 1.0 for n in lengths]
    gaps = [scale * torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    masks = [(torch.rand(n, generator=generator) < 0.8).long().tolist() for n in lengths]
    return mp.PackedSequences.from_lists(
        loss_masks=masks,
        rollout_log_probs=rollout,
        old_log_probs=[(row + gap).clamp(max=-1e-3) for row, gap in zip(rollout, gaps, strict=True)],
        advantages=torch.randn(sequences, generator=generator).tolist(),
    )


def judged(*criteria: str, **settings: object) -> mp.MismatchConfig:
    return mp.MismatchConfig.model_validate({"rs": {"criteria": criteria}, **settings})


def test_m2po_by_hand() -> None:
    """l² .01, .04, .36, 1: means .3525, .1367, .025, so that two of four stay below .04."""
    gaps = torch.tensor([0.1, 0.2, 0.6, -1.0], dtype=torch.float64)
    old = torch.full((4,), -2.0, dtype=torch.float64)
    packed = mp.PackedSequences.from_lists(
        loss_masks=[[1] * 4], old_log_probs=[old], rollout_log_probs=[old - gaps], advantages=[1.0]
    )
    config = mp.preset("m2po")
    thresholds = mp.correct(packed, config).statistics.thresholds()
    assert mp.correct(packed, config, thresholds=thresholds).keep.tolist() == [1, 1, 0, 0]
    assert 0.02 < float(thresholds["token_k2"]) < 0.18
    wide = config.replace(rs={"criteria": ["token:k2:0.02:mean=0.18"]})
    thresholds = mp.correct(packed, wide).statistics.thresholds()
    assert thresholds["token_k2"] == float("inf"), "the mean of all is below: nothing is rejected"
    assert mp.correct(packed, wide, thresholds=thresholds).keep.tolist() == [1, 1, 1, 1]
    metrics = mp.correct(packed, wide).statistics.metrics()
    assert metrics["rollout_corr/rollout_rs_token_k2_threshold"] == 1e12
    narrow = config.replace(rs={"criteria": ["token:k2:1e-9:mean=1e-6"]})
    kept = mp.correct(packed, narrow, thresholds=mp.correct(packed, narrow).statistics.thresholds()).keep
    assert kept.tolist() == [1, 0, 0, 0], "what is smallest stays, as in AReaL"
    for share, stays in ((0.2, 4), (0.25, 3), (0.6, 2), (0.9, 1)):
        config = judged(f"token:k2:1e-9:share={share}")
        assert mp.correct(packed, config).keep.sum() == 0, "the first step has the bound that is given"
        thresholds = mp.correct(packed, config).statistics.thresholds()
        assert mp.correct(packed, config, thresholds=thresholds).keep.tolist() == [1] * stays + [0] * (4 - stays)


@pytest.mark.parametrize("budget", ["share=0.07", "share=0.5", "mean={:.3g}"])
@pytest.mark.parametrize("statistic", ["k2", "k3", "tv", "binary_kl", "binary_kl_reverse"])
@pytest.mark.parametrize("aggregate", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
def test_the_threshold_is_that_of_sorting(aggregate: str, statistic: str, budget: str) -> None:
    for seed in range(3):
        packed = batch(seed, scale=10.0 ** (-seed - 0.5))
        everything = judged(f"{aggregate}:{statistic}:inf", metrics="full")
        size = mp.correct(packed, everything).statistics.metrics()
        name = f"{aggregate}_{statistic}"
        given = budget.format(size[f"rollout_corr/rollout_rs_{name}_mean"] / 2)
        config = judged(f"{aggregate}:{statistic}:1e-30:{given}")
        statistics = mp.correct(packed, config).statistics
        values = _values(packed, aggregate, statistic)
        low, high = budget_bounds(config.criteria[0], values)
        threshold = float(statistics.thresholds()[name])
        assert low <= threshold <= high
        if config.criteria[0].share is not None:
            assert sum(value > threshold for value in values) <= config.criteria[0].share * len(values)


def _values(packed: mp.PackedSequences, aggregate: str, statistic: str) -> list[float]:
    """What the criterion compares of each of its units."""
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    train, rollout = packed.old_log_probs, packed.rollout_log_probs
    rows = zip(
        token_statistic(statistic, train - rollout, train, rollout).split(packed.lengths),
        packed.loss_mask.split(packed.lengths),
        strict=True,
    )
    trained = [row[mask] for row, mask in rows if mask.any()]
    if aggregate == "token":
        return torch.cat(trained).tolist()
    form = {"sequence_sum": torch.sum, "sequence_mean": torch.mean, "sequence_max": torch.max}[aggregate]
    return [float(form(row)) for row in trained]


def test_m2po_keeps_what_areal_keeps() -> None:
    """But for tokens within the width of a bin of where AReaL cuts."""
    cases = json.loads(peers.DATA.read_text(encoding="utf-8"))
    rejected = 0
    for seed in range(BATCHES):
        data, theirs = make(seed), torch.tensor(cases[seed]["m2po"]).bool()
        packed = mp.PackedSequences.from_padded(
            loss_masks=data["mask"], rollout_log_probs=data["rollout"], old_log_probs=data["old"]
        )
        config = mp.preset("m2po", second_moment=peers.SECOND_MOMENT)
        thresholds = mp.correct(packed, config).statistics.thresholds()
        ours = packed.to_padded(mp.correct(packed, config, thresholds=thresholds).keep).bool()
        squares, mask = (data["old"] - data["rollout"]).square(), data["mask"].bool()
        assert squares[ours].mean() <= peers.SECOND_MOMENT and (ours & ~theirs).sum() == 0
        cut = squares[theirs & mask].max()
        assert (squares[theirs & ~ours & mask] > cut / 1.1).all()
        rejected += int((mask & ~theirs).sum())
    assert rejected > 20


@pytest.mark.parametrize("criterion", ["token:k2:0.05:share=0.1", "token:k2:0.01:mean=0.01"])
@pytest.mark.parametrize(
    "settings", [{}, {"use_rollout_log_probs": True, "objective": "reinforce"}, {"use_tis": True, "metrics": "off"}]
)
def test_a_budget_only_ever_keeps_more(criterion: str, settings: dict[str, object]) -> None:
    """Step for step: never below the bound that is given, in every algorithm, and the loss is the kept tokens'."""
    config, plain = judged(criterion, **settings), judged(":".join(criterion.split(":")[:3]), **settings)
    thresholds = None
    for seed, scale in enumerate((0.05, 0.6, 0.6, 0.02)):
        packed = batch(seed, scale=scale)
        assert packed.old_log_probs is not None
        log_probs = packed.old_log_probs.clone().requires_grad_()
        result = mp.policy_loss(log_probs, packed, config, thresholds=thresholds)
        with_bound = mp.policy_loss(log_probs, packed, plain)
        assert (result.correction.keep >= with_bound.correction.keep).all()
        if seed == 0:
            assert torch.equal(result.correction.keep, with_bound.correction.keep)
        (gradient,) = torch.autograd.grad(result.loss, log_probs)
        assert torch.equal(gradient != 0, result.correction.keep > 0)
        kept = float(result.correction.keep.sum() / packed.loss_mask.sum())
        if seed == 2:  # the step before was as far off: most of it stays, though the bound alone takes most
            assert kept > 0.8 if "share" in criterion else kept > 1.5 * float(with_bound.correction.keep.mean())
        thresholds = result.statistics.thresholds()
    assert thresholds is not None and float(thresholds["token_k2"]) >= config.criteria[0].upper_bound  # type: ignore[operator]


@pytest.mark.parametrize("budget", ["share=0.1", "mean=0.1"])
def test_a_step_without_tokens_leaves_the_bound_as_written(budget: str) -> None:
    packed = dataclasses.replace(full := batch(3), loss_mask=torch.zeros_like(full.loss_mask))
    thresholds = mp.correct(packed, judged(f"token:k2:0.05:{budget}")).statistics.thresholds()
    assert float(thresholds["token_k2"]) == 0.05


def test_a_budget_changes_no_other_figure() -> None:
    """Its histogram counts what others read, too."""
    with_budget, without = (
        mp.correct(batch(4), judged(f"sequence_sum:k2:0.5{budget}", metrics="full")) for budget in (":share=0.1", "")
    )
    assert torch.equal(with_budget.sums_N["k2"], without.sums_N["k2"])
    ours, theirs = with_budget.statistics.metrics(), without.statistics.metrics()
    assert ours.items() >= theirs.items() and len(ours) == len(theirs) + 1


def test_of_the_current_policy() -> None:
    """Under rs.policy current the histogram is of what is judged."""
    packed = batch(5)
    assert packed.old_log_probs is not None and packed.rollout_log_probs is not None
    config = judged("token:k2:1e-9:share=0.1")
    config = config.replace(rs={"policy": "current"})
    close = mp.correct(packed, config, log_probs=packed.rollout_log_probs + 1e-3).statistics.thresholds()
    far = mp.correct(packed, config, log_probs=packed.rollout_log_probs - 0.5).statistics.thresholds()
    assert float(close["token_k2"]) == pytest.approx(5e-7, rel=0.03)
    assert float(far["token_k2"]) == pytest.approx(0.125, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rs": {"criteria": ["token:k2:1:share=0.1:mean=2"]}}, "is one of share and mean: leave one out"),
        ({"rs": {"criteria": ["token:ratio:2:share=0.1"]}}, "raises one bound, and ratio has two: choose k2 or k3"),
        ({"rs": {"criteria": ["token:k2:0.1:1:share=0.1"]}}, "raises the upper bound alone: leave the lower one out"),
        ({"rs": {"criteria": ["token:k2:1:mean=0.1@negative"]}}, "counts all units: leave the condition out"),
        ({"rs": {"criteria": ["token:k2:1:shares=0.1"]}}, "'shares' is unknown: did you mean share"),
        ({"rs": {"criteria": ["token:k2:1:share=25"]}}, "is 25: give one between 0 and 1 (0.25 for 25 %)"),
        ({"rs": {"criteria": ["token:k2:1:mean=0"]}}, "should be greater than 0"),
        ({"rs": {"criteria": ["token:k2:share=0.1"]}}, "has no upper bound"),
        ({"rs": {"criteria": ["token:k2:1:share=0.1"], "group": "exclude"}}, "the budget of token_k2 moves at every"),
    ],
)
def test_what_has_no_meaning_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="rs") as caught:
        mp.MismatchConfig.build(settings)
    assert said in str(caught.value)
