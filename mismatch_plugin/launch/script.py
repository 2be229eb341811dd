"""What is to be run: a script or a module, where its source is, and which packages it imports."""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from mismatch_plugin.hooks.base import Host
from mismatch_plugin.patching import manifest


@dataclass(frozen=True)
class Target:
    """A script, or a module (`-m`), whose source is `path` where it can be found. source: what runs in its place."""

    name: str
    module: bool
    path: Path | None
    source: str | None = None

    @property
    def script(self) -> str:
        """Its name in sentences, without folders."""
        return os.path.basename(self.name)

    @classmethod
    def of(cls, words: Sequence[str], usage: str) -> tuple[Target, list[str]]:
        """What a command line names first, and the rest of the line. Raises ValueError where that does not exist."""
        if not words:
            raise ValueError(f"no training script is given. {usage}")
        if words[0] == "-m":
            if len(words) < 2:
                raise ValueError(f"-m names no module. {usage}")
            return cls(words[1], True, _module_path(words[1])), list(words[2:])
        path = Path(words[0])
        if not path.is_file():
            raise ValueError(f"training script {path} does not exist. {usage}")
        return cls(words[0], False, path.resolve()), list(words[1:])

    def imports(self) -> set[str]:
        """Dotted names of all modules that it imports anywhere, of what it takes from them, and its own if a module.

        The source is parsed and not run. Raises: ValueError for what is no Python: a shell script, most often.
        """
        found = {self.name} if self.module else set[str]()
        try:
            tree = ast.parse(self.path.read_bytes() if self.path is not None else b"")
        except (SyntaxError, ValueError) as error:
            raise ValueError(
                f"{self.path} is no Python script ({error}). If it starts one, put the launcher inside it, before "
                f"that one: `python -m mismatch_plugin.launch train.py …`."
            ) from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found

    def patched(self, host: Host) -> Target:
        """With the host's patch of its training script made in memory, where it has one and the script has it not.

        Raises: ValueError for a script that the patch is not for.
        """
        patch = next((patch for patch in manifest() if (patch.host, patch.file) == (host.name, host.trainer)), None)
        text = "" if self.path is None else self.path.read_text(encoding="utf-8")
        if patch is None or "mismatch_plugin" in text:
            return self
        if (source := patch.changed(text)) is None:
            raise ValueError(
                f"{self.path or self.name} is not the {host.trainer} that the plugin's patch is for, of "
                f"{host.repository} at {(host.commit or '')[:10]}: use that one, or make the edits of "
                f"patches/manifest.json in it by hand."
            )
        return replace(self, source=source)

    def put_first_on_path(self) -> None:
        """`python SCRIPT` has the script's folder first on sys.path; here the current folder is there instead."""
        if not self.module and self.path is not None:
            if sys.path[:1] in ([""], [os.getcwd()]):
                sys.path.pop(0)
            sys.path.insert(0, str(self.path.parent))

    def run(self, argv: Sequence[str]) -> None:
        """Run it as `python SCRIPT ARGS` or `python -m MODULE ARGS` would, in this process."""
        sys.argv = [str(self.path or self.name) if self.module else self.name, *argv]
        if self.source is not None:
            main = sys.modules["__main__"] = ModuleType("__main__")
            main.__file__ = sys.argv[0]
            exec(compile(self.source, str(self.path), "exec"), vars(main))
        elif self.module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")


def is_below(name: str, packages: Sequence[str]) -> bool:
    """Whether a module is one of the packages, or inside one."""
    return f"{name}.".startswith(tuple(f"{package}." for package in packages))


def _module_path(name: str) -> Path | None:
    """The source of a module, found without importing its package where that is possible."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    first, *others = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        raise ValueError(f"module {name} is not found: is its package installed, or on PYTHONPATH?")
    inside = [Path(folder, *others) for folder in spec.submodule_search_locations or ()]
    found = [file for path in inside for file in (path.with_suffix(".py"), path / "__main__.py")]
    if not others and spec.origin:
        found.append(Path(spec.origin))
    return next((file for file in found if file.is_file()), None)
