"""A step's metrics as one line of JSON in `DIR/metrics.jsonl`, with the settings they belong to in `DIR/settings.json`.

Hosts call it where `report_dir` is set; `mismatch-plugin inspect DIR` reads it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.documents import read_mapping
from mismatch_plugin.core.health import check_health
from mismatch_plugin.files import read_lines, read_text, write_whole

logger = logging.getLogger("mismatch_plugin")

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
    try:
        if not path.exists() or read_text(path) == settings:
            return
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    for name, before, now in differences(read_mapping(path), json.loads(settings)):
        if name != "report_dir":
            raise ValueError(
                f"{folder} holds steps of a run with {name} {before}, now {now}: give this run another folder."
            )


def _settings(config: MismatchConfig) -> str:
    return to_json(config.model_dump(mode="json"), indent=2) + "\n"


def write_step(folder: str | Path, config: MismatchConfig, metrics: Mapping[str, float]) -> None:
    """Append a step; one process of a run calls it. The first call writes the settings, too.

    metrics: numbers by name. Without `step` among them the step is one more than the last in the file, from 1. A run
    that goes on with the same settings appends.
    Raises ValueError where the folder holds steps of other settings (`report_dir` may differ: the same folder has
    several names) or a metric is not a number; OSError where the folder cannot be written.
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
        if "step" not in metrics:
            lines.flush()
            metrics = {"step": _last_step(lines) + 1, **metrics}
        lines.write((_line(metrics) + "\n").encode())


def log_step(folder: str | Path, config: MismatchConfig, metrics: Mapping[str, float]) -> None:
    """`write_step` for a hook, which never stops training: what cannot be written is a warning, once a folder.

    A host asks `refuse_other_settings` before it trains.
    """
    try:
        write_step(folder, config, metrics)
    except (OSError, ValueError) as error:
        if str(folder) not in _warned:
            _warned.add(str(folder))
            logger.warning("metrics are not written, training goes on (said once for %s): %s", folder, error)


def report_step(config: MismatchConfig, step: int, metrics: Mapping[str, float], writes: bool = True) -> None:
    """What follows an optimizer step on one rank of a host: the health check's warnings, and the report folder's line.

    writes: whether this process writes files; asked by hosts with several replicas.
    """
    for warning in check_health(metrics, config):
        logger.warning("step %d: %s", step, warning)
    if config.report_dir is not None and writes:
        log_step(config.report_dir, config, {"step": step, **metrics})


_warned: set[str] = set()


def _line(metrics: Mapping[str, Any]) -> str:
    try:
        return to_json(metrics)
    except (TypeError, ValueError):
        plain = (bool, int, float, str, type(None), Mapping, list, tuple)
        name = next((name for name, value in metrics.items() if not isinstance(value, plain)), None)
        kind = "the metrics hold what is" if name is None else f"metric {name} is a {type(metrics[name]).__name__},"
        raise ValueError(f"{kind} not a number: give float(value) where it holds one.") from None


def _last_step(lines: BinaryIO) -> int:
    """The step of the last whole line; where it has none, as in older files, the number of lines. 0 for no lines."""
    end, tail = lines.seek(0, os.SEEK_END), b""
    while end > 0:
        start = max(0, end - _BLOCK)
        lines.seek(start)
        first, *whole = (lines.read(end - start) + tail).split(b"\n")
        for line in reversed(whole if start else [first, *whole]):
            if (record := record_in(line)) is None:
                continue
            step = record.get("step")
            if isinstance(step, int | float) and math.isfinite(step):
                return int(step)
            lines.seek(0)
            return sum(record_in(entry) is not None for entry in lines)
        tail, end = first, start
    return 0


_BLOCK = 1 << 16


def record_in(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object of one line, None where there is none: a kill cut the line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_steps(path: str | Path) -> Iterator[dict[str, float]]:
    """The numbers of every step of a `metrics.jsonl` (or the folder that holds one), in order.

    Raises ValueError with file, line and reason; a line that was cut by a kill is left out.
    """
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path} is not there: give a metrics.jsonl, or the folder that --mismatch-report-dir named.")
    try:
        for number, line in read_lines(path):
            if line.strip() and (step := _numbers(path, number, line)) is not None:
                yield step
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no metrics.jsonl: {error}.") from None


def _numbers(path: Path, number: int, line: str) -> dict[str, float] | None:
    """The numbers of one line, None for one that a kill cut."""
    try:
        step = json.loads(line)
        if not isinstance(step, dict):
            raise ValueError("it is no object")
        nested = step.get("metrics")  # where `compare` keeps them
        step = {**step, **nested} if isinstance(nested, dict) else step
        numbers = {name: number_in(value) for name, value in step.items()}
        return {name: value for name, value in numbers.items() if value is not None}
    except (ValueError, OverflowError, RecursionError) as error:
        if line.startswith("{") and not line.endswith("}"):  # its writer was killed
            return None
        raise ValueError(f"{path}, line {number} is no step: {error}.") from None


def number_in(value: Any) -> float | None:
    """A number, or a text that spells one or nan or an infinity; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        return None
    return float(value)


_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?|\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?)", re.IGNORECASE)
