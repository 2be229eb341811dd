"""What Megatron-LM's train_rl.py needs in order to run without a GPU, and an engine that runs here."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_shim  # pyright: ignore[reportMissingImports]
import observe
import torch


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
    module.AGENT_REGISTRY["TinyAgent"] = "tiny_engine:TinyAgent"


def own_engine(module: Any) -> None:
    from tiny_engine import TinyEngine

    module.MegatronLocal = TinyEngine
