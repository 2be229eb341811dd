"""The policy that is judged, staleness, and budgets. Conditions and all criteria: `test_loss_differential`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.rejection import token_statistic
from tests.core.worked import config, logs, metrics_of, of_log_ratios
from tests.plain import budget_bounds

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

NAN, INF = math.nan, math.inf


def rejecting(*criteria: str, **settings: Any) -> mp.MismatchConfig:
    return config(rs={"criteria": criteria, **settings.pop("rs", {})}, **settings)


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


# Staleness ------------------------------------------------------------------------------------------------------------


def versions(**fields: Any) -> mp.PackedSequences:
    """Versions 7 to 11 under a trainer at 10, the last a server ahead of it; then a tool's token."""
    given: dict[str, Any] = {
        "old_log_probs": [[-1.0] * 6],
        "rollout_log_probs": [[-1.5] * 6],
        "weight_versions": [[7, 8, 9, 10, 11, -(2**40)]],
        "trainer_version": 10,
        "advantages": [1.0],
        "loss_masks": [[1, 1, 1, 1, 1, 0]],
    }
    return mp.PackedSequences.from_lists(**{name: v for name, v in (given | fields).items() if v is not None})


@pytest.mark.parametrize(("limit", "expected"), [(0, [0, 0, 0, 1, 1, 0]), (2, [0, 1, 1, 1, 1, 0]), (3, [1] * 5 + [0])])
@pytest.mark.parametrize("metrics", ["off", "basic", "full"])
def test_tokens_of_older_weights_leave_the_loss(limit: int, expected: list[int], metrics: str) -> None:
    """They still count in ratios; a dry run only reports them."""
    settings = config(use_tis=True, tis={"level": "sequence", "upper_bound": 50.0}, metrics=metrics)
    limited = settings.replace(rs={"max_staleness": limit})
    correction, dry = (mp.correct(versions(), each) for each in (limited, limited.replace(dry_run=True)))
    assert correction.keep.tolist() == expected and dry.keep.tolist() == [1] * 5 + [0]
    assert torch.equal(correction.weights, mp.correct(versions(), settings).weights)
    for each in (correction, dry) if metrics != "off" else ():
        found = each.statistics.metrics()
        for name in ("rollout_rs_staleness_masked_fraction", "rollout_rs_masked_fraction"):
            assert found[f"rollout_corr/{name}"] == pytest.approx(1 - sum(expected) / 5)
        assert found["rollout_corr/kl"] == pytest.approx(-0.5)


@pytest.mark.parametrize("metrics", ["off", "full"])
def test_staleness_needs_no_rollout_log_probs(metrics: str) -> None:
    """Neither absent nor invalid ones stop it: PPO only measures them."""
    for rollout in (None, [[NAN, NAN, -1.5, 0.7, -INF, NAN]]):
        settings = config(rs={"max_staleness": 2}, metrics=metrics)
        result = mp.policy_loss(torch.full((6,), -1.0), versions(rollout_log_probs=rollout), settings)
        assert result.correction.keep.tolist() == [0, 1, 1, 1, 1, 0] and int(result.denominator) == 4
        assert result.correction.tokens_N.tolist() == [5] and result.correction.kept_N.tolist() == [4]
        result.statistics.metrics()


def test_missing_versions_are_an_error() -> None:
    for name in ("weight_versions", "trainer_version"):
        with pytest.raises(ValueError, match=f"{name} is missing: rs.max_staleness needs the version"):
            mp.correct(versions(**{name: None}), config(rs={"max_staleness": 2}))


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

    keep, threshold = second(mp.preset("m2po"))
    assert keep == [1, 1, 0, 0] and 0.02 < threshold < 0.18
    wide = rejecting("token:k2:0.02:mean=0.18")  # the mean of all is below: nothing is rejected
    assert second(wide) == ([1, 1, 1, 1], INF)
    assert metrics_of(packed, wide)["rollout_rs_token_k2_threshold"] == 1e12
    assert second(rejecting("token:k2:1e-9:mean=1e-6"))[0] == [1, 0, 0, 0], "what is smallest stays, as in AReaL"
    assert second(rejecting("token:k2:0.3:share=0.6"))[0] == [1, 1, 1, 0], "never below the bound as written"
    for share, stays in ((0.2, 4), (0.25, 3), (0.6, 2), (0.9, 1)):
        settings = rejecting(f"token:k2:1e-9:share={share}")
        assert mp.correct(packed, settings).keep.sum() == 0, "the first step has the bound that is given"
        assert second(settings)[0] == [1] * stays + [0] * (4 - stays)


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
