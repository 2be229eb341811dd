"""slime's whole loop with a real SGLang server: six digits backwards, learned from a warm checkpoint, and faults of it.

SGLang on CPU follows no seed, so that every run of these draws other answers.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from statistics import mean, quantiles
from typing import Any

import pytest

from examples.sglang_server import start_cpu_server
from mismatch_plugin.patching import apply, patches_of
from tests.trainers.slime.loop import dumps, inspect, reverse, rewards
from tests.trainers.whole import RUNS, Host, Runs, Sources

ROLLOUTS = 24
STEPS = 4  # optimizer steps a rollout
RISE = 0.05
"""By which the mean reward of the last five rollouts is above that of the first five."""
ALGORITHMS = {0: "", 1: "--use-rollout-log-probs", 2: "--use-tis", 3: "--use-rollout-log-probs --use-tis"}
# Precision of trainer and server, and how weights travel. bf16 is slime's default.
HOW: dict[int, dict[str, Any]] = {
    0: {"config": {"bf16": True}, "dtype": "bfloat16"},
    1: {"transport": "nccl"},  # which the accelerator of CPU makes gloo
    2: {},
    3: {"dtype": "bfloat16"},
}
# Rollout n of train_async.py is sampled while n − 1 is trained on, and weights go out after every INTERVAL-th.
INTERVAL = 10
STALE = 2 * INTERVAL + 1
OLDEST = [n for n in range(STALE) if n % INTERVAL in (8, 9, 0) and n]
"""Rollouts that are eight to ten updates old."""
GENERATE = "--use-tis --custom-generate-function-path slime_faults"
JOBS = {
    **{f"algorithm {i}": reverse(flags, rollouts=ROLLOUTS, **HOW[i]) for i, flags in ALGORITHMS.items()},
    **{
        f"async {i}": reverse(
            f"{ALGORITHMS[i]} --update-weights-interval {INTERVAL} --lr 1.5e-3", script="train_async.py", rollouts=STALE
        )
        for i in (0, 1, 2)
    },
    "temperature": reverse(f"{GENERATE}.other_temperature", rollouts=3),
    "stale": reverse("--use-tis --custom-update-weight-post-write-path slime_faults.stale_files", rollouts=6),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_reward_rises_in_sync(algorithm: int, trained: Runs) -> None:
    run = trained(f"algorithm {algorithm}")
    assert run.finished.status == 0, run.text[-3000:]
    seen = rewards(run)
    assert len(seen) == ROLLOUTS
    rise = mean(seen[-5:]) - mean(seen[:5])
    print(f"algorithm {algorithm}: {mean(seen[:5]):.3f} to {mean(seen[-5:]):.3f} in {run.finished.seconds:.0f} s")
    assert rise > RISE
    assert [run.versions(rollout) for rollout in range(ROLLOUTS)] == [{(str(n + 1),)} for n in range(ROLLOUTS)]
    steps = run.reported
    assert [step["step"] for step in steps] == list(range(ROLLOUTS * STEPS))
    kl = run.tracked["train/rollout_corr/kl"]
    assert [kl[step["step"]] for step in steps] == pytest.approx([step["rollout_corr/kl"] for step in steps], abs=1e-6)


def test_stale_rollouts_part_the_algorithms_as_in_the_comparison(trained: Runs) -> None:
    """By the mechanism of docs/compare.md, not by reward, which two weight updates are too few to part: token weights
    take the gradient's spikes away, and bypass stays near the policy that sampled."""
    spikes, apart = [], []
    for i in (0, 1, 2):
        run = trained(f"async {i}")
        assert run.finished.status == 0, run.text[-3000:]
        wanted = [{(str(1 + max(n - 1, 0) // INTERVAL),)} for n in range(STALE)]
        assert [run.versions(n) for n in range(STALE)] == wanted
        spikes.append(quantiles([step["grad_norm"] for step in run.steps.values()], n=10)[-1])
        # Of the oldest rollouts, at the first step on each: there bypass compares π_old as well.
        steps = run.reported
        apart.append(mean(steps[n * STEPS]["rollout_corr/log_ratio_abs_by_position_below_64"] for n in OLDEST))
        print(
            f"algorithm {i}: a tenth of the norms above {spikes[-1]:.1f}, apart {apart[-1]:.2f}, reward {rewards(run)}"
        )
    plain, bypass, weighted = range(3)
    assert spikes[plain] > 2 * spikes[weighted]
    assert apart[plain] > 1.5 * apart[bypass]


def test_staleness_with_an_external_server(sources: Sources, host: Host) -> None:
    """Weights every second rollout: the trainer is one update ahead of rollouts 2 and 4."""
    copy = RUNS / "slime-with-versions"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sources.checkout, copy, ignore=shutil.ignore_patterns(".git", "docs", "imgs", "tests"))
    apply(patches_of("slime", ["slime/ray/rollout.py"]), copy)
    patched = dataclasses.replace(host, sources=dataclasses.replace(sources, checkout=copy))
    flags = "--use-tis --rs-max-staleness 0 --update-weights-interval 2"
    with start_cpu_server(sources.inputs / "warm", python=sources.python, arguments=["--trust-remote-code"]) as server:
        job = reverse(flags, script="train_async.py", rollouts=6, engine=server.url.removeprefix("http://"))
        run = patched.train(job, "loop/external")
    assert run.finished.status == 0, run.text[-3000:]
    assert [run.versions(n) for n in range(6)] == [{(v,)} for v in "111223"]
    left_out = [step["rollout_corr/rollout_rs_staleness_masked_fraction"] for step in run.reported]
    assert left_out == [float(n in (2, 4)) for n in range(6) for _ in range(STEPS)]


def test_a_server_at_another_temperature_is_named(trained: Runs, sources: Sources) -> None:
    run = trained("temperature")
    assert run.finished.status == 0, run.text[-3000:]
    status, found = inspect(sources, dumps(run, range(3)))
    assert status == 1 and found["findings"][0]["fault"] == "temperature", found
    status, found = inspect(sources, run.folder / "report")  # metrics alone cannot tell a temperature
    assert status == 1 and found["verdict"] == "large", found


def test_weights_that_do_not_arrive_are_named(trained: Runs, sources: Sources) -> None:
    """Nothing arrives under rollouts 1 and 2, one of two layers under 3 to 5; all versions are as they should be."""
    run = trained("stale")
    assert run.finished.status == 0, run.text[-3000:]
    status, found = inspect(sources, dumps(run, range(3), "rollout"), dumps(run, range(3)))
    assert status == 1 and found["findings"][0]["fault"] == "weights_not_updated", found
    both = ["--checkpoint", run.folder / "now/6", "--reference-checkpoint", sources.inputs / "warm"]
    status, found = inspect(sources, dumps(run, [5], "rollout"), dumps(run, [5]), *both)
    assert status == 1 and found["findings"][0]["fault"] == "weights_partly_updated", found
    status, found = inspect(sources, run.folder / "report")
    grown = next(f["evidence"] for f in found["findings"] if f["fault"] == "growth")
    assert status == 1 and re.search(r"from about step [345]\b", grown), found
