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


def parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    """Names of every parameter."""
    return tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def call_arguments(node: ast.FunctionDef, name: str) -> tuple[str, ...]:
    """Arguments, as written, of the first call of `name` inside a function; also through `checkpoint(name, …)`."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == name:
            return tuple(ast.unparse(argument) for argument in call.args)
    raise AssertionError(f"{node.name} calls no {name} any more: read the host's change, then the adapter.")


def strings(node: ast.AST) -> set[str]:
    """Every string constant inside a node."""
    return {item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)}
