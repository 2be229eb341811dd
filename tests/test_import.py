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

import mismatch_plugin

OPTIONAL = ("megatron", "sglang", "transformers", "transformer_engine", "triton", "matplotlib")
OPTIONAL += ("tensorboard", "pyarrow", "typer", "aiohttp")
ROOT = Path(mismatch_plugin.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
# The safety bound is what settings and formulas share; the rest of the package is out of bounds.
CORE_MAY_IMPORT = ("torch", "mismatch_plugin.core", "mismatch_plugin.limits", "__future__", *sys.stdlib_module_names)
DOWNWARDS = ("config", "core", "log_probs", "parallel", "data", "sglang", "report", "hooks", "diagnose")
DOWNWARDS += ("bisect", "compare", "explain", "launch")
DEPENDENCY = {
    "megatron": "megatron-core",
    "yaml": "pyyaml",
    "yarl": "aiohttp",
    "pydantic_core": "pydantic",
    "PIL": "matplotlib",
    "google": "tensorboard",
    "triton": "torch",
}
"""Of modules whose dependency is called otherwise, or that come with it."""


def test_importing_takes_no_optional_package_and_starts_nothing():
    code = f"""
import sys, mismatch_plugin, torch, torch.distributed as dist
print([name for name in {OPTIONAL} if name in sys.modules])
print(dist.is_available() and dist.is_initialized(), torch.cuda.is_initialized())
print([name for name in mismatch_plugin.__all__ if not hasattr(mismatch_plugin, name)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["[]", "False False", "[]"], done.stderr


def test_every_module_imported_is_of_a_dependency():
    """Or of an extra for users, not of those for tests and developers. slime's modules are imported inside slime."""
    lines = [line for line in requires("mismatch-plugin") or [] if not re.search(r"extra == .(test|dev)", line)]
    declared = {re.split(r"[^\w-]", line)[0] for line in lines}
    known = {*sys.stdlib_module_names, "mismatch_plugin", "slime"}
    unknown = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, tree in TREES.items()
        for name in imports(tree)
        if (top := name.split(".")[0]) not in known and DEPENDENCY.get(top, top.replace("_", "-")) not in declared
    ]
    assert unknown == []


def test_core_imports_nothing_outside_itself():
    outside = {
        (path.name, name)
        for path, tree in TREES.items()
        for name in imports(tree)
        if path.is_relative_to(ROOT / "core") and not name.startswith(CORE_MAY_IMPORT)
    }
    assert outside == {("segments.py", "numpy"), ("packed.py", "numpy")}  # CPU tensors' own memory, and lists


def test_files_import_downwards_and_in_no_circle():
    """Imports for types and inside functions count."""
    names = {module_name(path): path for path in TREES}
    graph = {name: inside(TREES[path], names) for name, path in names.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError naming the circle
    upwards = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if (mine := rank(module)) is not None and (theirs := rank(other)) is not None and theirs > mine
    ]
    assert upwards == []


def rank(module: str) -> int | None:
    """Place of a module's folder in DOWNWARDS; None for the files at the top."""
    folder = module.split(".")[1] if "." in module else ""
    return DOWNWARDS.index(folder) if folder in DOWNWARDS else None


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def inside(tree: ast.AST, names: dict[str, Path]) -> set[str]:
    """Modules of the package that are imported anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
            found |= inner or {node.module}
    return found & names.keys()


def imports(node: ast.AST) -> list[str]:
    """Modules imported anywhere below `node`, those for the type checker alone left out."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "."]
    return [name for child in ast.iter_child_nodes(node) for name in imports(child)]
