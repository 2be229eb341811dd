"""For a sitecustomize: changes to a few modules as they are imported, and empty ones in place of what cannot be.

It imports nothing heavy, so it costs Ray's own processes nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Shim(importlib.abc.MetaPathFinder):
    """host: whose trainer it is. shimmed: what is replaced, and why; printed once a run.

    hooks: module → function of the module `code` that gets it after its import. empty: module that is replaced by one
    that has these names alone.
    """

    host: str
    code: str
    shimmed: Sequence[tuple[str, str]]
    hooks: Mapping[str, str]
    empty: Mapping[str, Sequence[str]]

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if fullname in self.empty:
            return importlib.machinery.ModuleSpec(fullname, _Loader(self))
        if fullname not in self.hooks:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(self, spec.loader)
        return spec

    def loaded(self, module: ModuleType) -> None:
        shown = f"{self.host.upper()}_SHIM_SHOWN"  # the run's other processes inherit it
        if not os.environ.get(shown):
            os.environ[shown] = "1"
            for what, why in self.shimmed:
                print(f"shimmed: {what}: {why}", file=sys.stderr, flush=True)
        for name in self.empty.get(module.__name__, ()):
            setattr(module, name, type(name, (), {}))
        if hook := self.hooks.get(module.__name__):
            getattr(importlib.import_module(self.code), hook)(module)


class _Loader(importlib.abc.Loader):
    def __init__(self, shim: Shim, loader: Any = None) -> None:
        self.shim, self.loader = shim, loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None if self.loader is None else self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self.loader is not None:
            self.loader.exec_module(module)
        self.shim.loaded(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
