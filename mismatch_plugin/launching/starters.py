"""What a script's source tells before it runs: which packages it imports, and whether it only starts another program.

A script that only starts a trainer (miles's Python scripts, which submit a Ray job; a wrapper around subprocess) takes
the launcher's changes nowhere: they hold in its own process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
# Last part of a call that runs another program; the hosts' own helpers come last.
_STARTS = (
    *("system", "popen", "Popen", "check_call", "check_output", "getoutput", "submit_job"),
    *("create_subprocess_exec", "create_subprocess_shell", "execv", "execve", "execvp", "execvpe", "execl", "execlp"),
    *("posix_spawn", "spawnv", "spawnvp", "execute_train", "exec_command", "exec_command_cpu", "exec_command_gpu"),
)
_STARTS_OF_SUBPROCESS = ("run", "call")
_MOST_FILES = 100


def imported_packages(source: str) -> set[str]:
    """Dotted names of all modules that a script imports anywhere, and what it takes from them."""
    return _imports(ast.parse(source))


def refuse_starter(host: str, script: Path) -> None:
    """Raise ValueError where a script runs other programs and never imports what trains with the host.

    The script and the local modules that it imports are read; none of them is run.
    """
    start = None
    for path, tree in _local_modules(script):
        if any(_is_below(name, _TRAINS[host]) for name in _imports(tree)):
            return
        found = sorted(_starts(tree), key=lambda call: "train" not in call[0])  # execute_train says more than a pkill
        if start is None and found:
            start = (path, *found[0])
    if start is None:
        return
    path, call, line = start
    there = f"python -m mismatch_plugin.launch {_TRAINERS.get(host, 'train.py')} …"
    ways = [f"put the launcher where the trainer itself is started (`{there}`)"]
    if host in _PATCHED:
        ways.append(
            f"or patch the checkout once (`mismatch-plugin patch apply --host {host} --root DIR`) and write the flags "
            f"among the arguments that {script.name} hands on{_handed_on(script)}"
        )
    raise ValueError(
        f"{script.name} trains nothing itself, it starts another program ({call}, {path.name} line {line}), where the "
        f"plugin's flags would not arrive: {', '.join(ways)}."
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
    found = "extra_args" in script.read_text(encoding="utf-8", errors="replace")
    return ' (--extra-args "--use-tis …")' if found else ""


def _local_modules(script: Path) -> Iterator[tuple[Path, ast.Module]]:
    """The script and, breadth first, the modules next to it or in the current folder that it imports."""
    roots = list(dict.fromkeys([script.resolve().parent, Path.cwd()]))
    waiting, seen = [script.resolve()], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError) as error:
            if path == script.resolve():
                raise no_python(script, error) from None
            continue  # the interpreter says it when it comes to it
        yield path, tree
        packages = {name.split(".")[0] for names in _TRAINS.values() for name in names}
        for name in sorted(_imports(tree)):
            if name.split(".")[0] not in packages:  # what a host's own helpers import says nothing about the script
                files = (root.joinpath(*name.split(".")).with_suffix(".py") for root in roots)
                waiting += [file for file in files if file.is_file()]


def _imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _starts(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(call as written, line) of everything that runs another program."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        written = ast.unparse(node.func)
        *before, last = written.split(".")
        if last in _STARTS or (last in _STARTS_OF_SUBPROCESS and before[-1:] == ["subprocess"]):
            yield written, node.lineno


def _is_below(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
