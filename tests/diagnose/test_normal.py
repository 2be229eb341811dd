"""Whether a gap is called normal, by kind of pair, on levels that are and are not."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from mismatch_plugin.diagnose.findings import Mismatch
from mismatch_plugin.diagnose.normal import (
    LOOSE,
    PUBLISHED,
    Hints,
    Pair,
    compare,
    is_normal,
    normal_table,
    normality,
    pairs_like,
)


def level(abs_mean: float, k3_kl: float, **more: Any) -> Mismatch:
    about: dict[str, Any] = {"tokens": 10**5, "samples": 100, "kl": k3_kl, "abs_p50": abs_mean, "abs_p90": 2 * abs_mean}
    about |= {"abs_p99": 3 * abs_mean, "abs_max": 5 * abs_mean, "correlation": 0.99, "effective_sample_size": 0.99}
    return Mismatch(abs_mean=abs_mean, k3_kl=k3_kl, **{**about, **more})


@pytest.mark.parametrize(
    ("abs_mean", "k3_kl", "hints", "normal"),
    [
        (0.012, 4e-4, Hints(), True),
        (0.002, 1e-5, Hints(), True),  # smaller than any
        (0.3, 0.2, Hints(), False),
        (0.012, 0.2, Hints(), False),  # a tail: the mean alone would pass
        (0.02, 4e-4, Hints(engine="fp16"), False),
        (0.003, 2e-5, Hints(engine="fp16"), True),
        (0.013, 2e-3, Hints(moe=True), True),
        (0.013, 2e-3, Hints(moe=True, routing_replayed=True), False),
        (0.007, 4e-4, Hints(moe=True, routing_replayed=True), True),
        (0.02, 3.5e-4, Hints(engine="fp8", trainer="fp8"), True),
        (0.09, 2e-2, Hints(engine="fp8", trainer="fp8"), False),
        (0.06, 2e-2, Hints(engine="fp8", trainer="bf16"), True),
        (0.03, 1e-2, Hints(engine="int4"), True),
        (0.03, 1e-2, Hints(engine="int4", same_quantisation=True), False),
        (0.1, 0.03, Hints(stale=4), True),
        (0.1, 0.03, Hints(engine="bf16", trainer="bf16"), False),
        (1.5, 1.0, Hints(stale=4), False),
    ],
)
def test_is_this_normal(abs_mean: float, k3_kl: float, hints: Hints, normal: bool) -> None:
    found = normality(level(abs_mean, k3_kl), hints)
    assert found.normal is normal
    assert found.sentence == is_normal(level(abs_mean, k3_kl), hints)
    assert found.sentence.startswith("normal, " if normal else "not normal for ")
    assert "(published " in found.sentence


def test_an_exact_zero_is_said_as_such() -> None:
    assert is_normal(level(0.0, 0.0)).startswith("an exact zero")


def test_a_gap_of_another_kind_s_size_names_that_kind() -> None:
    found = is_normal(level(0.03, 0.018), Hints(engine="bf16", trainer="bf16"))
    assert (
        found.startswith("not normal for dense bf16, 22 times the largest published")
        and '; of the size of "fp8 or fp4 engine, bf16 trainer" or "int4 engine".' in found
    )
    assert found.count('"') <= 4
    hints = Hints(engine="bf16", trainer="bf16")
    assert "of the size of" not in normality(level(0.03, 0.018), hints, name_others=False).sentence
    assert "of the size of" not in is_normal(level(0.012, 40.0), hints)  # the mean is of a size, k3 of none
    assert "48,000 times" in is_normal(level(0.012, 40.0), hints)


def test_compare_says_where_the_value_is() -> None:
    found = {row.figure: row for row in compare(level(0.012, 1e-2), Hints(engine="bf16"))}
    assert found["mean |Δ log p|"].where == "inside" and found["mean |Δ log p|"].value == 0.012
    assert found["k3"].where == "above" and found["k3"].source.startswith("https://")
    assert {row.where for row in compare(level(1e-4, 1e-7), Hints(engine="bf16"))} == {"below"}


@pytest.mark.parametrize("engine", ["fp32", "fp16", "bf16", "fp8", "fp4", "int8", "int4"])
@pytest.mark.parametrize("trainer", [None, "fp32", "bf16", "fp8"])
@pytest.mark.parametrize("stale", [0.0, 2.0])
def test_every_pair_has_published_gaps(engine: Any, trainer: Any, stale: float) -> None:
    for more in ({}, {"moe": True}, {"moe": True, "routing_replayed": True}, {"same_quantisation": False}):
        assert compare(level(0.01, 1e-3), Hints(engine=engine, trainer=trainer, stale=stale, **more))


def test_each_row_has_a_source_and_a_range() -> None:
    assert {row.pair for row in PUBLISHED} == set(get_args(Pair))
    for row in PUBLISHED:
        assert 0 <= row.low <= row.high and (row.source.startswith(("https://", "this project")))
    assert len(normal_table().rows) == len(PUBLISHED)


def test_nothing_is_normal_by_a_fault() -> None:
    faulty = [row for row in PUBLISHED if row.faulty and row.figure == "mean |Δ log p|"]
    for row in (row for row in faulty if row.low > 0.1):  # one grew from a normal gap
        assert normality(level(row.low, row.low), Hints(moe=row.pair.startswith("MoE"))).normal is False
    assert faulty and pairs_like(Hints())[0] == "dense bf16"


@pytest.mark.parametrize(("times", "normal"), [(LOOSE * 0.99, True), (LOOSE * 1.01, False)])
def test_up_to_twice_the_largest_is_its_size(times: float, normal: bool) -> None:
    high = max(row.high for row in PUBLISHED if row.pair == "dense bf16" and row.figure == "k3" and not row.faulty)
    assert normality(level(0.01, times * high), Hints(engine="bf16", trainer="bf16")).normal is normal
