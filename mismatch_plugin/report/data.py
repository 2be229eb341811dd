"""A run folder of `compare`, read into arrays. What is missing, empty or cut is skipped and said, never an error.

RUN/run.json                                  settings, variants, seeds, which variant is in which setting (`plan`), ...
RUN/<setting>/<variant>/seed<k>/metrics.jsonl one JSON object an optimizer step
                               /config.json   the configuration; "variant" is the label
                               /done.json     there when the run has finished
RUN/<folder>/<setting>/...                    the cross-check with another trainer, where `run.json` names one
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_plugin.config import ALGORITHM_NAMES
from mismatch_plugin.files import read_json_object, read_lines
from mismatch_plugin.report.labels import preset_words
from mismatch_plugin.report.log import record_in
from mismatch_plugin.report.run_info import AboutSetting, Outcomes, mapping, names, seeds_of

Array = NDArray[np.float64]

BASELINE = "0"
"""Label of the variant that the others are compared with."""
TRAIN_COLUMNS = ("reward", "exact")
HELD_OUT = "held_out_"
_FOLDER = re.compile(r"\w[\w.-]{0,99}")
"""The name of a folder right below the run's."""
MAX_STEP = 1 << 53  # larger ones are damage
_TAILS = {"geo_rs": "geometric rejection"}
"""Words for the ends of labels that do not say it themselves."""


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
    diverged: bool = False
    """Its gradient stopped being finite: finished and collapsed, and its outcome is 0 from there on."""

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
    plan: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    cross_check: RunFolder | None = None

    def variants_of(self, setting: str) -> tuple[str, ...]:
        """The variants that a setting was planned with (all, where there is no plan), and any other that ran in it."""
        planned = self.plan.get(setting, self.variants)
        ran = {variant for s, variant, _ in self.runs if s == setting}
        return tuple(variant for variant in self.variants if variant in planned or variant in ran)

    def about(self, setting: str) -> AboutSetting:
        """Title, sentence and changes of a setting; its name alone where `run.json` says nothing of it."""
        entry = mapping(mapping(self.info.get("about_settings")).get(setting))
        return AboutSetting(
            str(entry.get("title") or setting),
            str(entry.get("what") or ""),
            str(entry.get("task") or ""),
            mapping(entry.get("changes")),
        )

    @property
    def outcomes(self) -> Outcomes | None:
        """The outcomes as they were named before the run; None where none was."""
        named = mapping(self.info.get("outcomes"))
        return Outcomes(str(named["primary"]), tuple(names(named.get("secondary")))) if "primary" in named else None

    @property
    def command(self) -> str:
        """The command that made the runs; empty where it was not recorded."""
        return str(self.info.get("command") or "")

    @property
    def diverged(self) -> list[Run]:
        """The runs whose gradient stopped being finite."""
        return [run for _, run in sorted(self.runs.items()) if run.diverged]

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
    folder = _read_runs(root, info, missing)
    if "cross_check" not in info:
        return folder
    asked = mapping(info["cross_check"])
    name = asked.get("folder")
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        note = "run.json names no folder of the cross-check: it is left out."
        return replace(folder, missing=(*folder.missing, note))
    check = _read_runs(
        root / name, {**{k: v for k, v in asked.items() if k != "cross_check"}, "lab": info.get("lab")}, []
    )
    notes = [f"cross-check, {note}" for note in check.missing]
    return replace(folder, missing=(*folder.missing, *notes), cross_check=check)


def _read_runs(root: Path, info: dict[str, Any], missing: list[str]) -> RunFolder:
    """The runs below `root` that `info`, the content of a `run.json`, describes."""
    runs: dict[tuple[str, str, int], Run] = {}
    touched: set[tuple[str, str, int]] = set()
    plan = {setting: tuple(names(labels)) for setting, labels in mapping(info.get("plan")).items()}
    known = list(_ordered(names(info.get("variants")), [label for labels in plan.values() for label in labels]))
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
    settings = _ordered(names(info.get("settings")), [key[0] for key in sorted(touched)])
    variants = _ordered(known, [key[1] for key in sorted(touched)])
    asked: list[int] = []
    if "seeds" in info:
        try:
            asked = seeds_of(info["seeds"])
        except ValueError as error:
            missing.append(str(error))
    seeds = _ordered(asked, sorted({key[2] for key in touched}))
    for setting in settings:
        missing += _not_started(setting, plan.get(setting, variants), seeds, touched)
    return RunFolder(root, info, settings, variants, seeds, runs, tuple(missing), plan)


