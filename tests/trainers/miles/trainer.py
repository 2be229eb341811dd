"""miles's train.py, and its scripts/run_qwen3_4b.py: slime's command line with a few other words, and its own dumps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from torch import Tensor

from mismatch_plugin.data.read import read
from tests.trainers.slime import trainer as slime
from tests.trainers.slime.reference import Reference
from tests.trainers.slime.trainer import CPU, FROM_DUMPS, FULL_LOOP, MODEL, TRAINING, run_script
from tests.trainers.whole import CPU_SHIM, ROOT, RUNS, Host, Sources, made_once, needed

HERE = Path(__file__).parent
SLIME = HERE.parent / "slime"
CONVERTER = "tools/convert_hf_to_torch_dist.py"
SCRIPT = "scripts/run_qwen3_4b.py"
NAMES = (
    *("tokens", "response_lengths", "loss_masks", "rollout_log_probs", "advantages", "log_probs"),
    "sample_indices",
)
"""Of a sample, in miles's dump of what it trained on."""


class MilesReference(Reference):
    """miles takes log-probs by Megatron-LM's fused cross-entropy, which rounds its gradient to bfloat16
    (megatron/core/fusions/fused_cross_entropy.py:82). Its rollout hook sees no data: every mean weight is deferred.
    """

    lr = 1e-4  # small, since that rounding and Adam turn 1e-7 into more in each step
    always_defers = True
    grad_norm = 3e-4
    small = 0.4
    untracked = None

    def logits(self, tokens: Tensor) -> Tensor:
        logits = super().logits(tokens)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.bfloat16().float())
        return logits


@dataclass(frozen=True)
class Trained(slime.Trained):
    """What a run left. miles dumps what it trained on rank by rank."""

    def steps_of(self, rollout: int) -> list[list[Mapping[str, Any]]]:
        """The samples of each optimizer step of a rollout on rank 0."""
        data = torch.load(self.folder / f"train_{rollout}_0.pt", weights_only=False)["rollout_data"]
        batches = iter(data["micro_batch_indices"])
        at = [[i for _ in range(count) for i in next(batches)] for count in data["num_microbatches"]]
        return [[{name: data[name][i] for name in NAMES if name in data} for i in step] for step in at]

    def old_log_probs(self, rollout: int) -> dict[int, Tensor]:
        """Sample → its old log-probs, as `inspect` puts them together from the dumps of all ranks."""
        folder = self.folder / f"train_{rollout}"
        folder.mkdir(exist_ok=True)
        for file in self.folder.glob(f"train_{rollout}_*.pt"):
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file)
        samples = read(folder).samples
        return {int(sample.sample_id or ""): torch.from_numpy(sample.train_log_probs).float() for sample in samples}


@dataclass(frozen=True)
class Job(slime.Job):
    """One run of miles's train.py."""

    RESULT = Trained
    NAME = "miles"
    SETTINGS: ClassVar[Mapping[str, Any]] = {"bf16": False}  # miles sets it with no flag against it
    REFERENCE = "torch_dist"
    TRAIN_DUMP = "train_{rollout_id}_{rank}.pt"
    MORE = f"--lr {MilesReference.lr}"

    @property
    def gpus(self) -> int:
        return self.ranks + self.starts_a_server

    def environment(self, sources: Sources, folder: Path, ray: Path) -> dict[str, str]:
        shims = (HERE / "shim", HERE.parent / "shim", SLIME / "shim", HERE / "inputs", SLIME / "inputs")
        paths = (*shims, sources.checkout, sources.megatron, ROOT, CPU_SHIM)
        env = {**super().environment(sources, folder, ray), "PYTHONPATH": ":".join(map(str, paths))}
        return {**env, "MILES_HOST_IP": "127.0.0.1"}

    def full_loop(self, folder: Path) -> list[str]:
        dump = ("--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.pt"))
        return ["--rollout-num-gpus-per-engine", "1", *self.own_server(), *FULL_LOOP.split(), *dump]


