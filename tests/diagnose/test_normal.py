"""Whether a gap is called normal, by kind of pair, on levels that are and are not; and the gate."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from mismatch_plugin.core.gate import DEFAULT_GATE_KL
from mismatch_plugin.diagnose.findings import Mismatch
from mismatch_plugin.diagnose.normal import (
    ENOUGH_TOKENS,
    FAR_ABS_MEAN,
    FAR_K3,
    GATE_TOKENS,
    KNOWN,
    LOOSE,
    MODERATE_K3,
    SMALL_K3,
    Hints,
    Pair,
    gate,
    normal_table,
    normality,
    size_class,
)


def level(abs_mean: float, k3_kl: float, **more: Any) -> Mismatch:
    about: dict[str, Any] = {"tokens": 10**5, "samples": 100, "kl": k3_kl, "abs_p50": abs_mean, "abs_p90": 2 * abs_mean}
    about |= {"abs_p99": 3 * abs_mean, "abs_max": 5 * abs_mean, "correlation": 0.99, "effective_sample_size": 0.99}
    return Mismatch(abs_mean=abs_mean, k3_kl=k3_kl, **{**about, **more})


@pytest.mark.parametrize("engine", ["fp32", "fp16", "bf16", "fp8", "fp4", "int8", "int4"])
def test_every_pair_has_known_gaps(engine: Any) -> None:
    trainers: tuple[Any, ...] = (None, "fp32", "bf16", "fp8")
    for trainer in trainers:
        for more in ({}, {"moe": True}):
            for stale in (0.0, 2.0):
                assert normality(level(0.01, 1e-3), Hints(engine=engine, trainer=trainer, stale=stale, **more)).rows
    assert {row.pair for row in KNOWN} == set(get_args(Pair)) and len(normal_table().rows) == len(KNOWN)
    for row in KNOWN:
        assert 0 <= row.low <= row.high and row.source.startswith(("https://", "this project"))


def test_nothing_is_normal_by_a_fault() -> None:
    faulty = [row for row in KNOWN if row.faulty and row.figure == "mean |Δ log p|" and row.low > 0.1]
    for row in faulty:  # one grew from a normal gap
        assert normality(level(row.low, row.low), Hints(moe=row.pair.startswith("MoE"))).normal is False
    assert faulty and normality(level(0.012, 4e-4)).rows[0].pair == "dense bf16"


@pytest.mark.parametrize(("times", "normal"), [(LOOSE * 0.99, True), (LOOSE * 1.01, False)])
def test_up_to_twice_the_largest_is_its_size(times: float, normal: bool) -> None:
    high = max(row.high for row in KNOWN if row.pair == "dense bf16" and row.figure == "k3" and not row.faulty)
    assert normality(level(0.01, times * high), Hints(engine="bf16", trainer="bf16")).normal is normal


def test_words_of_size() -> None:
    sizes = [size_class(level(0.01, k3)) for k3 in (SMALL_K3, MODERATE_K3, FAR_K3, 1.01 * FAR_K3)]
    assert sizes == ["small", "moderate", "large", "far"]
    assert size_class(level(0.0, 0.0)) == "exact" and size_class(level(1.01 * FAR_ABS_MEAN, SMALL_K3)) == "far"


@pytest.mark.parametrize(
    ("k3_kl", "tokens", "bar", "passed"),
    [
        (9e-4, GATE_TOKENS, None, True),
        (1.1e-3, GATE_TOKENS, None, False),
        (1.1e-3, GATE_TOKENS, 2e-3, True),
        (DEFAULT_GATE_KL, GATE_TOKENS, None, True),
        (9e-4, GATE_TOKENS - 1, None, None),  # within two standard errors of the bar
        (1e-4, 1000, None, True),
        (0.1, 1000, None, False),
        (1e-4, ENOUGH_TOKENS - 1, None, None),
        (0.0, ENOUGH_TOKENS, None, True),
        (math.nan, 10**6, None, None),
    ],
)
def test_the_gate_passes_fails_or_does_not_decide(
    k3_kl: float, tokens: int, bar: float | None, passed: bool | None
) -> None:
    found = gate(k3_kl, tokens, bar)
    assert found.passed is passed
    assert found.bar == (DEFAULT_GATE_KL if bar is None else bar) and ("xtuner#2044" in found.source) == (bar is None)
    for wrong in (0.0, -1e-3, math.nan, math.inf):
        with pytest.raises(ValueError, match="bar of the gate"):
            gate(1e-4, GATE_TOKENS, wrong)


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
        (0.02, 3.5e-4, Hints(engine="fp8", trainer="fp8"), True),
        (0.09, 2e-2, Hints(engine="fp8", trainer="fp8"), False),
        (0.06, 2e-2, Hints(engine="fp8", trainer="bf16"), True),
        (0.03, 1e-2, Hints(engine="int4"), True),
        (0.03, 1e-2, Hints(engine="int4", trainer="int4"), False),
        (0.1, 0.03, Hints(stale=4), True),
        (0.1, 0.03, Hints(engine="bf16", trainer="bf16"), False),
        (1.5, 1.0, Hints(stale=4), False),
    ],
)
def test_is_this_normal(abs_mean: float, k3_kl: float, hints: Hints, normal: bool) -> None:
    found = normality(level(abs_mean, k3_kl), hints)
    assert found.normal is normal
    assert found.sentence.startswith("normal, " if normal else "not normal for ")
    assert "(published " in found.sentence
    assert found.rows and f" for {found.rows[0].pair}" in found.sentence  # the kind that is named is shown first
    assert normality(level(0.0, 0.0), hints).sentence.startswith("an exact zero")


def test_what_was_measured_here_is_not_called_published() -> None:
    own = normality(level(0.036, 1.3e-3), Hints(engine="bf16", trainer="fp32")).sentence
    said = "mean |Δ log p| 0.036 (ours 0.03), k3 0.0013 (ours 0.0008)"
    assert own == f"normal, within twice what is measured on our tiny models for bf16 engine, fp32 trainer: {said}."
    both = normality(level(0.1, 0.03), Hints(stale=4)).sentence
    assert both.startswith("normal, as measured on our tiny models for stale rollouts: k3 0.03 (published 0.0017 to ")
    both = normality(level(0.1, 0.005), Hints(stale=4)).sentence
    assert both.startswith("normal, as published for stale rollouts: k3 0.005 (published 0.0017 to 0.0054, ours ")
    assert "ours" not in normality(level(0.012, 4e-4)).sentence
    assert {row.ours for row in normality(level(0.1, 0.03), Hints(stale=4)).rows} == {True, False}
