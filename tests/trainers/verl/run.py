"""`verl.trainer.main_ppo` started by our launcher, as its user would, on CPU: the command line and what came of it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainers.run import run as supervised

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROMPTS, SAMPLES, MINI_BATCH = 8, 4, 4  # prompts a step, responses a prompt, prompts an optimizer step
LIMIT = 1800
SERVER = (
    "device: cpu, attention_backend: torch_native, sampling_backend: pytorch, grammar_backend: none, "
    "enable_memory_saver: false, disable_cuda_graph: true, disable_overlap_schedule: true, disable_radix_cache: true, "
    "max_total_tokens: 16384, sleep_on_idle: true"
)


def host_arguments(inputs: Path, output: Path, ranks: int, steps: int, dtype: str) -> list[str]:
    """What a verl user writes behind `main_ppo` for a run without a GPU, none of it ours."""
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    prompts = inputs / "prompts.parquet"
    line = f"""
        algorithm.adv_estimator=grpo
        data.train_files={prompts} data.val_files={prompts} data.train_batch_size={PROMPTS}
        data.max_prompt_length=64 data.max_response_length=16 data.dataloader_num_workers=0 data.seed=1
        {model}.path={inputs / "model"} {model}.external_lib=verl_cpu_engine {model}.use_remove_padding=False
        +{model}.override_config.attn_implementation=sdpa {model}.enable_gradient_checkpointing=False
        {actor}.strategy=fsdp2 {actor}.fsdp_config.use_torch_compile=False
        +{actor}.fsdp_config.mixed_precision.param_dtype=fp32 +{actor}.fsdp_config.mixed_precision.reduce_dtype=fp32
        {actor}.optim.lr=5e-3 {actor}.ppo_mini_batch_size={MINI_BATCH} {actor}.ppo_micro_batch_size_per_gpu=8
        {rollout}.name=sglang {rollout}.n={SAMPLES} {rollout}.dtype={dtype} {rollout}.tensor_model_parallel_size=1
        {rollout}.free_cache_engine=False {rollout}.log_prob_micro_batch_size_per_gpu=16 {rollout}.agent.num_workers=1
        {rollout}.gpu_memory_utilization=0.3 {rollout}.max_num_seqs=32
        reward.num_workers=1 reward.custom_reward_function.path={HERE / "reward.py"}
        trainer.device=cpu trainer.n_gpus_per_node={ranks} trainer.logger=[console,file] trainer.val_before_train=False
        trainer.total_training_steps={steps} trainer.total_epochs=100 trainer.resume_mode=disable
        trainer.default_local_dir={output / "checkpoints"}
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        +ray_kwargs.ray_init.num_gpus={ranks} ray_kwargs.ray_init.num_cpus=16
        +ray_kwargs.ray_init.include_dashboard=False
    """
    return [*line.split(), f"+{rollout}.engine_kwargs.sglang={{{SERVER}}}"]


def environment(output: Path, ray: Path) -> dict[str, str]:
    """The shim in every process, Ray and SGLang on this machine alone. ray: a short path, since sockets lie in it."""
    return {
        **os.environ,
        "PYTHONPATH": f"{HERE / 'shim'}:{HERE}:{ROOT}",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_CPU_SAY": "1",
        "VERL_CPU_DUMP": str(output / "dump"),
        "VERL_CPU_WEIGHTS": str(output / "weights"),
        "VERL_FILE_LOGGER_PATH": str(output / "metrics.jsonl"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
        "no_proxy": "127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(ray),
        "RAY_NODE_IP": "127.0.0.1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then keeps to 127.0.0.1
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # else one idle Python a CPU
        "RAY_enable_worker_prestart": "0",
    }


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    status: int
    seconds: float
    peak_gib: float
    output: str

    @property
    def logged(self) -> list[dict[str, float]]:
        """verl's metrics of each step, from its own file logger."""
        return [json.loads(line)["data"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def report(self) -> Path:
        return self.folder / "report"


def command(flags: list[str], arguments: list[str]) -> list[str]:
    """The line that a user types."""
    return [sys.executable, "-m", "mismatch_plugin.launch", "-m", "verl.trainer.main_ppo", *arguments, *flags]


def run(
    folder: Path, inputs: Path, *flags: str, ranks: int = 1, steps: int = 5, dtype: str = "float32", **more: Any
) -> Run:
    """Start it and wait. more: further variables of the environment. Everything it started ends with it."""
    for name in ("dump", "weights"):
        (folder / name).mkdir(parents=True)
    line = command([*flags], host_arguments(inputs, folder, ranks, steps, dtype))
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as ray:
        variables = environment(folder, Path(ray)) | {name: str(value) for name, value in more.items()}
        ended = supervised(line, folder / "log.txt", limit=LIMIT, env=variables, cwd=folder)
    result = {"status": ended.status, "seconds": ended.seconds, "peak_gib": ended.peak_gib}
    (folder / "result.json").write_text(json.dumps(result))
    return finished(folder)


def finished(folder: Path) -> Run:
    """The run that has ended there."""
    return Run(
        folder,
        output=(folder / "log.txt").read_text(errors="replace"),
        **json.loads((folder / "result.json").read_text()),
    )
