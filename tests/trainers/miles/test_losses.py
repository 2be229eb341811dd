"""Each correction in miles's own train.py: loss, gradient and metrics of all four steps against torch and transformers.

Two rollouts of two optimizer steps, from dumps, as tests/trainers/slime/test_losses.py has them; on two ranks the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tests.trainers.slime.reference
from mismatch_plugin.hooks.slime.config import HOOKS, hook_path
from tests.trainers.columns import Shown, largest
from tests.trainers.miles.trainer import LR, Job, Sources, Trained
from tests.trainers.slime.reference import Expected, config_of

SMALL = "--max-tokens-per-gpu 96"  # several micro-batches a step
NORMALIZED = "--use-tis --tis-level sequence --tis-batch-normalize --tis-batch-normalize-scope step"
REJECTED = """
    --use-tis --tis-level token --use-rs --rs-level geometric --rs-lower-bound 0.93 --rs-upper-bound 1.1
    --rs-veto-threshold 0.2
"""
FULL = "--mismatch-metrics full --mismatch-report-dir {run}/report"
SETTINGS = Path(__file__).parents[1] / "settings.yaml"
HOOKED = ("rollout_data_postprocess", "before_train_step", "init")


def by_path(*names: str) -> str:
    """The host's arguments that name these functions of ours."""
    return " ".join(f"--{HOOKS[name].replace('_', '-')} {hook_path('miles', name)}" for name in names)


@dataclass(frozen=True)
class Case:
    """ours: flags of the plugin, on the line unless `config` says them in a YAML. theirs: flags of miles."""

    ours: str
    theirs: str = ""
    config: dict[str, Any] | None = None
    ranks: int = 1

    def job(self) -> Job:
        ours = self.ours if self.config is None else ""
        flags = [*ours.split(), *self.theirs.split()]
        return Job(flags, launch=self.config is None, config=self.config or {}, ranks=self.ranks)


SEQUENCE = "--use-tis --tis-level sequence"
CASES = {
    "algorithm 0": Case(FULL, SMALL),
    "algorithm 1": Case("--use-rollout-log-probs"),
    "algorithm 2": Case(SEQUENCE, SMALL),
    "algorithm 3": Case(f"--use-rollout-log-probs --use-tis {FULL}", SMALL),
    "rejection": Case(f"{REJECTED} {FULL}", SMALL),
    "mask, geometric": Case("--use-tis --tis-level geometric --tis-mode mask --tis-upper-bound 1.1", SMALL),
    "preset": Case("--mismatch-preset token_icepop", SMALL),
    "settings file": Case(f"--mismatch-config {SETTINGS}", SMALL),
    "normalised 2": Case(NORMALIZED, SMALL),
    "2 by path": Case(
        SEQUENCE, f"{by_path('tis_function', *HOOKED)} {SMALL}", {"use_tis": True, "tis_level": "sequence"}
    ),
    "3 by path": Case(
        "--use-rollout-log-probs --use-tis",
        f"{by_path('policy_loss', *HOOKED)} --loss-type custom_loss --use-rollout-logprobs {SMALL}",
        {"use_tis": True, "tis_level": "token", "tis_mode": "truncate"},
    ),
    "tp2": Case(SEQUENCE, f"--tensor-model-parallel-size 2 --sequence-parallel {SMALL}", ranks=2),
    "dp2": Case(SEQUENCE, SMALL, ranks=2),
    "cp2": Case(SEQUENCE, f"--context-parallel-size 2 --cp-comm-type all_gather {SMALL}", ranks=2),
}
JOBS = {name: case.job() for name, case in CASES.items()}
LAYOUTS = [name for name, case in CASES.items() if case.ranks > 1]


class Reference(tests.trainers.slime.reference.Reference):
    """miles takes log-probs by Megatron-LM's fused cross-entropy, which rounds its gradient to bfloat16
    (megatron/core/fusions/fused_cross_entropy.py:82). Its rollout hook sees no data: every mean weight is deferred.
    """

    always_defers = True

    def log_probs(self, sample: Mapping[str, Any]) -> Tensor:
        tokens, response = sample["tokens"], sample["response_lengths"]
        logits = self.model(tokens[None]).logits[0, -response - 1 : -1]
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.bfloat16().float())
        return logits.log_softmax(-1).gather(-1, tokens[-response:, None])[:, 0]


