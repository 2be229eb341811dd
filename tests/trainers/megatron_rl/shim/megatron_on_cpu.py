"""What Megatron-LM's train_rl.py needs in order to run without a GPU, and an engine that runs here."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import observe
import torch

from mismatch_plugin.lab import cpu_shim

SHIMMED = [
    ("typing.override", "Megatron-LM asks for Python 3.12"),
    ("torch.cuda (mismatch_plugin.lab.cpu_shim)", "no GPU: its device, streams and literals are the CPU's"),
    ("initialize_megatron(allow_no_cuda=True)", "no GPU: its own argument, which pretrain does not pass"),
    ("arguments.get_device_arch_version", "no GPU: asked for with tensor or context parallelism"),
    ("transformer_engine_torch.thd_get_partitioned_indices", "no Transformer Engine: which tokens a CP rank has"),
    ("--spec megatron_cpu_spec layer_spec", "no Transformer Engine: attention over packed sequences by torch's SDPA"),
    ("datasets.utils.compile_helpers", "pybind11 and write access to the checkout, for data that RL does not read"),
    ("GPTModel.forward(fp32_output=)", "without --bf16: get_logprobs passes it, and only Float16Module takes it"),
    ("registry.AGENT_REGISTRY['TinyAgent']", "an environment that needs no data set from a hub"),
    ("rl.inference.megatron.MegatronLocal", "Megatron's engine needs CUDA kernels: one of its own abstract type"),
]


def to_cpu(module: Any) -> None:
    cpu_shim.install()
    cuda: Any = torch.cuda
    cuda.device_count, cuda.set_device = lambda: 1, lambda device: None
    cuda.get_rng_state, cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
    cuda.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34, name="cpu")
    cuda.device_memory_used = lambda device=None: 0
    cuda.check_error = lambda status: None
    if folder := os.environ.get("MEGATRON_SEEN"):
        observe.start(Path(folder))
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"shimmed: {what}: {why}" for what, why in SHIMMED), flush=True)


def no_compiler(module: Any) -> None:
    module.compile_helpers = lambda: None


def no_cuda_asked_for(module: Any) -> None:
    module.initialize_megatron = partial(module.initialize_megatron, allow_no_cuda=True)


def no_device_architecture(module: Any) -> None:
    module.get_device_arch_version = lambda: 10


def full_precision(module: Any) -> None:
    forward = module.GPTModel.forward
    module.GPTModel.forward = lambda self, *args, fp32_output=True, **kwargs: forward(self, *args, **kwargs)


def own_environment(module: Any) -> None:
    module.AGENT_REGISTRY["TinyAgent"] = "tiny_task:TinyAgent"


def own_engine(module: Any) -> None:
    from tiny_engine import TinyEngine

    module.MegatronLocal = TinyEngine
