"""Metrics whose digits, bounds or names the differential test does not reach; all others stand there."""

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


def test_a_presets_bound_serves_the_metrics_alone() -> None:
    """`ppo_is_bypass` has no weights; its threshold is kept for the fractions."""
    metrics = metrics_of(sequences(*BATCH), mp.preset("ppo_is_bypass", threshold=2.5))
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    metrics = metrics_of(sequences(*BATCH), mp.preset("ppo_is_bypass", threshold=3.5))
    assert metrics["rollout_is_ratio_fraction_high"] == 0.0


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


@pytest.mark.parametrize("lower", [0.0, 1e-8, None])
@pytest.mark.parametrize("log_ratio", [-17.0, -18.0, -19.5, -20.0, -40.0])
@pytest.mark.parametrize("upper", [2.0, math.inf])
def test_vanishing_ratios_have_a_sample_size(log_ratio: float, lower: float | None, upper: float) -> None:
    """Equal weights have size 1 and deviation 0, however small. Catches (mean c)²/mean c² formed from ρ − 1."""
    settings = mp.MismatchConfig.model_validate(
        {"use_tis": True, "tis": {"level": "sequence", "mode": "clip", "lower_bound": lower, "upper_bound": upper}}
    )
    metrics = mp.correct(sequences(*[[log_ratio]] * 3), settings).statistics.metrics()
    assert metrics[f"{PREFIX}rollout_is_eff_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert metrics[f"{PREFIX}rollout_is_std"] == pytest.approx(0.0, abs=1e-7)


def test_statistics_of_batches_with_different_fields_do_not_merge() -> None:
    rows = {"rollout_log_probs": [[-1.0, -0.5]], "train_log_probs": [[-1.1, -0.6]], "loss_masks": [[1, 1]]}
    config = mp.MismatchConfig(metrics="full")
    more = mp.correct(mp.PackedSequences.from_lists(**rows, weight_versions=[[7, 8]]), config).statistics
    less = mp.correct(mp.PackedSequences.from_lists(**rows), config).statistics
    with pytest.raises(ValueError, match=r"one has -version, version, version_log_ratio.*, the other not"):
        more.merge(less)
    with pytest.raises(ValueError, match=r"the other has -version, .*, one not.*weight_versions"):
        less.merge(more)
    other = mp.correct(mp.PackedSequences.from_lists(**rows), mp.MismatchConfig(use_tis=True)).statistics
    with pytest.raises(ValueError, match="one has use_tis = False, the other has True"):
        less.merge(other)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_long_responses_in_float32_keep_their_digits(mode: str) -> None:
    """Equal tokens, 32768 of them: every mean is the token's own value, in one piece or in sixteen: to 1e-5.

    Catches sums accumulated in float32: their error grows with the length, and differs from split to split.
    """
    size, train, rollout = 32768, -1.1, -1.1003
    tis = {"mode": mode, "batch_normalize": True}
    settings = mp.MismatchConfig.model_validate({"use_tis": True, "tis": tis})
    ratio = math.exp(float(torch.tensor(train) - torch.tensor(rollout)))
    for pieces in (1, 16):
        rows = [[torch.full((size // pieces,), value)] * pieces for value in (train, rollout)]
        packed = mp.PackedSequences.from_lists(
            old_log_probs=rows[0], rollout_log_probs=rows[1], loss_masks=[torch.ones(size // pieces)] * pieces
        )
        found = mp.correct(packed, settings)
        metrics = {name.removeprefix(PREFIX): value for name, value in found.statistics.metrics().items()}
        assert found.weights.tolist() == pytest.approx([1.0] * size, rel=1e-5)
        assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(ratio, rel=1e-6)
        assert metrics["rollout_is_mean"] == pytest.approx(ratio, rel=1e-6)
        assert metrics["training_log_ppl"] == pytest.approx(1.1, rel=1e-5)
        assert metrics["training_ppl"] == pytest.approx(math.exp(1.1), rel=1e-5)
        assert metrics["rollout_is_weight_after_eff_sample_size"] == pytest.approx(1.0, rel=1e-5)
        assert metrics["rollout_is_weight_after_std"] == pytest.approx(0.0, abs=1e-3)
