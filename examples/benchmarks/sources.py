"""Code of other projects that no package has, from a checkout that an environment variable names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from examples.benchmarks.results import NotHereError

PACKAGES = "not installed: make bench-contenders"
"""Said of verl and TRL. What needs CUDA comes with the CUDA environment (docs/speed.md)."""


@dataclass(frozen=True)
class Checkout:
    """A project's repository. variable: of the environment, with its folder. commit: that its use was written for."""

    project: str
    variable: str
    commit: str

    @property
    def folder(self) -> Path:
        """Where it is. Raises NotHereError where the variable names no folder."""
        folder = Path(os.environ[self.variable]).resolve()
        if not folder.is_dir():
            raise NotHereError(f"{self.variable}={folder} is no folder")
        return folder

    @property
    def there(self) -> bool:
        """Whether the variable is set."""
        return bool(os.environ.get(self.variable))

    def source(self) -> str:
        """Where a figure's code is from, for its row."""
        if not self.there:
            return f"written from its description; its own: {self.variable}=CHECKOUT"
        command = ["git", "-C", os.environ[self.variable], "rev-parse", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        other = "" if head == self.commit else f", not the {self.commit[:9]} that this was written for"
        return f"checkout {head[:9] or 'without a commit'}{other}"

    def module(self, name: str) -> Any:
        """A module of it by its dotted name. The packages around it are not run, which would load the trainer."""
        parts, folder = name.split("."), self.folder
        for depth in range(1, len(parts)):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                bare = ModuleType(package)
                bare.__path__ = [str(folder.joinpath(*parts[:depth]))]
                sys.modules[package] = bare
        return import_module(name)

    def file(self, path: str) -> Any:
        """A file of it, as a module of its own."""
        return load_file(self.folder / path)


SLIME = Checkout("slime", "SLIME_SRC", "624b824a898ab0ec1fcb4d373004c7f3852bf515")
NEMO_RL = Checkout("NeMo-RL", "NEMO_RL_SRC", "7ea279abfbeb698b092856d0dab61e7cf39bc909")


def load_file(path: Path) -> Any:
    """One file as a module, without what is around it."""
    spec = importlib.util.spec_from_file_location(f"_of_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise NotHereError(f"{path} is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package_file(package: str, path: str) -> Any:
    """A file of an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise NotHereError(PACKAGES)
    return load_file(Path(spec.origin).parent / path)
