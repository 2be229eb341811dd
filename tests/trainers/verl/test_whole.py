"""verl's own main_ppo with the four algorithms, two ranks and faults, held against `mp.policy_loss` on its batches."""

from __future__ import annotations

import re

import pytest
import torch

import mismatch_plugin as mp
from tests.trainers.reference import TOLERANCE, config_of
from tests.trainers.verl.trainer import MINI_BATCH, OPTIMIZER_STEPS, SAMPLES, Job, Trained
from tests.trainers.whole import SETTINGS, Record, Runs, largest

STEPS = 8
OWN = {"ppo": {"eps_clip_low": 0.2, "eps_clip_high": 0.2, "dual_clip": 3.0}, "denominator": "original"}  # verl's
SEQUENCE = "--use-tis --tis-level sequence --tis-mode clip --tis-lower-bound 0.95 --tis-upper-bound 1.05"
REJECTED = "--use-rs --rs-level token --rs-lower-bound 0.95 --rs-upper-bound 1.05"
# bfloat16 is off by three hundredths of a nat a token, which the bounds cut into.
ALGORITHMS = {
    "algorithm_0": ("--mismatch-metrics full", "float32"),
    "algorithm_1": ("--use-rollout-log-probs", "bfloat16"),
    "algorithm_2": (f"{SEQUENCE} {REJECTED}", "bfloat16"),
    "algorithm_3": (f"--use-rollout-log-probs {SEQUENCE}", "bfloat16"),
}
MORE = {
    "rejection_and_mask": "--use-tis --tis-mode mask --tis-upper-bound 1.05 --rs-criterion sequence_max:k2:0.002",
    "geometric": "--use-tis --tis-level geometric --tis-mode clip --tis-upper-bound 1.005",
    "preset": "--mismatch-preset token_icepop --tis-upper-bound 1.05",
    "settings_file": f"--mismatch-config {SETTINGS}",
}
FLAGS = {**{name: flags for name, (flags, _) in ALGORITHMS.items()}, **MORE}
AGENT = "actor_rollout_ref.rollout.agent"
LOST = f"{AGENT}.default_agent_loop=missing {AGENT}.agent_loop_config_path={{run}}/loops.yaml"
LOSES = ("algorithm_2", "algorithm_3")
JOBS = {
    **{name: Job(flags.split(), dtype=dtype) for name, (flags, dtype) in ALGORITHMS.items()},
    **{name: Job(flags.split(), steps=2, dtype="bfloat16") for name, flags in MORE.items()},
    "two_ranks": Job(FLAGS["algorithm_2"].split(), ranks=2, steps=2, dtype="bfloat16"),
    **{f"missing_{name}": Job(f"{FLAGS[name]} {LOST}".split(), steps=1, dtype="bfloat16") for name in LOSES},
    "misspelt": Job(["--use-tis", "--tis-levle", "sequence"]),
}


def settings(name: str) -> mp.MismatchConfig:
    config = config_of(FLAGS[name].split())
    reinforce = config.use_rollout_log_probs and config.use_tis
    return config if reinforce else config.replace(**OWN)


def worst_loss(run: Trained, config: mp.MismatchConfig) -> float:
    """The largest |loss that verl logged − loss of `mp.policy_loss`|, held to the tolerance. π_θ moves in a step."""
    assert run.finished.status == 0, run.text[-4000:]
    assert len(run.steps) == len(run.logged) * OPTIMIZER_STEPS == run.job.steps * OPTIMIZER_STEPS
    apart, moved = list[float](), 0.0
    for number, logged in enumerate(run.logged):
        group = run.steps[number * OPTIMIZER_STEPS : (number + 1) * OPTIMIZER_STEPS]
        expected = sum(step.reference(config)[0] for step in group) / OPTIMIZER_STEPS
        apart.append(abs(logged["actor/pg_loss"] - expected))
        moved = max(moved, abs(expected))
    assert largest(apart) < TOLERANCE < moved
    return largest(apart)


