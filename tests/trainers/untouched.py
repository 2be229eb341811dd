"""untouched.py MODULE…, in a trainer's environment: which functions of its modules are not those of its source.

Every `def` of a module, and of its classes, must still be bound to code of the module's own file. Prints a JSON list of
what is not, so that a shim that puts something else there is seen however it did it.
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
from pathlib import Path
from typing import Any


def replaced(python: Path, modules: Sequence[str], env: Mapping[str, str], cwd: Path) -> set[str]:
    """What an interpreter with the shim on its path says of these modules."""
    done = subprocess.run(
        [str(python), __file__, *modules], env=dict(env), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def changed(name: str) -> Iterator[str]:
    """`module.function` and `module.Class.method` whose code is another file's, or that are gone."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    file = os.path.realpath(module.__file__)
    with open(file, encoding="utf-8") as source:
        body = ast.parse(source.read()).body
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not _is_of(vars(module).get(node.name), file):
                yield f"{name}.{node.name}"
        elif isinstance(node, ast.ClassDef):
            kind = vars(module).get(node.name)
            kind = getattr(getattr(kind, "__ray_metadata__", None), "modified_class", kind)
            members: dict[str, Any] = {}
            for base in reversed(inspect.getmro(kind) if inspect.isclass(kind) else ()):
                members |= vars(base)
            methods = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from (f"{name}.{node.name}.{each}" for each in methods if not _is_of(members.get(each), file))


def _is_of(value: Any, file: str) -> bool:
    value = getattr(value, "__func__", value)
    value = getattr(value, "fget", None) or getattr(value, "func", None) or value
    value = inspect.unwrap(value)
    value = getattr(value, "_torchdynamo_orig_callable", value)
    if type(value).__name__ == "ScriptFunction":  # compiled from source by the decorator itself
        return True
    code = getattr(value, "__code__", None)
    return code is not None and os.path.realpath(code.co_filename) == file


if __name__ == "__main__":
    print(json.dumps([found for name in sys.argv[1:] for found in changed(name)]))
