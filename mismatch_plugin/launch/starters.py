"""What a script's source tells before it runs: which packages it imports, and whether it only starts a trainer.

A script that only starts a trainer (miles's Python scripts, which submit a Ray job; a wrapper around subprocess) takes
the launcher's changes nowhere: they hold in its own process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mismatch_plugin.launch.programs import Source, trainer_starts

# Host → modules of which a script that trains imports one.
_TRAINS = {
    "slime": ("slime.utils.arguments",),
    "miles": ("miles.utils.arguments",),
    "megatron-lm": ("megatron.training", "megatron.rl"),
    "verl": ("verl.trainer", "verl.workers", "verl.experimental"),
    "nemo-rl": ("nemo_rl.algorithms",),
}
_TRAINERS = {"megatron-lm": "train_rl.py", "verl": "-m verl.trainer.main_ppo", "nemo-rl": "run_grpo.py"}
# Hosts whose parser takes our flags in whatever process it runs, once it is patched.
_PATCHED = ("slime", "miles")
_MOST_FILES = 100


def imported_packages(source: bytes) -> set[str]:
    """Dotted names of all modules that a script imports anywhere, and what it takes from them.

    source: the file's bytes, so that a byte order mark and an encoding declared are read as Python reads them.
    """
    return _imports(ast.parse(source))


def refuse_starter(host: str | None, script: Path) -> None:
    """Raise ValueError where a script starts a trainer in another program and never imports what trains with the host.

    host None: any. The script and the local modules that it imports are read; none of them is run. A program that does
    not look like a trainer is no reason, nor is a command that the source does not tell: whether the flags were read
    is asked again after the run.
    """
    trains = _TRAINS[host] if host is not None else tuple(name for names in _TRAINS.values() for name in names)
    paths: dict[str, Path] = {}
    sources: list[Source] = []
    for name, path, tree in _local_modules(script):
        if any(_is_below(imported, trains) for imported in _imports(tree)):
            return
        paths[name] = path
        sources.append(Source(name, tree))
    starts = sorted(trainer_starts(sources), key=lambda start: "train" not in start[1])  # execute_train says most
    if not starts:
        return
    source, call, line = starts[0]
    there = f"python -m mismatch_plugin.launch {_TRAINERS.get(host or '', 'train.py')} …"
    ways = [f"put the launcher where the trainer itself is started (`{there}`)"]
    if host in _PATCHED:
        ways.append(
            f"or patch the checkout once (`mismatch-plugin patch apply --host {host} --root DIR`) and write the flags "
            f"among the arguments that {script.name} hands on{_handed_on(script)}"
        )
    ways.append(f"or, if {script.name} does train in its own process, say so with --mismatch-host {host or 'HOST'}")
    raise ValueError(
        f"{script.name} trains nothing itself, it starts another program ({call}, {paths[source.name].name} line "
        f"{line}), where the plugin's flags would not arrive: {', '.join(ways)}."
    )


def no_python(path: Path | None, error: Exception) -> ValueError:
    """The error for a target that cannot be parsed: a shell script, most often."""
    reason = f"{error.msg}, line {error.lineno}" if isinstance(error, SyntaxError) else str(error)
    return ValueError(
        f"{path} is no Python script ({reason}). If it starts one, put the launcher inside it, before that one: "
        f"`python -m mismatch_plugin.launch train.py …`."
    )


def _handed_on(script: Path) -> str:
    """miles's scripts have a parameter for it."""
    found = b"extra_args" in script.read_bytes()
    return ' (--extra-args "--use-tis …")' if found else ""


def _local_modules(script: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """(name, path, tree) of the script and, breadth first, of the modules next to it or in the current folder that it
    imports."""
    roots = list(dict.fromkeys([script.resolve().parent, Path.cwd()]))
    packages = {name.split(".")[0] for names in _TRAINS.values() for name in names}
    waiting, seen = [("__main__", script.resolve())], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        module, path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            if path == script.resolve():
                raise no_python(script, error) from None
            continue  # the interpreter says it when it comes to it
        yield module, path, tree
        for name in sorted(_imports(tree)):
            if name.split(".")[0] not in packages:  # what a host's own helpers import says nothing about the script
                files = (root.joinpath(*name.split(".")).with_suffix(".py") for root in roots)
                waiting += [(name, file) for file in files if file.is_file()]


def _imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _is_below(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
