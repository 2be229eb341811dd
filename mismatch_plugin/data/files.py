"""Samples in files of our own: JSONL, a sample a line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.files import replacing


def write_samples(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write samples and return their number. Log-probs are kept to the last bit, NaN, infinities and nulls too.

    The file appears whole or not at all: it is written next to its place and moved there at the end.
    """
    path, count = Path(path), 0
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: samples are written as .jsonl, not {path.suffix!r}.")
    with replacing(path) as temporary, temporary.open("wb") as stream:
        for sample in samples:
            stream.write(to_json(row_of(sample), inf_nan_mode="strings") + b"\n")
            count += 1
    return count


def row_of(sample: Sample) -> dict[str, Any]:
    """What is known of a sample, as JSON has it: no name for what is not."""
    told = sample.model_fields_set - {"index"} | {"loss_mask", "log_probs_of"}
    row = sample.model_dump(include=told, warnings=False)
    return {name: value for name, value in row.items() if value is not None}
