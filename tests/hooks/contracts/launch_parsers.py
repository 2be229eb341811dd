"""The argument parsers of slime and miles, made by their own source, which MISMATCH_HOST_SRC names."""

from __future__ import annotations

import ast
import importlib.util
import logging
import sys
import types
from argparse import ArgumentParser, Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import yaml

from tests.host_source import host_source


class _Missing:
    """Makes modules of these packages, whatever is installed here, as stand-ins."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] in self.packages else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def read_custom_config(host: str, args: Namespace) -> None:
    """What the host's own argument check does with --custom-config-path: that one statement of it, run by itself."""
    tree = ast.parse((host_source(host) / host / "utils" / "arguments.py").read_text(encoding="utf-8"))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "args.custom_config_path"]
    (statement,) = found
    names: dict[str, Any] = {"args": args, "yaml": yaml, "logger": logging.getLogger("host")}
    names["resolve_file_arg"] = lambda path: Path(path).read_text(encoding="utf-8")  # miles's
    exec(compile(ast.Module(body=[statement], type_ignores=[]), "arguments.py", "exec"), names)


def host_parser(host: str, monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    """The parser of slime or miles with all that it declares itself. Skips where the source is absent."""
    path = host_source(host) / host / "utils" / "arguments.py"
    finder = _Missing(host, "sglang_router", "sglang")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    spec = importlib.util.spec_from_file_location(f"{host}_arguments", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.split(".")[0] in finder.packages]:
            del sys.modules[name]
        spec.loader.exec_module(module)
    for name in {"add_sglang_arguments", "add_dashboard_arguments"} & vars(module).keys():
        setattr(module, name, lambda parser, *args, **kwargs: parser)
    if host == "miles":
        module.RouterArgs.add_cli_args = lambda *args, **kwargs: None
        module.use_legacy_rollout_v1 = lambda: True
    parser = ArgumentParser(allow_abbrev=False, conflict_handler="resolve" if host == "miles" else "error")
    parser.add_argument("--calculate-per-token-loss", action="store_true")  # Megatron's
    return getattr(module, f"get_{host}_extra_args_provider")()(parser)
