"""All formats, and the one function that reads any of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from mismatch_plugin.rollout.dumps.generic import GENERIC
from mismatch_plugin.rollout.dumps.miles import MILES_TRAIN, SLIME_TRAIN
from mismatch_plugin.rollout.dumps.nemo_rl import NEMO_RL
from mismatch_plugin.rollout.dumps.part import Format, Options, Part
from mismatch_plugin.rollout.dumps.records import RECORDS, TRAINING
from mismatch_plugin.rollout.dumps.slime import SLIME
from mismatch_plugin.rollout.dumps.source import READ, Source, open_source
from mismatch_plugin.rollout.dumps.training import partners
from mismatch_plugin.rollout.dumps.trl import TRL
from mismatch_plugin.rollout.dumps.verl import VERL
from mismatch_plugin.rollout.dumps.vllm import VLLM
from mismatch_plugin.rollout.records import LogProbsOf
from mismatch_plugin.rollout.responses import Dump, Response, Scored

FORMATS: dict[str, Format] = {
    item.name: item for item in (RECORDS, TRAINING, SLIME, SLIME_TRAIN, MILES_TRAIN, VERL, NEMO_RL, TRL, VLLM, GENERIC)
}
"""By the name that --format takes. The first that recognises a file reads it; the last recognises all."""
_SUFFIXES = (".pt", ".pth", ".npz", ".parquet", ".jsonl", ".json")


def read_dump(
    path: str | Path,
    format: str | None = None,
    training: str | Path | None = None,
    *,
    log_probs_of: LogProbsOf | None = None,
    temperature: float | None = None,
) -> Dump:
    """Read a file, or a folder of files of one format in the order of the numbers in their names, as one dump.

    format: a name of FORMATS; default: recognised by content. training: the file or folder of the training side, in
    any format that holds one; matched by sample_id, else by index, else by order. Default: the training side in a
    folder of two files, our records and it. log_probs_of, temperature: for every response, instead of what the file
    tells.

    Raises ValueError naming file, sample and position where something cannot be read, is cut, or does not fit.
    """
    options = Options(log_probs_of, temperature)
    path = Path(path)
    if training is None and (path / "rollout_data").is_dir():  # a folder of slime's or miles' --dump-details
        training = path / "train_data" if (path / "train_data").is_dir() else None
        path = path / "rollout_data"
    files, own = _pair(path) if path.is_dir() and format is None else (path, None)
    name, part = _read(files, format, options)
    if not part.responses:
        raise ValueError(f"{path}: {part.missing or 'it holds no response'}.")
    notes = list(part.notes)
    if own and training and not own.samefile(training):
        notes.append(f"{own} was left out: the training side is {training}")
    training = training or own
    if training is None:
        return Dump(part.responses, part.scored, name, tuple(notes))
    training = Path(training)
    _, other = _read(training, None, options)
    if other.scored is None:
        raise ValueError(f"{training} holds no log-probs of the training side.")
    scored = _matched(part.responses, other)
    if (more := len(other.scored) - len(scored)) > 0:
        notes.append(f"training side {training}: {more} of its samples belong to no record and were not looked at")
    return Dump(part.responses, scored, name, tuple(dict.fromkeys([*notes, *other.notes])))


def _read(path: Path, format: str | None, options: Options) -> tuple[str, Part]:
    if format is not None and format not in FORMATS:
        raise ValueError(f"--format {format} is unknown: choose from {', '.join(FORMATS)}.")
    files, notes = _files(path)
    found = None if format is None else FORMATS[format]

    def parts() -> Iterator[tuple[Path, Any]]:
        nonlocal found
        for file in files:
            source = open_source(file)
            chosen = _recognised(source) if format is None else FORMATS[format]
            if found is not None and chosen is not found:
                raise ValueError(
                    f"{file} is of the format {chosen.name}, {files[0]} of {found.name}: give files of one format. "
                    f"Where one is the training side of the other: mismatch-plugin inspect ROLLOUTS TRAINING."
                )
            found = chosen
            with _named(file, chosen):
                piece = chosen.read(source, options)
            yield file, piece

    pieces = parts()
    first = next(pieces)
    assert found is not None
    with _named(path, found):
        part = found.join(chain([first], pieces))
    part.notes = [*notes, *part.notes]
    return found.name, part


@contextmanager
def _named(path: Path, item: Format) -> Iterator[None]:
    """Content of another shape than a format's can fail anywhere in its adapter: said with the file's name."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path} is not as {item.holds}: {type(error).__name__}: {str(error)[:200]}.") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from None


def _recognised(source: Source) -> Format:
    return next(item for item in FORMATS.values() if item.recognises(source))


def _pair(folder: Path) -> tuple[Path, Path | None]:
    """(what to read, its training side) of a folder: the two files where it holds our records and their training side
    and nothing else, otherwise the folder itself."""
    files, _ = _files(folder)
    if len(files) == 2 and all(file.suffix.lower() in (".jsonl", ".parquet") for file in files):
        by_format = {_recognised(open_source(file)): file for file in files}
        if by_format.keys() == {RECORDS, TRAINING}:
            return by_format[RECORDS], by_format[TRAINING]
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


def _matched(responses: Sequence[Response], side: Part) -> list[Scored]:
    """The training side in the order of the responses."""
    assert side.scored is not None
    places: dict[int | None, int] = {}
    indexes = []
    with_steps = any(isinstance(index, tuple) for index in side.indexes)
    for response in responses:
        step = response.step if with_steps else None
        place = places[step] = places.get(step, -1) + 1
        indexes.append(place if step is None else (step, place))
    wanted = {"sample_id": [response.sample_id for response in responses], "index": indexes}
    told = {"sample_id": side.sample_ids, "index": side.indexes}
    return [side.scored[at] for at in partners(wanted, told, len(responses), len(side.scored))]
