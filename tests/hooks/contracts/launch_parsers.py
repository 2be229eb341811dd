"""The argument parsers of slime and miles, made by their own source, which MISMATCH_HOST_SRC names."""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import sys
import types
from argparse import ArgumentParser, Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from tests.hooks.contracts.slime_source import host_root


class _Missing:
    """Makes every module that the host's file imports and that is not installed here, as a stand-in."""

    def __init__(self, prefixes: tuple[str, ...], tree: Path) -> None:
        self.prefixes, self.tree = prefixes, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in self.prefixes else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _host_module(host: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host's utils/arguments.py, with what it imports next to it replaced."""
    root = os.environ.get("MISMATCH_HOST_SRC")
    path = Path(root or "", host, host, "utils", "arguments.py")
    if root is None or not path.is_file():
        pytest.skip("NOT RUN (host source absent)")
    finder = _Missing((host, "sglang_router", "sglang"), path)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for name in list(sys.modules):
        if name.split(".")[0] in finder.prefixes:
            monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location(f"{host}_arguments", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in list(sys.modules):
        if name.split(".")[0] in finder.prefixes:
            monkeypatch.delitem(sys.modules, name)
    return module


def read_custom_config(host: str, args: Namespace) -> None:
    """What the host's own argument check does with --custom-config-path: that one statement of it, run by itself."""
    tree = ast.parse((host_root(host) / host / "utils" / "arguments.py").read_text(encoding="utf-8"))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "args.custom_config_path"]
    (statement,) = found
    names: dict[str, Any] = {"args": args, "yaml": yaml, "logger": logging.getLogger("host")}
    names["resolve_file_arg"] = lambda path: Path(path).read_text(encoding="utf-8")  # miles's
    exec(compile(ast.Module(body=[statement], type_ignores=[]), "arguments.py", "exec"), names)


def host_parser(host: str, monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    """The parser of slime or miles with all that it declares itself. Skips where the source is absent."""
    module = _host_module(host, monkeypatch)
    identity = lambda parser, *args, **kwargs: parser  # noqa: E731
    for name in ("add_sglang_arguments", "add_dashboard_arguments"):
        if hasattr(module, name):
            setattr(module, name, identity)
    if host == "miles":
        module.RouterArgs.add_cli_args = lambda *args, **kwargs: None
        module.use_legacy_rollout_v1 = lambda: True
    parser = ArgumentParser(allow_abbrev=False, conflict_handler="resolve" if host == "miles" else "error")
    parser.add_argument("--calculate-per-token-loss", action="store_true")  # Megatron's
    return getattr(module, f"get_{host}_extra_args_provider")()(parser)