def describe(label: str) -> str:
    """A variant's label in words: `2:token:truncate` is "2 decoupled PPO, token truncate", the preset `token_icepop`
    "2 decoupled PPO, IcePop 0.5 to 5", by its settings. Another label stays as it is."""
    if preset := preset_words(label):
        return ", ".join((f"{preset[0]} {ALGORITHM_NAMES[preset[0]]}", *preset[1]))
    number, *rest = label.split(":")
    if not (number.isdecimal() and int(number) < len(ALGORITHM_NAMES)):
        return label
    name = f"{number} {ALGORITHM_NAMES[int(number)]}"
    return f"{name}, {_tail(rest)}" if rest else name


def short(label: str) -> str:
    """A variant's label for legends: "2 token truncate", "2 IcePop"; 0 to 3 alone keep their names."""
    if preset := preset_words(label):
        return f"{preset[0]} {' + '.join(preset[2])}" if preset[2] else describe(label)
    number, *rest = label.split(":")
    return f"{number} {_tail(rest)}" if rest else describe(label)


def _tail(parts: Sequence[str]) -> str:
    return " ".join(_TAILS.get(part, part.replace("_", " ")) for part in parts)


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


def _read_run(folder: Path, key: tuple[str, str, int], config: dict[str, Any]) -> tuple[Run | None, list[str]]:
    """The run, None where it holds no step; and sentences about what is wrong with it."""
    setting, variant, seed = key
    name = f"{setting}, {describe(variant)}, seed {seed}"
    records, bad = _read_steps(folder / "metrics.jsonl")
    notes = [f"{name}: {bad} damaged line{'s' if bad > 1 else ''} skipped."] if bad else []
    if not records:
        return None, [*notes, f"{name}: started, but holds no step."]
    done, finished, last = _read_json(folder / "done.json"), (folder / "done.json").is_file(), max(records)
    end, diverged = done.get("step"), done.get("status") == "diverged"
    if finished and isinstance(end, int) and last < end:
        finished = False
        notes.append(f"{name}: ended at step {end}, and its metrics stop at step {last}; left out of every comparison.")
    elif not finished:
        notes.append(f"{name}: unfinished, {len(records)} steps; left out of every comparison.")
    steps = np.array(sorted(records), dtype=np.float64)
    columns: dict[str, Array] = {}
    for index, step in enumerate(sorted(records)):
        for column, value in _flat(records[step]):
            columns.setdefault(column, np.full(len(steps), np.nan))[index] = value
    if diverged:
        broken = ~np.isfinite(columns.get("grad_norm", np.zeros(len(steps)))) & (steps > 0)
        after = steps >= (steps[broken].min() if broken.any() else steps[-1])
        for outcome in (*TRAIN_COLUMNS, *(HELD_OUT + column for column in TRAIN_COLUMNS)):
            if outcome in columns:
                columns[outcome] = np.where(after, 0.0, columns[outcome])
    for column in (*TRAIN_COLUMNS, *(() if diverged else ("grad_norm",))):
        # Step 0 is the evaluation before the first update: it has no training figures. A host's run has none of these.
        lost = int(np.isnan(columns.get(column, steps)[steps > 0]).sum())
        if lost:
            notes.append(f"{name}: {column} is no finite number at {lost} step{'s' if lost > 1 else ''}.")
    return Run(setting, variant, seed, steps, columns, config, finished, diverged), notes


def _read_steps(path: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """(records by step, number of damaged lines). A step written twice counts as it was written last.

    A record without a step, as a loop of its own may write it, follows the one before it; the first is step 1.
    """
    records: dict[int, dict[str, Any]] = {}
    bad, last = 0, 0
    for record in read_objects(path):
        step = None if record is None else record.get("step", last + 1)
        if record is None or not isinstance(step, int | float) or not abs(step) < MAX_STEP or step != int(step):
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


def _label(folder: str, known: Sequence[str]) -> str:
    """The label that a folder's name stands for: ":" is written as "_" there."""
    return next((label for label in known if label.replace(":", "_") == folder), folder)


def _ordered(first: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys([*first, *found]))


def _not_started(
    setting: str, variants: Sequence[str], seeds: Sequence[int], touched: set[tuple[str, str, int]]
) -> Iterator[str]:
    for variant in variants:
        absent = [str(seed) for seed in seeds if (setting, variant, seed) not in touched]
        if absent:
            seed_words = f"seed{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
            yield f"{setting}, {describe(variant)}: {seed_words} not started."
