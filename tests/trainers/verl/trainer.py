"""`verl.trainer.main_ppo`: its command line, what it logs, and the micro-batches that it trained on."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from ci.sglang_cpu.tiny_model import byte_tokenizer, tiny_model
from tests.trainers import whole
from tests.trainers.reference import loss_and_gradient
from tests.trainers.whole import ENVIRONMENT, ROOT, RUNS, Host, Sources, lines_of, made_once

HERE = Path(__file__).parent
PROMPTS, SAMPLES, MINI_BATCH = 8, 4, 4  # prompts a step, responses a prompt, prompts an optimizer step
OPTIMIZER_STEPS = PROMPTS // MINI_BATCH  # of one step of the trainer
SERVER = (
    "device: cpu, attention_backend: torch_native, sampling_backend: pytorch, grammar_backend: none, "
    "enable_memory_saver: false, disable_cuda_graph: true, disable_overlap_schedule: true, disable_radix_cache: true, "
    "max_total_tokens: 16384, sleep_on_idle: true"
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"  # verl asks a Qwen for it


@dataclass(frozen=True)
class Step:
    """One optimizer step: all its micro-batches on all ranks. records: what each had, as the shim wrote it."""

    records: list[dict[str, Any]]

    def rows(self, name: str) -> list[Tensor]:
        """One tensor a response."""
        return [row for record in self.records for row in record.get(name, ())]

    def of_responses(self, name: str) -> list[Tensor]:
        """From values of whole sequences, where place t has what belongs to token t + 1."""
        pairs = zip(self.rows(name), self.rows("responses"), strict=True)
        return [row[-len(response) - 1 : -1] for row, response in pairs]

    @property
    def log_ratio(self) -> Tensor:
        """log π_old − log π_rollout of the trained tokens [T]."""
        columns = (self.rows(name) for name in ("old_log_probs", "rollout_log_probs", "loss_mask"))
        return torch.cat([(old - rollout)[mask.bool()] for old, rollout, mask in zip(*columns, strict=True)])

    def reference(self, config: mp.MismatchConfig) -> tuple[float, Tensor]:
        """(the loss of the step, its gradient with respect to log π_θ [T]), both by `mp.policy_loss` alone."""
        # One advantage a response (GRPO), which the driver has set to 0 at what it rejected.
        given = self.rows("advantages")
        return loss_and_gradient(
            config,
            self.of_responses("log_probs"),
            rollout=self.rows("rollout_log_probs"),
            old=None if config.use_rollout_log_probs else self.rows("old_log_probs"),
            advantages=[row.new_full(row.shape, float(row[row.abs().argmax()])) for row in given],
            masks=self.rows("loss_mask"),
        )


@dataclass(frozen=True)
class Trained(whole.Trained):
    """What a run left, with what the loss was given."""

    @cached_property
    def logged(self) -> list[dict[str, float]]:
        """verl's metrics of each step, from its own file logger."""
        return [line["data"] for line in lines_of(self.folder / "metrics.jsonl")]

    @cached_property
    def steps(self) -> list[Step]:
        """The optimizer steps in order."""
        found: dict[int, list[dict[str, Any]]] = {}
        for file in sorted((self.folder / "dump").glob("*.pt")):
            record = torch.load(file)
            found.setdefault(record["step"], []).append(record)
        return [Step(found[number]) for number in sorted(found)]


@dataclass(frozen=True)
class Job(whole.Job):
    """One run of main_ppo. steps: of the trainer. dtype: of the server."""

    steps: int = 8
    dtype: str = "float32"
    RESULT = Trained

    def cwd(self, sources: Sources, folder: Path) -> Path:
        return folder

    def prepare(self, folder: Path) -> None:
        for name in ("dump", "weights"):
            (folder / name).mkdir()
        (folder / "loops.yaml").write_text("- name: missing\n  _target_: verl_parts.MissingLogProbLoop\n")

    def environment(self, sources: Sources, folder: Path, ray: Path) -> dict[str, str]:
        return {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": f"{HERE / 'shim'}:{HERE}:{ROOT}",
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
            "VERL_CPU_DUMP": str(folder / "dump"),
            "VERL_CPU_WEIGHTS": str(folder / "weights"),
            "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            "RAY_TMPDIR": str(ray),
            "RAY_prestart_worker_first_driver": "0",  # else one idle Python a CPU
            "RAY_enable_worker_prestart": "0",
        }

    def command(self, sources: Sources, folder: Path) -> list[str]:
        model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
        prompts = sources.inputs / "prompts.parquet"
        line = f"""
            algorithm.adv_estimator=grpo
            data.train_files={prompts} data.val_files={prompts} data.train_batch_size={PROMPTS}
            data.max_prompt_length=64 data.max_response_length=16 data.dataloader_num_workers=0 data.seed=1
            {model}.path={sources.inputs / "model"} {model}.external_lib=verl_cpu_engine
            {model}.use_remove_padding=False
            +{model}.override_config.attn_implementation=sdpa {model}.enable_gradient_checkpointing=False
            {actor}.strategy=fsdp2 {actor}.fsdp_config.use_torch_compile=False
            +{actor}.fsdp_config.mixed_precision.param_dtype=fp32
            +{actor}.fsdp_config.mixed_precision.reduce_dtype=fp32
            {actor}.optim.lr=5e-3 {actor}.ppo_mini_batch_size={MINI_BATCH} {actor}.ppo_micro_batch_size_per_gpu=8
            {rollout}.name=sglang {rollout}.n={SAMPLES} {rollout}.dtype={self.dtype}
            {rollout}.tensor_model_parallel_size=1 {rollout}.free_cache_engine=False
            {rollout}.log_prob_micro_batch_size_per_gpu=16 {rollout}.agent.num_workers=1
            {rollout}.gpu_memory_utilization=0.3 {rollout}.max_num_seqs=32
            reward.num_workers=1 reward.custom_reward_function.path={HERE / "verl_parts.py"}
            trainer.device=cpu trainer.n_gpus_per_node={self.ranks} trainer.logger=[console,file]
            trainer.val_before_train=False trainer.total_training_steps={self.steps} trainer.total_epochs=100
            trainer.resume_mode=disable trainer.default_local_dir={folder / "checkpoints"}
            transfer_queue.backend.SimpleStorage.num_data_storage_units=1
            +ray_kwargs.ray_init.num_gpus={self.ranks} ray_kwargs.ray_init.num_cpus=16
            +ray_kwargs.ray_init.include_dashboard=False
        """
        server = f"+{rollout}.engine_kwargs.sglang={{{SERVER}}}"
        ours = [*self.placed_flags(folder), "--mismatch-report-dir", str(folder / "report")]
        return [*self.launcher, "-m", "verl.trainer.main_ppo", *line.split(), server, *ours]


def make_inputs(folder: Path) -> None:
    """A tiny model with its tokenizer, and 32 prompts."""
    from datasets import Dataset

    tiny_model("qwen3", seed=1).save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    more = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": ""}}
    asked = [f"write letters {chr(97 + i % 26)}{i}:" for i in range(32)]
    rows = [
        {"prompt": [{"role": "user", "content": words}], **more, "extra_info": {"index": i}}
        for i, words in enumerate(asked)
    ]
    Dataset.from_list(rows).to_parquet(str(folder / "prompts.parquet"))


def make_host() -> Host:
    """The tests run in the environment that has verl."""
    inputs = RUNS / "verl/inputs"
    made_once(inputs, [], lambda: make_inputs(inputs))
    return Host("verl", Sources(Path(sys.executable), inputs, inputs), at_once=1)
