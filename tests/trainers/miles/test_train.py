"""miles's own train.py: every step against torch and transformers; a whole loop with SGLang; its script; mistakes.

Two rollouts of two optimizer steps, from recorded rollouts, as those of slime's tests.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mismatch_plugin as mp
from tests.trainers.miles.trainer import SCRIPT, Job, MilesReference, ScriptJob
from tests.trainers.reference import TOLERANCE, config_of
from tests.trainers.run import OUT_OF_TIME
from tests.trainers.slime.cases import COMMON, REPORT, SEQUENCE, SMALL, Case, by_path
from tests.trainers.slime.reference import NORMALISER, check, pack
from tests.trainers.whole import RUNS, Host, Record, Runs, Sources, largest

REJECTED = """
    --use-tis --tis-level token --use-rs --rs-level geometric --rs-lower-bound 0.93 --rs-upper-bound 1.1
    --rs-veto-threshold 0.2
"""
LAYOUTS = {
    "tp2": Case(SEQUENCE, f"--tensor-model-parallel-size 2 --sequence-parallel {SMALL}", ranks=2),
    "dp2": Case(SEQUENCE, ranks=2),
    "cp2": Case(SEQUENCE, f"--context-parallel-size 2 --cp-comm-type all_gather {SMALL}", ranks=2),
}
CASES = {
    **COMMON,
    "algorithm 3": Case(f"--use-rollout-log-probs --use-tis {REPORT}"),
    "rejection": Case(f"{REJECTED} {REPORT}"),
    "2 by path": Case(
        SEQUENCE, f"{by_path('miles', 'tis_function')} {SMALL}", config={"use_tis": True, "tis_level": "sequence"}
    ),
    "3 by path": Case(
        "--use-rollout-log-probs --use-tis",
        f"{by_path('miles', 'policy_loss')} --loss-type custom_loss --use-rollout-logprobs {SMALL}",
        config={"use_tis": True, "tis_level": "token", "tis_mode": "truncate"},
    ),
    **LAYOUTS,
}
FAULTS = {
    "a misspelt flag": (
        Job(["--use-tis", "--tis-levl", "sequence"]),
        "--tis-levl is unknown: did you mean --tis-level",
    ),
    "an invalid log-prob": (
        Job(["--use-tis"], dump=Path("invalid"), rollouts=1),
        "rollout log-prob of sequence .* is missing or NaN",
    ),
    "no log-probs": (Job(["--use-tis"], dump=Path("missing"), rollouts=1), "rollout_log_probs is missing: algorithm 2"),
}
JOBS = {
    **{name: case.job(Job) for name, case in CASES.items()},
    **{name: job for name, (job, _) in FAULTS.items()},
    "live": Job(f"{SEQUENCE} --rs-max-staleness 2 {REPORT}".split(), dump=None, rollouts=3),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_reference(name: str, trained: Runs, sources: Sources, record_property: Record) -> None:
    """On two ranks the samples of a step are those of a single one, whose dumps hold them whole."""
    run, config = trained(name), CASES[name].settings()
    steps = None
    if name in LAYOUTS:
        complete = trained("algorithm 2")
        old = [run.old_log_probs(rollout) for rollout in range(2)]
        steps = [
            [{**sample, "log_probs": old[rollout][sample["sample_indices"]]} for sample in step]
            for rollout in range(2)
            for step in complete.steps_of(rollout)
        ]
    loss, grad_norm = check(run, config, MilesReference(sources.inputs / "hf"), steps=steps)
    if "report" in CASES[name].ours:
        assert [line["step"] for line in run.reported] == [0, 1, 2, 3]
    record_property("loss_equals_reference", loss)
    record_property("gradients_change", grad_norm)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run_and_is_named(name: str, trained: Runs) -> None:
    run = trained(name)
    assert run.finished.status not in (0, OUT_OF_TIME), run.text[-2000:]
    assert run.said(FAULTS[name][1]), run.text[-4000:]


def test_weights_and_their_versions_arrive(trained: Runs, sources: Sources, record_property: Record) -> None:
    """SGLang's own server on CPU samples, train.py trains, new weights go to the server."""
    run = trained("live")
    assert run.finished.status == 0, run.text[-4000:]
    assert sorted(run.steps) == list(range(6))
    config = config_of(SEQUENCE.split(), **NORMALISER)
    began = MilesReference(sources.inputs / "hf")
    losses, distances = [], []
    for rollout in range(3):
        assert run.versions(rollout) == {(str(rollout + 1),)}
        # At a rollout's first step the trainer's weights are π_old, and those that sampled it.
        first = run.steps_of(rollout)[0]
        result = mp.policy_loss(torch.cat([sample["log_probs"] for sample in first]), pack(first, config), config)
        losses.append(abs(result.loss.item() - run.steps[2 * rollout]["loss"]))
        distances.append(run.steps[2 * rollout]["train_rollout_logprob_abs_diff"])
        far = [(began.log_probs(s) - s["rollout_log_probs"]).abs().max().item() for s in first]
        assert rollout == 0 or max(far) > 0.1  # sampled by other weights than the first
    assert largest(losses) < TOLERANCE
    assert largest(distances) < 3e-6
    assert len([name for name in run.tracked if name.startswith("train/rollout_corr/")]) > 20
    assert [line["step"] for line in run.reported] == list(range(6))
    record_property("loss_equals_reference", max(losses))
    record_property("weight_versions_arrive", max(distances))


@pytest.fixture(scope="module")
def patched(sources: Sources, host: Host) -> Host:
    """With a copy of the checkout that has our patch, as `mismatch-plugin patch apply` makes it."""
    copy = RUNS / "miles/patched"
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--shared", str(sources.checkout), str(copy)], check=True)
    command = [str(Path(sys.executable).with_name("mismatch-plugin")), "patch", "apply"]
    done = subprocess.run(
        [*command, "--host", "miles", "--root", str(copy)], capture_output=True, text=True, check=True
    )
    assert "applied to miles/utils/arguments.py" in done.stdout
    return dataclasses.replace(host, sources=dataclasses.replace(sources, checkout=copy))


def test_flags_arrive_through_the_extra_args_of_its_script(patched: Host, record_property: Record) -> None:
    run = patched.train(ScriptJob(f"{SEQUENCE} {REPORT}".split()), "script/flags")
    config = config_of(SEQUENCE.split(), **NORMALISER)
    loss, _ = check(run, config, MilesReference(patched.sources.inputs / "hf"))
    assert run.said(r"mismatch_plugin on miles")
    assert len(run.reported) == 4
    record_property("loss_equals_reference", loss)


def test_the_launcher_refuses_to_run_its_script(sources: Sources) -> None:
    """Nothing is started: not even the script's own `pkill`."""
    words = ("-m", "mismatch_plugin.launch", SCRIPT, "--num-gpus-per-node", "1", "--use-tis")
    env = Job().environment(sources, Path("/tmp"), Path("/tmp"))
    done = subprocess.run([str(sources.python), *words], cwd=sources.checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "EXEC" not in done.stdout
    said = "mismatch_plugin: run_qwen3_4b.py starts its trainer in another program .*--extra-args"
    assert re.search(said, done.stderr), done.stderr[-2000:]
