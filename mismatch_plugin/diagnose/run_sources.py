"""A run's metrics as files hold them: `metrics.jsonl`, W&B exports (JSONL, CSV, a folder of CSVs), TensorBoard events.

Names may have anything before them: `train/`, or a run's name in a CSV of W&B's charts. What other trainers write
without the plugin is read under our names.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.data.read import SUFFIXES
from mismatch_plugin.files import read_lines, read_text
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.report.log import METRICS, number_in, read_steps, record_in

Rows = list[dict[str, float]]

_EVENTS = "tfevents"
"""In the name of each of TensorBoard's files."""
_CSV = (".csv", ".tsv")
_STEP_NAMES = ("step", "global_step", "iteration")
_SPREAD = ("__MIN", "__MAX")
"""W&B's charts export the range of each point next to its value."""
_LOOKED_AT = 20
"""Lines of a JSONL file: a tracker's export may begin with steps that hold nothing of ours."""
_LISTED = 8

ABS_GAP = "log_ratio_abs_mean"
"""Mean |log π_train − log π_rollout| of the tokens, nats: others record it, the plugin itself does not."""

KNOWN = {name: ours for host in HOSTS.values() for name, ours in host.metrics.items()}
"""What trainers record without the plugin: its name → ours. docs/metric_names.md says where they differ."""


@dataclass(frozen=True)
class Source:
    """rows: the metrics of each step under our names, which begin with `rollout_corr/`. numbers: the steps. path: what
    was read. notes: what its reader must know."""

    rows: tuple[dict[str, float], ...]
    numbers: tuple[float, ...]
    path: Path
    notes: tuple[str, ...] = ()


class _Column(NamedTuple):
    """A column that is known: before + metric, read as ours. rank: 0 of the plugin's own, else the place in KNOWN."""

    rank: int
    before: str
    metric: str
    ours: str


def _column(name: str) -> _Column | None:
    if name.endswith(_SPREAD):
        return None
    if PREFIX in name:
        before, _, rest = name.rpartition(PREFIX)
        return _Column(0, before, PREFIX + rest, PREFIX + rest.removesuffix("/mean"))  # so prime-rl names a mean
    for rank, (known, ours) in enumerate(KNOWN.items(), start=1):
        before = name.removesuffix(known)
        if before != name and (not before or before[-1] in "/ "):
            return _Column(rank, before, known, PREFIX + ours)
    return None


def _files(path: Path) -> tuple[Literal["lines", "csv", "events"], list[Path]]:
    """The files of a run's metrics that a path stands for, by name; none in a folder that holds something else."""
    if not path.is_dir():
        return "events" if _EVENTS in path.name else "csv" if path.suffix.lower() in _CSV else "lines", [path]
    if (path / METRICS).is_file():
        return "lines", [path / METRICS]
    if events := sorted(path.rglob(f"*{_EVENTS}*")):
        return "events", events
    files = sorted(path.iterdir())
    holds_dump = any(file.suffix.lower() in SUFFIXES for file in files)
    return "csv", [] if holds_dump else [file for file in files if file.suffix.lower() in _CSV]


def kind_of(path: Path) -> Literal["metrics", "dump"]:
    """Whether PATH of `inspect` is the metrics that a run wrote or the samples themselves: by name, and for JSONL by
    what its first lines hold: samples, else steps of a tracker. Other files are dumps.

    Raises ValueError or OSError where the file cannot be read.
    """
    form, files = _files(path)
    if path.is_dir():
        return "metrics" if files else "dump"
    if form != "lines" or path.name == METRICS:
        return "metrics"
    if path.suffix.lower() not in (".jsonl", ".json"):
        return "dump"
    numbers = False
    for number, line in read_lines(path, errors="replace"):
        record = record_in(line) or {}
        nested = record.get("metrics")
        if any(_column(name) for name in (*record, *(nested if isinstance(nested, dict) else ()))):
            return "metrics"
        if any(isinstance(value, list) for value in record.values()):
            return "dump"
        numbers |= any(isinstance(value, int | float) for value in record.values())
        if number >= _LOOKED_AT:
            break
    return "metrics" if numbers else "dump"


