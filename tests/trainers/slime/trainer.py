"""slime's train.py from a command line to what it logged and dumped: `Job` says what to run, `train` runs it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.trainers import trained
from tests.trainers.jobs import is_made, made_from, wait_for_ports
from tests.trainers.run import Finished, run
from tests.trainers.trained import CPU_SHIM, LAUNCHER, ROOT, once

HERE = Path(__file__).parent
# What slime's scripts/models/*.sh say of a model, here of the tiny Qwen3 that inputs/make.py makes.
MODEL = """
    --swiglu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 16 --qk-layernorm --use-rotary-position-embeddings --rotary-base 10000
    --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --vocab-size 512
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --accumulate-allreduce-grads-in-fp32
"""
CPU = """
    --transformer-impl local --spec slime_cpu_spec layer_spec --distributed-backend gloo --no-rope-fusion
    --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-persist-layer-norm
"""
# Settings without a flag: no CUDA generator; slime sets bf16 with no flag against it.
CPU_SETTINGS = {"inference_rng_tracker": True, "bf16": False}
TRAINING = """
    --use-dynamic-batch-size --data-pad-size-multiplier 16 --advantage-estimator grpo --eps-clip 0.2
    --optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0 --rollout-max-response-len 24
"""
FROM_DUMPS = "--rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 8 --max-tokens-per-gpu 256"
FULL_LOOP = """
    --custom-rm-path slime_task.reward --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-temperature 1
    --global-batch-size 32 --max-tokens-per-gpu 1024
"""
SERVER = """
    --device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none
    --disable-overlap-schedule --disable-radix-cache --disable-cuda-graph --sleep-on-idle --mem-fraction-static 0.3
    --max-total-tokens 16384 --max-running-requests 64
"""
"""Of SGLang on CPU."""


@dataclass(frozen=True)
class Sources:
    """slime, Megatron-LM at slime's pin with its patch, the environment of ci/slime_cpu.sh, and made inputs."""

    slime: Path
    megatron: Path
    python: Path
    inputs: Path

    def environment(self, ray: Path) -> dict[str, str]:
        """Of every process. ray: a short path, since Ray puts sockets below it."""
        paths = (HERE / "shim", HERE.parent / "shim", HERE / "inputs", self.slime, self.megatron, ROOT, CPU_SHIM)
        loopback = "127.0.0.1,localhost"
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))},
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "SLIME_ACCELERATOR": "cpu",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SLIME_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "no_proxy": loopback,
            "NO_PROXY": loopback,
            # Byte code is kept, and not in the checkouts.
            "PYTHONPYCACHEPREFIX": str(self.inputs.parent / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "TORCHDYNAMO_DISABLE": "1",  # slime compiles its policy loss: 17 s in the first step
            "SGLANG_CPU_OMP_THREADS_BIND": "0|0|1|1",  # by the logical GPU that slime gives a server of its own
            # slime's ray.init() then starts a cluster for this run, with GPUs that are numbers only, and ends it.
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(ray),
            "RAY_NODE_IP": "127.0.0.1",
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 8, "GPU": 6, "object_store_memory": 200000000}',
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then keeps to 127.0.0.1
        }


@dataclass(frozen=True)
class Job:
    """One run of train.py.

    flags: more of the command line; they come last. launch: through our launcher. script: train.py or train_async.py.
    config: keys of --custom-config-path. dump: the folder of rollout dumps, else the checkpoint's own; None for the
    full loop. engine: in the full loop "own", for the server that slime starts, or an address. cache: with SGLang's
    radix cache. env: more variables of every process.
    """

    flags: Sequence[str] = ()
    launch: bool = True
    script: str = "train.py"
    ranks: int = 1
    rollouts: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    dump: Path | None = Path("dump")
    engine: str = "own"
    transport: str = "disk"
    dtype: str = "float32"
    checkpoint: Path = Path("hf")
    prompts: Path = Path("prompts.jsonl")
    cache: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    limit: float = 600

    def words(self, sources: Sources, folder: Path) -> list[str]:
        """The command line after the interpreter. Paths are below the inputs where they are relative.

        `{run}` in a flag is the folder of the run.
        """
        inputs, config = sources.inputs, folder / "cpu.yaml"
        hf = str(inputs / self.checkpoint)
        return [
            *(LAUNCHER if self.launch else ()),
            *(self.script, *MODEL.split(), *CPU.split(), "--custom-config-path", str(config)),
            *("--hf-checkpoint", hf, "--ref-load", hf),
            *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(self.ranks)),
            *("--num-gpus-per-node", str(self.ranks), "--num-rollout", str(self.rollouts)),
            *("--prompt-data", str(inputs / self.prompts), "--input-key", "text", "--label-key", "label"),
            *TRAINING.split(),
            *(self._from_dumps(inputs) if self.dump is not None else self._full_loop(folder)),
            *("--save-debug-train-data", str(folder / "train_{rollout_id}.pt")),
            *("--use-tensorboard", "--tb-project-name", "slime"),
            *(flag.replace("{run}", str(folder)) for flag in self.flags),
        ]

    def _from_dumps(self, inputs: Path) -> list[str]:
        path = inputs / (self.dump or "") / "{rollout_id}.pt"
        return ["--debug-train-only", "--load-debug-rollout-data", str(path), *FROM_DUMPS.split()]

    def _full_loop(self, folder: Path) -> list[str]:
        if self.engine == "own":
            words = SERVER.replace("--disable-radix-cache", "") if self.cache else SERVER
            server = [f"--sglang-{word[2:]}" if word.startswith("--") else word for word in words.split()]
            engine = ["--rollout-num-gpus", "1", "--sglang-dtype", self.dtype, *server]
        else:
            engine = ["--rollout-external-engine-addrs", self.engine]
        return [
            *(*engine, "--rollout-num-gpus-per-engine", "1", "--update-weight-transport", self.transport),
            *("--update-weight-disk-dir", str(folder / "weights")),
            *FULL_LOOP.split(),
            *("--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.pt")),
        ]


