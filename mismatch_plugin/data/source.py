"""One file of a dump, opened by what it holds: torch zip, npz, Parquet, JSON or JSONL. No code of a file ever runs."""

from __future__ import annotations

import codecs
import importlib
import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic_core import from_json

from mismatch_plugin.files import read_lines, read_text, validate_regular_file

Kind = Literal["torch", "npz", "parquet", "json", "jsonl"]
Row = tuple[str, Mapping[str, Any]]
"""(how errors call it, its columns)."""
READ = ".pt (torch.save of a dict), .npz, .parquet, .json and .jsonl"
_BATCH = 32
"""Parquet rows that are Python objects at once."""


@dataclass(frozen=True)
class Source:
    """An open file. keys: its names: of a dict, of the columns, of the first JSON object. content: the loaded object
    (torch), a mapping that reads on access (npz), the first JSON object or the whole document; None for Parquet."""

    path: Path
    kind: Kind
    keys: tuple[str, ...]
    content: Any = None

    def rows(self) -> Iterator[Row]:
        """One row a sample, as it is read. Raises ValueError naming the place where one cannot be."""
        if self.kind == "jsonl":
            yield from _json_rows(self.path)
        elif self.kind == "parquet":
            yield from _parquet_rows(self.path)
        elif isinstance(self.content, list):
            yield from each(self.content, f"{self.path}, entry")
        elif self.kind == "json":
            yield str(self.path), self.content
        else:
            raise ValueError(f"{self.path} holds columns, not rows.")


def each(rows: list[Any], called: str) -> Iterator[Row]:
    """The rows of a list, which lets go of each: its lists are larger than its arrays by far."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{called} {number} is a {type(row).__name__}, not a dict.")
        yield f"{called} {number}", row
        rows[number] = None


def open_source(path: Path) -> Source:
    """Raises ValueError naming the file where it is empty, cut, damaged, of no known kind, or holds code."""
    validate_regular_file(path)
    with path.open("rb") as stream:
        head = stream.read(64)
    if not head.strip() and path.stat().st_size == len(head):
        raise ValueError(f"{path} is empty: it holds no response and no sample.")
    if head.startswith(b"PK"):
        names = _zip_names(path)
        if any(name.endswith("data.pkl") for name in names):
            return _of_objects(path, "torch", _load(path))
        if not any(name.endswith(".npy") for name in names):
            raise ValueError(f"{path} is a zip file, but neither of torch.save nor of numpy.savez.")
        arrays = np.load(path, allow_pickle=False)  # each is read when it is asked for
        return Source(path, "npz", tuple(arrays.files), arrays)
    if head.startswith(b"PAR1"):
        with _open_parquet(path) as file:
            return Source(path, "parquet", tuple(file.schema_arrow.names))
    if head.lstrip()[:1] in (b"{", b"["):
        return _json(path)
    if head[:1] == b"\x80":
        raise ValueError(
            f"{path} is a pickle, which may run code when it is loaded: it was not. verl's DataProto.save_to_disk "
            f"writes such files; save its tensors instead: torch.save(dict(data.batch.items()), path)."
        )
    raise ValueError(f"{path} is of no kind that is read: {READ}.")


def _of_objects(path: Path, kind: Kind, content: Any) -> Source:
    """Of one loaded object: a dict, or a list of dicts."""
    first = content[0] if isinstance(content, list) and content else content
    if not isinstance(first, Mapping):
        what = "an empty list" if first == [] else f"a {type(content).__name__}"
        raise ValueError(f"{path} holds {what}: give a dict of columns or samples, or a list of dicts.")
    return Source(path, kind, tuple(str(key) for key in first), content)


# JSON


def _json(path: Path) -> Source:
    """JSONL where the first line is an object of its own, else the whole document."""
    try:
        try:
            row = _loads(next(line for _, line in read_lines(path) if line.strip()))
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            return Source(path, "jsonl", tuple(row), row)
        return _of_objects(path, "json", _loads(read_text(path)))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is neither JSON nor JSONL: {error}. Is it cut?") from None


def _loads(text: str) -> Any:
    try:
        return from_json(text)  # a third of the time; it takes no lone surrogates and no number of 5000 digits
    except ValueError:
        return json.loads(text)


def _json_rows(path: Path) -> Iterator[Row]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = _loads(line)
        except ValueError as error:
            raise ValueError(f"{place} is no JSON: {error}. Is the file cut?") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place} is a {type(row).__name__}, not an object.")
        yield place, row


# Parquet


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """A pyarrow.parquet.ParquetFile. Raises ValueError where it is damaged."""
    try:
        pa, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError("Parquet needs pyarrow: pip install 'mismatch-plugin[io]'.") from None
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is cut or damaged: {error}.") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    with _open_parquet(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row


# Zip files: of torch.save and numpy.savez


def _zip_names(path: Path) -> list[str]:
    """What a zip file holds. Raises ValueError where it is cut or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            names, damaged = archive.namelist(), archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, OSError, EOFError) as error:
        raise ValueError(f"{path} is cut or damaged: {error}. Was it still being written?") from None
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of {damaged} is another.")
    return names


def _load(path: Path) -> Any:
    """What torch.save wrote, on the CPU; tensors stay in the file until they are used."""
    try:
        with torch.serialization.safe_globals([*_SAFE]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the bytes of a damaged file can fail in any way
        if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"(?:GLOBAL|class) (\S+)", str(error))):
            raise ValueError(
                f"{path} holds {found[1]}, which is code, not data: nothing was loaded. Save numbers, text and tensors "
                f"only: torch.save({{name: tensor, ...}}, path); of verl's batch dict(data.batch.items())."
            ) from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} cannot be loaded: {reason}. It is damaged, or no file of torch.save.") from None


def plain(value: Any) -> Any:
    """A nested tensor as a list of tensors; anything else as it is."""
    return list(value.unbind()) if isinstance(value, torch.Tensor) and value.is_nested else value


class _Inert:
    """An object of a trainer's own class: kept as nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


_RECONSTRUCT, _SCALAR = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_SAFE: list[Any] = [
    # What pickles of numpy arrays name, of numpy 1 and 2.
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdOUS")),
    (codecs.encode, "_codecs.encode"),
    # Of a sample that trains a LoRA adapter; nothing of it is needed.
    (_Inert, "miles.utils.types.AdapterRef"),
    (_Inert, "miles.utils.types.RewardSpec"),
]
