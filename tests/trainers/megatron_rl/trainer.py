"""Megatron-LM RL's train_rl.py from a command line to what it logged: `Job` says what to run, `train` runs it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.trainers import trained
from tests.trainers.run import Finished, run
from tests.trainers.trained import CPU_SHIM, LAUNCHER, ROOT, once

HERE = Path(__file__).parent
MODEL = """
    --use-mcore-models --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --max-position-embeddings 64 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 16
"""
CPU = """
    --transformer-impl local --spec megatron_cpu_spec layer_spec --distributed-backend gloo --inference-rng-tracker
    --use-cpu-initialization --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
"""
# Two optimizer steps a collection of 16 rollouts, two collections: at each second step π_θ is not π_old.
TRAINING = """
    --perform-rl-step --seq-length 32 --inference-max-seq-length 32 --micro-batch-size 1 --global-batch-size 8
    --grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-iterations 1 --grpo-clamp-eps-lower 0.2
    --grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.01 --train-iters 4 --lr 3e-3 --lr-decay-style constant
    --weight-decay 0 --clip-grad 1.0 --optimizer adam --calculate-per-token-loss --eval-iters 0 --eval-interval 1000
    --log-interval 1 --tensorboard-log-interval 1 --seed 3 --ckpt-format torch_dist --no-load-optim --no-load-rng
"""


@dataclass(frozen=True)
class Sources:
    """Megatron-LM, an environment in which it can be imported, and made inputs (`inputs.py`, and the first run)."""

    megatron: Path
    python: Path
    inputs: Path
    patched: Path
    """A copy of the checkout with our patch of train_rl.py."""

    def environment(self, folder: Path) -> dict[str, str]:
        keep = ("PATH", "HOME", "LANG", "TMPDIR")
        return {
            **{name: os.environ[name] for name in keep if name in os.environ},
            "PYTHONPATH": ":".join(map(str, (HERE / "shim", HERE.parent / "shim", ROOT, CPU_SHIM))),
            "MEGATRON_ON_CPU": "1",
            "MEGATRON_SEEN": str(folder),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }


@dataclass(frozen=True)
class Job:
    """One run of train_rl.py.

    flags: more of the command line; they come last. launch: through our launcher. patched: in the checkout with our
    patch. ranks: of torchrun. rollouts: the file they come from, below the inputs where relative; else the engine
    samples them. start: from the made checkpoint.
    """

    flags: Sequence[str] = ()
    launch: bool = True
    ranks: int = 1
    patched: bool = True
    rollouts: Path | None = Path("rollouts.jsonl")
    start: bool = True
    limit: float = 300
    env: Mapping[str, str] = field(default_factory=dict)

    def words(self, sources: Sources, folder: Path) -> list[str]:
        """The command line after the interpreter."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start = ("--pretrained-checkpoint", str(sources.inputs / "checkpoint")) if self.start else ()
        return [
            *("-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks), "--master-port", str(port)),
            *(*(LAUNCHER if self.launch else ()), "train_rl.py", *MODEL.split(), *CPU.split(), *TRAINING.split()),
            *("--tokenizer-model", str(sources.inputs / "tokenizer")),
            *("--langrl-env-config", str(sources.inputs / "env.yaml"), *start),
            *("--tensorboard-dir", str(folder / "tensorboard")),
            *(word.replace("{run}", str(folder)) for word in self.flags),
        ]


@dataclass(frozen=True)
class Trained(trained.Trained):
    """What a run left, with what `forward_step` had."""

    @cached_property
    def seen(self) -> dict[int, list[dict[str, Any]]]:
        """Step (from 0) → what `forward_step` had, micro-batches of all ranks of the last stage."""
        found: dict[int, list[dict[str, Any]]] = {}
        for file in sorted(self.folder.glob("seen_*")):
            record = torch.load(file, weights_only=True)
            found.setdefault(record["step"], []).append({**record, "rank": int(file.name.split("_")[1])})
        return found

    @property
    def losses(self) -> dict[int, float]:
        """What the trainer logged of its loss, by step from 1."""
        return self.tracked["lm loss"]


def train(job: Job, sources: Sources, folder: Path, reuse: bool = False) -> Trained:
    """Run a job to its end. folder: where its log and files go; emptied before. reuse: take what is there already."""

    def start() -> Finished:
        env = {**sources.environment(folder), **job.env}
        if job.rollouts is not None:
            env["MEGATRON_ROLLOUTS"] = str(sources.inputs / job.rollouts)
        command = [str(sources.python), *job.words(sources, folder)]
        cwd = sources.patched if job.patched else sources.megatron
        return run(command, folder / "log", limit=job.limit, env=env, cwd=cwd)

    return Trained(job, folder, once(folder, [repr(job)], reuse, start))
