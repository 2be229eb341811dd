"""What PATH of `inspect` is: the metrics that a run wrote, or the samples themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.files import read_lines
from mismatch_plugin.inspect.events import EVENTS
from mismatch_plugin.report.log import METRICS

Kind = Literal["metrics", "dump"]
_LOOKED_AT = 20
"""Lines of a JSONL file: a tracker's export may begin with steps that hold nothing of ours."""
_SAMPLE_KEYS = {"response_ids", "rollout_log_probs", "prompt_ids", "tokens", "completion_ids", "response", "responses"}


def kind_of(path: Path) -> Kind:
    """By name, and for JSONL by what its first lines hold. What cannot be told is a dump: its reader says what is wrong.

    Raises ValueError or OSError where the file cannot be read.
    """
    if path.is_dir():
        return "metrics" if (path / METRICS).exists() or any(path.rglob(f"*{EVENTS}*")) else "dump"
    if EVENTS in path.name or path.name == METRICS or path.suffix.lower() in (".csv", ".tsv"):
        return "metrics"
    if path.suffix.lower() not in (".jsonl", ".json"):
        return "dump"
    for number, line in read_lines(path, errors="replace"):
        if _SAMPLE_KEYS & (keys := _keys(line)):
            return "dump"
        if any(PREFIX in key for key in keys):
            return "metrics"
        if number >= _LOOKED_AT:
            break
    return "dump"


def _keys(line: str) -> set[str]:
    """Of the object in a line, and of the metrics nested in it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return set()
    if not isinstance(value, dict):
        return set()
    nested = value.get("metrics")
    return {*value, *(nested if isinstance(nested, dict) else ())}
