"""The cross entropy of transformer-engine, from its package on PyPI.

`make test` unpacks it outside of what is imported: installed, it would change what other libraries do, and it cannot be
imported without CUDA.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("MISMATCH_PEERS", Path(sys.prefix) / "peers"))
ABSENT = "the packages of other libraries' kernels are not unpacked"


def missing() -> bool:
    return not (FOLDER / "transformer_engine").is_dir()


def transformer_engine() -> Any:
    """`transformer_engine.pytorch.cross_entropy`, which the backend imports, without what its packages import. Its
    check that inputs are on CUDA is off: its kernels run in Triton's interpreter."""
    _bare("transformer_engine", "common", "common.triton", "pytorch", "pytorch.triton")
    jit: Any = sys.modules.setdefault("transformer_engine.pytorch.jit", ModuleType("jit"))
    jit.no_torch_dynamo = lambda: lambda function: function
    module: Any = importlib.import_module("transformer_engine.pytorch.cross_entropy")
    module._validate_inputs = lambda *_: None
    return module


def _bare(root: str, *packages: str) -> None:
    """The packages as plain folders, whose `__init__` is not run."""
    for name in (root, *(f"{root}.{package}" for package in packages)):
        module = sys.modules.setdefault(name, ModuleType(name))
        module.__path__ = [str(FOLDER.joinpath(*name.split(".")))]
