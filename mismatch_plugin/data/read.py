"""A dump of rollouts, and of what the trainer computed for them, as samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from mismatch_plugin.data.columns import NO_TEMPERATURE, TRAINER, Dump, sample_at
from mismatch_plugin.data.formats import FORMATS, Format
from mismatch_plugin.data.sample import LogProbsOf, Sample
from mismatch_plugin.data.source import READ, Source, open_source

SUFFIXES = (".pt", ".pth", ".npz", ".parquet", ".jsonl", ".json")


class InputError(ValueError):
    """A file or source from which nothing can be checked."""


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
    index, else by order. format: of `path`, a name of FORMATS; default: recognised by content. log_probs_of,
    temperature: for every response, instead of what the file tells.

    Raises ValueError naming file, sample and position where something cannot be read, is cut, or does not fit;
    InputError where the two sides do not.
    """
    path = Path(path)
    if training is None and (path / "rollout_data").is_dir():  # a folder of slime's or miles' --dump-details
        training = path / "train_data" if (path / "train_data").is_dir() else None
        path = path / "rollout_data"
    dump = _read(path, format)
    samples = dump.samples
    if dump.missing or not samples:
        raise ValueError(f"{path}: {dump.missing or 'it holds no response.'}")
    if training is not None:
        side = _read(Path(training), None)
        if not side.samples or not side.has_training:
            raise ValueError(f"{training} holds no log-probs of the training side.")
        for number, at in enumerate(_partners(samples, side.samples)):
            told = side.samples[at].model_fields_set & {*TRAINER, "advantages"}
            ours = samples[number].without(TRAINER)
            fields = {field: getattr(ours, field) for field in ours.model_fields_set}
            fields |= {field: getattr(side.samples[at], field) for field in told}
            samples[number] = sample_at(f"{path}, sample {number}", fields)
        if (more := len(side.samples) - len(samples)) > 0:
            left = f"{more} of its samples belong to no record and were not looked at"
            dump.notes.append(f"training side {training}: {left}")
        dump.notes += side.notes
    for at, sample in enumerate(samples):
        given: dict[str, Any] = {"index": at}
        if temperature is not None:  # other parameters of our own samples stay
            given["sampling"] = {**sample.sampling.model_dump(), "temperature": temperature}
        if log_probs_of is not None:
            given["log_probs_of"] = log_probs_of
        samples[at] = sample.replace(**given) if len(given) > 1 else sample.with_fields(**given)
    if temperature is not None:
        dump.notes = [note for note in dump.notes if not note.endswith(NO_TEMPERATURE)]
    dump.notes = list(dict.fromkeys(dump.notes))
    return dump


def _read(path: Path, format: str | None) -> Dump:
    if format is not None and format not in FORMATS:
        raise ValueError(f"--format {format} is unknown: choose from {', '.join(FORMATS)}.")
    files, notes = _files(path)
    opened = _opened(files, FORMATS[format] if format else None)
    first, item = next(opened)
    sources = chain([first], (source for source, _ in opened))
    if item.spread:
        with _named(path, item):
            dump = item.read(sources)
    else:
        parts = []
        for source in sources:
            with _named(source.path, item):
                parts.append((source.path, item.read(source)))
        dump = _joined(parts)
    dump.notes, dump.format = [*notes, *dump.notes], item.name
    return dump


def _opened(files: Sequence[Path], given: Format | None) -> Iterator[tuple[Source, Format]]:
    """Each file, and the format of all."""
    first = given
    for file in files:
        with _named(file, first):
            source = open_source(file)
        item = given or next(item for item in FORMATS.values() if item.recognises(source))
        first = first or item
        if item is not first:
            raise ValueError(
                f"{file} is of the format {item.name}, {files[0]} of {first.name}: give files of one format. "
                f"Where one is the training side of the other: mismatch-plugin inspect ROLLOUTS TRAINING."
            )
        yield source, item


