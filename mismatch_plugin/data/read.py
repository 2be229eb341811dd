"""A dump of rollouts, and of what the trainer computed for them, as samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mismatch_plugin.data.columns import NO_TEMPERATURE, TRAINER, Table, of_temperature
from mismatch_plugin.data.formats import AS_RAW, FORMATS, Format
from mismatch_plugin.data.sample import LogProbsOf, Sample
from mismatch_plugin.data.source import READ, Source, open_source

_SUFFIXES = (".pt", ".pth", ".npz", ".parquet", ".jsonl", ".json")
_DRAWN = ("response_ids", "rollout_log_probs")
_TELLING = 8
"""Tokens from which two equal responses with equal log-probs are one and the same."""


class InputError(ValueError):
    """A file or source from which nothing can be checked."""


@dataclass(frozen=True, eq=False)
class Dump:
    """What a file or folder holds. has_training: the samples have the training side's log-probs. format: what read it.
    notes: what a reader must know (what was left out and why, what was assumed)."""

    samples: Sequence[Sample]
    has_training: bool = False
    format: str = "records"
    notes: tuple[str, ...] = ()


def read(
    path: str | Path,
    training: str | Path | None = None,
    *,
    format: str | None = None,
    log_probs_of: LogProbsOf | None = None,
    temperature: float | None = None,
) -> Dump:
    """Read a file, or a folder of files of one format in the order of the numbers in their names, as one dump.

    training: the file or folder of the training side, in any format that holds one; matched by sample_id, else by
    index, else by order. Default: the training side in a folder of two files, our samples and it. format: of `path`, a
    name of FORMATS; default: recognised by content. log_probs_of, temperature: for every response, instead of what the
    file tells.

    Raises ValueError naming file, sample and position where something cannot be read, is cut, or does not fit;
    InputError where the two sides do not.
    """
    path = Path(path)
    if training is None and (path / "rollout_data").is_dir():  # a folder of slime's or miles' --dump-details
        training = path / "train_data" if (path / "train_data").is_dir() else None
        path = path / "rollout_data"
    files, own = _pair(path) if path.is_dir() and format is None else (path, None)
    name, table = _read(files, format)
    rows, notes = table.rows, table.notes
    if table.missing or not rows:
        raise ValueError(f"{path}: {table.missing or 'it holds no response'}.")
    if own and training and not own.samefile(training):
        notes.append(f"{own} was left out: the training side is {training}")
    training = training or own
    if training is not None:
        _, side = _read(Path(training), None)
        if not side.rows or not all("train_log_probs" in row for row in side.rows):
            raise ValueError(f"{training} holds no log-probs of the training side.")
        for row, at in zip(rows, _partners(rows, side.rows), strict=True):
            for field in TRAINER:
                row.pop(field, None)
            row.update({field: side.rows[at][field] for field in (*TRAINER, "advantages") if field in side.rows[at]})
        if (more := len(side.rows) - len(rows)) > 0:
            notes.append(f"training side {training}: {more} of its samples belong to no record and were not looked at")
        notes += side.notes
    has_training, samples = all("train_log_probs" in row for row in rows), list[Sample]()
    asked = None if temperature is None else of_temperature(temperature)
    known = (NO_TEMPERATURE,) * (asked is not None) + (AS_RAW,) * (log_probs_of is not None)
    for at, row in enumerate(rows):
        if asked is not None:  # other parameters of our own samples stay
            row["sampling"] = (
                {**row["sampling"], "temperature": temperature} if type(row.get("sampling")) is dict else asked
            )
        if log_probs_of is not None:
            row["log_probs_of"] = log_probs_of
        row["index"] = at
        samples.append(_sample(row))
        rows[at] = {}
    return Dump(samples, has_training, name, tuple(dict.fromkeys(note for note in notes if not note.endswith(known))))


def _sample(row: dict[str, Any]) -> Sample:
    place = row.pop("place")
    row.pop("at", None)
    try:
        return Sample(**row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None


def _read(path: Path, format: str | None) -> tuple[str, Table]:
    if format is not None and format not in FORMATS:
        raise ValueError(f"--format {format} is unknown: choose from {', '.join(FORMATS)}.")
    files, notes = _files(path)
    found = None if format is None else FORMATS[format]

    def tables() -> Iterator[tuple[Path, Table]]:
        nonlocal found
        for file in files:
            with _named(file, found):
                source = open_source(file)
            chosen = _recognised(source) if format is None else FORMATS[format]
            if found is not None and chosen is not found:
                raise ValueError(
                    f"{file} is of the format {chosen.name}, {files[0]} of {found.name}: give files of one format. "
                    f"Where one is the training side of the other: mismatch-plugin inspect ROLLOUTS TRAINING."
                )
            found = chosen
            with _named(file, chosen):
                table = chosen.read(source)
            yield file, table

    each = tables()
    first = next(each)
    assert found is not None
    with _named(path, found):
        table = found.join(chain([first], each)) if found.join else _joined(chain([first], each))
    table.notes = [*notes, *table.notes]
    return found.name, table


@contextmanager
def _named(path: Path, item: Format | None) -> Iterator[None]:
    """Content of another shape than a format's can fail anywhere in its reader: said with the file's name."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, MemoryError) as error:
        if isinstance(error, MemoryError) and not str(error):
            raise  # but for an array of a size that is told and cannot be
        holds = item.holds if item else READ
        raise ValueError(f"{path} is not as {holds}: {type(error).__name__}: {str(error)[:200]}.") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from None


