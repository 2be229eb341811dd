"""Megatron-LM RL's own train_rl.py, whole: two collections of 16 rollouts, two optimizer steps each.

At a collection's second step θ is not π_old any more. The recorded rollouts were all sampled with the first weights and
a bias on every token's logit, so they mismatch from the start, and the second collection's are stale as well.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainers.columns import Shown, largest
from tests.trainers.megatron_rl.conftest import Start
from tests.trainers.megatron_rl.reference import gradients_of, loss_of
from tests.trainers.megatron_rl.trainer import Job, Sources, Trained
from tests.trainers.run import OUT_OF_TIME

STEPS = (1, 2, 3, 4)
SEQUENCE = ("--use-tis", "--tis-level", "sequence")
PACKING = ("--rl-use-sequence-packing",)
REPORT = ("--mismatch-metrics", "full", "--mismatch-report-dir", "{run}/report")
# Name → our flags, and the run. Rows ("unpacked") and bins ("packed"), with the launcher or the patch or both.
CASES: dict[str, tuple[Sequence[str], Job]] = {
    "algorithm 0": (("--mismatch-metrics", "basic"), Job()),
    "algorithm 1": (("--use-rollout-log-probs",), Job(PACKING)),
    "algorithm 2": (("--use-tis",), Job(patched=False)),
    "algorithm 3": (("--use-rollout-log-probs", "--use-tis"), Job()),
    "sequence": ((*SEQUENCE, *REPORT), Job()),
    "rejection, mask": (("--use-tis", "--tis-mode", "mask", "--rs-criterion", "sequence_max:k2:0.5"), Job()),
    "geometric": (("--use-tis", "--tis-level", "geometric", "--tis-upper-bound", "1.01"), Job(PACKING)),
    "preset": (("--mismatch-preset", "token_icepop"), Job()),
    "settings file": (("--mismatch-config", str(Path(__file__).parents[1] / "settings.yaml")), Job()),
    "patch alone": (
        ("--use-rollout-log-probs", *SEQUENCE),
        Job((*PACKING, "--rl-inference-logprobs-is-correction"), launch=False, ranks=2),
    ),
}
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "dp2": (),
    # Without --bf16 train_rl.py itself cannot: under CP its inference model is another one, then without a `module`.
    "cp2": ("--context-parallel-size", "2", "--cp-comm-type", "all_gather", "--bf16"),
}


def _with(flags: Sequence[str], job: Job) -> Job:
    return replace(job, flags=(*flags, *job.flags))


def _difference(run: Trained, flags: Sequence[str]) -> float:
    """The largest over the four steps of |logged loss − mp.policy_loss on what forward_step had|."""
    assert run.finished.status == 0, run.text[-3000:]
    assert sorted(run.losses) == list(STEPS) and sorted(run.seen) == [step - 1 for step in STEPS]
    # Under tensor and context parallelism both ranks have all tokens; else each saw its own, or nothing (pipeline).
    copies = {"--tensor-model-parallel-size", "--context-parallel-size"} & set(run.job.flags)
    parts = {step: [part for part in run.seen[step - 1] if not copies or part["rank"] == 0] for step in STEPS}
    return largest(abs(loss_of(parts[step], flags).loss.item() - run.losses[step]) for step in STEPS)


@pytest.mark.shows("starts", "exit_status", "flags_arrive", "loss_equals_reference")
@pytest.mark.parametrize("name", CASES)
def test_the_logged_loss_is_ours_on_what_forward_step_had(name: str, start: Start, shows: Shown) -> None:
    flags, job = CASES[name]
    run = start(name, _with(flags, job))
    found = _difference(run, flags)
    assert found < 1e-5
    assert run.said("^mismatch_plugin on megatron-lm:")
    shows("starts", "train_rl.py, from recorded rollouts; one run sampled by an engine of our own")
    shows("flags_arrive", "each algorithm's loss is its own, in one and two processes")
    shows("loss_equals_reference", "algorithms 0 to 3, sequence weights", found)
    shows("exit_status", "0 at the end of training")


@pytest.mark.shows("loss_equals_reference")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_our_loss(layout: str, start: Start, shows: Shown) -> None:
    one = start("sequence", _with(*CASES["sequence"]))
    run = start(layout, Job((*SEQUENCE, *LAYOUTS[layout]), ranks=2))
    found = _difference(run, SEQUENCE)
    assert found < 1e-5
    shows("loss_equals_reference", "tp2, pp2, dp2, cp2", found)
    if layout in ("tp2", "pp2"):  # dp2 has other rollouts in a step
        apart = largest(abs(run.losses[step] - one.losses[step]) for step in STEPS)
        assert apart < 2e-5
        shows("loss_equals_reference", "tp2, pp2 and one rank, apart", apart)


@pytest.mark.shows("gradients_change")
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_ours(name: str, start: Start, shows: Shown) -> None:
    flags, job = CASES[name]
    run, found = start(name, _with(flags, job)), list[float]()
    for step in STEPS:
        theirs, mine = gradients_of(run.seen[step - 1], flags)
        assert mine.abs().max() > 0
        found.append(float((theirs - mine).abs().max() / mine.abs().max()))
    assert largest(found) < 1e-5
    shows("gradients_change", "∂ loss/∂ log π, of its largest", largest(found))


@pytest.mark.shows("flags_arrive")
def test_the_algorithms_gradients_are_as_the_formulas_say(start: Start) -> None:
    """At θ = π_old algorithms 2 and 3 have one gradient, w·A·∇log π; 0 has no w; later the clip makes them differ."""
    runs = {name: start(name, _with(*CASES[name])) for name in CASES}
    norms = {name: run.tracked["grad-norm"] for name, run in runs.items()}
    assert norms["algorithm 2"][1] == pytest.approx(norms["algorithm 3"][1], rel=1e-5)
    assert abs(norms["algorithm 0"][1] - norms["algorithm 2"][1]) > 0.05
    assert abs(norms["algorithm 3"][2] - norms["algorithm 2"][2]) > 1e-3
    losses = [round(run.losses[2], 5) for name, run in runs.items()]
    assert len(set(losses)) == len(losses)


@pytest.mark.shows("metrics_arrive")
def test_metrics_reach_tensorboard_and_the_report_folder(start: Start, shows: Shown) -> None:
    run = start("sequence", _with(*CASES["sequence"]))
    lines = [json.loads(line) for line in (run.folder / "report/metrics.jsonl").read_text().splitlines()]
    assert tuple(line["step"] for line in lines) == STEPS
    ours = {name for name in run.tracked if name.startswith("rollout_corr/")}
    assert len(ours) > 60 and all(tuple(sorted(run.tracked[name])) == STEPS for name in ours)
    for line in lines:
        for name in ours:
            assert run.tracked[name][line["step"]] == pytest.approx(line[name], rel=1e-5, abs=1e-7, nan_ok=True)
    shows("metrics_arrive", "TensorBoard and our report folder, equal, at the steps of lm loss")


def test_the_engine_samples_with_the_weights_of_the_last_step(start: Start) -> None:
    """The engine here is a forward pass of the trainer's own model: it agrees after every update."""
    run = start("sampled", Job(("--use-tis", *PACKING, *REPORT), rollouts=None))
    assert _difference(run, ("--use-tis",)) < 1e-5
    first = [run.seen[step] for step in (0, 2)]
    apart = [
        float((record["old_logprobs"] - record["inference_logprobs"])[record["loss_mask"] != 0].abs().max())
        for records in first
        for record in records
    ]
    assert largest(apart) < 1e-5


