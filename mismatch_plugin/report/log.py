"""A step's metrics as one line of JSON in `DIR/metrics.jsonl`, with the settings they belong to in `DIR/settings.json`.

Hosts call it where `report_dir` is set; `mismatch-plugin inspect DIR` reads it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.fields import read_file

METRICS, SETTINGS = "metrics.jsonl", "settings.json"


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON in which NaN and the infinities, which JSON lacks, are their names."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def write_whole(path: Path, text: str) -> None:
    """All of the file or nothing of it, so that a killed run never leaves half of one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value before, value now) of each leaf that differs between two JSON objects; dots join nested names."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in (*before, *(key for key in now if key not in before)):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, before, now


def refuse_other_settings(folder: str | Path, config: MismatchConfig) -> None:
    """Raise ValueError where the folder holds steps of a run with other settings. A host asks before it trains."""
    path, settings = Path(folder) / SETTINGS, _settings(config)
    if not path.exists() or path.read_text() == settings:
        return
    for name, before, now in differences(read_file(path), json.loads(settings)):
        if name != "report_dir":
            raise ValueError(
                f"{folder} holds steps of a run with {name} {before}, now {now}: give this run another folder."
            )


def _settings(config: MismatchConfig) -> str:
    return to_json(config.model_dump(mode="json"), indent=2) + "\n"


def write_step(folder: str | Path, config: MismatchConfig, metrics: Mapping[str, float]) -> None:
    """Append a step; one process of a run calls it. The first call writes the settings, too.

    A run that goes on with the same settings appends. Raises ValueError where the folder holds steps of other ones
    (`report_dir` may differ: the same folder has several names).
    """
    folder = Path(folder)
    refuse_other_settings(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SETTINGS).exists():
        write_whole(folder / SETTINGS, _settings(config))
    with (folder / METRICS).open("ab+") as lines:
        if lines.tell():  # appending: at the end
            lines.seek(-1, os.SEEK_END)
            if lines.read() != b"\n":
                lines.write(b"\n")  # a kill cut the last line
        lines.write((to_json(metrics) + "\n").encode())


def read_steps(path: str | Path) -> Iterator[dict[str, float]]:
    """The numbers of every step of a `metrics.jsonl` (or the folder that holds one), in order.

    Raises ValueError with file, line and reason; a line that was cut by a kill is left out.
    """
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path} is not there: give a metrics.jsonl, or the folder that --mismatch-report-dir named.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no metrics.jsonl: {error}.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step = json.loads(line)
            if not isinstance(step, dict):
                raise ValueError("it is no object")
            nested = step.get("metrics")  # where `compare` keeps them
            step = {**step, **nested} if isinstance(nested, dict) else step
            numbers = {name: float(value) for name, value in step.items() if _is_number(value)}
        except (ValueError, OverflowError, RecursionError) as error:
            if line.startswith("{") and not line.endswith("}"):  # its writer was killed
                continue
            raise ValueError(f"{path}, line {number} is no step: {error}.") from None
        yield numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, int | float) and not isinstance(value, bool)