@dataclass(frozen=True)
class Trained(trained.Trained):
    """What a run left, with what slime dumps."""

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """What slime logged of each optimizer step (model.py, `step N: {…}`), by its names without `train/`."""
        found = re.findall(r"model\.py:\d+ - step (\d+): (\{.*\})", self.text)
        read = {int(step): ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", values)) for step, values in found}
        return {step: {name.removeprefix("train/"): v for name, v in values.items()} for step, values in read.items()}

    def dump(self, rollout: int) -> dict[str, Any]:
        """slime's own dump of what it trained on in a rollout, all ranks' samples in the rollout's order."""
        return torch.load(self.folder / f"train_{rollout}.pt", weights_only=False)

    def sampled(self, rollout: int) -> dict[str, Any]:
        """In the full loop, slime's dump of the rollout itself."""
        return torch.load(self.folder / f"rollout_{rollout}.pt", weights_only=False)


def patched_megatron(checkout: Path, slime: Path, copy: Path) -> Path:
    """Megatron-LM with slime's patch: the checkout where it has it already, else a copy that gets it."""
    apply = ["git", "apply", str(slime / "docker/patch/latest/megatron.patch")]

    def alone(folder: Path) -> dict[str, str]:  # git apply passes over the files of a folder inside another repository
        return {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}

    reverse = [*apply, "--reverse", "--check"]
    if subprocess.run(reverse, cwd=checkout, env=alone(checkout), capture_output=True, check=False).returncode == 0:
        return checkout
    if not is_made(copy / "patched", made := made_from(checkout, slime)):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkout / "megatron", copy / "megatron", symlinks=True)
        done = subprocess.run(
            [*apply, "--include=megatron/*"], cwd=copy, env=alone(copy), stderr=-1, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"slime's docker/patch/latest/megatron.patch does not apply to {checkout}: MEGATRON_SRC is "
                f"NVIDIA/Megatron-LM at the commit that slime's docker/Dockerfile names.\n{done.stderr}"
            )
        (copy / "patched").write_text(made)
    return copy


def make_inputs(sources: Sources) -> None:
    """Checkpoint, tokenizer, prompts and dumps, where they are not there yet."""
    if not (sources.inputs / "made").exists():
        for script in ("make.py", "warm.py"):
            command = [str(sources.python), str(HERE / "inputs" / script), str(sources.inputs)]
            subprocess.run(command, env=sources.environment(Path("/tmp")), check=True)
        (sources.inputs / "made").touch()


def train(job: Job, sources: Sources, folder: Path, reuse: bool = False) -> Trained:
    """Run a job to its end. folder: where its log and files go; emptied before. reuse: take what is there already."""
    command = [str(sources.python), *job.words(sources, folder)]

    def start() -> Finished:
        (folder / "cpu.yaml").write_text(yaml.safe_dump({**CPU_SETTINGS, **job.config}))
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as ray:
            env = {
                **sources.environment(Path(ray)),
                "TENSORBOARD_DIR": str(folder / "tensorboard"),
                "RUN_FOLDER": str(folder),
                **job.env,
            }
            wait_for_ports(job.dump is None)
            return run(command, folder / "log", limit=job.limit, env=env, cwd=sources.slime)

    return Trained(job, folder, once(folder, [json.dumps([dict(job.config), dict(job.env)]), *command], reuse, start))
