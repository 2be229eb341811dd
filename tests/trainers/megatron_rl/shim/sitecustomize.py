"""Put on PYTHONPATH: changes what needs a GPU right after Megatron-LM's own modules are imported, and nothing else.

Importing nothing heavy itself, it costs processes that import no Megatron nothing.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import typing

import typing_extensions

if not hasattr(typing, "override"):  # Python 3.11; Megatron-LM asks for 3.12
    setattr(typing, "override", typing_extensions.override)  # noqa: B010

HOOKS = {
    "megatron.core.utils": "to_cpu",
    "megatron.core.datasets.utils": "no_compiler",
    "megatron.core.models.gpt.gpt_model": "full_precision",
    "megatron.training.training": "no_cuda_asked_for",
    "megatron.training.arguments": "no_device_architecture",
    "megatron.rl.agent.registry": "own_environment",
    "megatron.rl.inference.megatron": "own_engine",
}


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: typing.Any, function: str) -> None:
        self.loader, self.function = loader, function

    def create_module(self, spec: typing.Any) -> typing.Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: typing.Any) -> None:
        self.loader.exec_module(module)
        getattr(importlib.import_module("megatron_on_cpu"), self.function)(module)

    def __getattr__(self, name: str) -> typing.Any:
        return getattr(self.loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: typing.Any = None, target: typing.Any = None) -> typing.Any:
        if name not in HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, HOOKS[name])
        return spec


if "MEGATRON_ON_CPU" in os.environ:
    sys.meta_path.insert(0, _Finder())
