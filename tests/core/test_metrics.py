"""Metrics whose digits, bounds or names the differential test does not reach; what is declared is documented."""

from __future__ import annotations

import math
import re

import pytest
import torch

import mismatch_plugin as mp
from mismatch_plugin.core.metrics.registry import METRICS, Mean, Metric, State
from mismatch_plugin.parallel.agreement import settings_of
from tests.core.worked import config, metrics_of, of_log_ratios, weighted

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")

PREFIX = "rollout_corr/"


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("noise", [1e-3, 1e-6, 1e-7, 1e-9])
def test_deviations_keep_their_digits_where_the_engines_nearly_agree(level: str, noise: float) -> None:
    """ρ = 1 ± noise in single tokens: every deviation is the noise. Catches E[x²] − E[x]² formed from ρ itself."""
    metrics = metrics_of(of_log_ratios([[math.log1p(noise)], [math.log1p(-noise)]]), **weighted(level))
    names = ["rollout_is_std", "rollout_is_ratio_std", "rollout_is_weight_after_std"]
    for name in names + (["rollout_is_ratio_unit_std"] if level != "token" else []):
        assert metrics[name] == pytest.approx(noise, rel=1e-3 if noise > 1e-9 else 1e-2), name


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_long_responses_in_float32_keep_their_digits(mode: str) -> None:
    """Equal tokens, 32768 of them: every mean is the token's own value, in one piece or in sixteen: to 1e-5.

    Catches sums accumulated in float32: their error grows with the length, and differs from split to split.
    """
    size, train, rollout = 32768, -1.1, -1.1003
    ratio = math.exp(float(torch.tensor(train) - torch.tensor(rollout)))
    for pieces in (1, 16):
        rows = [[torch.full((size // pieces,), value)] * pieces for value in (train, rollout)]
        packed = mp.PackedSequences.from_lists(
            old_log_probs=rows[0], rollout_log_probs=rows[1], loss_masks=[torch.ones(size // pieces)] * pieces
        )
        found = mp.correct(packed, config(**weighted(mode=mode, batch_normalize=True)))
        metrics = {name.removeprefix(PREFIX): value for name, value in found.statistics.metrics().items()}
        assert found.weights.tolist() == pytest.approx([1.0] * size, rel=1e-5)
        expected = {
            "rollout_is_batch_norm_factor": ratio,
            "rollout_is_mean": ratio,
            "training_log_ppl": 1.1,
            "training_ppl": math.exp(1.1),
            "rollout_is_weight_after_eff_sample_size": 1.0,
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert metrics["rollout_is_weight_after_std"] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("level", ["token", "sequence", "prefix"])
def test_a_ratio_at_its_bound_is_inside(level: str) -> None:
    """For mask mode, a criterion, and the shares above and below."""
    bounds = {"lower_bound": math.exp(-0.5), "upper_bound": math.exp(0.5)}  # whose logs are −0.5 and 0.5
    settings = {"use_tis": True, "tis": {"level": level, "mode": "mask", **bounds}, "rs": {"criteria": [bounds]}}
    metrics = metrics_of(of_log_ratios([[0.5], [-0.5]]), **settings)
    shares = ("fraction_high", "fraction_low", "seq_fraction_high", "seq_fraction_low")
    assert [metrics[f"rollout_is_ratio_{name}".replace("ratio_seq", "seq")] for name in shares] == [0.0] * 4
    assert metrics["accepted_token_fraction"] == 1.0


def test_what_does_not_merge_says_so() -> None:
    """A default bound that was given is reported for and makes columns: ranks must not learn that in a reduction."""
    plain = config()
    given = mp.MismatchConfig.build(plain.model_dump())
    assert plain == given and settings_of(plain) != settings_of(given) and settings_of(plain) == settings_of(config())
    packed = of_log_ratios([[0.1, 0.1]])
    less = mp.correct(packed, config(metrics="full")).statistics
    versions = packed.replace(weight_versions=torch.tensor([7, 8]), trainer_version=8)
    more = mp.correct(versions, config(metrics="full")).statistics
    with pytest.raises(ValueError, match=r"one has version_log_ratio, version_tokens, the other not"):
        more.merge(less)
    with pytest.raises(ValueError, match="one has use_tis = False, the other has True"):
        less.merge(mp.correct(packed, config(use_tis=True)).statistics)


def test_versions_sixteen_before_the_trainers_are_older() -> None:
    """98 lags 2 behind the trainer's 100, 101 is newer: no lag; 85 lags 15, 84 and 70 are "older"."""
    packed = of_log_ratios([[0.1, 0.2, 0.4, 0.5, 0.7]])
    packed = packed.replace(weight_versions=torch.tensor([101, 98, 85, 84, 70]), trainer_version=100)
    metrics = metrics_of(packed, metrics="full")
    found = {name.split("version_")[1]: value for name, value in metrics.items() if "by_version_" in name}
    assert found == pytest.approx({"lag_0": 0.1, "lag_2": 0.2, "lag_15": 0.4, "lag_older": 0.6}, rel=1e-5)


def test_every_declared_metric_is_reachable_and_documented() -> None:
    """Some configuration gives each declared name, and none gives a name that is not declared."""
    lengths = (3, 300, 0, 255, 256, 1100, 40)
    total, generator = sum(lengths), torch.Generator().manual_seed(3)
    rollout = torch.rand(total, generator=generator, dtype=torch.float64).clamp(1e-3, 0.995).log()
    noise = 0.3 * torch.randn(total, generator=generator, dtype=torch.float64)
    packed = mp.PackedSequences(
        loss_mask=torch.rand(total, generator=generator) < 0.8,
        lengths=lengths,
        rollout_log_probs=rollout,
        old_log_probs=(rollout + noise).clamp(max=-1e-4),
        advantages=torch.ones(total),
        ref_log_probs=torch.full((total,), -1.0),
        entropy=torch.ones(total),
        weight_versions=torch.full((total,), 7),
        trainer_version=9,
    )
    criteria = ["token:ratio:0.7:1.4", "sequence_max:k2:0.5:share=0.1"]
    rest = {"metrics": "full", "terms": {"rollout_kl_coef": 0.1}}
    rest["rs"] = {"criteria": criteria, "veto_threshold": 0.2, "max_staleness": 2}
    assert packed.old_log_probs is not None
    seen: set[str] = set()
    for level in ("token", "turn", "sequence", "geometric", "prefix"):
        settings = config(**weighted(level, batch_normalize=True), **rest)
        statistics = mp.policy_loss(packed.old_log_probs, packed, settings).statistics
        seen |= set(statistics.metrics())
        shares = [
            f"{PREFIX}rollout_rs_token_ratio_{name}" for name in ("masked_fraction", "fraction_high", "fraction_low")
        ]
        assert {*shares, f"{PREFIX}rollout_rs_sequence_max_k2_seq_masked_fraction"} <= {*statistics.metrics(True)}
    state = State({"one@tokens": 1.0, "one@sequences": 1.0}, {}, config())
    with pytest.raises(KeyError, match="raito"):
        Metric("kl", "", "tokens", "one", Mean("raito")).form(state)
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    patterns = {name: re.compile(PREFIX + re.sub(r"\\\{.*\\\}", ".+", re.escape(name))) for name in names}
    assert [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, seen))] == []
    assert [name for name in seen if not any(pattern.fullmatch(name) for pattern in patterns.values())] == []
    assert {m.merges for m in METRICS} == {"sum", "max"} and {m.level for m in METRICS} == {"basic", "full"}
    assert {m.unit for m in METRICS} == {"", "share", "nat", "tokens", "sequences"} and all(m.formula for m in METRICS)
