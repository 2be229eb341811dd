"""A step's metrics as one line of JSON in `DIR/metrics.jsonl`, with the settings they belong to in `DIR/settings.json`.

Hosts call it where `report_dir` is set; `mismatch-plugin inspect DIR` reads it.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, SupportsFloat

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.documents import read_mapping
from mismatch_plugin.core.health import check_health
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.files import lock_file, read_lines, read_text, write_whole

logger = logging.getLogger("mismatch_plugin")

METRICS, SETTINGS, LOCK = "metrics.jsonl", "settings.json", ".lock"
_HELD: dict[Path, BinaryIO] = {}
"""Folder → its lock, which the kernel takes back when this process ends. A fork belongs to the same run."""
_LAST: dict[Path, int] = {}
"""File → the last step in it, as this process knows it."""


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


def validate_same_settings(folder: str | Path, config: MismatchConfig, holds: bool = False) -> None:
    """Raise ValueError where the folder holds steps of a run with other settings, or another process writes to it.

    A host asks before it trains. holds: this process will write, and others are refused until it ends. Only the rank
    that writes may say so, and then no other rank of the run may ask any more.
    """
    path, settings = Path(folder) / SETTINGS, _settings(config)
    same = not path.exists() or read_text(path) == settings
    for name, before, now in () if same else differences(read_mapping(path), json.loads(settings)):
        if name != "report_dir":
            raise ValueError(
                f"{folder} holds steps of a run with {name} {before}, now {now}: give this run another folder."
            )
    if (held := Path(folder).resolve()) in _HELD:
        return
    try:
        lock = lock_file(held / LOCK, shared=not holds)
    except BlockingIOError:
        raise ValueError(
            f"another run is writing to {held}: give this run another folder, or end that one first."
        ) from None
    if holds and lock is not None:
        _HELD[held] = lock


def _settings(config: MismatchConfig) -> str:
    return to_json(config.model_dump(mode="json"), indent=2) + "\n"


def write_step(folder: str | Path, config: MismatchConfig, metrics: Mapping[str, float]) -> None:
    """Append a step. The first call writes the settings, too; from then on the folder is this process's until it ends.

    metrics: numbers by name. Without `step` among them the step is one more than the last in the file, from 1. A run
    that goes on with the same settings appends.
    Raises ValueError where the folder holds steps of other settings (`report_dir` may differ: the same folder has
    several names), another process writes to it, or a metric is not a number; OSError where it cannot be written.
    """
    folder = Path(folder)
    validate_same_settings(folder, config, holds=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / SETTINGS).exists():
        write_whole(folder / SETTINGS, _settings(config))
    path = folder.resolve() / METRICS
    if "step" not in metrics:
        last = _LAST[path] if path in _LAST and path.exists() else _last_step(path)
        metrics = {"step": last + 1, **metrics}
    try:
        line = to_json(metrics)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a metric is not a number: {error}. Give float(value) where it holds one.") from None
    with path.open("ab+", buffering=0) as lines:  # a line is one write: no reader sees half of it
        if lines.tell():  # appending: at the end
            lines.seek(-1, os.SEEK_END)
            line = line if lines.read() == b"\n" else f"\n{line}"  # a kill cut the last line
        lines.write(f"{line}\n".encode())
    _LAST[path] = int(metrics["step"])


def _last_step(path: Path) -> int:
    """The step of the last whole line; of lines without one, as in older files, how many they are."""
    last = 0
    for record in read_records(path):
        if record is not None:
            last = int(record.get("step", last + 1))
    return last


def log_step(folder: str | Path, config: MismatchConfig, metrics: Mapping[str, float]) -> None:
    """`write_step` for a hook, which never stops training: what cannot be written is a warning, once a folder.

    A thread writes; it is waited for at most `WAIT_S`, and not at all while an older step waits for a disk that hangs.
    A host asks `validate_same_settings` before it trains.
    """
    _WRITER.write((Path(folder), config, dict(metrics)))


def report_step(config: MismatchConfig, step: int, metrics: Mapping[str, float]) -> None:
    """What follows a host's optimizer step on one rank: the health check's warnings, and the report folder's line."""
    for warning in check_health(metrics, config):
        logger.warning("step %d: %s", step, warning)
    if config.report_dir is not None:
        log_step(config.report_dir, config, {"step": step, **metrics})


