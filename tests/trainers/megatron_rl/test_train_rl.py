"""Megatron-LM RL's own train_rl.py, whole: two collections of 16 rollouts, two optimizer steps each.

At a collection's second step θ is not π_old any more. The recorded rollouts were all sampled with the first weights and
a bias on every token's logit, so they mismatch from the start, and the second collection's are stale as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trainers.megatron_rl.trainer import Job, Trained, step_of
from tests.trainers.reference import TOLERANCE
from tests.trainers.run import OUT_OF_TIME
from tests.trainers.whole import SETTINGS, Host, Record, Runs, Start, largest, lines_of

STEPS = (1, 2, 3, 4)
SEQUENCE = "--use-tis --tis-level sequence"
PACKING = "--rl-use-sequence-packing"
REPORT = "--mismatch-metrics full --mismatch-report-dir {run}/report"


def job(ours: str, theirs: str = "", launch: bool = True, ranks: int = 1, patched: bool = True) -> tuple[str, Job]:
    return ours, Job([*ours.split(), *theirs.split()], launch, ranks, patched=patched)


# Name → our flags, and the run. Rows ("unpacked") and bins ("packed"), with the launcher or the patch or both.
CASES = {
    "algorithm 0": job("--mismatch-metrics basic"),
    "algorithm 1": job("--use-rollout-log-probs", PACKING),
    "algorithm 2": job("--use-tis", patched=False),
    "algorithm 3": job("--use-rollout-log-probs --use-tis"),
    "sequence": job(f"{SEQUENCE} {REPORT}", patched=False),
    "rejection, mask": job("--use-tis --tis-mode mask --rs-criterion sequence_max:k2:0.5"),
    "geometric": job("--use-tis --tis-level geometric --tis-upper-bound 1.01", PACKING),
    "preset": job("--mismatch-preset token_icepop"),
    "settings file": job(f"--mismatch-config {SETTINGS}"),
    "patch alone": job(
        f"--use-rollout-log-probs {SEQUENCE}", f"{PACKING} --rl-inference-logprobs-is-correction", False, 2
    ),
}
LAYOUTS = {
    "tp2": job(SEQUENCE, "--tensor-model-parallel-size 2", ranks=2),
    "pp2": job(SEQUENCE, "--pipeline-model-parallel-size 2", ranks=2),
    "dp2": job(SEQUENCE, ranks=2),
    # Without --bf16 train_rl.py itself cannot: under CP its inference model is another one, then without a `module`.
    "cp2": job(SEQUENCE, "--context-parallel-size 2 --cp-comm-type all_gather --bf16", ranks=2),
}
SAMPLED = "sampled by the engine"
WRONG = {
    "misspelt": (Job(["--use-tis", "--tis-levle", "sequence"]), "--tis-levle.*--tis-level"),
}
JOBS = {
    **{name: run for name, (_, run) in (CASES | LAYOUTS).items()},
    SAMPLED: Job(f"--use-tis {PACKING} {REPORT}".split(), rollouts=None),
    **{name: run for name, (run, _) in WRONG.items()},
}


def differences(run: Trained, flags: Sequence[str]) -> tuple[list[float], list[float]]:
    """Of each step: |logged loss − mp.policy_loss on what forward_step had|; of the gradient, of its largest."""
    assert run.finished.status == 0, run.text[-3000:]
    assert tuple(sorted(run.losses)) == tuple(sorted(run.seen)) == STEPS
    # Under tensor and context parallelism both ranks have all tokens; else each saw its own, or nothing (pipeline).
    copies = {"--tensor-model-parallel-size", "--context-parallel-size"} & set(run.job.flags)
    losses, gradients = list[float](), list[float]()
    for step in STEPS:
        loss, mine, theirs = step_of([part for part in run.seen[step] if not copies or part["rank"] == 0], flags)
        losses.append(abs(loss - run.losses[step]))
        assert mine.abs().max() > 0
        gradients.append(float((theirs - mine).abs().max() / mine.abs().max()))
    return losses, gradients


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_ours_on_what_forward_step_had(name: str, trained: Runs, record_property: Record) -> None:
    run = trained(name)
    losses, gradients = differences(run, CASES[name][0].split())
    assert largest(losses) < TOLERANCE
    assert largest(gradients) < TOLERANCE
    assert run.said("^mismatch_plugin on megatron-lm:")
    record_property("loss_equals_reference", largest(losses))
    record_property("gradients_change", largest(gradients))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_our_loss(layout: str, trained: Runs, record_property: Record) -> None:
    one, run = trained("sequence"), trained(layout)
    losses, _ = differences(run, SEQUENCE.split())
    assert largest(losses) < TOLERANCE
    record_property("loss_equals_reference", largest(losses))
    if layout in ("tp2", "pp2"):  # dp2 has other rollouts in a step
        apart = largest(abs(run.losses[step] - one.losses[step]) for step in STEPS)
        assert apart < 2e-5
        record_property("loss_equals_reference", apart)


def test_metrics_reach_tensorboard_and_the_report_folder(trained: Runs) -> None:
    run = trained("sequence")
    assert tuple(line["step"] for line in run.reported) == STEPS
    ours = {name for name in run.tracked if name.startswith("rollout_corr/")}
    assert len(ours) > 60 and all(tuple(sorted(run.tracked[name])) == STEPS for name in ours)
    for line in run.reported:
        for name in ours:
            assert run.tracked[name][line["step"]] == pytest.approx(line[name], rel=1e-5, abs=1e-7, nan_ok=True)


def test_the_engine_samples_with_the_weights_of_the_last_step(trained: Runs) -> None:
    """The engine here is a forward pass of the trainer's own model: it agrees after every update."""
    run = trained(SAMPLED)
    assert largest(differences(run, ["--use-tis"])[0]) < TOLERANCE
    apart = [
        float((record["old_logprobs"] - record["inference_logprobs"])[record["loss_mask"] != 0].abs().max())
        for step in (1, 3)
        for record in run.seen[step]
    ]
    assert largest(apart) < 1e-5


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_line_is_named(name: str, trained: Runs) -> None:
    run = trained(name)
    assert run.finished.status not in (0, OUT_OF_TIME)
    assert run.said(WRONG[name][1])


def test_a_log_prob_that_the_engine_did_not_return_is_named(host: Host, start: Start) -> None:
    lines = lines_of(host.sources.inputs / "rollouts.jsonl")
    longest = max(lines[:8], key=lambda line: len(line["log_probs"]))
    longest["log_probs"] = [math.nan, *longest["log_probs"][1:]]
    broken = Path("missing.jsonl")
    (host.sources.inputs / broken).write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    run = start("missing", Job(["--use-tis", PACKING], rollouts=broken)).result()
    assert run.finished.status not in (0, OUT_OF_TIME)
    assert run.said("missing or NaN") and 1 not in run.tracked.get("lm loss", {})
