"""Dicts of columns, padded or ragged, as rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mismatch_plugin.rollout.dumps.names import NAMES, Columns
from mismatch_plugin.rollout.dumps.padding import without_padding
from mismatch_plugin.rollout.dumps.part import Options, Part
from mismatch_plugin.rollout.dumps.rows import RowReader
from mismatch_plugin.rollout.dumps.source import Row, Source
from mismatch_plugin.rollout.dumps.tensors import plain
from mismatch_plugin.rollout.records import LogProbsOf


def read_columns(
    source: Source,
    content: Any,
    options: Options,
    *,
    padded: Collection[str] = (),
    log_probs_of: LogProbsOf = "tempered",
) -> Part:
    """A dict of columns, or rows. padded: columns whose lists are padded; columns of two dimensions always are."""
    wide: list[str] = []
    if isinstance(content, Mapping) and (source.kind in ("torch", "npz") or _is_table(source, content)):
        if source.kind == "jsonl" and sum(1 for _ in source.rows()) > 1:
            raise ValueError(f"{source.path}: its lines hold lists of lists: give one sample a line.")
        columns = Columns([*map(str, content)], str(source.path))
        read = {what: plain(content[name]) for what, name in columns.found.items()}
        wide = [what for what, value in read.items() if getattr(value, "ndim", 1) == 2]
        rows, padded = rows_of(read, columns, source.path), {*padded, *wide}
    else:
        columns, rows = Columns(source.keys, str(source.path)), source.rows()
    part = RowReader(columns, options, padded=padded, log_probs_of=log_probs_of).part(rows)
    if "response_ids" in columns and not columns.found.keys() & {"loss_mask", "attention_mask", "response_length"}:
        without_padding(part, columns="response_ids" in wide)
    part.notes += columns.notes()
    return part


def _is_table(source: Source, content: Mapping[str, Any]) -> bool:
    """A JSON object of columns, as opposed to one sample: its ids are lists of lists."""
    names = (*NAMES["response_ids"], *NAMES["sequence"])
    ids = next((content[name] for name in names if name in content), None)
    return source.kind in ("json", "jsonl") and isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def rows_of(read: dict[str, Any], columns: Columns, path: object) -> Iterator[Row]:
    """The rows of columns: tensors or arrays [B, ...] or lists of B. A single value holds for every row.

    Raises ValueError where columns, or the widths of padded ones, do not fit together.
    """
    many = {what: value for what, value in read.items() if _is_many(value)}
    names = columns.found
    first = "response_ids" if "response_ids" in many else "sequence"
    if first not in many:
        raise ValueError(f"{path}: {names.get(first, first)} is a {type(read.get(first)).__name__}: give [B, n].")
    total = len(many[first])
    for what, value in many.items():
        if len(value) != total:
            raise ValueError(f"{path}: {names[what]} has {len(value)} rows, {names[first]} {total}.")
    widths = {what: value.shape[1] for what, value in many.items() if getattr(value, "ndim", 1) == 2}
    if width := widths.get(first):
        prompt = widths.get("prompt_ids", 0)
        fits = {width, width + prompt} if first == "response_ids" else {width, width - 1}
        for what in ("loss_mask", "rollout_log_probs", "log_probs", "advantages", "entropy"):
            allowed = fits if what == "loss_mask" or first == "sequence" else {width}
            if widths.get(what, width) not in allowed:
                raise ValueError(
                    f"{path}: {names[what]} is [{total}, {widths[what]}], {names[first]} [{total}, {width}]: their "
                    f"tokens cannot be matched."
                )
    for at in range(total):
        row = {names[what]: value[at] if what in many else value for what, value in read.items()}
        yield f"{path}, sample {at}", row
        for value in many.values():
            if isinstance(value, list):
                value[at] = None  # lists are larger than the arrays made of them


def _is_many(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, (list, tuple))