@pytest.mark.shows("fault_named")
@pytest.mark.parametrize(
    ("flags", "patched", "message"),
    [
        (("--use-tis", "--tis-levle", "sequence"), True, "--tis-levle.*--tis-level"),
        (SEQUENCE, False, "Megatron-LM RL passes no loss mask to its loss"),
        (
            ("--use-tis", "--no-rl-inference-logprobs-is-correction"),
            True,
            "keeps the inference log-probs from",
        ),
    ],
)
def test_a_wrong_command_line_is_named(
    flags: Sequence[str], patched: bool, message: str, start: Start, shows: Shown
) -> None:
    run = start(f"wrong {flags[-1]} {patched}", Job(flags, patched=patched))
    assert run.finished.status not in (0, OUT_OF_TIME)
    assert run.said(message)
    shows("fault_named", "a misspelt flag, an unpatched checkout, no correction flag")


@pytest.mark.shows("fault_named")
def test_a_log_prob_that_the_engine_did_not_return_is_named(start: Start, sources: Sources, shows: Shown) -> None:
    lines = [json.loads(line) for line in (sources.inputs / "rollouts.jsonl").read_text().splitlines()]
    longest = max(lines[:8], key=lambda line: len(line["log_probs"]))
    longest["log_probs"] = [math.nan, *longest["log_probs"][1:]]
    broken = Path("missing.jsonl")
    (sources.inputs / broken).write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    run = start("missing", Job(("--use-tis", *PACKING), rollouts=broken))
    assert run.finished.status not in (0, OUT_OF_TIME)
    assert run.said("missing or NaN") and 1 not in run.tracked.get("lm loss", {})
    shows("fault_named", "a NaN log-prob, before the optimizer steps")


@pytest.mark.shows("fault_named")
def test_an_unpatched_checkout_does_not_know_our_flags(start: Start) -> None:
    run = start("no patch", Job(("--use-tis",), launch=False, patched=False))
    assert run.finished.status not in (0, OUT_OF_TIME)
    assert run.said("unrecognized arguments: --use-tis")


def test_the_checkout_is_left_as_it_was(start: Start, sources: Sources) -> None:
    start("sequence", _with(*CASES["sequence"]))
    changed = subprocess.run(
        ["git", "status", "--short"], cwd=sources.patched, capture_output=True, text=True, check=True
    ).stdout.split()
    assert changed == ["M", "train_rl.py"]
