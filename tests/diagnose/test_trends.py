"""When the mismatch began to grow and with what: named where it is so, and nothing where it is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mismatch_plugin.diagnose.trends import LENGTH, MIN_STEPS, sentence, trend_of

K3 = "rollout_corr/k3_kl"


def noise(steps: int, seed: int, memory: float = 0.0, spread: float = 0.2) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.normal(0.0, spread, steps)
    for i in range(1, steps):
        values[i] = memory * values[i - 1] + math.sqrt(1 - memory**2) * values[i]
    return values


def rows(
    log_k3: np.ndarray, **columns: np.ndarray
) -> tuple[list[float], list[dict[str, float]], list[dict[str, float]]]:
    """A run: step numbers from 1, k3_kl, and columns of the host's own."""
    steps = [float(i + 1) for i in range(len(log_k3))]
    ours = [{K3: math.exp(value)} for value in log_k3]
    return steps, ours, [{name: float(column[i]) for name, column in columns.items()} for i in range(len(log_k3))]


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_a_flat_run_has_no_trend(memory: float) -> None:
    base = math.log(3e-4)
    alarms = [seed for seed in range(60) if trend_of(*rows(base + noise(150, seed, memory))) is not None]
    alarms += [seed for seed in range(60) if trend_of(*rows(base + noise(25, seed, memory, 0.5))) is not None]
    assert len(alarms) <= 2, alarms


def test_a_run_that_falls_has_none() -> None:
    assert trend_of(*rows(-8.0 + noise(150, 0) - 0.02 * np.arange(150))) is None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_growth_from_step_60_is_named(seed: int, memory: float) -> None:
    grown = -8.0 + noise(120, seed, memory) + 0.06 * np.maximum(np.arange(120) - 59.0, 0.0)
    found = trend_of(*rows(grown))
    assert found is not None and found.kind == "ramp"
    assert abs(found.began - 61) <= 5 and found.first - 3 <= 61 <= found.last + 3
    assert found.p <= 0.005 and found.after / found.before == pytest.approx(math.exp(0.06 * 60), rel=0.4)
    assert str(found).startswith(f"k3_kl has grown since step {found.began:g} (between ")


@pytest.mark.parametrize("seed", range(4))
def test_a_jump_is_named_as_one(seed: int) -> None:
    found = trend_of(*rows(-8.0 + noise(120, seed) + 1.5 * (np.arange(120) >= 70)))
    assert found is not None and found.kind == "jump" and found.began == 71 and found.first <= 71 <= found.last
    assert "rose at once at step 71" in str(found)


def test_growth_from_the_first_step_is_named() -> None:
    found = trend_of(*rows(-8.0 + noise(80, 1) + 0.05 * np.arange(80)))
    assert found is not None and found.began <= 5 and found.kind == "ramp"


def test_a_long_run_is_judged_as_well() -> None:
    found = trend_of(*rows(-8.0 + noise(5000, 2) + 0.002 * np.maximum(np.arange(5000) - 2999.0, 0.0)))
    assert found is not None and abs(found.began - 3000) <= 150


def test_little_growth_is_not_told() -> None:
    assert trend_of(*rows(-8.0 + noise(400, 3, spread=0.05) + 0.3 * (np.arange(400) >= 200))) is None


@pytest.mark.parametrize("seed", range(6))
def test_the_one_coupled_metric_of_ten_is_named(seed: int) -> None:
    time = np.maximum(np.arange(120) - 59.0, 0.0)
    shocks = noise(120, 100 + seed, 0.5)
    k3 = -8.0 + 0.05 * time + shocks
    columns = {f"host/other_{i}": noise(120, 1000 * seed + i) for i in range(7)}
    columns["host/reward"] = 0.01 * np.arange(120) + noise(120, seed, spread=0.02)  # rises from the first step on
    columns["actor/entropy"] = 2.0 - 0.02 * time - 0.3 * shocks + noise(120, 50 + seed, spread=0.03)
    columns["timing_s/step"] = time
    found = trend_of(*rows(k3, **columns))
    assert found is not None and [companion.metric for companion in found.companions] == ["actor/entropy"]
    assert found.companions[0].rank_correlation < -0.8
    assert "With it moved actor/entropy (rank correlation -0." in str(found)