@pytest.mark.parametrize("name", FLAGS)
def test_loss_and_gradient_are_those_of_the_reference(name: str, trained: Runs, record_property: Record) -> None:
    """And of nothing else: but for algorithm 0, the same batches without a correction have another loss."""
    run, config, plain = trained(name), settings(name), settings("algorithm_0")
    loss = worst_loss(run, config)
    gradients, sizes = [], []
    for step in run.steps:
        theirs = torch.cat(step.of_responses("gradient"))
        sizes.append(float(theirs.abs().max()))
        apart = float((theirs - step.reference(config)[1]).abs().max())
        gradients.append(apart / max(sizes[-1], 1e-6))  # a step whose groups have one reward each trains nothing
    assert largest(gradients) < TOLERANCE < max(sizes)
    if name not in ("algorithm_0", "algorithm_1"):
        assert max(abs(step.reference(config)[0] - step.reference(plain)[0]) for step in run.steps) > 10 * TOLERANCE
    record_property("gradients_change", largest(gradients))
    record_property("loss_equals_reference", loss)
    # once by the launcher, once by verl's own process when it checks its configuration
    assert name in MORE or len(run.said(rf"algorithm {name[-1]}: ")) == 2


def test_flags_arrive_in_the_driver_and_in_the_workers(trained: Runs) -> None:
    steps = trained("algorithm_2").steps
    weights = torch.cat([row for step in steps for row in step.rows("rollout_is_weights")])
    inside = weights[weights > 0]
    assert inside.max() == pytest.approx(1.05) and inside.min() == pytest.approx(0.95)
    # The response mask that the loss was given is that before any rejection, less what the driver rejected.
    pairs = [pair for s in steps for pair in zip(s.rows("loss_mask"), s.rows("response_mask"), strict=True)]
    rejected = sum(int((before - after).sum()) for before, after in pairs)
    outside = sum(int(((step.log_ratio.exp() - 1).abs() > 0.05).sum()) for step in steps)
    assert rejected == pytest.approx(outside, abs=outside * 0.05) and outside > 20


@pytest.mark.parametrize("name", ALGORITHMS)
def test_metrics_arrive_and_the_task_is_learned(name: str, trained: Runs) -> None:
    run = trained(name)
    assert [line["step"] for line in run.reported] == [n + 1 for n in range(STEPS)]
    ours = [metric for metric in run.logged[0] if "rollout_corr/" in metric]
    assert any(metric.endswith("rollout_corr/k3_kl") for metric in ours) and len(ours) > 20
    for line, logged in zip(run.reported, run.logged, strict=True):
        for metric in ours:
            # what verl's workers return it logs under actor/
            told = line[metric.removeprefix("actor/")]
            assert told == pytest.approx(logged[metric], rel=1e-6, nan_ok=True), metric
    scores = [logged["critic/score/mean"] for logged in run.logged]
    assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.03, scores


def test_every_update_of_the_weights_arrives_in_the_server(trained: Runs, record_property: Record) -> None:
    """The server starts with random weights (verl's load_format dummy), and π_θ moves at learning rate 5e-3."""
    run = trained("algorithm_0")
    worst = max(float(step.log_ratio.abs().max()) for step in run.steps)
    entropy = [logged["actor/entropy"] for logged in run.logged]
    assert worst < 5e-5 and abs(entropy[-1] - entropy[0]) > 0.05  # the policy has moved, and the server with it
    assert [logged["training/off_policy/trajectory_staleness/max"] for logged in run.logged] == [0] * STEPS
    record_property("weight_versions_arrive", worst)


def test_two_ranks(trained: Runs, record_property: Record) -> None:
    run = trained("two_ranks")
    loss = worst_loss(run, settings("algorithm_2"))
    assert {file.name[:5] for file in (run.folder / "dump").iterdir()} == {"rank0", "rank1"}
    assert all(len(step.rows("responses")) == MINI_BATCH * SAMPLES for step in run.steps)
    record_property("loss_equals_reference", loss)


@pytest.mark.parametrize("name", LOSES)
def test_a_missing_log_prob_is_named(name: str, trained: Runs) -> None:
    run = trained(f"missing_{name}")
    assert run.finished.status != 0
    (said,) = {*re.findall(r"InvalidLogProbError: (.*)", run.text)}
    assert "nan" in said.lower() and "position 1" in said, said


def test_a_wrong_flag_is_named_before_anything_starts(trained: Runs) -> None:
    run = trained("misspelt")
    assert run.finished.status == 2 and "--tis-level" in run.text and "ray" not in run.text.lower()
