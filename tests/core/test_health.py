"""The health check: each warning on data made for it, none on clean data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.health import all_rules

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

PREFIX = "rollout_corr/"


def warnings_of(log_ratios: Sequence[Sequence[float]], **settings: Any) -> dict[str, mp.HealthWarning]:
    """Warnings by metric, of sequences with the given log-ratios."""
    config = mp.MismatchConfig.model_validate(settings)
    rows = [torch.tensor(row, dtype=torch.float64) for row in log_ratios]
    rollout = [torch.full_like(row, -1.0) - row.clamp(min=0).amax() if len(row) else row for row in rows]
    packed = mp.PackedSequences.from_lists(
        old_log_probs=[r + row for r, row in zip(rollout, rows, strict=True)],
        rollout_log_probs=rollout,
        loss_masks=[[1] * len(row) for row in rows],
    )
    metrics = mp.correct(packed, config).statistics.metrics()
    found = mp.check_health(metrics, config)
    for warning in found:
        assert warning.value == metrics[warning.metric] and warning.meaning and warning.advice
        assert warning.metric in str(warning) and warning.advice in str(warning)
    names = [warning.metric.removeprefix(PREFIX) for warning in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def weighted(level: str = "token", mode: str = "truncate", **tis: Any) -> dict[str, Any]:
    return {"use_tis": True, "tis": {"level": level, "mode": mode, **tis}}


CLEAN = [[0.01, -0.02, 0.015], [-0.01, 0.02], [0.005]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_clean_data_give_no_warning(level: str, mode: str) -> None:
    for normalize in (False, True):
        settings = weighted(level, mode, batch_normalize=normalize) | {"rs": {"veto_threshold": 1e-4}}
        assert warnings_of(CLEAN, **settings) == {}
    assert warnings_of(CLEAN) == {}


@pytest.mark.parametrize("log_ratios", [[], [[]], [[], []]])
def test_a_step_without_tokens_says_so_and_nothing_else(log_ratios: list[list[float]]) -> None:
    found = warnings_of(log_ratios, **weighted())
    assert [*found] == ["tokens"] and "every loss mask is 0" in str(found["tokens"])


def test_a_policy_far_from_pi_old() -> None:
    """Shifted by one the clip acts on a third of random log-probs or more; an update of .1 nats leaves a few percent.

    Bypass anchors at π_rollout: not judged.
    """
    random = torch.Generator().manual_seed(0)
    old = -torch.empty(2000, dtype=torch.float64).exponential_(generator=random)
    noise = torch.randn(2000, generator=random).double()
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[old],
        old_log_probs=[old],
        loss_masks=[[1] * 2000],
        advantages=[torch.randn(2000, generator=random)],
    )
    cases: list[tuple[torch.Tensor, set[str]]] = [
        (old, set()),
        ((old + 0.1 * noise).clamp(max=0.0), set()),
        (old.roll(1), {"pg_clipfrac"}),
    ]
    for bypass in (False, True):
        config = mp.MismatchConfig(use_rollout_log_probs=bypass)
        for current, expected in cases:
            found = mp.check_health(mp.policy_loss(current, packed, config).statistics.metrics(), config)
            names = {w.metric.removeprefix(PREFIX) for w in found if "π_old" in w.meaning}
            assert names == (set() if bypass else expected)
    for tiny in (mp.MismatchConfig(objective="gspo"), mp.MismatchConfig(ppo=mp.PPOClip(eps_clip_low=0.05))):
        assert not mp.check_health({PREFIX + "pg_clipfrac": 0.9}, tiny), "so small an ε cuts much of any update"


N = 40  # sequences, where a rule needs thirty

# metric: (settings, bounds at their defaults; log-ratios that trip it; log-ratios that nearly do)
PLANTED: dict[str, tuple[dict[str, Any], list[list[float]], list[list[float]]]] = {
    "kl": ({}, [[-0.11, -0.1]], [[-0.1, -0.09]]),
    "rollout_is_ratio_mean": ({}, [[math.log(0.49)] * 4], [[math.log(0.51)] * 4]),
    # one ρ of 4.3 (4.1) among eight of 1: deviation (ρ − 1) · √8 / 9 = 1.04 (.97)
    "rollout_is_ratio_std": ({}, [[math.log(4.3), *[0.0] * 8]], [[math.log(4.1), *[0.0] * 8]]),
    # one ρ of 20 among 99 of 1: (119)² / (100 · 499) = .28; of 15: (114)² / (100 · 324) = .40
    "rollout_is_ratio_eff_sample_size": ({}, [[math.log(20.0), *[0.0] * 99]], [[math.log(15.0), *[0.0] * 99]]),
    # mean ρ² − 1: (12 + 9)/10 − 1 = 1.1 and (10 + 9)/10 − 1 = .9
    "chi2_token": ({}, [[0.5 * math.log(12.0), *[0.0] * 9]], [[0.5 * math.log(10.0), *[0.0] * 9]]),
    "rollout_is_ratio_unit_mean": (weighted("sequence"), [[-0.018] * 40] * N, [[-0.017] * 40] * N),
    # a quarter of the products are e^1.2 = 3.3 (e^1.0 = 2.7): deviation √3/4 · 2.3 = 1.005 (.744)
    "rollout_is_ratio_unit_std": (weighted("sequence"), [[0.3] * 4] * 10 + [[0.0] * 4] * 30,
                                  [[0.25] * 4] * 10 + [[0.0] * 4] * 30),
    # one product of e^4 among 39 of 1: (93.6)² / (40 · 3020) = .07; of e^2: (46.4)² / (40 · 93.6) = .57
    "rollout_is_ratio_unit_eff_sample_size": (weighted("sequence"), [[0.2] * 20, *[[0.0]] * 39],
                                              [[0.1] * 20, *[[0.0]] * 39]),
    "rollout_is_weight_after_mean": (weighted(), [[math.log(0.49)] * 4], [[math.log(0.51)] * 4]),
    # eight of ten weights vanish: size .2; six: .4
    "rollout_is_weight_after_eff_sample_size": (weighted(), [[-9.0] * 8 + [0.0] * 2], [[-9.0] * 6 + [0.0] * 4]),
    "rollout_is_weight_after_seq_eff_sample_size": (weighted("sequence"), [[-9.0]] * 8 + [[0.0]] * 2,
                                                    [[-9.0]] * 6 + [[0.0]] * 4),
    # the same of turns, one a sequence
    "rollout_is_weight_after_unit_eff_sample_size": (weighted("turn"), [[-9.0]] * 8 + [[0.0]] * 2,
                                                     [[-9.0]] * 6 + [[0.0]] * 4),
    # the length trap: 300 tokens of l = −.01 each are Σ l = −3, 190 are −1.9
    "seq_log_ratio_mean": (weighted("sequence"), [[-0.01] * 300], [[-0.01] * 190]),
    # one weight of 2 among 99 of 1e-3: the mean is .021, so the largest becomes 95 > 10 · 2; among 99 of .2: 9.2
    "rollout_is_weight_after_max": (weighted(batch_normalize=True), [[math.log(2)], *[[math.log(1e-3)]] * 99],
                                    [[math.log(2)], *[[math.log(0.2)]] * 99]),
    # two of ten sequences hold a token of ρ = e^-10; one of ten is the threshold itself
    "rollout_is_veto_fraction": ({"rs": {"veto_threshold": 1e-4}}, [*[[0.0, -10.0]] * 2, *[[0.0]] * 8],
                                 [[0.0, -10.0], *[[0.0]] * 9]),
    "accepted_token_fraction": (weighted("token", "mask"), [[0.9] * 6 + [0.0] * 4], [[0.9] * 5 + [0.0] * 5]),
    "all_rejected": (weighted("token", "mask"), [[1.0, 1.1], [1.2]], [[1.0, 1.1], [0.2]]),
}  # fmt: skip


@pytest.mark.parametrize("metric", PLANTED)
def test_each_rule_on_data_that_trip_it_and_data_that_do_not(metric: str) -> None:
    settings, bad, well = PLANTED[metric]
    assert metric in warnings_of(bad, **settings)
    assert metric not in warnings_of(well, **settings)


OTHER_SIDES: list[tuple[str, dict[str, Any], list[list[float]], list[list[float]]]] = [
    ("kl", {}, [[0.11, 0.1]], [[0.1, 0.09]]),
    ("rollout_is_ratio_mean", {}, [[math.log(2.01)] * 4], [[math.log(1.99)] * 4]),
    ("rollout_is_ratio_mean", weighted(), [[math.log(10.0)] * 4], [[math.log(1.99)] * 4]),
    # the same products of thirty sequences, and of twenty-nine
    ("rollout_is_ratio_unit_mean", weighted("sequence"), [[-0.018] * 40] * 30, [[-0.018] * 40] * 29),
    ("rollout_is_weight_after_seq_eff_sample_size", weighted("geometric"), [[-9.0]] * 8 + [[0.0]] * 2,
     [[-9.0]] * 6 + [[0.0]] * 4),
    # of prefixes the weights are the tokens'; the last ones have the product of the response
    ("rollout_is_weight_after_eff_sample_size", weighted("prefix"), [[0.0] * 2 + [-9.0] + [0.0] * 7],
     [[0.0] * 4 + [-9.0] + [0.0] * 5]),
    ("seq_log_ratio_mean", weighted("prefix"), [[-0.01] * 300], [[-0.01] * 190]),
    # geometric means of e^.7 = 2.01 and e^.68 = 1.97
    ("rollout_is_ratio_unit_mean", weighted("geometric"), [[0.7] * 3] * N, [[0.68] * 3] * N),
]  # fmt: skip


def test_a_largest_weight_is_not_held_against_bounds_that_grow() -> None:
    _, bad, _ = PLANTED["rollout_is_weight_after_max"]
    settings = weighted("prefix", batch_normalize=True, upper_bound=2.0)
    assert "rollout_is_weight_after_max" in warnings_of(bad, **settings)
    settings["tis"]["bound_growth"] = 0.5
    assert "rollout_is_weight_after_max" not in warnings_of(bad, **settings)


@pytest.mark.parametrize(("metric", "settings", "bad", "well"), OTHER_SIDES)
def test_other_sides_and_levels_of_the_rules(
    metric: str, settings: dict[str, Any], bad: list[list[float]], well: list[list[float]]
) -> None:
    assert metric in warnings_of(bad, **settings)
    assert metric not in warnings_of(well, **settings)


def test_invalid_values_of_a_side_are_added_up_and_named_by_their_side() -> None:
    """Of 100 tokens one None is nothing, one None and one +5 are a fault; so are two positive training log-probs."""
    rollout: list[float | None] = [-1.0] * 100
    for bad, old, metric in (
        ({3: None}, {}, None),
        ({3: None, 7: 5.0}, {}, "invalid_nan"),
        ({3: None}, {5: 0.7, 6: 0.8}, "invalid_train_positive"),
    ):
        packed = mp.PackedSequences.from_lists(
            rollout_log_probs=[[bad.get(i, value) for i, value in enumerate(rollout)]],
            old_log_probs=[[old.get(i, -1.0) for i in range(100)]],
            loss_masks=[[1] * 100],
        )
        config = mp.MismatchConfig(rollout_log_prob_policy="neutral")
        found = mp.check_health(mp.correct(packed, config).statistics.metrics(), config)
        faults = [warning for warning in found if warning.about == "fault"]
        assert len(faults) == (metric is not None)
        if metric is not None:
            side = "training" if "train" in metric else "rollout"
            assert faults[0].metric.startswith(PREFIX + "invalid_") and "2 of 100" in str(faults[0])
            assert f"{side} log-probs are invalid" in faults[0].meaning


def test_a_dry_run_says_what_would_be() -> None:
    (warning,) = [w for w in warnings_of([[-2.0] * 4], **weighted(), dry_run=True).values() if w.about == "correction"]
    assert warning.meaning.startswith("without dry-run: the weights shrink")


def test_every_rule_is_planted() -> None:
    """No threshold without data: those of invalid and broken numbers have tests of their own below."""
    others = {
        "tokens",
        "tis.upper_bound",
        "pg_clipfrac",
        "invalid_{kind}",
        "invalid_train_{kind}",
        "kl, pg_loss",
    }
    assert {rule.metric for rule in all_rules()} == {*PLANTED, *others}


@pytest.mark.parametrize(("bound", "wrong"), [(0.5, True), (1.0, False), (100.0, False), (math.inf, True)])
def test_an_upper_bound_that_is_none_or_hides_a_smaller_step(bound: float, wrong: bool) -> None:
    """By name and value, in the words of the settings; not where nothing is weighed."""
    metrics = {PREFIX + "tokens": 9.0}
    config = mp.MismatchConfig.build({"use_tis": True, "tis": {"upper_bound": bound}})
    found = mp.check_health(metrics, config)
    assert [(w.metric, w.value) for w in found] == [("tis.upper_bound", bound)] * wrong
    assert all(config.tis.upper_bound_fault == w.meaning for w in found)
    assert mp.check_health(metrics, mp.MismatchConfig.build({"tis": {"upper_bound": bound}})) == []


def test_a_clip_that_acts_on_the_mismatch_itself() -> None:
    """Bypass anchors the clip at π_rollout: at r = 1.5 with A > 0 it is active before any update was made."""
    rollout = torch.full((10,), -2.0, dtype=torch.float64)
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[rollout], old_log_probs=[rollout], loss_masks=[[1] * 10], advantages=[1.0]
    )
    for share, warned in ((3, True), (1, False)):  # of ten tokens
        current = rollout + torch.tensor([math.log(1.5)] * share + [0.0] * (10 - share))
        for bypass in (True, False):
            config = mp.MismatchConfig(use_rollout_log_probs=bypass)
            metrics = mp.policy_loss(current, packed, config).statistics.metrics()
            names = [warning.metric for warning in mp.check_health(metrics, config)]
            assert (f"{PREFIX}pg_clipfrac" in names) is (warned and bypass)


def test_what_the_clamp_keeps_in_its_range_is_not_judged() -> None:
    config = mp.MismatchConfig()
    for name in ("rollout_is_std", "rollout_is_eff_sample_size"):
        assert mp.check_health({PREFIX + name: 0.0}, config) == mp.check_health({PREFIX + name: 9.0}, config) == []


def test_few_sequences_are_no_verdict_on_their_products() -> None:
    assert "rollout_is_ratio_unit_std" not in warnings_of([[0.3] * 4] * 3 + [[0.0] * 4] * 9, **weighted("sequence"))


def test_advice_on_the_data_is_the_same_whatever_corrects_them() -> None:
    """No bound, criterion or normalisation changes χ²: it is of the unbounded ratio. So none is advised."""
    for name in ("disabled", "token_is", "geo_rs"):
        (warning,) = mp.check_health({f"{PREFIX}chi2_token": 9.0}, mp.preset(name))
        assert warning.about == "data" and "bound" not in warning.advice and "reject" not in warning.advice


# metric: settings that follow its advice, on the data that tripped it
FOLLOWED: dict[str, dict[str, Any]] = {
    "rollout_is_ratio_unit_mean": weighted("token"),
    "rollout_is_ratio_unit_std": weighted("geometric"),
    "rollout_is_ratio_unit_eff_sample_size": weighted("geometric"),
    "rollout_is_weight_after_mean": weighted(batch_normalize=True),
    "rollout_is_weight_after_eff_sample_size": weighted(mode="clip", lower_bound=0.5),
    "rollout_is_weight_after_seq_eff_sample_size": weighted("sequence", mode="clip", lower_bound=0.5),
    "rollout_is_weight_after_unit_eff_sample_size": weighted("turn", mode="clip", lower_bound=0.5),
    "seq_log_ratio_mean": weighted("geometric"),
    "rollout_is_weight_after_max": weighted(mode="clip", lower_bound=0.5, batch_normalize=True),
    "rollout_is_veto_fraction": {"rs": {"veto_threshold": 1e-6}},
    "accepted_token_fraction": weighted("token", "mask", upper_bound=3.0),
    "all_rejected": weighted("token", "mask", upper_bound=4.0),
}


@pytest.mark.parametrize("metric", FOLLOWED)
def test_advice_can_change_what_it_is_about(metric: str) -> None:
    assert metric not in warnings_of(PLANTED[metric][1], **FOLLOWED[metric])


def test_a_turn_s_product_does_not_vanish_with_the_response() -> None:
    assert "seq_log_ratio_mean" in warnings_of(PLANTED["seq_log_ratio_mean"][1], **weighted("prefix"))
    assert "seq_log_ratio_mean" not in warnings_of(PLANTED["seq_log_ratio_mean"][1], **weighted("turn"))


def test_where_most_is_rejected_the_sample_size_is_not_what_to_change() -> None:
    found = warnings_of([[0.9] * 8 + [0.0] * 2], **weighted("token", "mask"))
    assert "accepted_token_fraction" in found and "rollout_is_weight_after_eff_sample_size" not in found


def test_missing_log_probs_and_nan_are_no_health():
    step = {"rollout_corr/tokens": 100.0, "rollout_corr/invalid_nan": 60.0, "rollout_corr/kl": 0.0}
    (warning,) = mp.check_health(step, mp.MismatchConfig())
    assert warning.metric == "rollout_corr/invalid_nan" and "60 of 100 rollout log-probs" in str(warning)
    assert warning.about == "fault"
    assert mp.check_health({**step, "rollout_corr/invalid_nan": 1.0}, mp.MismatchConfig()) == []
    broken = {"rollout_corr/tokens": 1.0, "rollout_corr/pg_loss": float("nan")}
    (warning,) = mp.check_health(broken, mp.MismatchConfig())
    assert warning.metric == "rollout_corr/pg_loss" and warning.about == "fault"
