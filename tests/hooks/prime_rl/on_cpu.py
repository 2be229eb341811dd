"""What lets prime-rl's trainer be imported and run without a GPU: stand-ins for packages of kernels, and cuda → cpu."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformers.integrations.hub_kernels  # noqa: F401  # before it finds the stand-ins
from torch.overrides import TorchFunctionMode

# Kernels, engines and trackers that a dense model on one rank never calls.
ABSENT = (
    *("causal_conv1d", "cuda", "cutlass", "deep_ep", "dion", "fla", "flash_attn", "mamba_ssm", "modelexpress"),
    *("mooncake", "nixl", "openai", "prime_cli", "prometheus_client", "pynvml", "quack", "renderers"),
    *("ring_flash_attn", "tilelang", "torchao", "torchtitan", "triton", "verifiers", "vllm", "wandb"),
    *("wandb_gql", "wandb_workspaces"),
)  # fmt: skip


class _Anything(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return (
            args[0] if len(args) == 1 and not kwargs and callable(args[0]) else cls
        )  # as a decorator, or with options

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _StandIn(metaclass=_Anything):
    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _Module(ModuleType):
    __version__, __file__ = "99.0", "stand-in"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        absent = fullname.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value

        return func(*map(moved, args), **{name: moved(value) for name, value in (kwargs or {}).items()})


def prepare(source: str) -> Any:
    """prime-rl's module `trainer.rl.train` from a checkout."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    sys.path[:0] = [f"{source}/src", f"{source}/packages/prime-rl-configs/src"]
    sys.meta_path.insert(0, _Finder())
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # there is no compiler for it
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_: 0)
    torch.cuda.current_device = lambda: "cpu"
    own = dist.init_process_group
    dist.init_process_group = lambda backend=None, timeout=None, device_id=None: own("gloo", timeout=timeout)
    vars(import_module("prime_rl.trainer.parallel_dims"))["device_type"] = "cpu"
    import_module("prime_rl.trainer.perf").PerfCounter._mfu_from_tps = lambda *_: 0.0  # of a GPU's peak
    return import_module("prime_rl.trainer.rl.train")


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, "cuda" is the CPU."""
    os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    with _OnCpu():
        yield
