"""From a command line to a run that is ready to start."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mismatch_plugin.config import MismatchWarning
from mismatch_plugin.hooks.base import Given, Host, Plan
from mismatch_plugin.hooks.version import version_line
from mismatch_plugin.launch.command_line import read_command_line
from mismatch_plugin.report.log import validate_same_settings


def make_plan(host: Host, argv: Sequence[str], script: Path | None) -> tuple[Given, Plan]:
    """Read a command line and plan the run; its lines end in what was warned about, the host's version, and what is
    added to the command line.

    Raises: ValueError, also where the report folder holds steps of other settings.
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
            lines.append(f"! {warning.message}")
    if plan.config is not None:
        if plan.config.report_dir is not None:
            validate_same_settings(plan.config.report_dir, plan.config)
        lines.append(version_line(host.name, [script.parent] if script is not None else []))
    if plan.added:
        lines.append(f"added to the command line: {' '.join(plan.added)}")
    return given, replace(plan, lines=tuple(lines))
