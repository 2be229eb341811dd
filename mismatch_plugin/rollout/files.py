"""Records in files: JSONL (one record a line) and Parquet (one record a row; extra `[io]`), chosen by the suffix."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mismatch_plugin.files import MIB, read_lines, refuse_special, replacing
from mismatch_plugin.rollout.records import RolloutRecord

_ROWS = 1024
"""Rows of a Parquet row group."""
_READ_ROWS = 32
"""Rows that are Python objects at once."""
MAX_ROW_GROUP = 2048 * MIB
_PAIR = ("log_prob", "id")
"""A (log-prob, id) pair of `top_log_probs` is a struct in Parquet."""


def read_records(path: str | Path) -> list[RolloutRecord]:
    """All records of a file. Raises ValueError naming the file where it cannot be read, and line (or row),
    sample and field for one that is none."""
    return list(iter_records(path))


def iter_records(path: str | Path, jsonl: bool | None = None) -> Iterator[RolloutRecord]:
    """The records of a file one by one, so that the file need not fit in memory. jsonl: default: by the suffix."""
    path = Path(path)
    jsonl = _is_jsonl(path) if jsonl is None else jsonl
    return _named(path, _read_jsonl(path) if jsonl else _read_parquet(path))


def write_records(path: str | Path, records: Iterable[RolloutRecord]) -> int:
    """Write records and return their number. Log-probs are kept to the last bit, NaN and infinities too.

    The file appears whole or not at all: it is written next to its place and moved there at the end.
    """
    path = Path(path)
    write = _write_jsonl if _is_jsonl(path) else _write_parquet
    with replacing(path) as temporary:
        return write(temporary, records)


def _is_jsonl(path: Path) -> bool:
    if path.suffix in (".jsonl", ".parquet"):
        return path.suffix == ".jsonl"
    raise ValueError(f"{path}: the suffix {path.suffix!r} is unknown, use .jsonl or .parquet.")


def _write_jsonl(path: Path, records: Iterable[RolloutRecord]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(record.model_dump_json(exclude_none=False) + "\n")
            count += 1
    return count


def _named(path: Path, records: Iterator[RolloutRecord]) -> Iterator[RolloutRecord]:
    """The records, and errors of the file as a whole as one sentence with its name."""
    try:
        yield from records
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"{path}: {reason}. Give a whole .jsonl or .parquet file that may be read.") from None


def _read_jsonl(path: Path) -> Iterator[RolloutRecord]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            yield RolloutRecord.model_validate_json(line)
        except ValidationError as error:
            raise _unreadable(f"{path}, line {number}", error) from None


def _unreadable(place: str, error: ValidationError) -> ValueError:
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"])
    given = fault.get("input")
    sample = given.get("sample_id") if isinstance(given, Mapping) else None
    called = f" (sample {sample})" if sample is not None else ""
    value = "" if isinstance(given, (Mapping, list)) else f" (value {str(given)[:60]!r})"
    return ValueError(
        f"{place}{called}: {field or 'record'}: {fault['msg']}{value}. It is no rollout record: "
        f"docs/inspect.md shows one."
    )


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            "Parquet needs pyarrow: pip install 'mismatch-plugin[io]', or use a .jsonl file instead."
        ) from None


def _column(pa: Any, kind: Any) -> Any:
    """The type of a column for values of the type `kind`. Doubles, so that reading gives back what was written."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return pa.struct([(name, _column(pa, field.annotation)) for name, field in kind.model_fields.items()])
    if origin is Annotated:
        return _column(pa, inner[0])
    if origin is tuple and inner[-1] is not ...:  # of the top log-probs
        return pa.struct([(name, _column(pa, part)) for name, part in zip(_PAIR, inner, strict=True)])
    if origin in (list, tuple):
        return pa.list_(_column(pa, inner[0]))
    if type(None) in inner:
        (kind,) = (part for part in inner if part is not type(None))
        return _column(pa, kind)
    return {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}.get(kind, pa.string())


def _write_parquet(path: Path, records: Iterable[RolloutRecord]) -> int:
    pa, parquet = _pyarrow()
    schema = pa.schema([*_column(pa, RolloutRecord)])
    schema = schema.set(schema.get_field_index("loss_mask"), pa.field("loss_mask", pa.list_(pa.int8())))
    count, rows = 0, []
    with parquet.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        for record in records:
            rows.append(_row(record))
            count += 1
            if len(rows) == _ROWS:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return count


def _row(record: RolloutRecord) -> dict[str, Any]:
    row = record.model_dump()
    if record.top_log_probs is not None:
        row["top_log_probs"] = [[dict(zip(_PAIR, pair, strict=True)) for pair in top] for top in record.top_log_probs]
    return row


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A pyarrow.parquet.ParquetFile. Raises ValueError where it is damaged, and where a row group is too large."""
    pa, parquet = _pyarrow()
    refuse_special(path)
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            groups = (_bytes(file.metadata.row_group(at)) for at in range(file.metadata.num_row_groups))
            if (largest := max(groups, default=0)) > MAX_ROW_GROUP:
                raise ValueError(
                    f"{path} has a row group of {largest / MIB:.0f} MiB, {MAX_ROW_GROUP / MIB:.0f} at most are read: "
                    f"write it in smaller ones."
                )
            yield file
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}.") from None


def _bytes(group: Any) -> int:
    """Bytes of a row group in memory: equal values take next to none of the file, and 8 bytes each as numbers."""
    values = sum(group.column(at).num_values for at in range(group.num_columns))
    return max(group.total_byte_size, 8 * values)


def _read_parquet(path: Path) -> Iterator[RolloutRecord]:
    with open_parquet(path) as file:
        number = 0
        for batch in file.iter_batches(batch_size=_READ_ROWS):
            for row in batch.to_pylist():
                number += 1
                if isinstance(positions := row.get("top_log_probs"), list):
                    row["top_log_probs"] = [_pairs(position) for position in positions]
                try:
                    yield RolloutRecord.model_validate(row)
                except ValidationError as error:
                    raise _unreadable(f"{path}, row {number}", error) from None


def _pairs(position: Any) -> Any:
    """(log-prob, id) of each entry of a position; what has another form stays, for the record to refuse."""
    if not isinstance(position, list):
        return position
    return [
        tuple(entry[name] for name in _PAIR) if isinstance(entry, dict) and entry.keys() == {*_PAIR} else entry
        for entry in position
    ]
