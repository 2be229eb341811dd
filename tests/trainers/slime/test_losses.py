"""Each correction in slime's own train.py: loss, gradient and metrics of all four steps against torch and transformers.

Two rollouts of two optimizer steps, from dumps. At a rollout's second step θ is not π_old any more; the second rollout
was sampled by the first weights, so it is stale as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mismatch_plugin.cli import app
from mismatch_plugin.hooks.slime.config import HOOKS, hook_path
from tests.trainers.columns import Shown
from tests.trainers.slime.reference import LARGE_TERMS, agreement, config_of
from tests.trainers.slime.trainer import Job, Sources, Trained

SMALL = ("--max-tokens-per-gpu", "96")  # several micro-batches a step
NORMALIZED = "--use-tis --tis-level sequence --tis-batch-normalize --tis-batch-normalize-scope step"
REJECTED = """
    --use-tis --tis-level token --use-rs --rs-level geometric --rs-lower-bound 0.6 --rs-upper-bound 1.1
    --rs-veto-threshold 0.1
"""


def by_path(*names: str) -> tuple[str, ...]:
    """The host's arguments that name these functions of ours."""
    return tuple(word for name in names for word in (f"--{HOOKS[name].replace('_', '-')}", hook_path("slime", name)))


@dataclass(frozen=True)
class Case:
    """ours: flags of the plugin, which the reference takes; on the line unless config or paths say them."""

    ours: str
    theirs: Sequence[str] = ()
    reference: str = ""  # what slime's own arguments mean, as flags of ours
    config: dict[str, Any] | None = None

    def job(self) -> Job:
        if self.config is None:
            return Job([*self.ours.split(), *self.theirs])
        return Job(self.theirs, launch=False, config=self.config)

    def config_of(self) -> Any:
        return config_of([*self.ours.split(), *self.reference.split()])


SETTINGS = Path(__file__).parents[1] / "settings.yaml"
HOOKED = ("rollout_data_postprocess", "before_train_step", "init")
EPSILON = ("--eps-clip", "3e-4", "--eps-clip-high", "4e-4")
GSPO = ("--advantage-estimator", "gspo", *EPSILON)
OUR_EPSILON = "--mismatch-eps-clip-low 3e-4 --mismatch-eps-clip-high 4e-4"
CASES = {
    "algorithm 0": Case("--mismatch-metrics full --mismatch-report-dir {run}/report", SMALL),
    "algorithm 1": Case("--use-rollout-log-probs"),
    "algorithm 2": Case("--use-tis --tis-level sequence", SMALL),
    "algorithm 3": Case("--use-rollout-log-probs --use-tis", SMALL),
    "rejection": Case(f"{REJECTED} --mismatch-metrics full --mismatch-report-dir {{run}}/report", SMALL),
    "mask, geometric": Case("--use-tis --tis-level geometric --tis-mode mask --tis-upper-bound 1.1", SMALL),
    "preset": Case("--mismatch-preset token_icepop", SMALL),
    "settings file": Case(f"--mismatch-config {SETTINGS}", SMALL),
    "normalised 2": Case(NORMALIZED, SMALL),
    "normalised 3": Case(f"{NORMALIZED} --use-rollout-log-probs", SMALL),
    # slime's own GSPO has one gradient for all tokens of a sequence: so has ours under weights of a sequence.
    "gspo": Case("--use-tis --tis-level sequence", GSPO, f"--mismatch-objective gspo {OUR_EPSILON}"),
    "gspo, our loss": Case("--use-rollout-log-probs", GSPO, f"--mismatch-objective gspo {OUR_EPSILON}"),
    "cispo": Case(
        "--use-tis", ("--advantage-estimator", "cispo", *EPSILON), f"--mismatch-objective cispo {OUR_EPSILON}"
    ),
    "2 by path": Case(
        NORMALIZED,
        (*by_path("tis_function", *HOOKED), *SMALL),
        config={
            "use_tis": True,
            "tis_level": "sequence",
            "tis_batch_normalize": True,
            "tis_batch_normalize_scope": "step",
        },
    ),
    "3 by path": Case(
        "--use-rollout-log-probs --use-tis",
        (*by_path("policy_loss", *HOOKED), "--loss-type", "custom_loss", "--use-rollout-logprobs", *SMALL),
        config={"use_tis": True, "tis_level": "token", "tis_mode": "truncate"},
    ),
}
JOBS = {name: case.job() for name, case in CASES.items()}
ALGORITHMS = [f"algorithm {n}" for n in range(4)]


@pytest.mark.shows("starts", "exit_status", "loss_equals_reference", "gradients_change", "metrics_arrive")
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_reference(
    name: str, trained: Callable[[str], Trained], sources: Sources, shows: Shown
) -> None:
    run, config = trained(name), CASES[name].config_of()
    assert run.finished.status == 0, run.text[-4000:]
    assert sorted(run.steps) == [0, 1, 2, 3]
    found = agreement(run, config, sources.inputs / run.job.checkpoint)
    found.check(LARGE_TERMS if name == "normalised 3" else 1e-5)
    shows("starts", "train.py, from recorded rollouts and with a live SGLang server")
    shows("exit_status", "0 at the end of training")
    if name in ALGORITHMS:
        shows("loss_equals_reference", "algorithms 0 to 3", found.loss)
        shows("gradients_change", "norm as torch's, relative", found.grad_norm)
        shows("metrics_arrive", "TensorBoard, equal to the reference's")


@pytest.mark.shows("gradients_change")
def test_the_algorithms_differ(trained: Callable[[str], Trained]) -> None:
    """At the second step: there θ, π_old and π_rollout are three policies."""
    norms = sorted(trained(name).steps[1]["grad_norm"] for name in ALGORITHMS)
    assert all(high / low > 1.001 for low, high in pairwise(norms)), norms


@pytest.mark.shows("metrics_arrive")
@pytest.mark.parametrize("name", ["algorithm 0", "rejection"])
def test_inspect_reads_the_report_folder(name: str, trained: Callable[[str], Trained], shows: Shown) -> None:
    folder = trained(name).folder / "report"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    done = CliRunner().invoke(app, ["inspect", str(folder)])
    assert done.exit_code in (0, 1), done.output  # 1: it found something, and these dumps have noise put in
    assert "over the last 4 steps" in " ".join(done.output.split()), done.output
    shows("metrics_arrive", "a report folder that inspect reads")
