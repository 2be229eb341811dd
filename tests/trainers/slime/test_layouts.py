"""The same dumps under every kind of parallelism: what each rank is told, and what comes out, is that of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainers.columns import Shown
from tests.trainers.slime.reference import LARGE_TERMS, agreement, config_of
from tests.trainers.slime.trainer import Job, Sources, Trained

# Weights and rejection over whole sequences, which CP cuts, and a mean weight over the step, which DP and CP share.
DECOUPLED = """
    --use-tis --tis-level sequence --tis-batch-normalize --tis-batch-normalize-scope step
    --use-rs --rs-level geometric --rs-lower-bound 0.6 --rs-upper-bound 1.1 --mismatch-metrics full
"""
# The pass for π_ref also runs the hook that shows what a rank was told.
KL = "--use-rollout-log-probs --use-tis --tis-level sequence"
KL_ARGUMENTS = ("--use-kl-loss", "--kl-loss-coef", "0.05", "--kl-loss-type", "low_var_kl")
OUR_KL = "--mismatch-kl-coef 0.05 --mismatch-kl-type low_var_kl"
# Its mean weight is known only at the end of the step, and no KL may be added to it.
DEFERRED = f"{KL} --tis-batch-normalize --tis-batch-normalize-scope step"
PROBE = ("--custom-megatron-before-log-prob-hook-path", "probe.arrived", "--max-tokens-per-gpu", "96")
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
LAYOUTS = {
    "one": (1, ()),
    "tp2": (2, TP2),
    "tp2 sp": (2, (*TP2, "--sequence-parallel")),
    "dp2": (2, ()),
    "cp2": (2, ("--context-parallel-size", "2", "--cp-comm-type", "all_gather")),
    "pp2": (2, PP2),
    "tp2 pp2": (4, (*TP2, *PP2)),
}
LARGE = "algorithm 3 with a KL, or weights normalised over the step"
ALL = ", ".join(list(LAYOUTS)[1:])
JOBS = {name: Job([*DECOUPLED.split(), *PROBE, *more], ranks=ranks) for name, (ranks, more) in LAYOUTS.items()}
JOBS["dp2 kl"] = Job([*KL.split(), *KL_ARGUMENTS, *PROBE], ranks=2)
JOBS["cp2 deferred"] = Job([*DEFERRED.split(), *PROBE, *LAYOUTS["cp2"][1]], ranks=2)
for name in ("one", "cp2"):  # every third response with a span in its middle that does not train
    JOBS[f"{name} masked"] = replace(JOBS[name], dump=Path("masked"))
SETTINGS = {"dp2 kl": f"{KL} {OUR_KL}", "cp2 deferred": DEFERRED}


@pytest.mark.shows("loss_equals_reference", "gradients_change", "metrics_arrive")
@pytest.mark.parametrize("name", JOBS)
def test_every_step_is_the_reference(
    name: str, trained: Callable[[str], Trained], sources: Sources, shows: Shown
) -> None:
    run = trained(name)
    assert run.finished.status == 0, run.text[-4000:]
    config = config_of(SETTINGS.get(name, DECOUPLED).split())
    found = agreement(run, config, sources.inputs / run.job.checkpoint)
    found.check(LARGE_TERMS if name in SETTINGS else 1e-5)
    shows("loss_equals_reference", LARGE if name in SETTINGS else ALL, found.loss)


@pytest.mark.shows("gradients_change")
@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_every_step_is_that_of_one_rank(name: str, trained: Callable[[str], Trained]) -> None:
    """Later weights differ by float32's order of sums, which Adam makes larger."""
    one, run = trained("one"), trained(name)
    for step, theirs in one.steps.items():
        for metric in ("loss", "grad_norm", "tis", "tis_weight", "tis_rejected", "ppo_kl", "entropy_loss"):
            rel, absolute = (1e-5, 1e-6) if step == 0 else (2e-3, 3e-4)
            assert run.steps[step][metric] == pytest.approx(theirs[metric], rel=rel, abs=absolute), (step, metric)


@pytest.mark.shows("flags_arrive")
@pytest.mark.parametrize("name", [*LAYOUTS, "dp2 kl"])
def test_every_rank_is_told_the_same(name: str, trained: Callable[[str], Trained], shows: Shown) -> None:
    run = trained(name)
    told = [json.loads((run.folder / f"arrived_{rank}.json").read_text()) for rank in range(run.job.ranks)]
    assert told == [told[0]] * run.job.ranks
    settings, host = told[0]["settings"], told[0]["host"]
    bypass = name == "dp2 kl"
    assert settings["use_tis"] is True and settings["tis"]["level"] == "sequence"
    assert settings["use_rollout_log_probs"] is bypass is host["use_rollout_logprobs"]
    geometric = {"aggregate": "sequence_mean", "lower_bound": 0.6, "upper_bound": 1.1}
    assert settings.get("rs", {}).get("criteria") == (None if bypass else [geometric])
    assert host["loss_type"] == ("custom_loss" if bypass else "policy_loss")
    assert host["custom_megatron_init_path"] == "mismatch_plugin.hooks.slime.init"
    shows("flags_arrive", f"every rank of {ALL} is told the same")
