"""From a command line to a run that is ready to start, and the block that says what will run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.hooks.base import Given, Host, Plan
from mismatch_plugin.hooks.version import version_line
from mismatch_plugin.launch.command_line import read_command_line
from mismatch_plugin.launch.starters import refuse_starter


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


def start_block(host: str, plan: Plan) -> str:
    """The block that is printed before training starts."""
    lines = [f"mismatch_plugin on {host}:", *(f"  {line}" for line in plan.lines)]
    if plan.added:
        lines.append(f"  added to the command line: {' '.join(plan.added)}")
    return "\n".join(lines)
