"""How large a mismatch is said to be and whether that is normal: metrics of training, distribution, breakdowns, known
pairs, gate; and what is left out of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mismatch_plugin as mp
from mismatch_plugin.data.served import Served
from mismatch_plugin.data.versions import WeightSpan
from tests.diagnose.door import NAN, RECORDS, inspect, noisy, run, samples_of, told, training_file

FAR = ("--accept", "unexplained", "--accept", "unrelated", "--accept", "mixed_versions", "--accept", "staleness")


def groups(found: dict[str, Any], what: str) -> dict[str, int]:
    """Of one breakdown: name → tokens."""
    return {group["name"]: group["tokens"] for group in found["size"]["breakdowns"][what]}


def test_figures_and_a_bucket_by_hand() -> None:
    found = inspect(samples_of([[-1.0, -2.0]], [[-0.9, -2.2]]))
    (group,) = found["size"]["breakdowns"]["length"]
    up, down = math.exp(0.1), math.exp(-0.2)
    assert (group["name"], group["tokens"]) == ("0 to 63", 2)
    assert (group["abs_mean"], group["kl"]) == pytest.approx((0.15, 0.05))
    k3, ess = (up - 1 - 0.1 + down - 1 + 0.2) / 2, (up + down) ** 2 / (2 * (up**2 + down**2))
    assert (group["k3_kl"], group["ess"]) == pytest.approx((k3, ess))
    level = found["mismatch"]
    assert (level["kl"], level["k3_kl"], level["effective_sample_size"]) == pytest.approx((0.05, k3, ess))
    assert (level["abs_mean"], level["abs_max"], level["tokens"]) == (pytest.approx(0.15), pytest.approx(0.2), 2)
    assert inspect(samples_of([[None]], [[-1.0]]))["mismatch"] is None


def test_every_breakdown_by_hand() -> None:
    span = WeightSpan(version="v6", start=0, end=3)
    served = Served(server="b", dp_rank=0, sglang="0.5.23", dtype="bfloat16", head_dtype="float32")
    first: dict[str, Any] = {"loss_mask": [0, 1, 1, 0, 1], "weight_versions": (span,), "server": "a", "dp_rank": 1}
    first |= {"entropy": [9.0, 0.0, 0.3, 9.0, 5.0], "trainer_version": "v7", "advantages": np.arange(5.0)}
    last: dict[str, Any] = {"advantages": [-1.0] * 3, "server": "http://router", "served": served}
    last |= {"entropy": [0.6] * 3, "trainer_version": "v7"}
    rollout = [[-0.1, -0.001, -0.1, -1.0, -1.0], [-9.0, -3.0, -0.2]]
    found = inspect(samples_of(rollout, rollout, each=[first, last]))
    assert {what: groups(found, what) for what in found["size"]["breakdowns"]} == {
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


@pytest.mark.parametrize(("spread", "sequences"), [(0.0, 3), (0.3, 40)])
def test_metrics_are_those_that_training_reports_and_breakdowns_add_up_to_them(spread: float, sequences: int) -> None:
    draw = np.random.default_rng(sequences)
    samples = [
        one.with_fields(
            server=f"s{draw.integers(3)}",
            reward=float(draw.integers(2)),
            weight_versions=(WeightSpan(version=str(draw.integers(5)), start=0, end=len(one)),),
            trainer_version="5",
        )
        for one in noisy(spread, sequences, (1, 60))
    ]
    found = inspect(samples, "--preset", "token_is", *FAR)
    packed = mp.PackedSequences.from_lists(
        rollout_log_probs=[one.rollout_log_probs for one in samples],
        old_log_probs=[one.train_log_probs for one in samples],
        loss_masks=[[1] * len(one) for one in samples],
    )
    metrics = mp.correct(packed, mp.preset("token_is").replace(metrics="full")).statistics.metrics()
    for name in {*found["metrics"]} & {*metrics}:
        if "kl" in name:
            assert found["metrics"][name] == pytest.approx(metrics[name], rel=1e-9, abs=1e-12), name
    size, tokens = found["size"], found["mismatch"]["tokens"]
    assert [*size["quantiles"].values()] == sorted(size["quantiles"].values())
    for of in size["breakdowns"].values():
        assert sum(group["tokens"] for group in of) == tokens and all(0.0 < group["ess"] <= 1.0 for group in of)
        for name in ("kl", "k3_kl"):
            total = sum(group[name] * group["tokens"] for group in of) / tokens
            assert total == pytest.approx(metrics[f"rollout_corr/{name}"], rel=1e-9, abs=1e-12)


def test_only_trained_tokens_with_two_sound_numbers_count() -> None:
    masks = [[1, 0, 1, 1], [1], [1, 1]]
    rollout, train = [[-1.0, NAN, -3.0, -4.0], [NAN], [-9999.0, -0.5]], [[-1.1, -2.0, NAN, -4.1], [-1.0], [-1.0, -0.4]]
    found = inspect(samples_of(rollout, train, each=[{"loss_mask": mask} for mask in masks]))
    notes = found["notes"]
    assert "2 of 6 tokens that train have no number on one side: they are left out" in notes
    assert any(
        note.startswith("tokens with an invalid log-prob (1 floor) are left out, where training s") for note in notes
    )
    assert groups(found, "position") == {"0": 1, "1 to 3": 2}
    assert found["metrics"]["rollout_corr/kl"] == pytest.approx((0.1 + 0.1 - 0.1) / 3)


def with_gaps(abs_mean: float, k3_kl: float, tokens: int = 4000) -> list[Any]:
    """Responses whose mean |Δ log p| and k3 are these: most tokens are ±small, a share is ±large."""

    def k3_of(gap: float) -> float:
        return math.cosh(gap) - 1

    shares = (0.5, 0.2, 0.05, 0.02, 0.01, 0.005, 0.002)
    share = next(share for share in shares if share * k3_of(abs_mean / share) >= k3_kl)
    large = small = 0.0
    low, high = abs_mean, abs_mean / share
    for _ in range(60):  # the larger of both gaps, by bisection
        large = (low + high) / 2
        small = (abs_mean - share * large) / (1 - share)
        total = share * k3_of(large) + (1 - share) * k3_of(small)
        low, high = (large, high) if total < k3_kl else (low, large)
    draw = np.random.default_rng(0)
    sizes = np.where(np.arange(tokens) < share * tokens, large, small) * np.where(np.arange(tokens) % 2, 1, -1)
    rollout = -draw.uniform(4.0, 9.0, tokens).reshape(-1, 100)
    return samples_of(rollout.tolist(), (rollout + draw.permutation(sizes).reshape(-1, 100)).tolist())


@pytest.mark.parametrize(
    ("abs_mean", "k3_kl", "options", "normal", "pair"),
    [
        (0.012, 4e-4, (), True, "dense bf16"),
        (0.3, 0.2, (), False, "dense bf16"),
        (0.012, 0.2, (), False, "dense bf16"),  # a tail: the mean alone would pass
        (0.02, 4e-4, ("--engine", "fp16"), False, "fp16"),
        (0.013, 2e-3, ("--moe",), True, "MoE bf16"),
        (0.02, 3.5e-4, ("--engine", "fp8", "--trainer", "fp8"), True, "fp8, both sides alike"),
        (0.06, 2e-2, ("--engine", "fp8", "--trainer", "bf16"), True, "fp8 or fp4 engine, bf16 trainer"),
        (0.03, 1e-2, ("--engine", "int4", "--trainer", "int4"), False, "int4, both sides alike"),
        (0.012, 8.3e-4 * 1.98, ("--engine", "bf16", "--trainer", "bf16"), True, "dense bf16"),  # twice the largest
        (0.012, 8.3e-4 * 2.02, ("--engine", "bf16", "--trainer", "bf16"), False, "dense bf16"),
    ],
)
def test_is_this_normal(abs_mean: float, k3_kl: float, options: tuple[str, ...], normal: bool, pair: str) -> None:
    found = inspect(with_gaps(abs_mean, k3_kl), "--brief", *options)
    level = found["mismatch"]
    assert (level["abs_mean"], level["k3_kl"]) == pytest.approx((abs_mean, k3_kl), rel=0.02)
    assert found["normality"].startswith("yes, " if normal else "no: for ") and pair in found["normality"]
    assert found["verdict"] in ("fault", "normal" if normal else "large")


def test_what_was_measured_here_is_not_called_published_and_stale_rollouts_are_a_kind_of_their_own() -> None:
    said = "mean |Δ log p| 0.036 (ours 0.03), k3 0.0013 (ours 0.0008)"
    own = inspect(with_gaps(0.036, 1.3e-3), "--brief", "--trainer", "fp32")["normality"]
    assert own == f"yes, within twice the largest known for bf16 engine, fp32 trainer: {said}."
    span = {"weight_versions": [WeightSpan(version="3", start=0, end=100)], "trainer_version": "7"}
    found = inspect([one.with_fields(**span) for one in with_gaps(0.05, 0.005)], "--brief")
    words = "yes, as known for stale rollouts: k3 0.005 (published 0.0017 to 0.0054, ours "
    assert found["normality"].startswith(words), found["normality"]
    rows = [[-1.0, -2.0] * 60]
    found = inspect(samples_of(rows, rows))
    assert found["normality"].startswith("yes, an exact zero") and {*found["size"]["quantiles"].values()} == {0.0}


@pytest.mark.parametrize(
    ("k3_kl", "tokens", "options", "passed"),
    [
        (9e-4, 10_000, (), True),
        (1.1e-3, 10_000, (), False),
        (1.1e-3, 10_000, ("--gate-kl", "2e-3"), True),
        (9e-4, 9_900, (), None),  # within two standard errors of the bar
        (1e-4, 900 // 10, (), None),  # too few, whatever they are
    ],
)
def test_the_gate_passes_fails_or_does_not_decide(
    k3_kl: float, tokens: int, options: tuple[str, ...], passed: bool | None
) -> None:
    gap = math.acosh(1 + k3_kl)
    sizes = gap * np.where(np.arange(tokens) % 2, 1, -1)
    rollout = -np.random.default_rng(0).uniform(1.0, 3.0, tokens)
    width = 90 if tokens == 90 else 100
    found = inspect(
        samples_of(rollout.reshape(-1, width), (rollout + sizes).reshape(-1, width)), "--brief", "--gate", *options
    )
    gate = found["gate"]
    assert gate["passed"] is passed and gate["value"] == pytest.approx(k3_kl, rel=1e-6)
    assert ("xtuner#2044" in gate["source"]) == (not options) and gate["bar"] == (2e-3 if options else 1e-3)
    worst = {True: 0, False: 1, None: 3}[passed]
    assert found["status"] == (1 if found["verdict"] == "fault" else max(worst, 3 * (found["verdict"] == "undecided")))


def test_a_gate_needs_both_sides_and_an_end(tmp_path: Path) -> None:
    assert run(RECORDS, training_file(tmp_path), "--gate-kl", "inf").exit_code == 2
    assert told(RECORDS, "--brief", "--gate")["gate"] is None  # one side alone
