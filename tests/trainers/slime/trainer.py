"""slime's train.py: its command line, and what it logs and dumps."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from tests.trainers import whole
from tests.trainers.whole import CPU_SHIM, ENVIRONMENT, ROOT, RUNS, Host, Sources, made_once, needed, ray_resources

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
class Trained(whole.Trained):
    """What a run left, with what slime dumps."""

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """What slime logged of each optimizer step (model.py, `step N: {…}`), by its names without `train/`."""
        found = re.findall(r"model\.py:\d+ - step (\d+): (\{.*\})", self.text)
        read = {int(step): ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", values)) for step, values in found}
        return {step: {name.removeprefix("train/"): v for name, v in values.items()} for step, values in read.items()}

    def steps_of(self, rollout: int) -> list[list[Mapping[str, Any]]]:
        """The samples of each optimizer step of a rollout, of all ranks, from slime's dump of what it trained on."""
        dump = torch.load(self.folder / f"train_{rollout}.pt", weights_only=False)
        samples = {sample["rollout_position"]: sample for sample in dump["samples"]}
        steps: list[list[Mapping[str, Any]]] = [[] for _ in dump["dp_shards"][0]["num_microbatches"]]
        for shard in dump["dp_shards"]:
            batches = iter(shard["micro_batch_indices"])
            for step, count in zip(steps, shard["num_microbatches"], strict=True):
                step += [samples[shard["partition"][i]] for _ in range(count) for i in next(batches)]
        return steps

    def versions(self, rollout: int) -> set[tuple[str, ...]]:
        """Weight versions of the samples of a live rollout, from slime's dump of it."""
        sampled = torch.load(self.folder / f"rollout_{rollout}.pt", weights_only=False)["samples"]
        return {tuple(sample["weight_versions"]) for sample in sampled}


@dataclass(frozen=True)
class Job(whole.Job):
    """One run of train.py, or of another script of its folder.

    config: keys of --custom-config-path. dump: the folder of rollout dumps, else the checkpoint's own; None for the
    full loop. engine: in the full loop "own", for the server that slime starts, or an address. cache: with SGLang's
    radix cache. Paths are below the inputs where they are relative.
    """

    script: str = "train.py"
    rollouts: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    dump: Path | None = Path("dump")
    engine: str = "own"
    transport: str = "disk"
    dtype: str = "float32"
    checkpoint: Path = Path("hf")
    prompts: Path = Path("prompts.jsonl")
    cache: bool = False
    RESULT = Trained
    NAME: ClassVar[str] = "slime"
    SETTINGS: ClassVar[Mapping[str, Any]] = CPU_SETTINGS
    REFERENCE: ClassVar[str | None] = None
    """The checkpoint in Megatron's form, where the trainer needs it."""
    TRAIN_DUMP: ClassVar[str] = "train_{rollout_id}.pt"
    MORE: ClassVar[str] = ""

    @property
    def starts_a_server(self) -> bool:
        return self.dump is None

    @property
    def gpus(self) -> int:
        return self.ranks

    def environment(self, sources: Sources, folder: Path, ray: Path) -> dict[str, str]:
        paths = (HERE / "shim", HERE.parent / "shim", HERE / "inputs", sources.checkout, sources.megatron)
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))},
            **ENVIRONMENT,
            "PATH": f"{sources.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(map(str, (*paths, ROOT, CPU_SHIM))),
            "TRAINER_SHIM": self.NAME,
            "SLIME_ACCELERATOR": "cpu",
            "SLIME_HOST_IP": "127.0.0.1",
            # Byte code is kept, and not in the checkouts.
            "PYTHONPYCACHEPREFIX": str(sources.inputs.parent / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|0|1|1",  # by the logical GPU that slime gives a server of its own
            "RAY_TMPDIR": str(ray),
            "RAY_OVERRIDE_RESOURCES": ray_resources(6),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "TENSORBOARD_DIR": str(folder / "tensorboard"),
            "RUN_FOLDER": str(folder),
        }

    def prepare(self, folder: Path) -> None:
        (folder / "cpu.yaml").write_text(yaml.safe_dump({**self.SETTINGS, **self.config}))

    def command(self, sources: Sources, folder: Path) -> list[str]:
        inputs = sources.inputs
        hf = str(inputs / self.checkpoint)
        return [
            *(*self.launcher, self.script, *MODEL.split(), *CPU.split()),
            *("--custom-config-path", str(folder / "cpu.yaml")),
            *("--hf-checkpoint", hf, "--ref-load", str(inputs / self.REFERENCE) if self.REFERENCE else hf),
            *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(self.ranks)),
            *("--num-gpus-per-node", str(self.gpus), "--num-rollout", str(self.rollouts)),
            *("--prompt-data", str(inputs / self.prompts), "--input-key", "text", "--label-key", "label"),
            *(*TRAINING.split(), *self.MORE.split()),
            *(self.from_dumps(inputs) if self.dump is not None else self.full_loop(folder)),
            *("--save-debug-train-data", str(folder / self.TRAIN_DUMP)),
            *("--use-tensorboard", "--tb-project-name", self.NAME),
            *self.placed_flags(folder),
        ]

    def from_dumps(self, inputs: Path) -> list[str]:
        path = inputs / (self.dump or "") / "{rollout_id}.pt"
        return ["--debug-train-only", "--load-debug-rollout-data", str(path), *FROM_DUMPS.split()]

    def full_loop(self, folder: Path) -> list[str]:
        return [
            *(self.own_server() if self.engine == "own" else ["--rollout-external-engine-addrs", self.engine]),
            *("--rollout-num-gpus-per-engine", "1", "--update-weight-transport", self.transport),
            *("--update-weight-disk-dir", str(folder / "weights"), *FULL_LOOP.split()),
            *("--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.pt")),
        ]

    def own_server(self) -> list[str]:
        words = SERVER.replace("--disable-radix-cache", "") if self.cache else SERVER
        server = [f"--sglang-{word[2:]}" if word.startswith("--") else word for word in words.split()]
        return ["--rollout-num-gpus", "1", "--sglang-dtype", self.dtype, *server]


def run_script(sources: Sources, job: Job, words: Sequence[str]) -> None:
    """Something of the trainer that starts no Ray, in the environment of its runs."""
    env = job.environment(sources, Path("/tmp"), Path("/tmp"))
    subprocess.run([str(sources.python), *words], env=env, cwd=sources.checkout, check=True)


def make_inputs(sources: Sources) -> None:
    """Checkpoint, tokenizer, prompts and dumps."""
    run_script(sources, Job(), [str(HERE / "inputs/make.py"), str(sources.inputs)])


def make_host() -> Host:
    """SLIME_SRC, MEGATRON_SRC: checkouts."""
    slime, megatron, python = needed("SLIME_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")
    found = Sources(python, slime, RUNS / "slime/inputs", megatron)
    made_once(found.inputs, [slime], lambda: make_inputs(found))
    return Host("slime", found)
