"""Scalars in TensorBoard's event files: one file, or those of a folder, where a resumed run writes another one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.files import refuse_special

EVENTS = "tfevents"
"""In the name of each event file."""


@dataclass
class _File:
    """begun: when its writer opened it. values: (name, step) → value. purges: steps from which older files are void."""

    path: Path
    begun: float = 0.0
    values: dict[tuple[str, int], float] = field(default_factory=dict)
    purges: list[int] = field(default_factory=list)

    @property
    def steps(self) -> set[int]:
        return {step for _, step in self.values}


@dataclass(frozen=True)
class Events:
    """rows: by step, `step` among them. notes: what a reader must know. chosen: `run` chose among the files."""

    rows: list[dict[str, float]]
    notes: tuple[str, ...]
    chosen: bool


def read_events(path: Path, run: str | None = None) -> Events:
    """The scalars of ours in a file, or in the files of a folder. Of a step that was written twice the later counts.

    run: a part of the names of those files that are meant, where they hold several runs.
    Raises ValueError where a file is damaged, where files hold the same steps and none goes on after the other, and
    where tensorboard is not installed.
    """
    paths = sorted(path.glob(f"*{EVENTS}*")) if path.is_dir() else [path]
    files = sorted((_read(file) for file in paths), key=lambda file: (file.begun, file.path.name))
    if not any(file.begun for file in files):
        raise ValueError(f"{path} holds no events: its writer has written none yet.")
    values, notes, clash = _joined(files)
    chosen = [file for file in files if run is not None and run in file.path.name] if clash else []
    if chosen:
        values, notes, clash = _joined(chosen)
    if clash:
        raise ValueError(f"{path}: {clash}")
    rows: dict[int, dict[str, float]] = {}
    for (name, step), value in values.items():
        rows.setdefault(step, {})[name] = value
    return Events([{"step": float(step), **rows[step]} for step in sorted(rows)], tuple(notes), bool(chosen))


def _joined(files: Sequence[_File]) -> tuple[dict[tuple[str, int], float], list[str], str]:
    """The values of all files, notes, and why they are not of one run ("": they are)."""
    values: dict[tuple[str, int], float] = {}
    origin: dict[tuple[str, int], _File] = {}
    notes: list[str] = []
    for file in files:
        for first in file.purges:
            for key in [key for key in values if key[1] >= first]:
                del values[key], origin[key]
        twice: dict[str, set[int]] = {}
        for key in file.values.keys() & values.keys():
            twice.setdefault(origin[key].path.name, set()).add(key[1])
        for older in files:
            steps = twice.get(older.path.name)
            if not steps:
                continue
            pair = f"{older.path.name} and {file.path.name}"
            if not _goes_on(older.steps, file.steps, len(steps)):
                return (
                    {},
                    [],
                    (
                        f"{pair} both hold {len(steps)} steps, and neither goes on after the other. Two runs? "
                        "Give one of the files, or --run with a part of its name that the other has not."
                    ),
                )
            notes.append(f"{len(steps)} steps are in {pair}, as of a resumed run: those of the later file count")
        values |= file.values
        origin |= dict.fromkeys(file.values, file)
    return values, notes, ""


def _goes_on(older: set[int], later: set[int], twice: int) -> bool:
    """Whether a file may be that of a run that was resumed: it begins and ends later, and most of it is new."""
    return min(later) > min(older) and max(later) > max(older) and 2 * twice <= len(later)


def _read(path: Path) -> _File:
    try:
        importlib.import_module("tensorboard")
        from google.protobuf.message import DecodeError
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

        protocol: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
    except ImportError:
        raise ValueError(
            f"{path} holds TensorBoard events, and tensorboard is not installed: pip install 'mismatch-plugin[lab]'."
        ) from None
    refuse_special(path)
    file, count = _File(path), 0
    with path.open("rb"):  # an OSError of the usual kind where it cannot be read
        reader: Any = PyRecordReader_New(str(path))
    while True:
        try:
            reader.GetNext()
            event: Any = protocol.Event.FromString(reader.record())
        except errors.OutOfRangeError:
            return file
        except (errors.DataLossError, DecodeError) as error:
            if count and "truncated" in str(error):  # its writer was killed, or writes still
                return file
            raise ValueError(
                f"{path} is damaged after {count} events ({error}): copy it once more from where it was written."
            ) from None
        file.begun = event.wall_time if count == 0 else file.begun
        count += 1
        if event.HasField("session_log") and event.session_log.status == protocol.SessionLog.START:
            # A writer with purge_step says so from where it writes anew.
            file.purges.append(event.step)
            for key in [key for key in file.values if key[1] >= event.step]:
                del file.values[key]
        for value in event.summary.value:
            if PREFIX in value.tag and (number := _number(value)) is not None:
                file.values[value.tag, event.step] = number


def _number(value: Any) -> float | None:
    """A scalar of old or new writers; None for text, pictures, histograms and tensors."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    try:
        array = make_ndarray(value.tensor)
    except (TypeError, ValueError):
        return None
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "biuf" else None
