"""slime's train_async.py, where rollouts are older than the weights that train on them.

Rollout n is sampled while n − 1 is trained on, with weights that reach the server after every INTERVAL-th rollout.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from statistics import mean

import pytest

from examples.sglang_server import start_cpu_server
from mismatch_plugin.patching import apply, patches_of
from tests.trainers.columns import Shown
from tests.trainers.slime.loop import reported, reverse, rewards, versions
from tests.trainers.slime.test_learned import ALGORITHMS, STEPS
from tests.trainers.slime.trainer import Sources, Trained, train

INTERVAL = 10
ROLLOUTS = 2 * INTERVAL + 1
OLDEST = [n for n in range(ROLLOUTS) if n % INTERVAL in (8, 9, 0) and n]
"""Rollouts that are eight to ten updates old."""
JOBS = {
    f"algorithm {i}": reverse(
        f"{ALGORITHMS[i]} --update-weights-interval {INTERVAL} --lr 1.5e-3", script="train_async.py", rollouts=ROLLOUTS
    )
    for i in (0, 1, 2)
}


def _spike(run: Trained) -> float:
    return max(step["grad_norm"] for step in run.steps.values())


def _apart(run: Trained) -> float:
    """Mean |Δ log p| of the oldest rollouts, at the first step on each: there bypass compares π_old as well."""
    steps = reported(run)
    return mean(steps[n * STEPS]["rollout_corr/log_ratio_abs_by_position_below_64"] for n in OLDEST)


@pytest.mark.shows("starts", "weight_versions_arrive")
def test_stale_rollouts_part_the_algorithms_as_in_the_comparison(
    trained: Callable[[str], Trained], shows: Shown
) -> None:
    """By the mechanism of docs/compare.md, not by reward, which two weight updates are too few to part: token weights
    take the gradient's spikes away, and bypass stays near the policy that sampled."""
    runs = {i: trained(f"algorithm {i}") for i in (0, 1, 2)}
    for i, run in runs.items():
        assert run.finished.status == 0, run.text[-3000:]
        assert [versions(run, n) for n in range(ROLLOUTS)] == [
            {(str(1 + max(n - 1, 0) // INTERVAL),)} for n in range(ROLLOUTS)
        ]
        print(f"algorithm {i}: largest norm {_spike(run):.1f}, apart {_apart(run):.2f}, reward {rewards(run)}")
    plain, bypass, weighted = runs.values()
    assert _spike(plain) > 3 * _spike(weighted)
    assert _apart(plain) > 1.5 * _apart(bypass)
    shows("starts", "train_async.py")
    shows("weight_versions_arrive", f"train_async.py: rollouts up to {INTERVAL} old, as their versions say")


@pytest.mark.shows("weight_versions_arrive")
def test_staleness_with_an_external_server(sources: Sources, shows: Shown) -> None:
    """Weights every second rollout: the trainer is one update ahead of rollouts 2 and 4."""
    runs = sources.inputs.parent
    copy = runs / "slime-with-versions"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sources.slime, copy, ignore=shutil.ignore_patterns(".git", "docs", "imgs", "tests"))
    apply(patches_of("slime", ["slime/ray/rollout.py"]), copy)
    flags = "--use-tis --rs-max-staleness 0 --update-weights-interval 2"
    with start_cpu_server(sources.inputs / "warm", python=sources.python, arguments=["--trust-remote-code"]) as server:
        job = reverse(flags, script="train_async.py", rollouts=6, engine=server.url.removeprefix("http://"))
        run = train(job, dataclasses.replace(sources, slime=copy), runs / "async/external")
    assert run.finished.status == 0, run.text[-3000:]
    assert [versions(run, n) for n in range(6)] == [{(v,)} for v in "111223"]
    left_out = [step["rollout_corr/rollout_rs_staleness_masked_fraction"] for step in reported(run)]
    assert left_out == [float(n in (2, 4)) for n in range(6) for _ in range(4)]
    shows("weight_versions_arrive", "--rs-max-staleness leaves out the rollouts that are too old")
