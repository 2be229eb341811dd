"""NeMo-RL's examples/run_grpo.py from a command line to what it logged: `Job` says what to run, `train` runs it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.trainers import trained
from tests.trainers.run import Finished, run
from tests.trainers.trained import LAUNCHER, ROOT, once

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sources:
    """NeMo-RL, the environment of ci/nemo_rl_cpu.sh, and made inputs (`inputs.py`)."""

    nemo_rl: Path
    python: Path
    inputs: Path

    def environment(self, folder: Path, ray: Path) -> dict[str, str]:
        """Of every process. ray: a short path, since Ray puts sockets below it."""
        keep = ("PATH", "HOME", "LANG", "TMPDIR")
        return {
            **{name: os.environ[name] for name in keep if name in os.environ},
            "PYTHONPATH": ":".join(map(str, (HERE / "shim", HERE.parent / "shim", ROOT, self.nemo_rl))),
            "NEMO_RL_SEEN": str(folder),
            "NEMO_RL_ENGINE_BIAS": "0.5",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            # NeMo-RL's ray.init() then starts a cluster for this run, with a GPU that is a number only, and ends it.
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(ray),
            "RAY_NODE_IP": "127.0.0.1",
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 8, "GPU": 1, "object_store_memory": 200000000}',
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then keeps to 127.0.0.1
        }


@dataclass(frozen=True)
class Job:
    """One run of run_grpo.py: two rollouts of 16, two optimizer steps each. flags: the end of its command line."""

    flags: Sequence[str] = ()
    launch: bool = True
    limit: float = 300
    env: Mapping[str, str] = field(default_factory=dict)

    def words(self, sources: Sources, folder: Path) -> list[str]:
        """The command line after the interpreter. `{run}` in a flag is the folder of the run."""
        return [
            *(LAUNCHER if self.launch else ()),
            *(
                "examples/run_grpo.py",
                "--config",
                str(sources.inputs / "tiny.yaml"),
                f"logger.log_dir={folder / 'logs'}",
            ),
            *(word.replace("{run}", str(folder)) for word in self.flags),
        ]


@dataclass(frozen=True)
class Trained(trained.Trained):
    """What a run left, with what the policy had."""

    EVENTS = "logs"

    @cached_property
    def seen(self) -> dict[int, dict[str, Any]]:
        """Rollout (from 1) → `parts`, the micro-batches that the policy had, and `grad_norms` by optimizer step."""
        files = {int(file.stem.removeprefix("seen_")): file for file in self.folder.glob("seen_*.pt")}
        return {rollout: torch.load(files[rollout], weights_only=True) for rollout in sorted(files)}


def train(job: Job, sources: Sources, folder: Path, reuse: bool = False) -> Trained:
    """Run a job to its end. folder: where its log and files go; emptied before. reuse: take what is there already."""

    def start() -> Finished:
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as ray:
            env = {**sources.environment(folder, Path(ray)), **job.env}
            command = [str(sources.python), *job.words(sources, folder)]
            return run(command, folder / "log", limit=job.limit, env=env, cwd=sources.nemo_rl)

    return Trained(job, folder, once(folder, [repr(job)], reuse, start))
