"""Values at their bounds, the policy that is judged, and budgets. All else: `test_loss_differential`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.rejection import token_statistic
from tests.core.worked import config, logs, metrics_of, of_log_ratios, weighted
from tests.plain import budget_bounds

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf


def rejecting(*criteria: str, **settings: Any) -> mp.MismatchConfig:
    return config(rs={"criteria": criteria, **settings.pop("rs", {})}, **settings)


# At a bound, from which the differential test keeps away --------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "turn", "prefix"])
def test_a_ratio_at_its_bound_is_inside(level: str) -> None:
    """ρ is exactly ½, 2 and just beyond either."""
    ln2 = math.log(2.0)
    for train, stays in ((-2 * ln2, True), (0.0, True), (-2 * ln2 - 1e-9, False), (1e-9, False)):
        values = torch.tensor([-ln2, train], dtype=torch.float64)
        packed = of_log_ratios([[0.0]]).replace(rollout_log_probs=values[:1], old_log_probs=values[1:])
        weights = mp.correct(packed, config(**weighted(level, "mask", upper_bound=2.0))).weights
        assert bool(weights[0] > 0) is stays


@pytest.mark.parametrize(("advantage", "condition"), [(-1.0, "negative"), (1.0, "away")])
def test_a_value_at_its_bound_stays(advantage: float, condition: str) -> None:
    """Strictly outside goes, under a condition too. 0.25 and ρ = 2 are exact."""
    rows: dict[str, Any] = {"old_log_probs": logs([[0.5]]), "rollout_log_probs": logs([[0.25]]), "loss_masks": [[1]]}
    packed = mp.PackedSequences.from_lists(**rows, advantages=[advantage])
    for bound, keep in (("0.25", 1.0), (f"{math.nextafter(0.2499999, 0)}", 0.0)):
        assert mp.correct(packed, rejecting(f"token:tv:{bound}@{condition}")).keep.tolist() == [keep]


def test_the_veto_sees_ratios_beyond_the_safety_bound() -> None:
    """e^-25 < 1e-10 and e^-22 > 1e-10."""
    settings = config(rs={"veto_threshold": 1e-10})
    assert mp.correct(of_log_ratios([[-25.0], [-22.0]]), settings).keep.tolist() == [0, 1]


# The policy that is judged --------------------------------------------------------------------------------------------

CURRENT = mp.PackedSequences.from_padded(
    old_log_probs=torch.tensor([[0.25, 0.25], [0.5, NAN]]).log(),
    rollout_log_probs=torch.tensor([[0.5, 0.5], [0.5, NAN]]).log(),
    loss_masks=torch.tensor([[1, 1], [1, 0]]),
    advantages=torch.ones(2),
)
THETA = torch.tensor([[0.5, 0.5], [0.05, NAN]]).log()  # back at π_rollout; gone from it; padding


def test_the_current_policy_is_judged_and_must_be_given() -> None:
    current = rejecting("token:k2:0.1", rs={"policy": "current"})
    for theta in (THETA, THETA.flatten()):  # may be padded
        assert mp.correct(CURRENT, current, log_probs=theta).keep.tolist() == [1, 1, 0, 0]
    assert mp.correct(CURRENT, rejecting("token:k2:0.1")).keep.tolist() == [0, 0, 1, 0]
    with pytest.raises(ValueError, match=r"log_probs is missing: under rs.policy current .* choose rs.policy auto"):
        mp.correct(CURRENT, current)


@pytest.mark.parametrize("bad", [NAN, 3.0, -INF])
def test_an_invalid_current_log_prob_is_not_judged_and_shows_in_the_loss(bad: float) -> None:
    theta = THETA.clone()
    theta[0, 0] = bad
    settings = rejecting("token:k2:0.1", "sequence_sum:k2:0.5", rs={"policy": "current"})
    result = mp.policy_loss(theta, CURRENT, settings)
    assert result.correction.keep.tolist() == [1, 1, 0, 0]
    assert bool(result.loss.isnan()) == math.isnan(bad)


def test_missing_versions_are_an_error() -> None:
    for name in ("weight_versions", "trainer_version"):
        fields: dict[str, Any] = {"weight_versions": [[7, 8]], "trainer_version": 10} | {name: None}
        with pytest.raises(ValueError, match=f"{name} is missing: rs.max_staleness needs the version"):
            mp.correct(of_log_ratios([[0.1, 0.2]], **fields), config(rs={"max_staleness": 2}))


# Budgets --------------------------------------------------------------------------------------------------------------


def batch(seed: int, sequences: int = 20, scale: float = 0.2) -> mp.PackedSequences:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (sequences,), generator=generator).tolist()
    rollout = [-3.0 * torch.rand(n, generator=generator, dtype=torch.float64) - 1.0 for n in lengths]
    gaps = [scale * torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
    return mp.PackedSequences.from_lists(
        loss_masks=[(torch.rand(n, generator=generator) < 0.8).long().tolist() for n in lengths],
        rollout_log_probs=rollout,
        old_log_probs=[(row + gap).clamp(max=-1e-3) for row, gap in zip(rollout, gaps, strict=True)],
        advantages=torch.randn(sequences, generator=generator).tolist(),
    )


def test_m2po_by_hand() -> None:
    """l² .01, .04, .36, 1: means .3525, .1367, .025, so that two of four stay below .04."""
    packed = of_log_ratios([[0.1, 0.2, 0.6, -1.0]])

    def second(settings: mp.MismatchConfig) -> tuple[list[float], float]:
        """What the second step on the same data keeps, and its threshold."""
        thresholds = mp.correct(packed, settings).statistics.thresholds()
        return mp.correct(packed, settings, thresholds=thresholds).keep.tolist(), float(thresholds["token_k2"])

    for wrong in (["0.1"], {"token_k3": torch.ones(())}):
        with pytest.raises(ValueError, match=rf"thresholds, a {type(wrong).__name__}, .* each budget \(token_k2\)"):
            mp.correct(packed, mp.preset("m2po"), thresholds=cast("Any", wrong))
    keep, threshold = second(mp.preset("m2po"))
    assert keep == [1, 1, 0, 0] and 0.02 < threshold < 0.18
    wide = rejecting("token:k2:0.02:mean=0.18")  # the mean of all is below: nothing is rejected
    assert second(wide) == ([1, 1, 1, 1], INF)
    assert metrics_of(packed, wide)["rollout_rs_token_k2_threshold"] == 1e12
    assert second(rejecting("token:k2:1e-9:mean=1e-6"))[0] == [1, 0, 0, 0], "what is smallest stays, as in AReaL"
    assert second(rejecting("token:k2:0.3:share=0.6"))[0] == [1, 1, 1, 0], "never below the bound as written"
    first = mp.correct(packed, rejecting("token:k2:1e-9:share=0.6"))
    assert first.keep.sum() == 0, "the first step has the bound that is given"


@pytest.mark.parametrize("budget", ["share=0.07", "share=0.5", "mean={:.3g}"])
@pytest.mark.parametrize("statistic", ["k2", "k3", "tv", "binary_kl", "binary_kl_reverse"])
@pytest.mark.parametrize("aggregate", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
def test_the_threshold_is_that_of_sorting(aggregate: str, statistic: str, budget: str) -> None:
    for seed in range(2):
        packed, name = batch(seed, scale=10.0 ** (-2 * seed - 0.5)), f"{aggregate}_{statistic}"
        size = metrics_of(packed, rejecting(f"{aggregate}:{statistic}:inf", metrics="full"))
        given = budget.format(size[f"rollout_rs_{name}_mean"] / 2)
        settings = rejecting(f"{aggregate}:{statistic}:1e-30:{given}")
        values = _values(packed, aggregate, statistic)
        low, high = budget_bounds(settings.criteria[0], values)
        threshold = float(mp.correct(packed, settings).statistics.thresholds()[name])
        assert low <= threshold <= high
        if settings.criteria[0].share is not None:
            assert sum(value > threshold for value in values) <= settings.criteria[0].share * len(values)


def _values(packed: mp.PackedSequences, aggregate: str, statistic: str) -> list[float]:
    """What the criterion compares of each of its units."""
    train, rollout = packed.old_log_probs, packed.rollout_log_probs
    assert train is not None and rollout is not None
    values = packed.unpack(token_statistic(statistic, train - rollout, train, rollout))
    trained = [row[mask] for row, mask in zip(values, packed.unpack(packed.loss_mask), strict=True) if mask.any()]
    if aggregate == "token":
        return torch.cat(trained).tolist()
    form = {"sequence_sum": torch.sum, "sequence_mean": torch.mean, "sequence_max": torch.max}[aggregate]
    return [float(form(row)) for row in trained]


@pytest.mark.parametrize("budget", ["share=0.1", "mean=0.1"])
def test_what_a_budget_reads(budget: str) -> None:
    """A step without tokens leaves the bound as written; no other figure changes; under rs.policy current the
    histogram is of what is judged."""
    empty = dataclasses.replace(full := batch(3), loss_mask=torch.zeros_like(full.loss_mask))
    thresholds = mp.correct(empty, rejecting(f"token:k2:0.05:{budget}")).statistics.thresholds()
    assert float(thresholds["token_k2"]) == 0.05
    ours, theirs = (
        metrics_of(batch(4), rejecting(f"sequence_sum:k2:0.5{each}", metrics="full")) for each in (f":{budget}", "")
    )
    assert ours.items() >= theirs.items() and len(ours) == len(theirs) + 1
    current = rejecting("token:k2:1e-9:share=0.1", rs={"policy": "current"})
    assert full.rollout_log_probs is not None
    for gap, threshold in ((1e-3, 5e-7), (-0.5, 0.125)):
        found = mp.correct(full, current, log_probs=full.rollout_log_probs + gap).statistics.thresholds()
        assert float(found["token_k2"]) == pytest.approx(threshold, rel=0.03)


def test_advantages_of_accepted_responses_need_rewards() -> None:
    """`rs.group` acts in `group_advantages` alone: a batch without rewards had none of it. Rewards let it through."""
    settings = mp.MismatchConfig.build({"rs": {"criteria": ["sequence_mean:k3:0.1"], "group": "exclude"}})
    rows: dict[str, Any] = {"old_log_probs": logs([[0.3] * 3] * 2), "rollout_log_probs": logs([[0.3] * 3, [0.05] * 3])}
    packed = mp.PackedSequences.from_lists(**rows, loss_masks=[[1] * 3] * 2, rewards=[1.0, 0.0])
    accepted = mp.correct(packed, settings).kept_N
    assert accepted.tolist() == [3, 0]
    packed = packed.replace(advantages=mp.group_advantages([1.0, 0.0], [0, 0], accepted).repeat_interleave(3))
    assert float(mp.policy_loss(torch.full((6,), -1.0), packed, settings).loss) == 0.0
    without = packed.replace(rewards=None)
    with pytest.raises(ValueError, match=r"rewards is missing: rs\.group exclude acts in mp\.group_advantages"):
        mp.policy_loss(torch.full((6,), -1.0), without, settings)
    mp.policy_loss(torch.full((6,), -1.0), without, settings.replace(rs={"group": "keep"}))