def _recognised(source: Source) -> Format:
    return next(item for item in FORMATS.values() if item.recognises(source))


def _pair(folder: Path) -> tuple[Path, Path | None]:
    """(what to read, its training side) of a folder: the two files where it holds our samples and their training side
    and nothing else, otherwise the folder itself."""
    files, _ = _files(folder)
    if len(files) == 2 and all(file.suffix.lower() in (".jsonl", ".parquet") for file in files):
        by_format = {_recognised(open_source(file)).name: file for file in files}
        if by_format.keys() == {"records", "training"}:
            return by_format["records"], by_format["training"]
    return folder, None


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """The files to read, and what is left out."""
    if not path.exists():
        raise ValueError(f"{path} is not there.")
    if not path.is_dir():
        return [path], []
    inside = [file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")]
    files = sorted((file for file in inside if not file.name.startswith("eval_")), key=_numbers)
    if not files:
        raise ValueError(f"{path} holds no dump: none of its files is {READ}.")
    left = len(inside) - len(files)
    return files, [f"{left} files of evaluation were left out"] if left else []


def _numbers(file: Path) -> list[tuple[int, Any]]:
    """10.pt comes after 9.pt."""
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in re.split(r"(\d+)", file.name) if piece]


def _joined(files: Iterable[tuple[Path, Table]]) -> Table:
    """Files in order, one after the other. Raises ValueError where two hold one sample, or sides differ."""
    parts = list(files)
    if len(parts) == 1:
        return parts[0][1]
    sides = [
        tuple(name in row for name in ("rollout_log_probs", "train_log_probs"))
        for _, table in parts
        for row in table.rows[:1]
    ]
    if len({*sides}) > 1:
        lacking = parts[sides.index(min(sides, key=sum))][0]
        raise ValueError(
            f"{lacking} lacks a side that other files of the folder have: give files of one sort. Where they are both "
            f"sides of a run, put each into a folder of its own: mismatch-plugin inspect ROLLOUTS TRAINING."
        )
    whole, seen = Table(missing=parts[0][1].missing), dict[Any, Path]()
    for path, table in parts:
        own = dict[Any, Path]()
        for row in table.rows:
            if "rollout_log_probs" in row and len(row["response_ids"]) >= _TELLING:
                drawn = (row.get(name, row["response_ids"][:0]) for name in ("prompt_ids", *_DRAWN))
                own[hash(b"".join(array.tobytes() for array in drawn))] = path
            if "rollout_log_probs" in row and {"sample_id", "step"} <= row.keys():
                own[row["step"], row["sample_id"]] = path
        if (twice := next((key for key in own if key in seen), None)) is not None:
            what = f"sample {twice[1]}" if isinstance(twice, tuple) else "the same response with the same log-probs"
            raise ValueError(f"{path} and {seen[twice]} both hold {what}: give each sample once.")
        seen |= own
        whole.rows += table.rows
        whole.notes += [f"{path.name}: {note}" if len(parts) < 4 else note for note in table.notes]
    whole.notes = list(dict.fromkeys(whole.notes))
    return whole


def _partners(rows: Sequence[Mapping[str, Any]], side: Sequence[Mapping[str, Any]]) -> Sequence[int]:
    """For each row the place of its partner in the training side: by the first of sample_id and index that every
    sample of the training side has, else by order.

    Raises InputError where a row has no partner, or two.
    """
    told = {"sample_id": [row.get("sample_id") for row in side], "index": [row.get("at") for row in side]}
    with_steps = any(isinstance(index, tuple) for index in told["index"])
    places, indexes = Counter[Any](), []
    for row in rows:
        step = row.get("step") if with_steps else None
        indexes.append(places[step] if step is None else (step, places[step]))
        places[step] += 1
    wanted = {"sample_id": [row.get("sample_id") for row in rows], "index": indexes}
    complete = [key for key, values in told.items() if None not in values]
    if not complete:
        if any(value is not None for values in told.values() for value in values):
            raise InputError(
                "some lines of the training file have a sample_id or index and some none: give all or none."
            )
        if len(side) != len(rows):
            raise InputError(
                f"{len(rows)} records and {len(side)} lines of training log-probs: without sample_id or index "
                f"they are matched line by line, so give one line a record."
            )
        return range(len(rows))
    # A dump may give one sample_id to several responses and still tell their places.
    unique = [key for key in complete if len({*told[key]}) == len(side) and len({*wanted[key]}) == len(rows)]
    key = (unique or complete)[0]
    names, table = wanted[key], {value: at for at, value in enumerate(told[key])}
    if all(name is None for name in names):
        raise InputError("the training file names samples by sample_id, but no record has one: use index instead.")
    if len(table) != len(side):
        twice = next(value for value, times in Counter(told[key]).items() if times > 1)
        raise InputError(f"the training file has {key} {twice!r} twice.")
    if missing := [name for name in names if name not in table]:
        raise InputError(f"the training file has no {key} {missing[0]!r} ({len(missing)} records have no partner).")
    if len({*names}) != len(rows):
        raise InputError(f"the records have a {key} twice: it must name one record.")
    return [table[name] for name in names]
