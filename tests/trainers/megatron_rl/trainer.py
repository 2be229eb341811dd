"""Megatron-LM RL's train_rl.py from a command line to what it logged: `Job` says what to run, `train` runs it."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.trainers.run import Finished, run

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LAUNCHER = ("-m", "mismatch_plugin.launch")
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
            "PYTHONPATH": ":".join(map(str, (HERE / "shim", ROOT))),
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
class Trained:
    """What a run left: its end, its log and the files below `folder`."""

    job: Job
    folder: Path
    finished: Finished
    command: list[str]

    @property
    def text(self) -> str:
        return self.finished.text

    @cached_property
    def tracked(self) -> dict[str, dict[int, float]]:
        """All that reached TensorBoard's files: name → step → value."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        found: dict[str, dict[int, float]] = {}
        for file in sorted((self.folder / "tensorboard").rglob("*tfevents*")):
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
                    found.setdefault(value.tag, {})[event.step] = number
        return found

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

    def said(self, pattern: str) -> list[str]:
        """The log's lines that match."""
        return [line for line in self.text.splitlines() if re.search(pattern, line)]


def train(job: Job, sources: Sources, folder: Path, reuse: bool = False) -> Trained:
    """Run a job to its end. folder: where its log and files go. reuse: not where a run of the same job is there."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**sources.environment(folder), **job.env}
    if job.rollouts is not None:
        env["MEGATRON_ROLLOUTS"] = str(sources.inputs / job.rollouts)
    done = folder / "finished.json"
    if reuse and done.exists():
        said = json.loads(done.read_text())
        if said.pop("job") == repr(job):
            return Trained(job, folder, Finished(log=folder / "log", **said), [])
    for old in ("seen_*", "tensorboard/*", "report/*", "finished.json"):
        for file in folder.glob(old):
            file.unlink()
    command = [str(sources.python), *job.words(sources, folder)]
    cwd = sources.patched if job.patched else sources.megatron
    finished = run(command, folder / "log", limit=job.limit, env=env, cwd=cwd)
    measured = {"status": finished.status, "seconds": finished.seconds, "peak_gib": finished.peak_gib}
    done.write_text(json.dumps({"job": repr(job), **measured}))
    return Trained(job, folder, finished, command)
