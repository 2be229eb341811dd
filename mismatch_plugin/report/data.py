"""A run folder of `compare`, read into arrays. What is missing, empty or cut is skipped and said, never an error.

RUN/run.json                                  settings, variants, number of seeds, the lab's settings, versions
RUN/<setting>/<variant>/seed<k>/metrics.jsonl one JSON object an optimizer step
                               /config.json   the configuration; "variant" is the label
                               /done.json     there when the run has finished
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_plugin.config import ALGORITHM_NAMES
from mismatch_plugin.files import read_json_object, read_lines
from mismatch_plugin.report.log import record_in

Array = NDArray[np.float64]

BASELINE = "0"
"""Label of the variant that the others are compared with."""
TRAIN_COLUMNS = ("reward", "exact")
HELD_OUT = "held_out_"
MAX_SEEDS = 10_000


@dataclass(frozen=True, eq=False)
class Run:
    """One seed of one variant in one setting: steps [T], and columns [T] by name, NaN where nothing was recorded.

    Columns are those of the file; the ones inside "seconds" are called `seconds/…`, metrics keep their names.
    """

    setting: str
    variant: str
    seed: int
    steps: Array
    columns: dict[str, Array] = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    finished: bool = False

    def column(self, name: str) -> Array:
        """A column, all NaN where the run does not have it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def curve(self, name: str) -> tuple[Array, Array]:
        """(steps, values) where the column has a finite value."""
        values = self.column(name)
        there = np.isfinite(values)
        return self.steps[there], values[there]


@dataclass(frozen=True, eq=False)
class RunFolder:
    """Everything read: names in the order of `run.json`, runs by (setting, variant, seed), and what is missing."""

    root: Path
    info: dict[str, Any]
    settings: tuple[str, ...]
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: dict[tuple[str, str, int], Run] = field(repr=False)
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True where every run that was asked for has finished and could be read."""
        return not self.missing

    def finished(self, setting: str, variant: str) -> list[Run]:
        """The finished runs of one variant, by seed."""
        return [run for run in self.all(setting, variant) if run.finished]

    def all(self, setting: str, variant: str) -> list[Run]:
        """All runs of one variant that hold at least one step, by seed."""
        return [run for (s, v, _), run in sorted(self.runs.items()) if (s, v) == (setting, variant)]

    def shown(self, setting: str, variant: str) -> list[Run]:
        """The runs that a curve is drawn from: the finished ones, or the unfinished where there is no other."""
        return self.finished(setting, variant) or self.all(setting, variant)

    def source(self, name: str) -> str:
        """Column for `reward` or `exact`: the held-out one where any run recorded it, else that of the batches."""
        return HELD_OUT + name if HELD_OUT + name in self._recorded else name

    def recorded(self, name: str, older: str) -> str:
        """The column `name`, or the older one where no run recorded it and some run the older one."""
        return older if name not in self._recorded and older in self._recorded else name

    def has(self, name: str) -> bool:
        """Whether some run recorded a finite value in this column."""
        return name in self._recorded

    @cached_property
    def _recorded(self) -> frozenset[str]:
        """Columns with a finite value in some run."""
        runs = self.runs.values()
        return frozenset(name for run in runs for name, column in run.columns.items() if np.isfinite(column).any())


def read_run_folder(root: str | Path) -> RunFolder:
    """Read a run folder. Raises FileNotFoundError only where there is no such folder."""
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder: give the folder that compare wrote its runs to.")
    missing: list[str] = []
    info = _read_json(root / "run.json")
    if not info:
        missing.append("run.json is missing or damaged: settings, variants and seeds are those found in the folder.")
    runs: dict[tuple[str, str, int], Run] = {}
    touched: set[tuple[str, str, int]] = set()
    known = [str(label) for label in _names(info.get("variants"))]
    for folder in sorted(root.glob("*/*/seed*")):
        number = folder.name.removeprefix("seed")
        if not number.isdecimal():
            continue
        config = _read_json(folder / "config.json")
        variant = str(config.get("variant") or _label(folder.parent.name, known))
        key = (folder.parent.parent.name, variant, int(number))
        touched.add(key)
        run, notes = _read_run(folder, key, config)
        missing += notes
        if run is not None:
            runs[key] = run
    settings = _ordered(_names(info.get("settings")), [key[0] for key in sorted(touched)])
    variants = _ordered(known, [key[1] for key in sorted(touched)])
    asked: list[int] = []
    if "seeds" in info:
        try:
            asked = _seeds(info["seeds"])
        except ValueError as error:
            missing.append(str(error))
    seeds = _ordered(asked, sorted({key[2] for key in touched}))
    missing += _not_started(settings, variants, seeds, touched)
    return RunFolder(root, info, settings, variants, seeds, runs, tuple(missing))


def describe(label: str) -> str:
    """A variant's label in words: `2:token:truncate` is "2 decoupled PPO, token truncate"; another stays as it is."""
    number, *rest = label.split(":")
    if not (number.isdecimal() and int(number) < len(ALGORITHM_NAMES)):
        return label
    name = f"{number} {ALGORITHM_NAMES[int(number)]}"
    return f"{name}, {' '.join(rest)}" if rest else name


