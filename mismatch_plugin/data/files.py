"""Samples in files of our own: JSONL (a sample a line) and Parquet (a sample a row; extra `[io]`), by the suffix."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from mismatch_plugin.data.arrays import with_nulls
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.files import MIB, replacing, validate_regular_file

_ROWS = 1024
"""Rows of a Parquet row group."""
MAX_ROW_GROUP = 2048 * MIB
IDS = ("response_ids", "prompt_ids", "trained_ids", "trained_prompt_ids")
MASKS = ("loss_mask", "trained_mask")
FLOATS = (
    *("rollout_log_probs", "behaviour_log_probs", "prompt_log_probs", "train_log_probs", "ref_log_probs"),
    *("advantages", "entropy"),
)
EXPERTS = ("routed_experts", "trained_experts")
NESTED = ("sampling", "weight_versions", "kept_ids", "top_log_probs", "served", *EXPERTS)
"""JSON text in Parquet."""


def write_samples(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write samples and return their number. Log-probs are kept to the last bit, NaN, infinities and nulls too.

    The file appears whole or not at all: it is written next to its place and moved there at the end.
    """
    path = Path(path)
    if isinstance(samples, Sample) or not isinstance(samples, Iterable):
        kind = type(samples).__name__
        raise TypeError(f"write_samples takes a list of samples, not a {kind}: give [sample], or a dump's samples.")
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: the suffix {path.suffix!r} is unknown, use .jsonl or .parquet.")
    with replacing(path) as temporary:
        return (_write_jsonl if path.suffix == ".jsonl" else _write_parquet)(temporary, samples)


def row_of(sample: Sample) -> dict[str, Any]:
    """What is known of a sample, as JSON has it: no name for what is not."""
    row: dict[str, Any] = {}
    for name in Sample.model_fields:
        value = getattr(sample, name)
        told = name in sample.model_fields_set or name in ("loss_mask", "log_probs_of")
        if name == "index" or not told or value is None:
            continue
        if isinstance(value, np.ndarray):
            value = _listed(value)
        elif isinstance(value, BaseModel):
            value = value.model_dump()
        elif name == "weight_versions":
            value = [span.model_dump() for span in value]
        row[name] = value
    return row


def _listed(value: np.ndarray[Any, Any]) -> list[Any]:
    if value.dtype.kind == "f":
        return with_nulls(value)
    return (value.view(np.int8) if value.dtype.kind == "b" else value).tolist()


def _write_jsonl(path: Path, samples: Iterable[Sample]) -> int:
    count = 0
    with path.open("wb") as stream:
        for sample in samples:
            stream.write(to_json(row_of(sample), inf_nan_mode="strings") + b"\n")
            count += 1
    return count


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            "Parquet needs pyarrow: pip install 'mismatch-plugin[io]', or use a .jsonl file instead."
        ) from None


def _write_parquet(path: Path, samples: Iterable[Sample]) -> int:
    pa, parquet = _pyarrow()
    lists = {
        **dict.fromkeys(IDS, pa.int64()),
        **dict.fromkeys(MASKS, pa.int8()),
        **dict.fromkeys(FLOATS, pa.float64()),
    }
    single = {
        **dict.fromkeys(("dp_rank", "step", "cached_tokens"), pa.int64()),
        "reward": pa.float64(),
        "trainer_temperature": pa.float64(),
    }
    schema = pa.schema(
        [
            (name, pa.list_(lists[name]) if name in lists else single.get(name, pa.string()))
            for name in Sample.model_fields
        ]
    )
    count, rows = 0, []
    with parquet.ParquetWriter(path, schema, write_page_checksum=True) as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            rows.clear()

        for sample in samples:
            row = row_of(sample)
            for name in (*NESTED, "group"):  # a group is text or a number
                if name in row:
                    row[name] = to_json(row[name], inf_nan_mode="strings").decode()
            rows.append(row)
            count += 1
            if len(rows) == _ROWS:
                flush()
        flush()
    return count


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A pyarrow.parquet.ParquetFile. Raises ValueError where it is damaged, and where a row group is too large."""
    pa, parquet = _pyarrow()
    validate_regular_file(path)
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
    except OSError as error:
        raise ValueError(f"{path} is cut or damaged: {error}.") from None


def _bytes(group: Any) -> int:
    """Bytes of a row group in memory: equal values take next to none of the file, and 8 bytes each as numbers."""
    values = sum(group.column(at).num_values for at in range(group.num_columns))
    return max(group.total_byte_size, 8 * values)


def own_fields(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a sample from a row of our Parquet files: null is unknown, and nested values are JSON text."""
    found = {name: value for name, value in row.items() if value is not None}
    for name in (*NESTED, "group"):
        if isinstance(value := found.get(name), str):
            with suppress(ValueError):  # a group of somebody else's file is text
                found[name] = from_json(value)
    return found
