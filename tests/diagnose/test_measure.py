"""How large a mismatch is said to be: the metrics of training, the distribution, the breakdowns, what is stale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mismatch_plugin as mp
from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.served import Served
from mismatch_plugin.data.versions import WeightSpan
from mismatch_plugin.diagnose import packing
from mismatch_plugin.diagnose.measure import measure, packed_of, separate
from mismatch_plugin.diagnose.result import Size
from tests.diagnose.dumps import batch_of, drawn

CONFIG = mp.preset("token_is")


def names(size: Size, what: str) -> dict[str, int]:
    return {group.name: group.tokens for group in size.breakdowns[what]}


def test_metrics_are_those_that_training_reports():
    batch = drawn()
    packed, _ = packed_of(batch)
    metrics, _ = measure(batch, CONFIG)
    assert metrics == mp.correct(packed, CONFIG.replace(metrics="full")).statistics.metrics()
    by_hand = batch.tokens.gap
    assert metrics["rollout_corr/kl"] == pytest.approx(-by_hand.mean())
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((np.expm1(by_hand) - by_hand).mean())


def test_what_judges_the_current_policy_is_that_of_the_first_step():
    batch, current = drawn(), CONFIG.replace(rs={"criteria": ["token:k3:1e-5"], "policy": "current"})
    metrics, _ = measure(batch, current)
    other, _ = measure(batch, current.replace(rs={"policy": "auto"}))
    share = "rollout_corr/accepted_token_fraction"
    assert metrics[share] == pytest.approx(other[share]) and other[share] < 1


def test_metrics_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch):
    batch = drawn()
    whole, size = measure(batch, CONFIG)
    monkeypatch.setattr(packing.pieces, "__defaults__", (37,))
    parts, other = measure(batch, CONFIG)
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert (size.counts, size.quantiles) == (other.counts, other.quantiles)
    for what, groups in size.breakdowns.items():
        for one, two in zip(groups, other.breakdowns[what], strict=True):
            assert two.name == one.name
            assert two.model_dump(exclude={"name"}) == pytest.approx(one.model_dump(exclude={"name"}), rel=1e-9)


def test_a_bucket_by_hand():
    batch = batch_of([[-1.0, -2.0]], [[-0.9, -2.2]])
    (group,) = measure(batch, CONFIG)[1].breakdowns["length"]
    ratios = math.exp(0.1), math.exp(-0.2)
    assert (group.name, group.tokens) == ("0 to 63", 2)
    assert (group.abs_mean, group.kl) == pytest.approx((0.15, 0.05))
    assert group.k3_kl == pytest.approx((ratios[0] - 1 - 0.1 + ratios[1] - 1 + 0.2) / 2)
    assert group.ess == pytest.approx(sum(ratios) ** 2 / (2 * (ratios[0] ** 2 + ratios[1] ** 2)))


def test_every_breakdown_by_hand():
    mask = np.array([False, True, True, False, True])
    span = WeightSpan(version="v6", start=0, end=3)
    first = {"loss_mask": mask, "weight_versions": (span,), "server": "a", "dp_rank": 1, "advantages": np.arange(5.0)}
    first |= {"entropy": np.array([9.0, 0.0, 0.3, 9.0, 5.0]), "trainer_version": "v7"}
    last = {"advantages": np.full(3, -1.0), "server": "b", "entropy": np.full(3, 0.6), "trainer_version": "v7"}
    rollout = [[-0.1, -0.001, -0.1, -1.0, -1.0], [-9.0, -3.0, -0.2]]
    size = measure(batch_of(rollout, rollout, [first, last]), CONFIG)[1]
    assert names(size, "position") == {"0": 1, "1 to 3": 4, "4 to 15": 1}
    assert names(size, "length") == {"0 to 63": 6}
    assert names(size, "probability") == {
        "below 0.01": 1, "0.01 to 0.1": 1, "0.1 to 0.5": 1, "0.5 to 0.9": 1, "0.9 to 0.99": 1, "from 0.99": 1
    }  # fmt: skip
    assert names(size, "entropy") == {"below 0.01": 1, "0.1 to 0.5": 1, "0.5 to 1": 3, "from 2": 1}
    assert names(size, "turn") == {"1": 5, "2": 1}
    assert names(size, "version") == {"v6": 2, "unknown": 4}
    assert names(size, "staleness") == {"1": 2, "unknown": 4}
    assert names(size, "server") == {"a": 3, "b": 3}
    assert names(size, "dp_rank") == {"1": 3, "unknown": 3}
    assert names(size, "advantage") == {"negative": 3, "positive": 3}


def test_servers_are_told_apart_behind_a_router_by_what_they_tell():
    rows = [[-1.0, -2.0], [-1.5, -0.5, -0.1]]
    fields = []
    for name, rank in (("a", 0), ("b", 1)):
        told = Served(server=name, dp_rank=rank, sglang="0.5.23", dtype="bfloat16", head_dtype="float32")
        fields.append({"server": "http://router", "served": told})
    size = measure(batch_of(rows, rows, fields), CONFIG)[1]
    assert names(size, "server") == {"a": 2, "b": 3} and names(size, "dp_rank") == {"0": 2, "1": 3}


def test_what_nothing_tells_has_no_breakdown():
    size = measure(drawn(), CONFIG)[1]
    assert set(size.breakdowns) == {"position", "length", "probability"}
    assert size.separated == {}


def test_many_turns_and_servers_end_in_one_bucket():
    mask = np.tile([True, False], 12)
    rows = [[-1.0] * 24] * 40
    size = measure(
        batch_of(rows, rows, [{"loss_mask": mask, "server": f"s{index:02}"} for index in range(40)]), CONFIG
    )[1]
    assert names(size, "turn") == {**{str(turn): 40 for turn in range(1, 9)}, "from 9": 4 * 40}
    assert names(size, "server")["others"] == 16 * 12


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
    metrics, size = measure(batch, CONFIG)
    tokens = len(batch.tokens)
    assert sum(size.counts) == tokens and len(size.edges) == len(size.counts) + 1
    assert list(size.edges) == sorted({*size.edges}) and [*size.quantiles.values()] == sorted(size.quantiles.values())
    for groups in size.breakdowns.values():
        assert sum(group.tokens for group in groups) == tokens
        for field, name in (("kl", "kl"), ("k3_kl", "k3_kl")):
            total = sum(getattr(group, field) * group.tokens for group in groups)
            assert total / tokens == pytest.approx(metrics[f"rollout_corr/{name}"], rel=1e-9, abs=1e-12)
        assert all(0.0 < group.ess <= 1.0 for group in groups)
    assert Size.model_validate_json(size.model_dump_json()) == size


def test_the_outer_bins_hold_the_tails():
    gaps = np.r_[np.linspace(-0.01, 0.01, 2001), 5.0, -7.0]
    size = measure(batch_of([[-8.0] * len(gaps)], [(gaps - 8.0).tolist()]), CONFIG)[1]
    assert size.edges[-1] < 0.02 and size.counts[0] >= 1 and size.counts[-1] >= 1
    assert sum(size.counts) == len(gaps)
    assert size.quantiles["p50"] == pytest.approx(0.0, abs=1e-9)


def test_two_equal_sides_are_measured_as_such():
    batch = batch_of([[-1.0, -2.0]], [[-1.0, -2.0]])
    metrics, size = measure(batch, CONFIG)
    assert metrics["rollout_corr/k3_kl"] == 0.0 and set(size.quantiles.values()) == {0.0}
    assert sum(size.counts) == 2


def test_a_single_token_and_none():
    metrics, size = measure(batch_of([[-1.0]], [[-1.5]]), CONFIG)
    assert metrics["rollout_corr/kl"] == pytest.approx(0.5) and names(size, "position") == {"0": 1}
    with pytest.raises(InputError, match="nothing to measure"):
        measure(batch_of([[math.nan]], [[-1.5]]), CONFIG)


def test_settings_of_a_rejecting_kind_show_in_the_metrics():
    config = mp.MismatchConfig(rs=mp.Rejection.model_validate({"criteria": ["token:ratio:50:60"]}))
    metrics, _ = measure(drawn(), config)
    assert metrics["rollout_corr/accepted_token_fraction"] == 0.0 and metrics["rollout_corr/all_rejected"] == 1.0


# What is stale.


def k3(gap: float) -> float:
    return math.expm1(gap) - gap


def of_versions(gaps: dict[str, float], tokens: int, trainer: str | None = "v5") -> dict[str, float]:
    """`separate` of one response a version, each with one gap at all of its tokens."""
    return separate(
        batch_of(
            [[-2.0] * tokens] * len(gaps),
            [[-2.0 + gap] * tokens for gap in gaps.values()],
            [
                {"weight_versions": (WeightSpan(version=version, start=0, end=tokens),), "trainer_version": trainer}
                for version in gaps
            ],
        )
    )


def test_tokens_of_the_same_weights_show_the_engines_alone():
    found = of_versions({"v5": 0.01, "v3": 0.1}, 4)
    assert found == pytest.approx(
        {
            "engine_abs": 0.01,
            "engine_k3": k3(0.01),
            "stale_abs": 0.1,
            "stale_k3": k3(0.1),
            "staleness_k3": (k3(0.1) - k3(0.01)) / 2,
        }
    )
    assert of_versions({"v5": 0.01}, 4) == pytest.approx(
        {"engine_abs": 0.01, "engine_k3": k3(0.01), "staleness_k3": 0.0}
    )


def test_without_fresh_tokens_the_line_is_followed_to_staleness_0():
    found = of_versions({"v4": 0.1, "v3": 0.2}, 200)
    slope = k3(0.2) - k3(0.1)
    engine = max(k3(0.1) - slope, 0.0)
    assert found == pytest.approx(
        {"engine_k3": engine, "staleness_k3": (k3(0.1) + k3(0.2)) / 2 - engine, "k3_per_step": slope}
    )
    found = of_versions({"v4": 0.10, "v3": 0.12}, 200)
    slope = k3(0.12) - k3(0.1)
    assert found["engine_k3"] == pytest.approx(k3(0.1) - slope) and found["engine_k3"] > 0


@pytest.mark.parametrize(
    ("versions", "tokens", "trainer"),
    [
        ({"v4": 0.1, "v3": 0.2}, 99, "v5"),  # too few tokens of each
        ({"v4": 0.1}, 500, "v5"),  # one staleness is no line
        ({"v5": 0.1, "v4": 0.2}, 500, None),  # the trainer's version is not known
        ({"red": 0.1, "blue": 0.2}, 500, "v5"),
        ({"v5": 0.1, "v4": 0.2}, 500, "green"),
    ],
)
def test_where_versions_do_not_tell_nothing_is_separated(versions: dict[str, float], tokens: int, trainer: str | None):
    assert of_versions(versions, tokens, trainer) == {}


def test_a_rescoring_splits_the_gap_at_the_server():
    batch = batch_of([[-1.0, -2.0], [-3.0]], [[-1.3, -2.3], [-3.3]])
    rescored = [np.array([-1.1, -2.1]), np.array([np.nan])]
    found = separate(batch, rescored)
    assert found == pytest.approx(
        {"sampled_abs": 0.1, "sampled_k3": k3(-0.1), "trainer_abs": 0.2, "trainer_k3": k3(-0.2)}
    )
    assert separate(batch, [np.full(2, np.nan), np.full(1, np.nan)]) == {}


def test_the_packed_batch_may_be_given():
    batch = drawn()
    packed, _ = packed_of(batch)
    assert measure(batch, CONFIG, packed) == measure(batch, CONFIG)
    assert packed.old_log_probs is not None and torch.equal(
        packed.old_log_probs, torch.cat([torch.from_numpy(sample.train_log_probs) for sample in batch])
    )