@dataclass(frozen=True)
class ScriptJob(Job):
    """One run of SCRIPT, which starts Ray's job itself, on a patched checkout: our flags in --extra-args.

    Its own arguments are those of Qwen3-0.6B on one GPU; --extra-args makes it the tiny model on CPU. Ray is there
    before it (MILES_SCRIPT_EXTERNAL_RAY), and `hf` and `pkill` do nothing: no network, and other people's processes.
    """

    # What the script sets and no flag takes back: recomputation, which asks for a CUDA generator.
    SETTINGS: ClassVar[Mapping[str, Any]] = {
        "bf16": False,
        **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")),
    }
    HERE = """
        --attention-backend auto --no-offload-train --no-offload-rollout --debug-train-only --eps-clip-high 0.2
        --adam-beta2 0.999
    """
    RAY = """
        ray start --head --node-ip-address 127.0.0.1 --port {port} --dashboard-host 127.0.0.1 \
            --dashboard-port {dashboard} --dashboard-agent-listen-port {agent} --num-gpus 2 --num-cpus 8 \
            --object-store-memory 200000000 --temp-dir "$RAY_TMPDIR" --disable-usage-stats &&
        export RAY_ADDRESS=http://127.0.0.1:{dashboard} &&
        for i in $(seq 60); do ray job submit -- true > /dev/null 2>&1 && break; sleep 2; done &&
        {script}
        status=$?
        for dump in {folder}/out/one/dump_details/train_data/*.pt; do
            mv "$dump" {folder}/train_$(basename "$dump")
        done
        exit $status
    """

    def environment(self, sources: Sources, folder: Path, ray: Path) -> dict[str, str]:
        env = super().environment(sources, folder, ray)
        for name in ("RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES"):
            del env[name]
        more = {"MILES_SCRIPT_EXTERNAL_RAY": "1", "NCCL_NVLS_ENABLE": "0", "RAY_AUTH_MODE": "disabled"}
        return {**env, **more, "PATH": f"{folder}/bin:{env['PATH']}"}

    def prepare(self, folder: Path) -> None:
        (folder / "cpu.yaml").write_text(yaml.safe_dump(self.SETTINGS))
        (folder / "bin").mkdir()
        for tool in ("hf", "pkill"):
            (folder / "bin" / tool).write_text("#!/bin/sh\n")
            (folder / "bin" / tool).chmod(0o755)
        # The script converts a checkpoint unless this says that it has.
        converted = folder / "models/Qwen3-0.6B_torch_dist"
        converted.mkdir(parents=True)
        (converted / "latest_checkpointed_iteration.txt").write_text("release")

    def command(self, sources: Sources, folder: Path) -> list[str]:
        inputs, ours = sources.inputs, " ".join(self.placed_flags(folder))
        paths = f"--hf-checkpoint {inputs}/hf --ref-load {inputs}/torch_dist --load {folder}/none"
        data = f"--prompt-data {inputs}/prompts.jsonl --load-debug-rollout-data {inputs}/dump/{{rollout_id}}.pt"
        extra = f"{MODEL} {CPU} {paths} {data} {TRAINING} {FROM_DUMPS} {self.HERE} {self.MORE} --num-rollout 2 {ours}"
        extra += f" --custom-config-path {folder}/cpu.yaml --input-key text --use-tensorboard --tb-project-name miles"
        script = [
            *(str(sources.python), SCRIPT, "--model-name", "Qwen3-0.6B", "--mode", "debug_minimal"),
            *("--num-gpus-per-node", "1", "--model-dir", str(folder / "models"), "--data-dir", str(folder / "data")),
            *("--run-id", "one", "--output-dir", str(folder / "out"), "--megatron-path", str(sources.megatron)),
            *("--extra-args", " ".join(extra.split())),
        ]
        port = 20000 + os.getpid() % 3000 * 3
        ports = {"port": port, "dashboard": port + 1, "agent": port + 2}
        line = self.RAY.format(**ports, script=shlex.join(script), folder=shlex.quote(str(folder)))
        return ["-c", "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1]])", line]


def make_inputs(sources: Sources) -> None:
    """Checkpoint in both forms, tokenizer, prompts and dumps."""
    run_script(sources, Job(), [str(HERE / "inputs/make_miles.py"), str(sources.inputs)])
    hf, megatron = str(sources.inputs / "hf"), str(sources.inputs / "torch_dist")
    words = (*MODEL.split(), *CPU.split(), "--hf-checkpoint", hf, "--save", megatron)
    run_script(sources, Job(), [str(HERE / "inputs/convert.py"), CONVERTER, *words])


def make_host() -> Host:
    """MILES_SRC, MEGATRON_SRC (radixark's): checkouts."""
    miles, megatron, python = needed("MILES_SRC", "MEGATRON_SRC", "MISMATCH_HOST_PYTHON")
    found = Sources(python, miles, RUNS / "miles/inputs", megatron)
    made_once(found.inputs, [miles, megatron], lambda: make_inputs(found))
    return Host("miles", found)
