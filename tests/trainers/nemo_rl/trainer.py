"""NeMo-RL's examples/run_grpo.py: its command line, what it logs, and what its policy had in its hands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.trainers import whole
from tests.trainers.reference import config_of, loss_and_gradient
from tests.trainers.whole import ENVIRONMENT, ROOT, RUNS, Host, Sources, made_once, needed, ray_resources

HERE = Path(__file__).parent
# Its KL penalty is 0.01 · k3 of each token, where that is below 10 (its clamp).
KL = ("--mismatch-kl-coef", "0.01", "--mismatch-kl-type", "k3", "--mismatch-denominator", "original")
COLUMNS = {
    "rollout": "generation_logprobs",
    "old": "prev_logprobs",
    "ref": "reference_policy_logprobs",
    "advantages": "advantages",
}


@dataclass(frozen=True)
class Trained(whole.Trained):
    """What a run left, with what the policy had."""

    EVENTS = "logs"

    @cached_property
    def seen(self) -> dict[int, dict[str, Any]]:
        """Rollout (from 1) → `parts`, the micro-batches that the policy had, and `grad_norms` by optimizer step."""
        files = {int(file.stem.removeprefix("seen_")): file for file in self.folder.glob("seen_*.pt")}
        return {rollout: torch.load(files[rollout], weights_only=True) for rollout in sorted(files)}

    def parts(self, rollout: int, step: int) -> list[dict[str, Any]]:
        return [part for part in self.seen[rollout]["parts"] if part["step"] == step]

    def log_ratios(self, rollout: int, step: int) -> torch.Tensor:
        """log π_old − log π_rollout of a step's trained tokens."""
        apart = [(p["prev_logprobs"] - p["generation_logprobs"], p["token_mask"]) for p in self.parts(rollout, step)]
        return torch.cat([ratio[:, 1:][mask[:, 1:] != 0] for ratio, mask in apart])

    def loss(self, rollout: int, step: int, flags: Sequence[str]) -> float:
        """By `mp.policy_loss` on what NeMo-RL's data flow handed to its policy: rows [B, S], `current` [B, S − 1]."""
        current, columns = [], {name: [] for name in COLUMNS}
        for part in self.parts(rollout, step):
            for row in range(len(part["current"])):
                trained = (part["token_mask"][row, 1:] * part["sample_mask"][row]) != 0
                current.append(part["current"][row][trained])
                for name, theirs in COLUMNS.items():
                    columns[name].append(part[theirs][row, 1:][trained])
        return loss_and_gradient(config_of([*KL, *flags]), current, **columns)[0]


@dataclass(frozen=True)
class Job(whole.Job):
    """One run of run_grpo.py: two rollouts of 16, two optimizer steps each."""

    RESULT = Trained

    def environment(self, sources: Sources, folder: Path, ray: Path) -> dict[str, str]:
        keep = ("PATH", "HOME", "LANG", "TMPDIR")
        return {
            **{name: os.environ[name] for name in keep if name in os.environ},
            **ENVIRONMENT,
            "PYTHONPATH": ":".join(map(str, (HERE / "shim", HERE.parent / "shim", ROOT, sources.checkout))),
            "TRAINER_SHIM": "nemo_rl",
            "NEMO_RL_SEEN": str(folder),
            "NEMO_RL_ENGINE_BIAS": "0.5",
            "RAY_TMPDIR": str(ray),
            "RAY_OVERRIDE_RESOURCES": ray_resources(1),
        }

    def command(self, sources: Sources, folder: Path) -> list[str]:
        config, logs = str(sources.inputs / "tiny.yaml"), f"logger.log_dir={folder / 'logs'}"
        return [*self.launcher, "examples/run_grpo.py", "--config", config, logs, *self.placed_flags(folder)]


def make_host() -> Host:
    """NEMO_RL_SRC: a checkout."""
    nemo_rl, python = needed("NEMO_RL_SRC", "MISMATCH_HOST_PYTHON")
    inputs = RUNS / "nemo_rl/inputs"
    words = [str(python), str(HERE / "inputs.py"), str(inputs), str(nemo_rl)]
    made_once(inputs, [nemo_rl], lambda: subprocess.run(words, check=True))
    return Host("nemo_rl", Sources(python, nemo_rl, inputs))