@contextmanager
def _named(path: Path, item: Format | None) -> Iterator[None]:
    """Content of another shape than a format's can fail anywhere in its reader: said with the file's name."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        holds = item.holds if item else READ
        raise ValueError(f"{path} is not as {holds}: {type(error).__name__}: {str(error)[:200]}.") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from None


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """The files to read, and what is left out."""
    if not path.exists():
        raise ValueError(f"{path} is not there.")
    if not path.is_dir():
        return [path], []
    inside = [file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
    files = sorted((file for file in inside if not file.name.startswith("eval_")), key=_numbers)
    if not files:
        raise ValueError(f"{path} holds no dump: none of its files is {READ}.")
    left = len(inside) - len(files)
    return files, [f"{left} files of evaluation were left out"] if left else []


def _numbers(file: Path) -> list[tuple[int, Any]]:
    """10.pt comes after 9.pt."""
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in re.split(r"(\d+)", file.name) if piece]


def _joined(parts: list[tuple[Path, Dump]]) -> Dump:
    """Files in order, one after the other. Raises ValueError where two hold one sample, or sides differ."""
    whole, seen = Dump(missing=parts[0][1].missing), dict[Any, Path]()
    sides = [bool(dump.missing) + dump.has_training for _, dump in parts]
    if len({*sides}) > 1:
        lacking = parts[sides.index(min(sides))][0]
        raise ValueError(
            f"{lacking} lacks a side that other files of the folder have: give files of one sort. Where they are both "
            f"sides of a run, put each into a folder of its own: mismatch-plugin inspect ROLLOUTS TRAINING."
        )
    for path, dump in parts:
        own = {(one.step, one.sample_id): path for one in dump.samples if None not in (one.step, one.sample_id)}
        if twice := next((key for key in own if key in seen), None):
            raise ValueError(f"{path} and {seen[twice]} both hold sample {twice[1]}: give each sample once.")
        seen |= own
        whole.samples += dump.samples
        several = 1 < len(parts) < 4
        whole.notes += [f"{path.name}: {note}" if several else note for note in dump.notes]
    whole.notes = list(dict.fromkeys(whole.notes))
    return whole


def _partners(samples: Sequence[Sample], side: Sequence[Sample]) -> Sequence[int]:
    """For each sample the place of its partner in the training side: by the first of sample_id and index that every
    sample of the training side has, else by order.

    Raises InputError where a sample has no partner, or two.
    """
    by_step = any(one.step is not None for one in side)
    before, places = Counter[Any](), list[Any]()
    for sample in samples:
        places.append((sample.step, before[sample.step]) if by_step else len(places))
        before[sample.step] += 1
    told: list[Any] = [(one.step, one.index) if by_step else one.index for one in side]
    told = [at if "index" in one.model_fields_set else None for at, one in zip(told, side, strict=True)]
    ids: list[Any] = [one.sample_id for one in side]
    keys = [("sample_id", [one.sample_id for one in samples], ids), ("index", places, told)]
    complete = [key for key in keys if None not in key[2]]
    if not complete:
        if any(value is not None for value in (*ids, *told)):
            raise InputError(
                "some lines of the training file have a sample_id or index and some none: give all or none."
            )
        if len(side) != len(samples):
            raise InputError(
                f"{len(samples)} records and {len(side)} lines of training log-probs: without sample_id or index "
                f"they are matched line by line, so give one line a record."
            )
        return range(len(samples))
    # A dump may give one sample_id to several responses and still tell their places.
    unique = [key for key in complete if all(len({*values}) == len(values) for values in key[1:])]
    key, ours, theirs = (unique or complete)[0]
    for values, what in ((theirs, "the training file has"), (ours, "the records have")):
        if len({*values}) < len(values):
            raise InputError(f"{what} {key} {Counter(values).most_common(1)[0][0]!r} twice: it must name one record.")
    at = {value: number for number, value in enumerate(theirs)}
    if missing := [value for value in ours if value not in at]:
        raise InputError(f"the training file has no {key} {missing[0]!r} ({len(missing)} records have no partner).")
    return [at[value] for value in ours]
