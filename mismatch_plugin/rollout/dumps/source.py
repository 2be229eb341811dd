"""One file of a dump, opened by what it holds: torch zip, npz, Parquet, JSON or JSONL. No code of a file ever runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mismatch_plugin.files import read_lines, read_text, refuse_special
from mismatch_plugin.rollout.dumps.tensors import DataProto, open_npz, open_torch, refuse_pickle, zip_names
from mismatch_plugin.rollout.files import open_parquet

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
        elif self.kind == "json" and isinstance(self.content, Mapping):
            yield str(self.path), self.content
        elif isinstance(self.content, list):
            for number, row in enumerate(self.content):
                if not isinstance(row, Mapping):
                    raise ValueError(f"{self.path}, entry {number} is a {type(row).__name__}, not a dict.")
                yield f"{self.path}, entry {number}", row
                self.content[number] = None  # the lists of a row are larger than its arrays by far
        else:
            raise ValueError(f"{self.path} holds columns, not rows.")


def open_source(path: Path) -> Source:
    """Raises ValueError naming the file where it is empty, cut, too large, of no known kind, or could run code."""
    refuse_special(path)
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    if not head.strip() and path.stat().st_size == len(head):
        raise ValueError(f"{path} is empty: it holds no response and no sample.")
    if head.startswith(b"PK"):
        if any(name.endswith("data.pkl") for name in zip_names(path)):
            return _of_objects(path, "torch", open_torch(path))
        content = open_npz(path)
        return Source(path, "npz", tuple(content), content)
    if head.startswith(b"PAR1"):
        with _parquet(path) as file:
            return Source(path, "parquet", tuple(file.schema_arrow.names))
    if head.lstrip()[:1] in (b"{", b"["):
        return _json(path)
    refuse_pickle(path, head)
    raise ValueError(f"{path} is of no kind that is read: {READ}.")


def _of_objects(path: Path, kind: Kind, content: Any) -> Source:
    """Of one loaded object: a dict, or a list of dicts."""
    if isinstance(content, DataProto):
        return Source(path, kind, ("batch", "non_tensor_batch", "meta_info"), content)
    first = content[0] if isinstance(content, list) and content else content
    if not isinstance(first, Mapping):
        what = "an empty list" if first == [] else f"a {type(content).__name__}"
        raise ValueError(f"{path} holds {what}: give a dict of columns or samples, or a list of dicts.")
    return Source(path, kind, tuple(str(key) for key in first), content)


def _json(path: Path) -> Source:
    """JSONL where the first line is an object of its own, else the whole document."""
    first = next((line for _, line in _lines(path) if line.strip()), "")
    try:
        row = _loads(first)
    except json.JSONDecodeError:
        return _document(path)
    if isinstance(row, dict):
        return Source(path, "jsonl", tuple(row), row)
    return _document(path)


def _document(path: Path) -> Source:
    try:
        return _of_objects(path, "json", _loads(read_text(path)))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is neither JSON nor JSONL: {error}. Is it cut?") from None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply.") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        yield from read_lines(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}.") from None


def _json_rows(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
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


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """The open file; what pyarrow says of damaged pages names it."""
    try:
        with open_parquet(path) as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path} is cut or damaged: {error}.") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    with _parquet(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH):
            columns = {name: _column(batch.column(at)) for at, name in enumerate(batch.schema.names)}
            for at in range(batch.num_rows):
                number += 1
                yield f"{path}, row {number}", {name: value(at) for name, value in columns.items()}


def _column(array: Any) -> Callable[[int], Any]:
    """Rows of an Arrow column: numbers of a list column as numpy without a Python object each, else Python values."""
    if str(getattr(array.type, "value_type", None)) not in _NUMBERS:
        return array.to_pylist().__getitem__

    def row(at: int) -> Any:
        cell = array[at]
        if not cell.is_valid:
            return None
        return cell.values.to_numpy(zero_copy_only=False) if cell.values.null_count == 0 else cell.as_py()

    return row


_NUMBERS = ("float", "double", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")
