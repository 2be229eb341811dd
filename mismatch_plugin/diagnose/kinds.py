"""What PATH of `inspect` is: the metrics that a run wrote, or the samples themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.events import EVENTS
from mismatch_plugin.files import read_lines
from mismatch_plugin.report.log import METRICS

Kind = Literal["metrics", "dump"]
_LOOKED_AT = 20
"""Lines of a JSONL file: a tracker's export may begin with steps that hold nothing of ours."""


def kind_of(path: Path) -> Kind:
    """By name, and for JSONL by what its first lines hold: samples, else steps of a tracker. Other files are dumps.

    Raises ValueError or OSError where the file cannot be read.
    """
    if path.is_dir():
        return "metrics" if (path / METRICS).exists() or any(path.rglob(f"*{EVENTS}*")) else "dump"
    if EVENTS in path.name or path.name == METRICS or path.suffix.lower() in (".csv", ".tsv"):
        return "metrics"
    if path.suffix.lower() not in (".jsonl", ".json"):
        return "dump"
    numbers = False
    for number, line in read_lines(path, errors="replace"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            nested = value.get("metrics")
            if any(PREFIX in key for key in (*value, *(nested if isinstance(nested, dict) else ()))):
                return "metrics"
            if any(isinstance(entry, list) for entry in value.values()):
                return "dump"
            numbers |= any(isinstance(entry, int | float) for entry in value.values())
        if number >= _LOOKED_AT:
            break
    return "metrics" if numbers else "dump"