def short(label: str) -> str:
    """A variant's label for legends: `2:token:truncate` is "2 token truncate"; 0 to 3 alone keep their names."""
    return label.replace(":", " ") if ":" in label else describe(label)


def align(curves: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """(steps [K], values [N, K]) at the steps that every curve has: seeds side by side."""
    if not curves:
        return np.empty(0), np.empty((0, 0))
    common = curves[0][0]
    for steps, _ in curves[1:]:
        common = np.intersect1d(common, steps)
    return common, np.array([values[np.isin(steps, common)] for steps, values in curves]).reshape(len(curves), -1)


def mean_over(runs: Iterable[Run], column: str) -> float:
    """Mean of the runs' means of a column; NaN where none recorded it."""
    means = [float(values.mean()) for run in runs if len(values := run.curve(column)[1])]
    return float(np.mean(means)) if means else math.nan


def mean_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Mean seconds a step of each part over all runs; 0 where a part was not recorded."""
    means = {part: mean_over(runs, f"seconds/{part}") for part in ("rollout", "old_log_probs", "train")}
    return {part: 0.0 if math.isnan(mean) else mean for part, mean in means.items()}


def _read_run(folder: Path, key: tuple[str, str, int], config: dict[str, Any]) -> tuple[Run | None, list[str]]:
    """The run, None where it holds no step; and sentences about what is wrong with it."""
    setting, variant, seed = key
    name = f"{setting}, {describe(variant)}, seed {seed}"
    records, bad = _read_steps(folder / "metrics.jsonl")
    notes = [f"{name}: {bad} damaged line{'s' if bad > 1 else ''} skipped."] if bad else []
    if not records:
        return None, [*notes, f"{name}: started, but holds no step."]
    finished = (folder / "done.json").is_file()
    if not finished:
        notes.append(f"{name}: unfinished, {len(records)} steps; left out of every comparison.")
    steps = np.array(sorted(records), dtype=np.float64)
    columns: dict[str, Array] = {}
    for index, step in enumerate(sorted(records)):
        for column, value in _flat(records[step]):
            columns.setdefault(column, np.full(len(steps), np.nan))[index] = value
    for column in (*TRAIN_COLUMNS, "grad_norm"):
        # Step 0 is the evaluation before the first update: it has no training figures. A host's run has none of these.
        lost = int(np.isnan(columns.get(column, steps)[steps > 0]).sum())
        if lost:
            notes.append(f"{name}: {column} is no finite number at {lost} step{'s' if lost > 1 else ''}.")
    return Run(setting, variant, seed, steps, columns, config, finished), notes


def _read_steps(path: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """(records by step, number of damaged lines). A step written twice counts as it was written last.

    A record without a step, as a loop of its own may write it, follows the one before it; the first is step 1.
    """
    records: dict[int, dict[str, Any]] = {}
    bad, last = 0, 0
    for record in read_objects(path):
        step = None if record is None else record.get("step", last + 1)
        if record is None or not isinstance(step, int | float) or not math.isfinite(step) or step != int(step):
            bad += 1
            continue
        last = int(step)
        records[last] = record
    return records, bad


def read_objects(path: Path) -> Iterator[dict[str, Any] | None]:
    """The JSON object of every line that is not blank; None for a damaged one. Nothing where no file can be read."""
    try:
        for _, line in read_lines(path, errors="replace"):
            if line.strip():
                yield record_in(line)
    except OSError:
        return
    except ValueError:  # no regular file, or a line without end
        yield None


def _flat(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(column, value) of every number in a record; what is no finite number is NaN."""
    seconds, metrics = record.get("seconds"), record.get("metrics")
    parts = {name: value for name, value in record.items() if name not in ("step", "seconds", "metrics")}
    parts |= {f"seconds/{name}": value for name, value in seconds.items()} if isinstance(seconds, dict) else {}
    parts |= metrics if isinstance(metrics, dict) else {}
    for name, value in parts.items():
        if isinstance(value, (int, float)):
            try:
                number = float(value)
            except OverflowError:  # an integer of 400 digits
                number = math.nan
            yield name, number if math.isfinite(number) else math.nan


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def _seeds(asked: object) -> list[int]:
    """The seeds that `run.json` asks for, by number or one by one. Raises ValueError for what is neither."""
    if isinstance(asked, int) and 0 <= asked <= MAX_SEEDS:
        return list(range(asked))
    if isinstance(asked, list) and len(asked) <= MAX_SEEDS and all(isinstance(seed, int) for seed in asked):
        return asked
    raise ValueError(f"run.json has {str(asked)[:40]} as seeds, which is not a number of seeds: taken are those found.")


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, (list, tuple)) else []


def _label(folder: str, known: Sequence[str]) -> str:
    """The label that a folder's name stands for: ":" is written as "_" there."""
    return next((label for label in known if label.replace(":", "_") == folder), folder)


def _ordered(first: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys([*first, *found]))


def _not_started(
    settings: Sequence[str], variants: Sequence[str], seeds: Sequence[int], touched: set[tuple[str, str, int]]
) -> Iterator[str]:
    for setting in settings:
        for variant in variants:
            absent = [str(seed) for seed in seeds if (setting, variant, seed) not in touched]
            if absent:
                seed_words = f"seed{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
                yield f"{setting}, {describe(variant)}: {seed_words} not started."
