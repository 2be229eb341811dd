"""How large a mismatch is said to be: the metrics of training, the distribution, the breakdowns, what is stale."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mismatch_plugin as mp
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.served import Served
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose import packing
from mismatch_plugin.diagnose.batch import Batch
from mismatch_plugin.diagnose.measure import measure
from mismatch_plugin.diagnose.packing import packed_of
from mismatch_plugin.diagnose.result import Size
from tests.diagnose.dumps import batch_of, drawn

CONFIG = mp.preset("token_is")


def measured(batch: Batch) -> tuple[dict[str, float], Size]:
    return measure(batch, packed_of(batch)[0], CONFIG)


def names(size: Size, what: str) -> dict[str, int]:
    return {group.name: group.tokens for group in size.breakdowns[what]}


def test_a_bucket_by_hand():
    batch = batch_of([[-1.0, -2.0]], [[-0.9, -2.2]])
    (group,) = measured(batch)[1].breakdowns["length"]
    ratios = math.exp(0.1), math.exp(-0.2)
    assert (group.name, group.tokens) == ("0 to 63", 2)
    assert (group.abs_mean, group.kl) == pytest.approx((0.15, 0.05))
    assert group.k3_kl == pytest.approx((ratios[0] - 1 - 0.1 + ratios[1] - 1 + 0.2) / 2)
    assert group.ess == pytest.approx(sum(ratios) ** 2 / (2 * (ratios[0] ** 2 + ratios[1] ** 2)))


def test_every_breakdown_by_hand():
    mask = np.array([False, True, True, False, True])
    span = WeightSpan(version="v6", start=0, end=3)
    told = Served(server="b", dp_rank=0, sglang="0.5.23", dtype="bfloat16", head_dtype="float32")
    first = {"loss_mask": mask, "weight_versions": (span,), "server": "a", "dp_rank": 1, "advantages": np.arange(5.0)}
    first |= {"entropy": np.array([9.0, 0.0, 0.3, 9.0, 5.0]), "trainer_version": "v7"}
    last = {"advantages": np.full(3, -1.0), "server": "http://router", "served": told, "trainer_version": "v7"}
    last |= {"entropy": np.full(3, 0.6)}
    rollout = [[-0.1, -0.001, -0.1, -1.0, -1.0], [-9.0, -3.0, -0.2]]
    size = measured(batch_of(rollout, rollout, [first, last]))[1]
    assert {what: names(size, what) for what in size.breakdowns} == {
        "position": {"0": 1, "1 to 3": 4, "4 to 15": 1},
        "length": {"0 to 63": 6},
        "probability": {"below 0.01": 1, "0.01 to 0.1": 1, "0.1 to 0.5": 1, "0.5 to 0.9": 1, "0.9 to 0.99": 1,
                        "from 0.99": 1},
        "entropy": {"below 0.01": 1, "0.1 to 0.5": 1, "0.5 to 1": 3, "from 2": 1},
        "turn": {"1": 5, "2": 1},
        "version": {"v6": 2, "unknown": 4},
        "staleness": {"1": 2, "unknown": 4},
        "server": {"a": 3, "b": 3},  # behind a router by what each tells
        "dp_rank": {"0": 3, "1": 3},
        "advantage": {"negative": 3, "positive": 3},
    }  # fmt: skip
    rows = [[-1.0] * 24] * 40
    fields = [{"loss_mask": np.tile([True, False], 12), "server": f"s{index:02}" if index else None,
               "weight_versions": (WeightSpan(version=f"v{index}", start=0, end=24),),
               "trainer_version": "v20"} for index in range(40)]  # fmt: skip
    size = measured(batch_of(rows, rows, fields))[1]
    assert names(size, "turn") == {**{str(turn): 40 for turn in range(1, 9)}, "from 9": 4 * 40}
    assert [names(size, "server")[name] for name in ("s24", "others", "unknown")] == [12, 15 * 12, 12]
    assert names(size, "version") == {"older": 16 * 12, **{f"v{version}": 12 for version in range(16, 40)}}
    assert names(size, "staleness") == {
        "ahead": 19 * 12, **{str(steps): 12 for steps in range(9)}, "from 9": 12 * 12
    }  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 3), st.integers(1, 30))
def test_every_breakdown_adds_up_to_the_whole(seed: int, spread: float, sequences: int):
    generator = np.random.default_rng(seed)
    batch = drawn(sequences, spread, seed)
    told = {
        one.index: {
            "server": f"s{generator.integers(3)}",
            "reward": float(generator.integers(2)),
            "weight_versions": (WeightSpan(version=str(generator.integers(5)), start=0, end=len(one)),),
            "trainer_version": "5",
        }
        for one in batch
    }
    batch = batch.with_values(told)
    metrics, size = measured(batch)
    tokens = len(batch.tokens)
    assert [*size.quantiles.values()] == sorted(size.quantiles.values())
    for groups in size.breakdowns.values():
        assert sum(group.tokens for group in groups) == tokens
        for field, name in (("kl", "kl"), ("k3_kl", "k3_kl")):
            total = sum(getattr(group, field) * group.tokens for group in groups)
            assert total / tokens == pytest.approx(metrics[f"rollout_corr/{name}"], rel=1e-9, abs=1e-12)
        assert all(0.0 < group.ess <= 1.0 for group in groups)
    assert Size.model_validate_json(size.model_dump_json()) == size


def test_the_distribution_of_few_of_equal_and_of_far_tokens():
    gaps = np.r_[np.linspace(-0.01, 0.01, 2001), 5.0, -7.0]
    size = measured(batch_of([[-8.0] * len(gaps)], [(gaps - 8.0).tolist()]))[1]
    assert size.quantiles["p50"] == pytest.approx(0.0, abs=1e-9) and size.quantiles["p99.9"] < 0.02
    metrics, size = measured(batch_of([[-1.0, -2.0]], [[-1.0, -2.0]]))
    assert metrics["rollout_corr/k3_kl"] == 0.0 and set(size.quantiles.values()) == {0.0}
    metrics, size = measured(batch_of([[-1.0]], [[-1.5]]))
    assert metrics["rollout_corr/kl"] == pytest.approx(0.5) and names(size, "position") == {"0": 1}
    with pytest.raises(InputError, match="nothing to measure"):
        measured(batch_of([[math.nan]], [[-1.5]]))


def test_metrics_are_those_that_training_reports(monkeypatch: pytest.MonkeyPatch):
    batch = drawn()
    packed, _ = packed_of(batch)
    metrics, size = measured(batch)
    assert metrics == mp.correct(packed, CONFIG.replace(metrics="full")).statistics.metrics()
    by_hand = batch.tokens.gap
    assert metrics["rollout_corr/kl"] == pytest.approx(-by_hand.mean())
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((np.expm1(by_hand) - by_hand).mean())
    # What nothing tells has no breakdown.
    assert set(size.breakdowns) == {"position", "length", "probability"}
    # They do not depend on the pieces.
    monkeypatch.setattr(packing.pieces, "__defaults__", (37,))
    assert measured(batch)[0] == pytest.approx(metrics, rel=1e-9, abs=1e-12)
