"""untouched.py MODULE…, in a trainer's environment: which functions of its modules are not those of its source.

Every `def` of a module, and of its classes, must still be bound to code of the module's own file, with no wrapper
around it but its own decorators', and every imported name to what it was imported from. Prints a JSON list of what is
not, so that a shim that puts something else there is seen however it did it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

Def = ast.FunctionDef | ast.AsyncFunctionDef
OURS = tuple(os.path.realpath(Path(__file__).parents[2] / name) + os.sep for name in ("tests", "mismatch_plugin"))


def replaced(python: Path, modules: Sequence[str], env: Mapping[str, str], cwd: Path) -> set[str]:
    """What an interpreter with the shim on its path says of these modules."""
    done = subprocess.run(
        [str(python), __file__, *modules], env=dict(env), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def changed(name: str) -> Iterator[str]:
    """`module.function` and `module.Class.method` whose code is another file's, or that are gone; `module.imported`."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    file = os.path.realpath(module.__file__)
    with open(file, encoding="utf-8") as source:
        body = ast.parse(source.read()).body
    yield from (f"{name}.{each}" for each in _rebound(module, body))
    for node in body:
        if isinstance(node, Def):
            if not _is_of(vars(module).get(node.name), file, bool(node.decorator_list)):
                yield f"{name}.{node.name}"
        elif isinstance(node, ast.ClassDef):
            kind = vars(module).get(node.name)
            kind = getattr(getattr(kind, "__ray_metadata__", None), "modified_class", kind)
            members: dict[str, Any] = {}
            for base in reversed(inspect.getmro(kind) if inspect.isclass(kind) else ()):
                members |= vars(base)
            for inner in node.body:  # Ray's decorator of a class wraps its methods
                decorated = isinstance(inner, Def) and bool(inner.decorator_list or node.decorator_list)
                if isinstance(inner, Def) and not _is_of(members.get(inner.name), file, decorated):
                    yield f"{name}.{node.name}.{inner.name}"


def _is_of(value: Any, file: str, decorated: bool) -> bool:
    value = getattr(value, "__func__", value)
    if isinstance(value, property | cached_property):
        value = value.fget if isinstance(value, property) else value.func
    while decorated:
        inner = getattr(value, "__wrapped__", None) or getattr(value, "_torchdynamo_orig_callable", None)
        if inner is None or _file(value).startswith(OURS):
            break
        value = inner
    compiled = type(value).__name__ == "ScriptFunction"  # from source, by the decorator itself
    return compiled or (_file(value) == file and not (hasattr(value, "__wrapped__") and not decorated))


def _file(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else os.path.realpath(code.co_filename)


def _rebound(module: ModuleType, body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that the module imports, and binds in no other way, but that are no longer what it imported."""
    imported, other = dict[str, list[Any]](), set[str]()
    for node in _statements(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                origin = sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0])
                imported.setdefault(alias.asname or alias.name.partition(".")[0], []).append(origin)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), module.__package__)
            for alias in node.names:
                found = getattr(sys.modules.get(origin), alias.name, sys.modules.get(f"{origin}.{alias.name}"))
                imported.setdefault(alias.asname or alias.name, []).append(found)
        elif isinstance(node, Def | ast.ClassDef):
            other.add(node.name)
        else:
            other |= {
                part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    for name, origins in imported.items():
        known = [origin for origin in origins if callable(origin) or inspect.ismodule(origin)]
        if (
            name not in other
            and name in vars(module)
            and known
            and not any(vars(module)[name] is each for each in known)
        ):
            yield name


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module that stand outside of functions and classes, one by one."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
        else:
            yield node


if __name__ == "__main__":
    print(json.dumps([found for name in sys.argv[1:] for found in changed(name)]))