def expected(run: Trained, ours: str, sources: Sources, of: Trained | None = None) -> list[Expected]:
    """of: a run of the same samples on one rank, whose dumps hold them whole; π_old is always the run's own."""
    reference, config = Reference(sources.inputs / "hf", LR), config_of(ours.split(), denominator="original")
    steps: list[list[dict[str, Any]]] = []
    for rollout in range(run.job.rollouts):
        if of is None:
            steps += run.steps_of(rollout)
        else:
            old = run.old_log_probs(rollout)
            steps += [[{**s, "log_probs": old[s["sample_indices"]]} for s in step] for step in of.steps_of(rollout)]
    return [reference.step(samples, config) for samples in steps]


def differences(run: Trained, wanted: list[Expected]) -> tuple[list[float], float, int]:
    """Of each step's loss; the largest of the gradient norms' (relative); the fewest metrics that agree."""
    assert run.finished.status == 0, run.text[-4000:]
    assert sorted(run.steps) == list(range(len(wanted)))
    losses, norms, metrics = [], [], []
    for step, (mine, theirs) in enumerate(zip(wanted, run.steps.values(), strict=True)):
        losses.append(abs(mine.loss - theirs["loss"]))
        norms.append(abs(mine.grad_norm / theirs["grad_norm"] - 1))
        tracked = {name: run.tracked[f"train/{name}"][step] for name in mine.metrics if f"train/{name}" in run.tracked}
        for name, value in tracked.items():
            close = math.isclose(value, mine.metrics[name], rel_tol=5e-4, abs_tol=2e-4)
            said = f"step {step}: {name} is {value:.6g} in miles and {mine.metrics[name]:.6g} in the reference"
            assert close or (math.isnan(value) and math.isnan(mine.metrics[name])), said
        metrics.append(len(tracked))
    firsts = [step.old for step in wanted[:: len(wanted) // run.job.rollouts]]
    assert max(firsts) < 1e-4, f"log π_θ − log π_old at each rollout's first step is at most {firsts}"
    return losses, largest(norms), min(metrics)


@pytest.mark.shows("starts", "exit_status", "loss_equals_reference", "gradients_change", "metrics_arrive")
@pytest.mark.parametrize("name", [name for name in CASES if name not in LAYOUTS])
def test_every_step_is_the_reference(
    name: str, trained: Callable[[str], Trained], sources: Sources, shows: Shown
) -> None:
    run = trained(name)
    wanted = expected(run, CASES[name].ours, sources)
    losses, norm, metrics = differences(run, wanted)
    loss = largest(losses)
    assert loss < 1e-5
    assert norm < 3e-4
    assert metrics > 20
    if "report" in CASES[name].ours:
        lines = (run.folder / "report/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
        shows("metrics_arrive", "TensorBoard, equal to the reference's")
    shows("starts", "train.py, from recorded rollouts; three rollouts with a live SGLang server")
    shows("exit_status", "0 at the end of training")
    shows("loss_equals_reference", "algorithms 0 to 3, rejection, normalised", loss)
    shows("gradients_change", "norm as torch's, relative", norm)


@pytest.mark.shows("flags_arrive", "loss_equals_reference", "gradients_change")
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_do_not_matter(name: str, trained: Callable[[str], Trained], sources: Sources, shows: Shown) -> None:
    """The samples of a step are those of a single rank, whose dumps hold them whole."""
    run = trained(name)
    losses, norm, metrics = differences(run, expected(run, CASES[name].ours, sources, trained("algorithm 2")))
    loss = largest(losses)
    assert loss < 1e-5
    assert norm < 3e-4
    assert metrics > 20
    shows("flags_arrive", "tp2, dp2, cp2: both ranks train as one")
    shows("loss_equals_reference", "tp2, dp2, cp2", loss)
    shows("gradients_change", "norm as torch's, relative", norm)
