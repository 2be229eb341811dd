"""miles's train.py from a command line to what it logged and dumped: `Job` says what to run, `train` runs it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from mismatch_plugin.data.read import read
from tests.trainers.jobs import is_made, made_from, wait_for_ports
from tests.trainers.run import Finished, run
from tests.trainers.slime import trainer as slime
from tests.trainers.slime.trainer import CPU, FROM_DUMPS, FULL_LOOP, MODEL, SERVER, TRAINING
from tests.trainers.trained import CPU_SHIM, LAUNCHER, ROOT, once

HERE = Path(__file__).parent
SLIME = HERE.parent / "slime"
LR = 1e-4  # small, since rounding to bfloat16 in the gradient and Adam turn 1e-7 into more in each step
CONVERTER = "tools/convert_hf_to_torch_dist.py"


@dataclass(frozen=True)
class Sources:
    """miles, radixark's Megatron-LM, the environment of ci/slime_cpu.sh, and made inputs."""

    miles: Path
    megatron: Path
    python: Path
    inputs: Path

    def environment(self, ray: Path) -> dict[str, str]:
        """Of every process: slime's with miles's paths. ray: a short path, since Ray puts sockets below it."""
        shims = (HERE / "shim", HERE.parent / "shim", SLIME / "shim", HERE / "inputs", SLIME / "inputs")
        return {
            **slime.Sources(self.miles, self.megatron, self.python, self.inputs).environment(ray),
            "PYTHONPATH": ":".join(map(str, (*shims, self.miles, self.megatron, ROOT, CPU_SHIM))),
            "MILES_HOST_IP": "127.0.0.1",
        }

    def run(self, *words: str) -> None:
        """Something of miles that starts no Ray."""
        env = self.environment(Path("/tmp"))
        subprocess.run([str(self.python), *words], env=env, cwd=self.miles, check=True)


@dataclass(frozen=True)
class Job:
    """One run of train.py.

    flags: more of the command line; they come last. launch: through our launcher. config: keys of --custom-config-path.
    dump: the folder of rollout dumps, below the inputs; None for the full loop, with a server that miles starts.
    """

    flags: Sequence[str] = ()
    launch: bool = True
    ranks: int = 1
    rollouts: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    dump: Path | None = Path("dump")
    limit: float = 600
    checkpoint: Path = Path("hf")

    def words(self, sources: Sources, folder: Path) -> list[str]:
        """The command line after the interpreter. `{run}` in a flag is the folder of the run."""
        inputs, config = sources.inputs, folder / "cpu.yaml"
        gpus = self.ranks if self.dump is not None else self.ranks + 1
        return [
            *(LAUNCHER if self.launch else ()),
            *("train.py", *MODEL.split(), *CPU.split(), "--custom-config-path", str(config)),
            *("--hf-checkpoint", str(inputs / self.checkpoint), "--ref-load", str(inputs / "torch_dist")),
            *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(self.ranks)),
            *("--num-gpus-per-node", str(gpus), "--num-rollout", str(self.rollouts)),
            *("--prompt-data", str(inputs / "prompts.jsonl"), "--input-key", "text", "--label-key", "label"),
            *(*TRAINING.split(), "--lr", str(LR)),
            *(self._from_dumps(inputs) if self.dump is not None else self._full_loop(folder)),
            *("--save-debug-train-data", str(folder / "train_{rollout_id}_{rank}.pt")),
            *("--use-tensorboard", "--tb-project-name", "miles"),
            *(flag.replace("{run}", str(folder)) for flag in self.flags),
        ]

    def _from_dumps(self, inputs: Path) -> list[str]:
        path = inputs / (self.dump or "") / "{rollout_id}.pt"
        return ["--debug-train-only", "--load-debug-rollout-data", str(path), *FROM_DUMPS.split()]

    def _full_loop(self, folder: Path) -> list[str]:
        server = [f"--sglang-{word[2:]}" if word.startswith("--") else word for word in SERVER.split()]
        return [
            *("--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1", "--sglang-dtype", "float32", *server),
            *FULL_LOOP.split(),
            *("--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.pt")),
        ]


@dataclass(frozen=True)
class Trained(slime.Trained):
    """What a run left. miles dumps what it trained on rank by rank."""

    job: Any

    def dump(self, rollout: int, rank: int = 0) -> dict[str, Any]:
        return torch.load(self.folder / f"train_{rollout}_{rank}.pt", weights_only=False)["rollout_data"]

    def steps_of(self, rollout: int) -> list[list[dict[str, Any]]]:
        """The samples of each optimizer step of a rollout on rank 0, as `Reference.step` takes them."""
        data = self.dump(rollout)
        names = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs", "advantages", "log_probs")
        names = (*names, "sample_indices")
        batches = iter(data["micro_batch_indices"])
        at = [[i for _ in range(count) for i in next(batches)] for count in data["num_microbatches"]]
        return [[{name: data[name][i] for name in names if name in data} for i in step] for step in at]

    def old_log_probs(self, rollout: int) -> dict[int, Tensor]:
        """Sample → its old log-probs, as `inspect` puts them together from the dumps of all ranks."""
        folder = self.folder / f"train_{rollout}"
        folder.mkdir(exist_ok=True)
        for file in self.folder.glob(f"train_{rollout}_*.pt"):
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file)
        dump = read(folder)
        return {
            int(sample.sample_id or ""): torch.from_numpy(sample.train_log_probs).float() for sample in dump.samples
        }


def make_inputs(sources: Sources) -> None:
    """Checkpoint in both forms, tokenizer, prompts and dumps, where they are not there yet."""
    made = made_from(sources.miles, sources.megatron)
    if is_made(sources.inputs / "made", made):
        return
    shutil.rmtree(sources.inputs, ignore_errors=True)
    sources.run(str(HERE / "inputs/make_miles.py"), str(sources.inputs))
    hf, megatron = str(sources.inputs / "hf"), str(sources.inputs / "torch_dist")
    words = (*MODEL.split(), *CPU.split(), "--hf-checkpoint", hf, "--save", megatron)
    sources.run(str(HERE / "inputs/convert.py"), CONVERTER, *words)
    (sources.inputs / "made").write_text(made)


def train(job: Job, sources: Sources, folder: Path, reuse: bool = False) -> Trained:
    """Run a job to its end. folder: where its log and files go; emptied before. reuse: take what is there already."""
    command = [str(sources.python), *job.words(sources, folder)]
    settings = yaml.safe_dump({"bf16": False, **job.config})  # miles sets it with no flag against it

    def start() -> Finished:
        (folder / "cpu.yaml").write_text(settings)
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as ray:
            env = {**sources.environment(Path(ray)), "TENSORBOARD_DIR": str(folder / "tensorboard")}
            wait_for_ports(job.dump is None)
            return run(command, folder / "log", limit=job.limit, env=env, cwd=sources.miles)

    return Trained(job, folder, once(folder, [settings, *command], reuse, start))