def report_logged(config: MismatchConfig, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """A host's logging function, own(metrics, step, …), and `report_step` where these are a training step's: others,
    such as a validation, hold none of our metrics. Next to ours a line has the host's numbers."""
    own(*args, **kwargs)
    metrics, step = [*args, *(kwargs[name] for name in ("metrics", "data", "step") if name in kwargs)][:2]
    numbers = numbers_in(metrics)
    if any(name.startswith(PREFIX) for name in numbers):
        report_step(config, int(step), numbers)


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a host's metrics, ours under the names that begin with `rollout_corr/`; the rest is left out."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        _, prefix, rest = str(name).rpartition(PREFIX)
        if isinstance(value, SupportsFloat) and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0:
            found[prefix + rest if prefix else str(name)] = float(value)
    return found


_warned: set[str] = set()


def _warn(folder: Path, reason: object) -> None:
    if str(folder) not in _warned:
        _warned.add(str(folder))
        logger.warning("metrics are not written, training goes on (said once for %s): %s", folder, reason)


class _Writer:
    """A thread of this process that writes steps in order."""

    def __init__(self) -> None:
        self._process = -1

    def write(self, step: tuple[Path, MismatchConfig, dict[str, float]]) -> None:
        """Hand a step over, and wait for its line, unless another waits for its own: that disk hangs."""
        if self._process != os.getpid():  # at first, and after a fork, which takes no thread along
            self._process, self._steps = os.getpid(), queue.Queue[Any]()
            threading.Thread(target=self._run, args=(self._steps,), name="mismatch_plugin metrics", daemon=True).start()
            atexit.register(self._end, self._steps)
        waits, written = self._steps.unfinished_tasks > 0, threading.Event()
        self._steps.put((written, step))
        if not waits and not written.wait(WAIT_S):
            _warn(step[0], "its disk hangs; steps wait until it answers.")

    @staticmethod
    def _run(steps: queue.Queue[Any]) -> None:
        while True:
            written, step = steps.get()
            try:
                write_step(*step)
            except Exception as error:  # whatever it is: the thread writes the next step, and training goes on
                _warn(step[0], error)
            steps.task_done()
            written.set()

    @staticmethod
    def _end(steps: queue.Queue[Any]) -> None:
        end = time.monotonic() + END_S
        while steps.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.05)


WAIT_S = 1.0
"""Seconds that a step waits for its line to be written."""
END_S = 10.0
"""Seconds that the end of a process waits for what is not written yet."""
_WRITER = _Writer()


def record_in(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object of one line, None where there is none: a kill cut the line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """The JSON object of every line that is not blank; None for a damaged one. Nothing where no file can be read."""
    try:
        for _, line in read_lines(path, errors="replace"):
            if line.strip():
                yield record_in(line)
    except OSError:
        return
    except ValueError:  # no regular file, or a line without end
        yield None


def read_steps(path: str | Path) -> Iterator[dict[str, float]]:
    """The numbers of every step of a `metrics.jsonl` (or the folder that holds one), in order.

    Raises ValueError with file, line and reason; a line that was cut by a kill is left out.
    """
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path} is not there: give a metrics.jsonl, or the folder that --mismatch-report-dir named.")
    for number, line in read_lines(path, errors="replace"):
        step = record_in(line)
        if step is not None:
            step |= nested if isinstance(nested := step.get("metrics"), dict) else {}  # where `compare` keeps them
            numbers = {name: number_in(value) for name, value in step.items()}
            yield {name: value for name, value in numbers.items() if value is not None}
        elif line.strip() and not line.startswith("{"):  # else its writer was killed
            raise ValueError(f"{path}, line {number} is no step: it is no JSON object.")


def number_in(value: Any) -> float | None:
    """A number, or a text that spells one or nan or an infinity; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
