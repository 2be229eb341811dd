"""Runs from recorded rollouts whose every step is held against the reference: those of slime and miles alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_plugin.hooks.slime.config import HOOKS, hook_path
from tests.trainers.reference import TOLERANCE, config_of
from tests.trainers.slime import trainer
from tests.trainers.slime.reference import NORMALISER
from tests.trainers.whole import SETTINGS

SMALL = "--max-tokens-per-gpu 96"  # several micro-batches a step
SEQUENCE = "--use-tis --tis-level sequence"
NORMALIZED = f"{SEQUENCE} --tis-batch-normalize --tis-batch-normalize-scope step"
REPORT = "--mismatch-metrics full --mismatch-report-dir {run}/report"


def by_path(host: str, *names: str) -> str:
    """The host's arguments that name these functions of ours, next to those that every run by path needs."""
    every = ("rollout_data_postprocess", "before_train_step", "init")
    return " ".join(f"--{HOOKS[name].replace('_', '-')} {hook_path(host, name)}" for name in (*names, *every))


@dataclass(frozen=True)
class Case:
    """ours: flags of the plugin, which the reference takes; on the line unless `config` (a YAML) or `theirs` say them.

    reference: what slime's own arguments mean, as flags of ours. masked: every third response has a span in its middle
    that does not train.
    """

    ours: str
    theirs: str = SMALL
    reference: str = ""
    config: dict[str, Any] | None = None
    told: bool = False
    ranks: int = 1
    masked: bool = False
    bound: float = TOLERANCE

    def job(self, kind: type[trainer.Job] = trainer.Job) -> trainer.Job:
        flags = f"{'' if self.told or self.config is not None else self.ours} {self.theirs}".split()
        dump = Path("masked" if self.masked else "dump")
        return kind(flags, self.config is None, self.ranks, config=self.config or {}, dump=dump)

    def settings(self) -> Any:
        return config_of([*self.ours.split(), *self.reference.split()], **NORMALISER)


COMMON = {
    "algorithm 0": Case(REPORT),
    "algorithm 1": Case("--use-rollout-log-probs", ""),
    "algorithm 2": Case(SEQUENCE),
    "algorithm 3": Case("--use-rollout-log-probs --use-tis"),
    "mask, geometric": Case("--use-tis --tis-level geometric --tis-mode mask --tis-upper-bound 1.1"),
    "preset": Case("--mismatch-preset token_icepop"),
    "settings file": Case(f"--mismatch-config {SETTINGS}"),
    "normalised 2": Case(NORMALIZED),
}