def test_nothing_is_named_where_nothing_moved_with_it() -> None:
    k3 = -8.0 + noise(120, 0) + 0.05 * np.maximum(np.arange(120) - 59.0, 0.0)
    found = trend_of(*rows(k3, **{f"host/{i}": noise(120, i + 1) for i in range(10)}))
    assert found is not None and found.companions == () and "With it" not in str(found)


def test_our_own_metrics_that_are_made_of_the_same_ratio_do_not_explain_it() -> None:
    steps, ours, _ = rows(-8.0 + noise(120, 0) + 0.05 * np.maximum(np.arange(120) - 59.0, 0.0))
    for row in ours:
        k3 = row[K3]
        row |= {"rollout_corr/kl": k3, "rollout_corr/chi2_token": 2 * k3, "rollout_corr/rollout_is_ratio_std": k3**0.5}
        row |= {"rollout_corr/sequences": 8.0, "rollout_corr/tokens": 8.0 * (100.0 + 1e6 * k3)}
    found = trend_of(steps, ours)
    assert found is not None and [companion.metric for companion in found.companions] == [LENGTH]


def test_steps_are_put_in_order_and_the_later_of_two_counts() -> None:
    steps, ours, _ = rows(-8.0 + noise(120, 0) + 0.06 * np.maximum(np.arange(120) - 59.0, 0.0))
    once = trend_of(steps, ours)
    order = np.random.default_rng(0).permutation(120)
    shuffled = trend_of([steps[-1], *(steps[i] for i in order)], [{K3: 9.0}, *(ours[i] for i in order)])
    assert once == shuffled is not None


def test_what_cannot_be_told_is_not_told() -> None:
    few = rows(np.linspace(-8.0, -2.0, MIN_STEPS - 1))
    assert trend_of(*few) is None and sentence(None, MIN_STEPS - 1) == "none in 19 steps: it takes 20 to tell."
    assert trend_of(*rows(np.full(50, -8.0))) is None
    steps, ours, _ = rows(np.full(50, -8.0))
    assert trend_of(steps, [{**row, K3: math.nan} for row in ours]) is None
    assert trend_of(steps, [{**row, K3: 0.0} for row in ours]) is None  # aligned kernels
    assert sentence(None, 50) == "none in 50 steps."


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("steps", [30, 60, 100])
def test_growth_that_flattens_on_a_log_scale_is_named(steps: int, spread: float) -> None:
    """The deviation of the noise, or k3 itself, rises linearly from step 15 on."""
    since = np.maximum(np.arange(steps) - 13.0, 0.0)
    runs = [2 * np.log(0.01 + 0.03 * since), 2 * np.log(0.01 + 0.003 * since), np.log1p(10 * since), np.log1p(since)]
    for seed, log_k3 in enumerate(runs):
        found = trend_of(*rows(log_k3 - 9.0 + noise(steps, seed, spread=spread)))
        assert found is not None and found.kind == "ramp" and abs(found.began - 15) <= 2, found
        assert found.first - 2 <= 15 <= found.last + 2 and found.last - found.first <= 6, found


def _wild(seed: int, up: float) -> np.ndarray:
    """Ten low steps, then swings of forty times without a shape, and ten high ones."""
    swings = np.random.default_rng(seed).choice([-3.0, 0.0, 1.5], 40)
    return -8.0 + np.concatenate([np.zeros(10), swings, np.full(10, up)]) + noise(60, seed, spread=0.3)


def test_a_run_that_ends_far_above_its_beginning_is_never_without_a_trend() -> None:
    found = [trend_of(*rows(_wild(seed, 2.5))) for seed in range(10)]
    assert all(found)
    unclear = [trend for trend in found if trend is not None and trend.kind == "higher"]
    for trend in unclear:
        assert (trend.first, trend.last) == (1, 60) and trend.times == pytest.approx(math.exp(2.5), rel=0.4)
        assert str(trend).startswith("k3_kl is higher in the last 10 steps than in the first: from 0.0003")
        assert str(trend).endswith("since when is not clear.")
    assert unclear
    # As wild, and it ends where it began.
    assert [trend_of(*rows(_wild(seed, 0.0))) for seed in range(10)].count(None) >= 9