def read_source(path: Path, run: str | None = None) -> Source:
    """Read a run's metrics. run: text that tells one run or family from others in what stands before a metric's name.

    Raises ValueError naming the file where it cannot be read, holds several runs, or nothing that is known.
    """
    form, files = _files(path)
    folders = sorted({file.parent for file in files})
    if len(folders) > 1:
        listed = _listed(str(folder.relative_to(path)) for folder in folders)
        raise ValueError(f"{path} holds TensorBoard events of {len(folders)} runs: give one of {listed}.")
    if form == "events":
        path = folders[0] if path.is_dir() else path
        rows = _events(path)
    elif form == "csv":
        rows = _charts(files) if path.is_dir() else _csv(path)
    else:
        path = files[0]
        rows = list(read_steps(path))
    notes = list[str]()
    if len(files) > 1 and form == "events":
        listed = _listed(file.name for file in files)
        notes.append(
            f"{len(files)} event files of one folder are read as one run that was resumed: where both have a "
            f"step, the later file counts ({listed}). Of several runs give one file"
        )
    columns = _columns(path, rows, run)
    if any(column.rank for column in columns):
        renamed = [f"{c.metric} as {ours}" for c in columns if (ours := c.ours.removeprefix(PREFIX)) not in c.metric]
        also = f": {_listed(renamed)}" if renamed else ""
        notes.append(f"metrics of the trainer itself are read under our names{also} (docs/metric_names.md)")
    names = {column.before + column.metric: column.ours for column in columns}
    kept = [(index, row) for index, row in enumerate(rows, start=1) if not names.keys().isdisjoint(row)]
    steps = _step_name([row for _, row in kept])
    numbers = tuple(row[steps] if steps else float(index) for index, row in kept)
    ours = tuple({names[name]: value for name, value in row.items() if name in names} for _, row in kept)
    return Source(ours, numbers, path, tuple(notes))


def _columns(path: Path, rows: Rows, run: str | None) -> list[_Column]:
    """The known columns of one run; where several are the same metric, the plugin's own, else the first of KNOWN.

    Raises ValueError where none is known, `run` names none, or they are of several runs.
    """
    seen = list(dict.fromkeys(name for row in rows for name in row))
    columns = [column for name in seen if (column := _column(name)) is not None]
    if not columns:
        looked_for = (f"{PREFIX}*", "mis_*", *(known for known in KNOWN if not known.startswith("mis_")))
        raise ValueError(
            f"{path}: no step holds a known metric of a mismatch. Looked for: {', '.join(looked_for)}. "
            f"It has: {_listed(seen) or 'nothing'}. The plugin writes none with --mismatch-metrics off."
        )
    if run is not None:
        runs = dict.fromkeys(repr(column.before) for column in columns)
        columns = [c for c in columns if c.before.startswith(run)] or [c for c in columns if run in c.before]
        if not columns:
            raise ValueError(f"--run {run} is none of those in {path}: there is {_listed(runs)}.")
    held: dict[str, _Column] = {}
    for column in sorted(columns, key=lambda column: column.rank):
        first = held.setdefault(column.ours, column)
        if first is not column and first.rank == column.rank:
            runs = dict.fromkeys(repr(column.before) for column in columns)
            raise ValueError(
                f"{path} holds {column.metric} for several runs, {_listed(runs)}: choose one with --run, by how its "
                f"name begins or a part of it."
            )
    return list(held.values())


def _step_name(rows: Rows) -> str | None:
    """The column of the steps: there, and finite, in every row. A tracker's own count comes last."""
    candidates = [name for name in rows[0] if name.rsplit("/", 1)[-1].lower().lstrip("_") in _STEP_NAMES]
    for name in sorted(candidates, key=lambda name: (name.startswith("_"), len(name))):
        if all(math.isfinite(row.get(name, math.nan)) for row in rows):
            return name
    return None


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _csv(path: Path) -> Rows:
    text = io.StringIO(read_text(path, encoding="utf-8-sig"), newline="")
    reader = csv.DictReader(text, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    try:
        return [
            {name: value for name, cell in cells.items() if (value := number_in(cell)) is not None} for cells in reader
        ]
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file: {error}. Is it cut, or a quote not closed?") from None


def _charts(files: Sequence[Path]) -> Rows:
    """W&B's charts of one run, each a CSV of its own: what they hold of one step is one row."""
    merged: dict[float, dict[str, float]] = {}
    unknown: Rows = []
    axis = None
    for file in files:
        rows = _csv(file)
        if not any(_column(name) for row in rows for name in row):
            unknown += rows
            continue
        steps = _step_name(rows)
        if steps is None or axis not in (None, steps):
            raise ValueError(f"{file} counts by {steps}, another by {axis}: export all charts over one x axis.")
        axis = steps
        for row in rows:
            merged.setdefault(row[steps], {}).update(row)
    return [merged[step] for step in sorted(merged)] or unknown


def _events(path: Path) -> Rows:
    """The scalars of one run's event files. Where a resumed run went back, its own count, and what came behind the step
    from which it resumed does not."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ValueError(
            f"{path} holds TensorBoard events, and tensorboard is not installed: pip install 'mismatch-plugin[lab]'."
        ) from None
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        kept: list[tuple[int, float]] = []
        for event in events.Scalars(tag):
            while kept and kept[-1][0] >= event.step:
                kept.pop()
            kept.append((event.step, event.value))
        for step, value in kept:
            rows.setdefault(step, {"step": float(step)})[tag] = value
    if not rows:
        raise ValueError(f"{path} holds no events with a number: it is damaged, or its writer has written none yet.")
    return [rows[step] for step in sorted(rows)]
