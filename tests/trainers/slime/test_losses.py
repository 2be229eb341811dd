"""slime's own train.py from recorded rollouts: every step against torch and transformers, whatever is on the line.

Two rollouts of two optimizer steps. At a rollout's second step θ is not π_old any more; the second rollout was sampled
by the first weights, so it is stale as well.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from tests.trainers.run import OUT_OF_TIME
from tests.trainers.slime.cases import COMMON, NORMALIZED, REPORT, SEQUENCE, SMALL, Case, by_path
from tests.trainers.slime.reference import LARGE_TERMS, Reference, check
from tests.trainers.slime.trainer import Job, Trained
from tests.trainers.whole import ROOT, Host, Record, Runs, Sources, Start

GEOMETRIC = "--use-rs --rs-level geometric --rs-lower-bound 0.6 --rs-upper-bound 1.1"
REJECTED = f"--use-tis --tis-level token {GEOMETRIC} --rs-veto-threshold 0.1"
EPSILON = "--eps-clip 3e-4 --eps-clip-high 4e-4"
GSPO = f"--advantage-estimator gspo {EPSILON}"
OUR_EPSILON = "--mismatch-eps-clip-low 3e-4 --mismatch-eps-clip-high 4e-4"
# Weights and rejection over whole sequences, which CP cuts, and a mean weight over the step, which DP and CP share.
DECOUPLED = f"{NORMALIZED} {GEOMETRIC} --mismatch-metrics full"
BYPASS = f"--use-rollout-log-probs {SEQUENCE}"
KL = "--use-kl-loss --kl-loss-coef 0.05 --kl-loss-type low_var_kl"
OUR_KL = "--mismatch-kl-coef 0.05 --mismatch-kl-type low_var_kl"
EXAMPLES = ROOT / "examples/slime"


def added(diff: str) -> str:
    """The arguments that a diff of examples/slime adds, with its files where they are here."""
    lines = re.findall(r"^\+\s+(--\S.*)$", (EXAMPLES / diff).read_text(), re.MULTILINE)
    return " ".join(lines).replace("/root/", f"{EXAMPLES}/")


TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2 --cp-comm-type all_gather"
LAYOUTS = {
    "one": Case(DECOUPLED),
    "tp2": Case(DECOUPLED, f"{SMALL} {TP2}", ranks=2),
    "tp2 sp": Case(DECOUPLED, f"{SMALL} {TP2} --sequence-parallel", ranks=2),
    "dp2": Case(DECOUPLED, ranks=2),
    "cp2": Case(DECOUPLED, f"{SMALL} {CP2}", ranks=2),
    "pp2": Case(DECOUPLED, f"{SMALL} {PP2}", ranks=2),
    "tp2 pp2": Case(DECOUPLED, f"{SMALL} {TP2} {PP2}", ranks=4),
    "dp2 kl": Case(BYPASS, f"{KL} {SMALL}", OUR_KL, ranks=2, bound=LARGE_TERMS),
}
CASES = {
    **COMMON,
    "rejection": Case(f"{REJECTED} {REPORT}"),
    "normalised 3": Case(f"{NORMALIZED} --use-rollout-log-probs", bound=LARGE_TERMS),
    # slime's own GSPO has one gradient for all tokens of a sequence: so has ours under weights of a sequence.
    "gspo": Case(SEQUENCE, GSPO, f"--mismatch-objective gspo {OUR_EPSILON}"),
    "gspo, our loss": Case("--use-rollout-log-probs", GSPO, f"--mismatch-objective gspo {OUR_EPSILON}"),
    "cispo": Case("--use-tis", f"--advantage-estimator cispo {EPSILON}", f"--mismatch-objective cispo {OUR_EPSILON}"),
    "2 by path": Case(
        NORMALIZED,
        f"{by_path('slime', 'tis_function')} {SMALL}",
        config={
            "use_tis": True,
            "tis_level": "sequence",
            "tis_batch_normalize": True,
            "tis_batch_normalize_scope": "step",
        },
    ),
    "3 by path": Case(
        "--use-rollout-log-probs --use-tis",
        f"{by_path('slime', 'policy_loss')} --loss-type custom_loss --use-rollout-logprobs {SMALL}",
        config={"use_tis": True, "tis_level": "token", "tis_mode": "truncate"},
    ),
    "examples/slime flags": Case("--use-tis", added("run-qwen3-4B.diff"), told=True),
    "examples/slime yaml": Case("--use-tis", added("run-qwen3-4B-yaml.diff"), told=True),
    **LAYOUTS,
    # Its mean weight is known only at the end of the step, and no KL may be added to it.
    "cp2 deferred": Case(f"{NORMALIZED} --use-rollout-log-probs", f"{SMALL} {CP2}", ranks=2, bound=LARGE_TERMS),
    "one masked": Case(DECOUPLED, masked=True),
    "cp2 masked": Case(DECOUPLED, f"{SMALL} {CP2}", ranks=2, masked=True),
}

# Megatron-LM's distributed optimizer cannot load the state of torch's Adam (it asserts that there is one already), and
# its own Adam needs a GPU; slime sets it with no flag against.
UNDISTRIBUTED = {"use_distributed_optimizer": False}
RESUMED = f"{SEQUENCE} --rs-veto-threshold 0.1 {SMALL}"
SAVE = "--save-interval 2 --mismatch-report-dir {run}/../report --save {run}/../checkpoint"
REFUSED = {
    "misspelt": (Job(["--use-tis", "--tis-levle", "sequence"]), "--tis-levle.*--tis-level"),
    "not hooked": (
        Job(by_path("slime").split(), False, config={"use_tis": True, "tis_level": "sequence"}),
        "no hook of the plugin would run",
    ),
}
JOBS = {
    **{name: case.job() for name, case in CASES.items()},
    **{name: job for name, (job, _) in REFUSED.items()},
    "resume whole": Job(RESUMED.split(), rollouts=4, config=UNDISTRIBUTED),
    "resume first": Job(f"{RESUMED} {SAVE}".split(), config=UNDISTRIBUTED),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_reference(name: str, trained: Runs, sources: Sources, record_property: Record) -> None:
    run, case = trained(name), CASES[name]
    loss, grad_norm = check(run, case.settings(), Reference(sources.inputs / "hf"), case.bound)
    if "report" in case.ours:
        assert [line["step"] for line in run.reported] == [0, 1, 2, 3]
    record_property("loss_equals_reference", loss)
    record_property("gradients_change", grad_norm)


def test_a_resumed_run_goes_on_with_the_same_numbers(trained: Runs, start: Start) -> None:
    """By slime's own checkpoints."""
    complete, first = trained("resume whole"), trained("resume first")
    # The scheduler knows another number of rollouts; the random state, which nothing draws from, has none of CUDA's.
    load = "--load {run}/../checkpoint --override-opt_param-scheduler --no-load-rng"
    job = Job(f"{RESUMED} {SAVE} {load}".split(), rollouts=4, config=UNDISTRIBUTED)
    again = start("losses/resume again", job).result()
    assert [run.finished.status for run in (complete, first, again)] == [0, 0, 0], again.text[-4000:]
    assert sorted(first.steps) == [0, 1, 2, 3] and sorted(again.steps) == [4, 5, 6, 7]
    for step, theirs in complete.steps.items():
        run = first if step < 4 else again
        for metric in ("loss", "grad_norm", "tis", "tis_weight", "tis_rejected", "ppo_kl"):
            assert run.steps[step][metric] == pytest.approx(theirs[metric], rel=1e-6, abs=1e-7), (step, metric)
    lines = (again.folder.parent / "report/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(8))


def check_refused(run: Trained, pattern: str) -> None:
    assert run.finished.status not in (0, OUT_OF_TIME), run.text[-4000:]
    assert run.said(pattern), run.text[-4000:]


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_named(name: str, trained: Runs) -> None:
    run = trained(name)
    check_refused(run, REFUSED[name][1])
    assert not run.steps


@pytest.mark.parametrize(
    ("name", "ranks", "pattern"),
    [
        ("absent", 1, "the rollout batch has no rollout_log_probs"),
        ("nan", 2, r"rollout log-prob of sequence \d+, position 2 .*kind nan"),
        ("short", 2, "log_prob length mismatch: len.log_prob.=18, response_length=19"),
    ],
)
def test_wrong_data_are_named(name: str, ranks: int, pattern: str, start: Start, host: Host, tmp_path: Path) -> None:
    """In the second rollout, after a first that is sound. A sample is on one rank of two."""
    for rollout in range(2):
        dump = torch.load(host.sources.inputs / f"dump/{rollout}.pt", weights_only=False)
        samples = dump["samples"]
        if rollout and name == "absent":
            for sample in samples:
                sample["rollout_log_probs"] = None
        elif rollout and name == "nan":
            samples[5]["rollout_log_probs"][2] = math.nan
        elif rollout:
            samples[5]["rollout_log_probs"].pop()
        torch.save(dump, tmp_path / f"{rollout}.pt")
    flags = f"{SEQUENCE} --use-rs --rs-level geometric --rs-lower-bound 0.5".split()
    run = start(f"faults/{name}", Job(flags, ranks=ranks, dump=tmp_path)).result()
    check_refused(run, pattern)
    assert sorted(run.steps) == [0, 1]
