"""miles's whole loop: SGLang's own server on CPU samples, train.py trains, new weights go to the server."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import mismatch_plugin as mp
from tests.trainers.columns import Shown, largest
from tests.trainers.miles.test_losses import FULL, SEQUENCE, Reference
from tests.trainers.miles.trainer import Job, Sources, Trained
from tests.trainers.slime.reference import config_of, pack

OURS = f"{SEQUENCE} --rs-max-staleness 2 {FULL}"
JOBS = {"staleness": Job(OURS.split(), dump=None, rollouts=3)}
COLUMNS = ("starts", "loss_equals_reference", "metrics_arrive", "weight_versions_arrive", "exit_status")


@pytest.mark.shows(*COLUMNS)
def test_weights_and_their_versions_arrive(trained: Callable[[str], Trained], sources: Sources, shows: Shown) -> None:
    run = trained("staleness")
    assert run.finished.status == 0, run.text[-4000:]
    assert sorted(run.steps) == list(range(6))
    config = config_of(SEQUENCE.split(), denominator="original")
    losses, distances = [], []
    for rollout in range(3):
        samples = run.sampled(rollout)["samples"]
        assert {tuple(sample["weight_versions"]) for sample in samples} == {(str(rollout + 1),)}
        # At a rollout's first step the trainer's weights are π_old, and those that sampled it.
        first = run.steps_of(rollout)[0]
        result = mp.policy_loss(torch.cat([sample["log_probs"] for sample in first]), pack(first, config), config)
        losses.append(abs(result.loss.item() - run.steps[2 * rollout]["loss"]))
        distances.append(run.steps[2 * rollout]["train_rollout_logprob_abs_diff"])
    assert largest(losses) < 1e-5
    assert largest(distances) < 3e-6
    began = Reference(sources.inputs / "hf")
    for rollout in (1, 2):  # sampled by other weights than the first
        far = [(began.log_probs(s) - s["rollout_log_probs"]).abs().max().item() for s in run.steps_of(rollout)[0]]
        assert max(far) > 0.1
    assert len([name for name in run.tracked if name.startswith("train/rollout_corr/")]) > 20
    loss, distance = max(losses), max(distances)
    lines = [json.loads(line) for line in (run.folder / "report/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    shows("starts", "train.py, from recorded rollouts; three rollouts with a live SGLang server")
    shows("exit_status", "0 at the end of training")
    shows("loss_equals_reference", "live server", loss)
    shows("metrics_arrive", "TensorBoard and our report folder, step by step")
    shows("weight_versions_arrive", "versions 1, 2, 3; nat between trainer and server after each update", distance)
