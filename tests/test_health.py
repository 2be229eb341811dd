"""The health check: each warning on data made for it, none on clean data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import mismatch_plugin as mp

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
def test_a_step_without_tokens_gives_no_warning(log_ratios: list[list[float]]) -> None:
    assert warnings_of(log_ratios, **weighted()) == {}


MADE = {  # metric: (log-ratios, settings)
    # ρ = .4 everywhere: its mean is low, and nothing spreads.
    "rollout_is_mean": ([[math.log(0.4)] * 4], {}),
    "rollout_is_weight_after_mean": ([[math.log(0.4)] * 4], weighted()),
    # hi = 1000: one weight of 500 among twenty of 1: (520)² / (21 · 250020) = .05
    "rollout_is_weight_after_eff_sample_size": ([[math.log(500)], *[[0.0]] * 20], weighted(upper_bound=1000.0)),
    "rollout_is_weight_after_std": ([[math.log(6)], [math.log(0.2)] * 2], weighted(upper_bound=10.0)),
    # two of ten sequences hold a token of ρ = e^-10
    "rollout_is_veto_fraction": ([*[[0.0, -10.0]] * 2, *[[0.0]] * 8], {"rs": {"veto_threshold": 1e-4}}),
    "kl": ([[-0.2, -0.15]], {}),
    # mean ρ² = (36 + 9)/10 > 2
    "chi2_token": ([[math.log(6)], [0.0] * 9], {}),
    # Π ρ = e^2 once in ten: (e^4 + 9)/10 − 1 > 1, while no token's ratio is above e^.25
    "chi2_seq": ([[0.25] * 8, *[[0.0]] * 9], weighted("sequence")),
    # the length trap: 300 tokens of l = −.01 each: Σ l = −3
    "seq_log_ratio_mean": ([[-0.01] * 300], weighted("sequence")),
    # one weight of 2 among 99 of 1e-3: the mean is .021, so the largest becomes 95 > 10 · 2
    "rollout_is_weight_after_max": ([[math.log(2)], *[[math.log(1e-3)]] * 99], weighted(batch_normalize=True)),
    "all_rejected": ([[1.0, 1.1], [1.2]], weighted("token", "mask")),
}


@pytest.mark.parametrize("metric", MADE)
def test_each_warning_on_data_made_for_it(metric: str) -> None:
    log_ratios, settings = MADE[metric]
    assert metric in warnings_of(log_ratios, **settings)


THRESHOLDS = {  # metric: (value at which all is well, value at which it is not)
    "rollout_is_mean": [(0.51, 0.49), (1.99, 2.01)],
    "rollout_is_eff_sample_size": [(0.31, 0.29)],
    "rollout_is_veto_fraction": [(0.09, 0.11)],
    "rollout_is_std": [(0.99, 1.01)],
    "kl": [(0.09, 0.11), (-0.09, -0.11)],
    "chi2_token": [(0.99, 1.01)],
}


@pytest.mark.parametrize("metric", THRESHOLDS)
def test_thresholds_of_the_guide(metric: str) -> None:
    config = mp.MismatchConfig()
    for well, ill in THRESHOLDS[metric]:
        assert mp.check_health({PREFIX + metric: well}, config) == []
        (warning,) = mp.check_health({PREFIX + metric: ill}, config)
        assert (warning.metric, warning.value) == (PREFIX + metric, ill)


def test_weights_really_used_are_judged_where_there_are_any() -> None:
    """A ratio far from 1 that the bound tames is no warning; the guide's raw ratio would be one."""
    config = mp.MismatchConfig.model_validate(weighted())
    metrics = {
        "rollout_is_mean": 50.0,
        "rollout_is_std": 9.0,
        "rollout_is_eff_sample_size": 0.01,
        "rollout_is_weight_after_mean": 1.2,
        "rollout_is_weight_after_std": 0.4,
        "rollout_is_weight_after_eff_sample_size": 0.8,
    }
    assert mp.check_health({PREFIX + name: value for name, value in metrics.items()}, config) == []


@pytest.mark.parametrize("metric", ["chi2_token", "rollout_is_eff_sample_size", "rollout_is_std"])
def test_advice_fits_the_configuration(metric: str) -> None:
    """Without a correction no bound acts, and there is none to lower."""
    ill = {PREFIX + metric: 0.01 if "size" in metric else 9.0}
    (uncorrected,) = mp.check_health(ill, mp.preset("disabled"))
    assert "bound, " not in uncorrected.advice and uncorrected.advice.startswith("Choose a correction")
    (corrected,) = mp.check_health(ill, mp.preset("token_is"))
    assert corrected.advice.startswith("Lower the upper bound")


def test_batch_normalisation_is_advised_where_there_are_weights() -> None:
    ill = {f"{PREFIX}rollout_is_mean": 9.0}
    for name, advised in (("disabled", False), ("token_is", True)):
        (warning,) = mp.check_health(ill, mp.preset(name))
        assert ("batch_normalize" in warning.advice) is advised


def test_normalised_weight_of_ten_times_hi() -> None:
    config = mp.MismatchConfig.model_validate(weighted(upper_bound=3.0, batch_normalize=True))
    name = f"{PREFIX}rollout_is_weight_after_max"
    assert mp.check_health({name: 29.9}, config) == []
    assert [warning.metric for warning in mp.check_health({name: 30.1}, config)] == [name]


def test_missing_log_probs_and_nan_are_no_health():
    step = {"rollout_corr/tokens": 100.0, "rollout_corr/invalid_nan": 60.0, "rollout_corr/kl": 0.0}
    (warning,) = mp.check_health(step, mp.MismatchConfig())
    assert warning.metric == "rollout_corr/invalid_nan" and "60 of 100 rollout log-probs" in str(warning)
    assert mp.check_health({**step, "rollout_corr/invalid_nan": 1.0}, mp.MismatchConfig()) == []
    broken = {"rollout_corr/tokens": 1.0, "rollout_corr/pg_loss": float("nan")}
    (warning,) = mp.check_health(broken, mp.MismatchConfig())
    assert warning.metric == "rollout_corr/pg_loss"
