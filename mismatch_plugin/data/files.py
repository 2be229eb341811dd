"""Samples in files of our own: JSONL (a sample a line) and Parquet (a sample a row; extra `[io]`), by the suffix."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from mismatch_plugin.data.arrays import with_nulls
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.files import replacing

_ROWS = 1024
"""Rows of a Parquet row group."""
IDS = ("response_ids", "prompt_ids", "trained_ids", "trained_prompt_ids")
MASKS = ("loss_mask", "trained_mask")
FLOATS = (
    *("rollout_log_probs", "behaviour_log_probs", "prompt_log_probs", "train_log_probs", "ref_log_probs"),
    *("advantages", "entropy"),
)
EXPERTS = ("routed_experts", "trained_experts")
_TEXT = ("sampling", "weight_versions", "kept_ids", "top_log_probs", "served", "group", *EXPERTS)
"""JSON text in Parquet; a group is text or a number."""


def write_samples(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write samples and return their number. Log-probs are kept to the last bit, NaN, infinities and nulls too.

    The file appears whole or not at all: it is written next to its place and moved there at the end.
    """
    path = Path(path)
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
    kinds = {
        **dict.fromkeys(IDS, pa.list_(pa.int64())),
        **dict.fromkeys(MASKS, pa.list_(pa.int8())),
        **dict.fromkeys(FLOATS, pa.list_(pa.float64())),
        **dict.fromkeys(("dp_rank", "step", "cached_tokens"), pa.int64()),
        **dict.fromkeys(("reward", "trainer_temperature"), pa.float64()),
    }
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in Sample.model_fields])
    count, rows = 0, map(_with_text, samples)
    with parquet.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        while group := [*islice(rows, _ROWS)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def _with_text(sample: Sample) -> dict[str, Any]:
    row = row_of(sample)
    return row | {name: to_json(row[name], inf_nan_mode="strings").decode() for name in _TEXT if name in row}


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A pyarrow.parquet.ParquetFile. Raises ValueError where it is damaged."""
    pa, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is cut or damaged: {error}.") from None


def own_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a sample from a row of our Parquet files: null is unknown, and nested values are JSON text."""
    found = {name: value for name, value in row.items() if value is not None}
    for name in _TEXT:
        if isinstance(value := found.get(name), str):
            with suppress(ValueError):  # a group of somebody else's file is text
                found[name] = from_json(value)
    return found
