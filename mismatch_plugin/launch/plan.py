"""From a command line to a run that is ready to start, and the block that says what will run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.hooks.base import Given, Host, Plan
from mismatch_plugin.hooks.version import version_line
from mismatch_plugin.launch.command_line import read_command_line


def make_plan(host: Host, argv: Sequence[str], script: Path | None) -> tuple[Given, Plan]:
    """Read a command line and plan the run; its lines end in what was warned about and the host's version.

    Raises: ValueError.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        given = read_command_line(argv, host.flags)
        plan = host.plan(given, script)
    lines = list(plan.lines)
    for warning in found:
        if not issubclass(warning.category, MismatchWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif not any(str(warning.message) in line for line in lines):
            lines.append(f"note: {warning.message}")
    if plan.ours:
        lines.append(version_line(host.name, [script.parent] if script is not None else []))
    return given, replace(plan, lines=tuple(lines))


def start_block(host: str, plan: Plan) -> str:
    """The block that is printed before training starts."""
    lines = [f"mismatch_plugin on {host}:", *(f"  {line}" for line in plan.lines)]
    if plan.added:
        lines.append(f"  added to the command line: {' '.join(plan.added)}")
    return "\n".join(lines)
