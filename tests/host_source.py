"""Reads a host's source without importing it, for comparing recorded facts with a checkout."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest


def host_source(host: str, *parts: str) -> Path:
    """The checkout of a host, or a file or folder in it; a skip that says so where it is not there."""
    folder = os.environ.get("MISMATCH_HOST_SRC")
    path = Path(folder or ".", host, *parts)
    if not folder or not path.exists():
        pytest.skip("NOT RUN (host source absent)")
    return path


def function(path: Path, name: str) -> ast.FunctionDef:
    """The function or method of that name, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise AssertionError(f"{path} has no function {name} any more: read the host's change, then the adapter.")
