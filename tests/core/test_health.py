"""The health check: each warning on data made for it, none on clean data; the gate: what it lets pass and says."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.health import ALL_RULES, GateError, check_gate
from tests.core.worked import config, metrics_of, of_log_ratios, weighted

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

PREFIX = "rollout_corr/"
Rows = list[list[float]]


def warnings_of(log_ratios: Rows, **settings: Any) -> dict[str, mp.HealthWarning]:
    """Warnings by metric, of sequences with the given log-ratios."""
    chosen = config(**settings)
    metrics = mp.correct(of_log_ratios(log_ratios), chosen).statistics.metrics()
    found = mp.check_health(metrics, chosen)
    for warning in found:
        assert warning.value == metrics[warning.metric] and warning.meaning and warning.advice
        assert warning.metric in str(warning) and warning.advice in str(warning)
    names = [warning.metric.removeprefix(PREFIX) for warning in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric", "prefix"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_clean_data_give_no_warning(level: str, mode: str) -> None:
    settings = weighted(level, mode, batch_normalize=True) | {"rs": {"veto_threshold": 1e-4}}
    assert warnings_of([[0.01, -0.02, 0.015], [-0.01, 0.02], [0.005]], **settings) == {}


def test_a_step_without_tokens_says_so_and_nothing_else() -> None:
    for log_ratios in ([], [[], []]):
        found = warnings_of(log_ratios, **weighted())
        assert [*found] == ["tokens"] and "every loss mask is 0" in str(found["tokens"])


N = 40  # sequences, where a rule needs thirty
VANISH: tuple[Rows, Rows] = ([[-9.0]] * 8 + [[0.0]] * 2, [[-9.0]] * 6 + [[0.0]] * 4)
LARGEST: tuple[Rows, Rows] = ([[math.log(2)], *[[math.log(1e-3)]] * 99], [[math.log(2)], *[[math.log(0.2)]] * 99])
LONG: tuple[Rows, Rows] = ([[-0.01] * 300], [[-0.01] * 190])
SPREAD: tuple[Rows, Rows] = ([[0.3] * 4] * 10 + [[0.0] * 4] * 30, [[0.25] * 4] * 10 + [[0.0] * 4] * 30)
FAR: tuple[Rows, Rows] = ([[0.2] * 20, *[[0.0]] * 39], [[0.1] * 20, *[[0.0]] * 39])
CLIPPED = {"mode": "clip", "lower_bound": 0.5}

# metric, settings (bounds at their defaults), log-ratios that trip it, that nearly do, settings that follow its advice
PLANTED: list[tuple[str, dict[str, Any], Rows, Rows, dict[str, Any] | None]] = [
    ("kl", {}, [[-0.11, -0.1]], [[-0.1, -0.09]], None),
    ("rollout_is_ratio_mean", {}, [[math.log(0.49)] * 4], [[math.log(0.51)] * 4], None),
    # one ρ of 4.3 (4.1) among eight of 1: deviation (ρ − 1) · √8 / 9 = 1.04 (.97)
    ("rollout_is_ratio_std", {}, [[math.log(4.3), *[0.0] * 8]], [[math.log(4.1), *[0.0] * 8]], None),
    # one ρ of 20 among 99 of 1: (119)² / (100 · 499) = .28; of 15: (114)² / (100 · 324) = .40
    ("rollout_is_ratio_eff_sample_size", {}, [[math.log(20), *[0.0] * 99]], [[math.log(15), *[0.0] * 99]], None),
    # mean ρ² − 1: (12 + 9)/10 − 1 = 1.1 and (10 + 9)/10 − 1 = .9
    ("chi2_token", {}, [[0.5 * math.log(12.0), *[0.0] * 9]], [[0.5 * math.log(10.0), *[0.0] * 9]], None),
    ("rollout_is_ratio_unit_mean", weighted("sequence"), [[-0.018] * 40] * N, [[-0.017] * 40] * N, weighted()),
    # the same products of thirty sequences, and of twenty-nine
    ("rollout_is_ratio_unit_mean", weighted("sequence"), [[-0.018] * 40] * 30, [[-0.018] * 40] * 29, None),
    # a quarter of the products are e^1.2 = 3.3 (e^1.0 = 2.7): deviation √3/4 · 2.3 = 1.005 (.744)
    ("rollout_is_ratio_unit_std", weighted("sequence"), *SPREAD, weighted("geometric")),
    ("rollout_is_ratio_unit_std", weighted("sequence"), SPREAD[0], SPREAD[0][9:21], None),  # few sequences
    # one product of e^4 among 39 of 1: (93.6)² / (40 · 3020) = .07; of e^2: (46.4)² / (40 · 93.6) = .57
    ("rollout_is_ratio_unit_eff_sample_size", weighted("sequence"), *FAR, weighted("geometric")),
    ("rollout_is_weight_after_mean", weighted(), [[math.log(0.49)] * 4], [[math.log(0.51)] * 4],
     weighted(batch_normalize=True)),
    # eight of ten weights vanish: size .2; six: .4
    ("rollout_is_weight_after_eff_sample_size", weighted(), [[-9.0] * 8 + [0.0] * 2], [[-9.0] * 6 + [0.0] * 4],
     weighted(**CLIPPED)),
    # where most is rejected the sample size is not what to change
    ("accepted_token_fraction", weighted("token", "mask"), [[0.9] * 8 + [0.0] * 2], [[0.9] * 5 + [0.0] * 5],
     weighted("token", "mask", upper_bound=3.0)),
    ("rollout_is_weight_after_seq_eff_sample_size", weighted("sequence"), *VANISH, weighted("sequence", **CLIPPED)),
    ("rollout_is_weight_after_unit_eff_sample_size", weighted("turn"), *VANISH, weighted("turn", **CLIPPED)),
    # the length trap: 300 tokens of l = −.01 each are Σ l = −3, 190 are −1.9
    ("seq_log_ratio_mean", weighted("sequence"), *LONG, weighted("geometric")),
    # one weight of 2 among 99 of 1e-3: the mean is .021, so the largest becomes 95 > 10 · 2; among 99 of .2: 9.2
    ("rollout_is_weight_after_max", weighted(batch_normalize=True), *LARGEST,
     weighted(**CLIPPED, batch_normalize=True)),
    # not held against bounds that grow
    ("rollout_is_weight_after_max", weighted("prefix", batch_normalize=True), *LARGEST,
     weighted("prefix", batch_normalize=True, upper_bound=2.0, bound_growth=0.5)),
    # two of ten sequences hold a token of ρ = e^-10; one of ten is the threshold itself
    ("rollout_is_veto_fraction", {"rs": {"veto_threshold": 1e-4}}, [*[[0.0, -10.0]] * 2, *[[0.0]] * 8],
     [[0.0, -10.0], *[[0.0]] * 9], {"rs": {"veto_threshold": 1e-6}}),
    ("all_rejected", weighted("token", "mask"), [[1.0, 1.1], [1.2]], [[1.0, 1.1], [0.2]],
     weighted("token", "mask", upper_bound=4.0)),
]  # fmt: skip


@pytest.mark.parametrize("row", PLANTED, ids=lambda row: row[0])
def test_each_rule_on_data_that_trip_it_and_data_that_do_not(row: Any) -> None:
    metric, settings, bad, well, followed = row
    found = warnings_of(bad, **settings)
    assert metric in found and metric not in warnings_of(well, **settings)
    assert followed is None or metric not in warnings_of(bad, **followed), "its advice changes what it is about"
    if metric == "accepted_token_fraction":
        assert "rollout_is_weight_after_eff_sample_size" not in found


def test_every_rule_is_planted() -> None:
    """No threshold without data: those of invalid and broken numbers have tests of their own below."""
    others = {"tokens", "tis.upper_bound", "pg_clipfrac", "invalid_{kind}", "invalid_train_{kind}", "pg_loss"}
    assert {rule.metric for rule in ALL_RULES} == {row[0] for row in PLANTED} | others


def test_a_value_at_its_bar_is_well() -> None:
    """Which the docs state as "above" and "below"."""
    bars = {"kl": 0.1, "rollout_is_ratio_mean": 0.5, "rollout_is_ratio_std": 1.0, "chi2_token": 1.0, "sequences": 30.0}
    bars |= {"rollout_is_ratio_eff_sample_size": 0.3, "rollout_is_ratio_unit_eff_sample_size": 0.3}
    bars |= {"rollout_is_weight_after_mean": 0.5, "rollout_is_veto_fraction": 0.1, "accepted_token_fraction": 0.5}
    bars |= {"rollout_is_weight_after_seq_eff_sample_size": 0.3, "seq_log_ratio_mean": -2.0}
    assert mp.check_health({PREFIX + name: value for name, value in bars.items()}, config(**weighted("sequence"))) == []


def test_what_clips_before_an_update_and_far_from_pi_old() -> None:
    """Shifted by one the clip acts on a third of random log-probs; an update of .1 nats leaves a few percent. Bypass
    anchors at π_rollout, where at r = 1.5 with A > 0 it is active before any update was made."""
    random = torch.Generator().manual_seed(0)
    old = -torch.empty(2000, dtype=torch.float64).exponential_(generator=random)
    noise = torch.randn(2000, generator=random).double()
    rows: dict[str, Any] = {"rollout_log_probs": [old], "old_log_probs": [old], "loss_masks": [[1] * 2000]}
    packed = mp.PackedSequences.from_lists(**rows, advantages=[torch.randn(2000, generator=random)])
    ahead = packed.replace(advantages=torch.ones(2000))
    third, tenth = (old + math.log(1.5) * (torch.arange(2000) < share).double() for share in (600, 200))
    cases = [
        (packed, old, False, False, ""),
        (packed, (old + 0.1 * noise).clamp(max=0.0), False, False, ""),
        (packed, old.roll(1), False, True, "π_old"),
        (ahead, third.clamp(max=0.1), True, True, "π_rollout"),
        (ahead, tenth.clamp(max=0.1), True, False, ""),
        (ahead, third.clamp(max=0.1), False, False, ""),
    ]
    for batch, current, bypass, warned, said in cases:
        chosen = config(use_rollout_log_probs=bypass)
        found = mp.check_health(mp.policy_loss(current, batch, chosen).statistics.metrics(), chosen)
        clipped = [warning for warning in found if warning.metric == f"{PREFIX}pg_clipfrac"]
        assert len(clipped) == warned and all(said in str(warning) for warning in clipped)
    for tiny in (config(objective="gspo"), config(ppo={"eps_clip_low": 0.05})):
        assert not mp.check_health({PREFIX + "pg_clipfrac": 0.9}, tiny), "so small an ε cuts much of any update"


def test_a_broken_number_is_one_finding() -> None:
    found = mp.check_health({"rollout_corr/kl": math.nan, "rollout_corr/tokens": 9.0}, config())
    assert [(warning.metric, warning.about) for warning in found] == [("rollout_corr/kl", "fault")]


def test_invalid_values_of_a_side_are_added_up_and_named_by_their_side() -> None:
    """Of 100 tokens one None is nothing, one None and one +5 are a fault; so are two positive training log-probs."""
    for bad, old, metric in (
        ({3: None}, {}, None),
        ({3: None, 7: 5.0}, {}, "invalid_nan"),
        ({3: None}, {5: 0.7, 6: 0.8}, "invalid_train_positive"),
    ):
        packed = mp.PackedSequences.from_lists(
            rollout_log_probs=[[bad.get(i, -1.0) for i in range(100)]],
            old_log_probs=[[old.get(i, -1.0) for i in range(100)]],
            loss_masks=[[1] * 100],
        )
        chosen = config(rollout_log_prob_policy="neutral")
        found = mp.check_health(mp.correct(packed, chosen).statistics.metrics(), chosen)
        faults = [warning for warning in found if warning.about == "fault"]
        assert len(faults) == (metric is not None)
        if metric is not None:
            side = "training" if "train" in metric else "rollout"
            assert faults[0].metric.startswith(PREFIX + "invalid_") and "2 of 100" in str(faults[0])
            assert f"{side} log-probs are invalid" in faults[0].meaning
    step = {PREFIX + "tokens": 1.0, PREFIX + "pg_loss": math.nan}
    (warning,) = mp.check_health(step, config())
    assert (warning.metric, warning.about) == (PREFIX + "pg_loss", "fault")


@pytest.mark.parametrize(("bound", "wrong"), [(0.5, True), (1.0, False), (100.0, False), (math.inf, True)])
def test_an_upper_bound_that_is_none_or_hides_a_smaller_step(bound: float, wrong: bool) -> None:
    """By name and value, in the words of the settings; not where nothing is weighed."""
    metrics = {PREFIX + "tokens": 9.0}
    chosen = mp.MismatchConfig.build({"use_tis": True, "tis": {"upper_bound": bound}})
    found = mp.check_health(metrics, chosen)
    assert [(w.metric, w.value) for w in found] == [("tis.upper_bound", bound)] * wrong
    assert all(chosen.tis.upper_bound_fault == w.meaning for w in found)
    assert mp.check_health(metrics, mp.MismatchConfig.build({"tis": {"upper_bound": bound}})) == []


def test_what_is_judged_and_what_is_advised() -> None:
    """What the clamp keeps in its range is not judged. No bound changes χ², which is of the unbounded ratio: none is
    advised. A dry run says what would be."""
    for value in (0.0, 9.0):
        assert mp.check_health({f"{PREFIX}rollout_is_std": value}, config()) == []
    for name in ("disabled", "token_is", "geo_rs"):
        (warning,) = mp.check_health({f"{PREFIX}chi2_token": 9.0}, mp.preset(name))
        assert warning.about == "data" and "bound" not in warning.advice and "reject" not in warning.advice
    found = warnings_of([[-2.0] * 4], **weighted(), dry_run=True).values()
    (warning,) = [warning for warning in found if warning.about == "correction"]
    assert warning.meaning.startswith("without dry-run: the weights shrink")


# The gate -------------------------------------------------------------------------------------------------------------


def noisy(noise: float, mask: float = 1.0, rollout: float | None = None) -> mp.PackedSequences:
    """Four sequences of 500 tokens whose log-ratio is Gaussian."""
    generator = torch.Generator().manual_seed(0)
    train = [-torch.rand(500, generator=generator, dtype=torch.float64) - 3.0 for _ in range(4)]
    drawn = [t - noise * torch.randn(500, generator=generator, dtype=torch.float64) for t in train]
    return mp.PackedSequences.from_lists(
        old_log_probs=train,
        rollout_log_probs=drawn if rollout is None else [torch.full((500,), rollout, dtype=torch.float64)] * 4,
        loss_masks=[torch.full((500,), mask)] * 4,
    )


def test_a_step_at_the_bar_passes_and_one_above_it_fails() -> None:
    k3_kl = metrics_of(noisy(0.05))["k3_kl"]
    assert k3_kl == pytest.approx(0.05**2 / 2, rel=0.1)
    assert metrics_of(noisy(0.05), gate_kl=k3_kl)["k3_kl"] == k3_kl
    with pytest.raises(GateError, match=r"k3_kl 0.00134 nats per token is above the bar .* inspect on a dump"):
        metrics_of(noisy(0.05), gate_kl=k3_kl * (1 - 1e-12))
    with pytest.raises(GateError):  # rejecting everything does not lower it
        metrics_of(noisy(0.5), gate_kl=1e-3, rs={"criteria": ["token:ratio:50:60"]})


@pytest.mark.parametrize("policy", ["error", "neutral", "drop-token", "drop-sequence"])
def test_no_token_passes_and_no_valid_token_fails(policy: str) -> None:
    settings: dict[str, Any] = {"gate_kl": 1e-3, "rollout_log_prob_policy": policy, "use_tis": policy != "error"}
    assert metrics_of(noisy(0.5, mask=0.0), **settings)["tokens"] == 0
    metrics_of(noisy(0.0), **settings)
    with pytest.raises(GateError, match="no token has valid log-probs"):
        metrics_of(noisy(0.5, rollout=-9999.0), **settings)
    with pytest.raises(ValueError, match="rollout_log_probs is missing"):
        metrics_of(noisy(0.5).replace(rollout_log_probs=None), **settings)


def test_the_error_names_the_step_and_crosses_processes() -> None:
    with pytest.raises(GateError, match=r"^step 3: k3_kl 0.02 nats per token is above") as found:
        check_gate(0.02, 0.01, 3)
    copy = pickle.loads(pickle.dumps(found.value))  # as Ray does
    assert type(copy) is GateError and str(copy) == str(found.value)
    check_gate(0.01, 0.01, 3)
    with pytest.raises(GateError, match="cannot be compared"):
        check_gate(math.nan, 0.01)
