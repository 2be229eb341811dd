"""Put on PYTHONPATH with a trainer's own shim: changes to a few modules as they are imported, so that it runs on CPU.

TRAINER_SHIM names the trainer. Nothing heavy is imported here, so it costs Ray's own processes nothing. Nothing of a
trainer's loss, data or arguments is replaced: docs/appendix.md has what is, and why.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import time
import typing
from types import ModuleType, SimpleNamespace
from typing import Any

_MILES_WEIGHTS = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed"
HOOKS: dict[str, dict[str, str]] = {
    "slime": {
        "slime.utils.accelerator": "cpu_accelerator",
        "megatron.training.utils": "no_device_architecture",
        "slime.utils.reloadable_process_group": "collectives_of_newer_torch",
        "slime.backends.sglang_utils.sglang_engine": "newer_sglang",
    },
    "miles": {
        "miles.ray.train_actor": "cuda_means_cpu",
        "megatron.training.utils": "no_device_architecture",
        "miles.utils.http_utils": "patience",
        "miles.utils.reloadable_process_group": "collectives_of_newer_torch",
        f"{_MILES_WEIGHTS}.broadcast": "gloo_to_the_engines",
        "miles.backends.sglang_utils.sglang_engine": "newer_sglang",
    },
    "megatron_rl": {
        "megatron.core.utils": "to_cpu",
        "megatron.core.datasets.utils": "no_compiler",
        "megatron.core.models.gpt.gpt_model": "full_precision",
        "megatron.training.training": "no_cuda_asked_for",
        "megatron.training.arguments": "no_device_architecture",
        "megatron.rl.agent.registry": "own_environment",
        "megatron.rl.inference.megatron": "own_engine",
    },
    "nemo_rl": {"nemo_rl.algorithms.grpo": "own_policy_and_engine", "nemo_rl.distributed.model_utils": "tensors_stay"},
}
"""Module → the function of HOST_on_cpu.py that gets it after its import."""
EMPTY: dict[str, dict[str, tuple[str, ...]]] = {
    "miles": {"sglang.srt.entrypoints.openai.encoding_dsv4": (), f"{_MILES_WEIGHTS}.p2p": ("UpdateWeightP2P",)},
    "nemo_rl": dict.fromkeys(("mlflow", "swanlab", "soundfile"), ()),
}
"""Modules that are replaced by ones that have these names alone."""
HOST = os.environ.get("TRAINER_SHIM", "")
RAY_NODE = "ray._private.node"
hooks, empty = {**HOOKS.get(HOST, {}), RAY_NODE: ""}, EMPTY.get(HOST, {})


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if fullname in empty:
            return importlib.machinery.ModuleSpec(fullname, _Loader())
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in hooks else None
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any = None) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None if self.loader is None else self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self.loader is not None:
            self.loader.exec_module(module)
        for name in empty.get(module.__name__, ()):
            setattr(module, name, type(name, (), {}))
        if module.__name__ == RAY_NODE:  # it gives its own processes 30 s to start, which busy cores exceed
            patient = {**vars(time), "monotonic": lambda: time.monotonic() / 10}
            setattr(module, "time", SimpleNamespace(**patient))  # noqa: B010
        if hook := hooks.get(module.__name__):
            getattr(importlib.import_module(f"{HOST}_on_cpu"), hook)(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


if HOST in ("megatron_rl", "nemo_rl"):  # they ask for newer Pythons
    import typing_extensions

    for newer in ("override", "TypedDict", "NotRequired") if HOST == "nemo_rl" else ("override",):
        setattr(typing, newer, getattr(typing_extensions, newer))
if HOST:
    sys.meta_path.insert(0, _Finder())
