"""Importing the package is light (no trainer, sampler or process group), and its files depend on each other one way.

The order of the folders is docs/design.md's: data flows upwards from settings to commands, imports downwards.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import requires
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
    "aiohttp",
)
ROOT = Path(mismatch_plugin.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
CORE = sorted((ROOT / "core").rglob("*.py"))
# The safety bound is what settings and formulas share; the rest of the package is out of bounds.
CORE_MAY_IMPORT = ("torch", "mismatch_plugin.core", "mismatch_plugin.limits", "__future__", *sys.stdlib_module_names)
FOLDERS = (
    *(
        "config",
        "core",
        "log_probs",
        "parallel",
        "data",
        "sglang",
        "report",
        "hooks",
        "diagnose",
        "bisect",
        "compare",
        "explain",
        "launch",
    ),  # downwards only
)
# Modules whose dependency is called otherwise, or that come with it.
DEPENDENCY = {
    "megatron": "megatron-core",
    "yaml": "pyyaml",
    "yarl": "aiohttp",
    "pydantic_core": "pydantic",
    "PIL": "matplotlib",
    "google": "tensorboard",
    "triton": "torch",
}


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


def test_every_module_imported_is_of_a_dependency():
    """Or of an extra for users, not of those for tests and developers. slime's modules are imported inside slime."""
    lines = [line for line in requires("mismatch-plugin") or [] if not re.search(r"extra == .(test|dev)", line)]
    declared = {re.split(r"[^\w-]", line)[0] for line in lines}
    known = {*sys.stdlib_module_names, "mismatch_plugin", "slime"}
    unknown = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in _imports(ast.parse(path.read_text()))
        if (top := name.split(".")[0]) not in known and DEPENDENCY.get(top, top.replace("_", "-")) not in declared
    ]
    assert unknown == []


def test_every_public_name_is_there():
    missing = [name for name in mismatch_plugin.__all__ if not hasattr(mismatch_plugin, name)]
    assert missing == []


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_imports_nothing_outside_itself(path: Path):
    outside = [name for name in _imports(ast.parse(path.read_text())) if not name.startswith(CORE_MAY_IMPORT)]
    assert outside == (["numpy"] if path.name == "host.py" else [])  # there it reads CPU tensors' own memory


def test_no_circle_of_imports_between_files():
    """Imports for types and inside functions count."""
    TopologicalSorter(_graph()).prepare()  # raises CycleError naming the circle


def test_folders_import_downwards_only():
    upwards = [
        f"{module} imports {other}"
        for module, others in _graph().items()
        for other in others
        if (mine := _rank(module)) is not None and (theirs := _rank(other)) is not None and theirs > mine
    ]
    assert upwards == []


def _rank(module: str) -> int | None:
    """Place of a module's folder in FOLDERS; None for the files at the top."""
    folder = module.split(".")[1] if "." in module else ""
    return FOLDERS.index(folder) if folder in FOLDERS else None


def _graph() -> dict[str, set[str]]:
    """Module → modules of the package that it imports anywhere."""
    names = {_name(path): path for path in FILES}
    return {name: _inside(path, names) for name, path in names.items()}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _inside(path: Path, names: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
            found |= inner or {node.module}
    return found & names.keys()


def _imports(node: ast.AST) -> list[str]:
    """Modules imported anywhere below `node`, those for the type checker alone left out."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "."]
    return [name for child in ast.iter_child_nodes(node) for name in _imports(child)]
