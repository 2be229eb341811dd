"""Run a host's training script with the flags of the correction added to its command line, and nothing else changed.

```bash
python -m mismatch_plugin.launch train.py … --use-tis --tis-level sequence        # also behind `ray job submit --`
torchrun … -m mismatch_plugin.launch train_rl.py … --use-tis
python -m mismatch_plugin.launch -m verl.trainer.main_ppo … --use-rollout-log-probs --use-tis
```

It takes our flags off the line and refuses what is misspelt or contradictory, sets the host's own arguments for them,
prints one block that says what will run, and runs the script as `python SCRIPT` would. `--mismatch-explain-only` stops
after the block, and `--help` in place of a script lists our flags. The host is found by what the script imports, or
named by `--mismatch-host`.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mismatch_plugin.config.values import unknown
from mismatch_plugin.hooks.base import HOSTS, Given, Host, Plan, find_host
from mismatch_plugin.launch import patched
from mismatch_plugin.launch.command_line import HOST_FLAG, help_text, named_host, script_position
from mismatch_plugin.launch.plan import make_plan, start_block
from mismatch_plugin.launch.starters import imported_packages, no_python, refuse_starter

_COMMAND = "python -m mismatch_plugin.launch"
_LINE = f"{_COMMAND} [--mismatch-host NAME] TRAIN_SCRIPT ARGS…   (or -m MODULE ARGS…)"
_USAGE = f"usage: {_LINE}"
_DESCRIPTION = (
    "Runs a training script with the flags below taken off its command line, checked, and set in the host's own way; "
    "every other flag is the host's. The host is found by what the script imports, or named by --mismatch-host: "
    f"{', '.join(HOSTS)}."
)


@dataclass(frozen=True)
class Target:
    """What is to be run: a script, or a module (`-m`), whose source is `path` where it can be found."""

    name: str
    module: bool
    path: Path | None

    def run(self, argv: Sequence[str]) -> None:
        """Run it as `python SCRIPT ARGS` or `python -m MODULE ARGS` would, in this process."""
        sys.argv = [str(self.path or self.name) if self.module else self.name, *argv]
        if self.module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")


def prepare(argv: Sequence[str]) -> tuple[Target, Host, Given, Plan]:
    """Everything up to the start. Raises ValueError with one sentence for whatever cannot run."""
    target, rest = _target(argv)
    host = host_of(target, named_host(rest))
    return target, host, *make_plan(host, rest, target.path)


def host_of(target: Target, named: str | None = None) -> Host:
    """The host named, or else the one whose package the script imports. Raises ValueError where that is not one."""
    source = target.path.read_bytes() if target.path is not None else b""
    try:
        imported = imported_packages(source) | ({target.name} if target.module else set())
    except (SyntaxError, ValueError) as error:
        raise no_python(target.path, error) from None
    if named is not None:
        if named not in HOSTS:
            raise unknown(HOST_FLAG, named, HOSTS)
        return find_host(named)
    found = [host for host in map(find_host, HOSTS) if any(_is_in(name, host.packages) for name in imported)]
    if len(found) == 1:
        return found[0]
    if not found and target.path is not None:
        refuse_starter(None, target.path)  # naming the host would only hide it
    seen = f"imports {' and '.join(host.name for host in found)}" if found else "imports no host that is known"
    raise ValueError(f"{target.name} {seen}: say which it is, {HOST_FLAG} {'|'.join(HOSTS)}.")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exits 2 with one sentence where the command line cannot mean anything."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[script_position(arguments) :][:1] in (["-h"], ["--help"]):
            print(help_text(_LINE, _DESCRIPTION))
            return
        target, host, given, plan = prepare(arguments)
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank comes here
            print(start_block(host.name, plan), flush=True)
        if given.explain_only:
            return
        _put_first_on_path(target)
        patched.under_launcher()
        try:
            plan.install()
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{host.name} cannot be imported here ({error}): install it in this Python, or put its checkout first "
                f"on PYTHONPATH."
            ) from None
    except ValueError as error:
        more = f" (The plugin's own flags: {_COMMAND} --help)" if {"-h", "--help"}.intersection(arguments) else ""
        print(f"mismatch_plugin: {error}{more}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        target.run(plan.argv)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if not plan.read():
        print(
            f"mismatch_plugin: {target.name} has ended and never read {host.name}'s command line in this process, so "
            f"that the plugin's flags did nothing: put the launcher before the script that trains.",
            file=sys.stderr,
        )
        raise SystemExit(2)


def _target(argv: Sequence[str]) -> tuple[Target, list[str]]:
    """The script or module, and every other token."""
    at = script_position(argv)
    before, rest = list(argv[:at]), list(argv[at:])
    if not rest:
        raise ValueError(f"no training script is given. {_USAGE}")
    if rest[0] == "-m":
        if len(rest) < 2:
            raise ValueError(f"-m names no module. {_USAGE}")
        return Target(rest[1], True, _module_path(rest[1])), before + rest[2:]
    path = Path(rest[0])
    if not path.is_file():
        raise ValueError(f"training script {path} does not exist. {_USAGE}")
    return Target(rest[0], False, path.resolve()), before + rest[1:]


def _module_path(name: str) -> Path | None:
    """The source of a module, found without importing its package where that is possible."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    first, *others = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        raise ValueError(f"module {name} is not found: is its package installed, or on PYTHONPATH?")
    for folder in spec.submodule_search_locations or []:
        path = Path(folder, *others)
        for candidate in (path.with_suffix(".py"), path / "__main__.py"):
            if candidate.is_file():
                return candidate
    origin = Path(spec.origin) if spec.origin and not others else None
    return origin if origin is not None and origin.is_file() else None


def _put_first_on_path(target: Target) -> None:
    """`python SCRIPT` has the script's folder first on sys.path; here the current folder is there instead."""
    if target.module or target.path is None:
        return
    if sys.path[:1] in ([""], [os.getcwd()]):
        sys.path.pop(0)
    sys.path.insert(0, str(target.path.parent))


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


if __name__ == "__main__":
    main()
