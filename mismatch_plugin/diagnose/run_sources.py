"""What `inspect` reads: a `metrics.jsonl`, exports of W&B (CSV, JSONL) and TensorBoard events, under one set of names.

A tracker's names may have anything before `rollout_corr/` (`train/`, or the run's name in a CSV of W&B's charts).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.events import EVENTS, Events, read_events
from mismatch_plugin.files import read_text, refuse_special
from mismatch_plugin.report.log import METRICS, number_in, read_steps

_STEP_NAMES = ("step", "global_step", "iteration")
_SPREAD = ("__MIN", "__MAX")
"""W&B's charts export the range of each point next to its value."""
_ACCEPTED = "a metrics.jsonl, a CSV or JSONL export of W&B, TensorBoard events, or a folder that holds one of them"


@dataclass(frozen=True)
class Source:
    """rows: of each step the metrics that begin with `rollout_corr/`. numbers: the steps. path: what was read.

    notes: what its reader must know. others: of each step the numbers that are not ours, of the host or the tracker.
    """

    rows: tuple[dict[str, float], ...]
    numbers: tuple[float, ...]
    path: Path
    notes: tuple[str, ...] = ()
    others: tuple[dict[str, float], ...] = ()


def read_source(path: str | Path, run: str | None = None) -> Source:
    """Read a run's metrics. run: text that tells one run or family from others in what stands before `rollout_corr/`,
    or one of TensorBoard's files from others in their names.

    Raises ValueError naming the file where it cannot be read, holds several runs, or nothing of ours.
    """
    path = Path(path)
    try:
        path = _resolve(path)
        read = _rows(path, run)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. Give {_ACCEPTED}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}. Give {_ACCEPTED}.") from None
    rows = read.rows
    names = _names(path, rows, None if read.chosen else run)
    found, numbers, others = [], [], []
    steps = _step_name(rows, names)
    for index, row in enumerate(rows, start=1):
        ours = {names[name]: value for name, value in row.items() if name in names}
        if ours:
            found.append(ours)
            numbers.append(row[steps] if steps else float(index))
            others.append({name: value for name, value in row.items() if PREFIX not in name and name != steps})
    return Source(tuple(found), tuple(numbers), path, read.notes, tuple(others))


def _resolve(path: Path) -> Path:
    """The file, or the folder of event files, that a path stands for."""
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"{path} is not there: give {_ACCEPTED}.")
        refuse_special(path)
        return path
    written = path / METRICS
    if written.exists() and not written.is_dir():
        refuse_special(written)
        return written
    folders = sorted({file.parent for file in path.rglob(f"*{EVENTS}*") if file.is_file()})
    if not folders:
        raise ValueError(f"{path} holds neither {METRICS} nor TensorBoard events: give {_ACCEPTED}.")
    if len(folders) > 1:
        listed = ", ".join(str(folder.relative_to(path)) for folder in folders[:8])
        raise ValueError(f"{path} holds TensorBoard events of {len(folders)} runs: give one of {listed}.")
    return folders[0]


def _rows(path: Path, run: str | None) -> Events:
    if path.is_dir() or EVENTS in path.name:
        return read_events(path, run)
    rows = _csv(path) if path.suffix.lower() in (".csv", ".tsv") else list(read_steps(path))
    return Events(rows, (), chosen=False)


def _csv(path: Path) -> list[dict[str, float]]:
    text = read_text(path, encoding="utf-8-sig")
    tabs = path.suffix.lower() == ".tsv"
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if tabs else ",", strict=True)
    begun = 1
    try:
        header = next(reader, [])
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise ValueError(f"{path} has the column {twice} twice: give an export in which it is there once.")
        begun = reader.line_num + 1
        rows = []
        for cells in reader:
            if len(cells) > len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num} has {len(cells)} cells for {len(header)} columns: is it cut, or "
                    f"not separated by commas?"
                )
            values = {name: number_in(cell) for name, cell in zip(header, cells, strict=False)}
            rows.append({name: value for name, value in values.items() if value is not None})
            begun = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {begun} is no line of a CSV file: {error}. Is the file cut, or a quote not closed?"
        ) from None
    return rows


def _names(path: Path, rows: Iterable[dict[str, float]], run: str | None) -> dict[str, str]:
    """Name in the file → name that begins with `rollout_corr/`. Raises ValueError where two become one, or none is."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        before, prefix, _ = name.rpartition(PREFIX)
        if prefix and not name.endswith(_SPREAD):
            found.setdefault(before, []).append(name)
    if not found:
        raise ValueError(f"{path}: no step holds a metric that begins with {PREFIX}: is --mismatch-metrics off?")
    if run is not None:
        begins = [before for before in found if before.startswith(run)]
        chosen = [run] if run in found else begins or [before for before in found if run in before]
        if not chosen:
            raise ValueError(f"--run {run} is none of those in {path}: there is {_listed(found)}.")
        found = {before: found[before] for before in chosen}
    names: dict[str, str] = {}
    owner: dict[str, str] = {}
    for before, members in found.items():
        for name in members:
            ours = name[len(before) :]
            if ours in owner:
                raise ValueError(
                    f"{path} holds {ours} for several runs, {_listed(found)}: choose one with --run, by how "
                    f"its name begins or a part of it."
                )
            owner[ours], names[name] = before, ours
    return names


def _listed(found: Iterable[str]) -> str:
    names = [repr(before) for before in found]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _step_name(rows: Sequence[dict[str, float]], names: dict[str, str]) -> str | None:
    """The column of the steps: there, and finite, wherever a metric of ours is. A tracker's own count comes last."""
    ours = [row for row in rows if not names.keys().isdisjoint(row)]

    def rank(name: str) -> tuple[bool, int]:
        return name.startswith("_"), len(name)

    candidates = [name for name in ours[0] if name.rsplit("/", 1)[-1].lower().lstrip("_") in _STEP_NAMES]
    for name in sorted(candidates, key=rank):
        if all(math.isfinite(row.get(name, math.nan)) for row in ours):
            return name
    return None
