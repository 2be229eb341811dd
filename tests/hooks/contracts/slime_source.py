"""Reads a host's source without importing it, for comparing recorded facts with a checkout."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

VARIABLE = "MISMATCH_HOST_SRC"


def host_root(host: str) -> Path:
    """The checkout of a host, or a skip that says that there is none."""
    folder = os.environ.get(VARIABLE)
    root = Path(folder or ".") / host
    if not folder or not root.is_dir():
        pytest.skip("NOT RUN (host source absent)")
    return root


def function(path: Path, name: str) -> ast.FunctionDef:
    """The function or method of that name, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{path} has no function {name} any more: read the host's change, then the adapter.")
