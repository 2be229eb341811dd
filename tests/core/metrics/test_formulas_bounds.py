"""Metrics that depend on which bounds act, what criteria report, and digits where the two engines nearly agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.parallel.agreement import settings_of

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

PREFIX = "rollout_corr/"


def sequences(*log_ratios: list[float]) -> mp.PackedSequences:
    """Float64 sequences of the given log-ratios."""
    rollout = [[-1.0 - max(0.0, max(row))] * len(row) for row in log_ratios]
    old = [[r + x for r, x in zip(*pair, strict=True)] for pair in zip(rollout, log_ratios, strict=True)]
    rows = [[torch.tensor(row, dtype=torch.float64) for row in side] for side in (old, rollout)]
    return mp.PackedSequences.from_lists(
        old_log_probs=rows[0], rollout_log_probs=rows[1], loss_masks=[[1] * len(row) for row in log_ratios]
    )


def metrics_of(packed: mp.PackedSequences, config: mp.MismatchConfig | dict[str, Any]) -> dict[str, float]:
    config = config if isinstance(config, mp.MismatchConfig) else mp.MismatchConfig.model_validate(config)
    found = mp.correct(packed, config).statistics.metrics()
    return {name.removeprefix(PREFIX): value for name, value in found.items()}


#           ρ of the tokens 1, 3, 1 and 1/4; products 3 and 1/4; geometric means √3 and 1/4
BATCH = ([0.0, math.log(3.0)], [math.log(0.25)])
FRACTIONS = (
    # settings, share above, share below
    ({"use_tis": True}, 1 / 3, 1 / 3),  # [1/2, 2], tokens
    ({"use_tis": True, "tis": {"upper_bound": 5.0}}, 0.0, 0.0),  # [1/5, 5]
    ({"use_tis": True, "tis": {"level": "sequence"}}, 1 / 2, 1 / 2),
    ({"rs": {"criteria": ["token:ratio:0.3:4"]}}, 0.0, 1 / 3),  # the criterion's, not the unused TIS bound of 2
    ({"rs": {"criteria": ["token:k3:9", "sequence_sum:ratio:0.2:2.5"]}}, 1 / 2, 0.0),  # the first ratio criterion's
    ({"rs": {"criteria": ["sequence_mean:k1:0.5:2"]}}, 0.0, 1 / 2),  # geometric means
    ({"use_tis": True, "tis": {"upper_bound": 5.0}, "rs": {"criteria": ["token:ratio:0.3:2"]}}, 0.0, 0.0),
)


@pytest.mark.parametrize(("settings", "high", "low"), FRACTIONS)
def test_fractions_are_outside_the_bounds_that_act(settings: dict[str, Any], high: float, low: float) -> None:
    metrics = metrics_of(sequences(*BATCH), settings)
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(high)
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(low)


def test_without_bounds_there_are_no_fractions() -> None:
    """Nothing bounds a ratio: a share outside the unused default would be made up."""
    for settings in ({}, {"rs": {"criteria": ["token:k3:0.5"]}}, {"rs": {"veto_threshold": 1e-4}}):
        assert not [name for name in metrics_of(sequences(*BATCH), settings) if "fraction_high" in name], settings


def test_a_presets_bound_serves_the_metrics_alone() -> None:
    """`ppo_is_bypass` has no weights; its threshold is kept for the fractions."""
    metrics = metrics_of(sequences(*BATCH), mp.preset("ppo_is_bypass", threshold=2.5))
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    metrics = metrics_of(sequences(*BATCH), mp.preset("ppo_is_bypass", threshold=3.5))
    assert metrics["rollout_is_ratio_fraction_high"] == 0.0


def test_what_a_criterion_reports() -> None:
    """Mean, extremes and both sides of what it compares, each worked out from BATCH."""
    criteria = ["token:ratio:0.5:2", "sequence_sum:k1:0.2:2", "sequence_max:k2:0.7", "token:k3:0.5"]
    metrics = metrics_of(sequences(*BATCH), {"rs": {"criteria": criteria}, "metrics": "full"})
    log3, log4 = math.log(3.0), math.log(4.0)
    k3 = [0.0, 3.0 - 1.0 - log3, 0.25 - 1.0 + log4]  # 0, .901, .636
    expected = {
        "token_ratio": (1 / 3, 1 / 3, (1 + 3 + 0.25) / 3, 3.0, 0.25),
        "sequence_sum_ratio": (1 / 2, 0.0, (3 + 0.25) / 2, 3.0, 0.25),
        "sequence_max_k2": (1 / 2, 0.0, (log3**2 + log4**2) / 4, log4**2 / 2, log3**2 / 2),
        "token_k3": (2 / 3, 0.0, sum(k3) / 3, k3[1], 0.0),
    }
    for name, values in expected.items():
        for tail, value in zip(("fraction_high", "fraction_low", "mean", "max", "min"), values, strict=True):
            assert metrics[f"rollout_rs_{name}_{tail}"] == pytest.approx(value, abs=1e-12), (name, tail)
    basic = metrics_of(sequences(*BATCH), {"rs": {"criteria": criteria}})
    assert not [name for name in basic if name.startswith("rollout_rs_token_ratio_m") and "masked" not in name]


def test_an_empty_sequence_is_not_in_a_criterions_values() -> None:
    packed = sequences(*BATCH, [5.0])
    packed = packed.replace(loss_mask=torch.tensor([True, True, True, False]))
    settings = {"rs": {"criteria": ["sequence_max:ratio:0.2:2", "token:ratio:0.2:2"]}, "metrics": "full"}
    whole, less = metrics_of(packed, settings), metrics_of(sequences(*BATCH), settings)
    assert {name: value for name, value in whole.items() if "rollout_rs_" in name} == pytest.approx(
        {name: value for name, value in less.items() if "rollout_rs_" in name}
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("noise", [1e-3, 1e-6, 1e-7, 1e-9])
def test_deviations_keep_their_digits_where_the_engines_nearly_agree(level: str, noise: float) -> None:
    """ρ = 1 ± noise in single tokens: every deviation is the noise. Catches E[x²] − E[x]² formed from ρ itself."""
    settings = {"use_tis": True, "tis": {"level": level}}
    metrics = metrics_of(sequences([math.log1p(noise)], [math.log1p(-noise)]), settings)
    names = ["rollout_is_std", "rollout_is_ratio_std", "rollout_is_weight_after_std"]
    for name in names + (["rollout_is_ratio_unit_std"] if level != "token" else []):
        assert metrics[name] == pytest.approx(noise, rel=1e-3 if noise > 1e-9 else 1e-2), name


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_deviation_of_small_weights_keeps_its_digits(level: str) -> None:
    """Products of long responses are e^-19; normalised, their mean is 1. Catches moments about 1, which give 0."""
    logs = [-19.0, -18.5, -19.5, -19.8]
    config = mp.MismatchConfig.model_validate({"use_tis": True, "tis": {"level": level, "batch_normalize": True}})
    found = mp.correct(sequences(*[[log] for log in logs]), config)
    mean = sum(map(math.exp, logs)) / 4
    expected = math.sqrt(sum((math.exp(log) / mean - 1) ** 2 for log in logs) / 4)
    assert found.statistics.metrics()[f"{PREFIX}rollout_is_weight_after_std"] == pytest.approx(expected, rel=1e-5)


def test_sample_sizes_of_ratios() -> None:
    # ρ: 4 and five of 1: (9)² / (6 · 21)
    packed = sequences([math.log(4.0)], *[[0.0]] * 5)
    size = 81 / 126
    for level, name in (("token", "ratio"), ("sequence", "ratio_unit"), ("geometric", "ratio_unit")):
        metrics = metrics_of(packed, {"use_tis": True, "tis": {"level": level}})
        assert metrics[f"rollout_is_{name}_eff_sample_size"] == pytest.approx(size)
        assert ("rollout_is_ratio_unit_mean" in metrics) is (level != "token")
    # Products that vanish alike are of equal weight; tokens that vanish leave no digits.
    metrics = metrics_of(sequences([-30.0], [-30.0]), {"use_tis": True, "tis": {"level": "sequence"}})
    assert metrics["rollout_is_ratio_unit_eff_sample_size"] == pytest.approx(1.0)
    assert metrics["rollout_is_ratio_eff_sample_size"] == 0.0
    # … but small ones have them: equal ratios of .05 are of equal weight.
    metrics = metrics_of(sequences([math.log(0.05)] * 4), {})
    assert metrics["rollout_is_ratio_eff_sample_size"] == pytest.approx(1.0)


def test_configurations_that_are_equal_may_report_other_fractions_and_the_digest_knows() -> None:
    """A default bound that was given is reported for, and makes columns: ranks must not learn that in a reduction."""
    plain = mp.MismatchConfig()
    given = mp.MismatchConfig.build(plain.model_dump())
    assert plain == given and settings_of(plain) != settings_of(given)
    assert settings_of(plain) == settings_of(mp.MismatchConfig())


def test_the_deviation_after_a_factor_of_the_micro_batch() -> None:
    """With scope micro_batch the factor is applied before the sums: they are still about the weights used."""
    packed = sequences([0.3, -0.2, 0.05], [0.9, -0.4])
    for level in ("token", "sequence"):
        tis = {"level": level, "batch_normalize": True, "batch_normalize_scope": "micro_batch"}
        config = mp.MismatchConfig.model_validate({"use_tis": True, "tis": tis})
        found = mp.correct(packed, config)
        metrics = {name.removeprefix(PREFIX): value for name, value in found.statistics.metrics().items()}
        assert metrics["rollout_is_weight_after_mean"] == pytest.approx(float(found.weights.mean()))
        assert metrics["rollout_is_weight_after_std"] == pytest.approx(float(found.weights.std(correction=0)))
        size = float(found.weights.sum() ** 2 / (5 * found.weights.square().sum()))
        assert metrics["rollout_is_weight_after_eff_sample_size"] == pytest.approx(size)
