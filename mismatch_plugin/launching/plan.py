"""What a host makes of a command line, and the checks that several hosts share."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.host_version import version_line
from mismatch_plugin.launching.command_line import Given, read_command_line
from mismatch_plugin.launching.starters import refuse_starter

MINIMUM_MEGATRON = (0, 16)
"""Oldest megatron-core whose finalize_model_grads and DDP.scale_gradients the hooks were run with."""


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    argv: the host's command line. added: what of it the launcher added. lines: the start-up block. install: called
    with the script's folder on sys.path, right before the script runs; it replaces functions of the host. settle: what
    a host's Namespace goes through once it is parsed, for hosts that have one. ours: False for a run without us. read:
    asked when the script has ended, whether what was installed was ever called.
    """

    argv: tuple[str, ...]
    added: tuple[str, ...]
    lines: tuple[str, ...]
    install: Callable[[], None]
    settle: Callable[[Namespace], None] = lambda namespace: None
    ours: bool = True
    read: Callable[[], bool] = lambda: True

    @classmethod
    def untouched(cls, host: str, given: Given) -> Plan:
        """The run as it is without the launcher."""
        line = f"none of the plugin's flags is given: {host} runs as it is"
        return cls(given.host_argv, (), (line,), lambda: None, ours=False)


@dataclass(frozen=True)
class Host:
    """One host. packages: whose import in the script tells it. flags: those near ours that it declares itself.

    plan(given, script): the run. Raises ValueError for what cannot mean anything there.
    """

    name: str
    packages: tuple[str, ...]
    flags: frozenset[str]
    plan: Callable[[Given, Path | None], Plan]


def make_plan(host: Host, argv: Sequence[str], script: Path | None) -> tuple[Given, Plan]:
    """Read a command line and plan the run; its lines end in what was warned about and the host's version.

    Raises ValueError. With the host named by hand the script is not questioned: that is the way to say that it trains.
    """
    with collected_notes() as notes:
        given = read_command_line(argv, host.flags)
        questioned = script if given.host is None else None
        if given.flags and questioned is not None:
            refuse_starter(host.name, questioned)
        plan = host.plan(given, script)
        if plan.added and questioned is not None:  # for settings in the host's YAML
            refuse_starter(host.name, questioned)
    new = tuple(f"note: {note}" for note in notes if not any(note in line for line in plan.lines))
    version = (version_line(host.name, [script.parent] if script is not None else []),) if plan.ours else ()
    return given, replace(plan, lines=plan.lines + new + version)


def megatron_core_version(folders: Sequence[Path] = ()) -> tuple[str, tuple[int, int]] | None:
    """(version, (major, minor)) of the megatron-core that the script will import, read and not imported.

    folders: looked at first, as sys.path will have them. None where there is none, or its version cannot be read.
    """
    for path in [*(folder / "megatron" / "core" / "package_info.py" for folder in folders), _installed_package_info()]:
        if path is not None and path.is_file():
            numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", path.read_text(encoding="utf-8"), re.M))
            if {"MAJOR", "MINOR"} <= numbers.keys():
                major, minor = int(numbers["MAJOR"]), int(numbers["MINOR"])
                return f"{major}.{minor}.{numbers.get('PATCH', 0)}", (major, minor)
    return None


def refuse_old_megatron(folders: Sequence[Path] = ()) -> None:
    """Raises ValueError where the megatron-core that will be imported is older than the hooks work with."""
    found = megatron_core_version(folders)
    if found is not None and found[1] < MINIMUM_MEGATRON:
        needed = ".".join(map(str, MINIMUM_MEGATRON))
        raise ValueError(
            f"megatron-core {found[0]} is too old: the correction ends each step inside finalize_model_grads as "
            f"megatron-core {needed} has it. Put Megatron {needed} or newer first on PYTHONPATH."
        )


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """MismatchWarnings raised inside, as lines for the block; others pass."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield notes
    for warning in found:
        if issubclass(warning.category, MismatchWarning):
            if str(warning.message) not in notes:
                notes.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def settled(parse: Callable[..., Namespace], settle: Callable[[Namespace], None]) -> Callable[..., Namespace]:
    """A host's argument parser that hands its Namespace to `settle` before it returns it.

    Where `settle` raises ValueError the program ends with that sentence, before training starts.
    """

    @wraps(parse)
    def parse_and_settle(*args: Any, **kwargs: Any) -> Namespace:
        namespace = parse(*args, **kwargs)
        try:
            settle(namespace)
        except ValueError as error:
            stop(str(error))
        return namespace

    return parse_and_settle


def start_block(host: str, plan: Plan) -> str:
    """The block that is printed before training starts."""
    lines = [f"mismatch_plugin on {host}:", *(f"  {line}" for line in plan.lines)]
    if plan.added:
        lines.append(f"  added to the command line: {' '.join(plan.added)}")
    return "\n".join(lines)


def stop(message: str) -> NoReturn:
    """End the program with one sentence, before training starts."""
    print(f"mismatch_plugin: {message}", file=sys.stderr)
    raise SystemExit(2)


def _installed_package_info() -> Path | None:
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name("package_info.py")
