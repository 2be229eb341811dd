"""Importing the package is light (no trainer, no sampler, no process group), and core depends only on itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mismatch_plugin

OPTIONAL = (
    "megatron",
    "sglang",
    "transformers",
    "transformer_engine",
    "triton",
    "matplotlib",
    "tensorboard",
    "pyarrow",
    "typer",
    "httpx",
)
CORE = sorted((Path(mismatch_plugin.__file__).parent / "core").glob("*.py"))
# Settings of a criterion and field metadata are pure data without torch; the rest of the package is out of bounds.
CORE_MAY_IMPORT = ("torch", "mismatch_plugin.core", "__future__", *sys.stdlib_module_names)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_pulls_in_no_optional_package():
    code = f"import sys, mismatch_plugin; print([name for name in {OPTIONAL} if name in sys.modules])"
    assert _run(code) == "[]"


def test_import_initialises_neither_processes_nor_gpus():
    code = (
        "import mismatch_plugin, torch, torch.distributed as dist;"
        "print(dist.is_available() and dist.is_initialized(), torch.cuda.is_initialized())"
    )
    assert _run(code) == "False False"


def test_every_public_name_is_there():
    missing = [name for name in mismatch_plugin.__all__ if not hasattr(mismatch_plugin, name)]
    assert missing == []


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_core_imports_nothing_outside_itself(path: Path):
    outside = [name for name in _imports(ast.parse(path.read_text())) if not name.startswith(CORE_MAY_IMPORT)]
    assert outside == []


def _imports(node: ast.AST) -> list[str]:
    """Modules imported anywhere below `node`, those for the type checker alone left out."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "."]
    return [name for child in ast.iter_child_nodes(node) for name in _imports(child)]
