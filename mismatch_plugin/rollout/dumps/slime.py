"""slime (624b824) and miles (31f1ca9): --save-debug-rollout-data, and slime's --save-debug-train-data.

{"rollout_id", "samples": [Sample.to_dict()]}; the training side's has "format_version" and "dp_shards" too, and
samples with log_probs, advantages and so on, already gathered over data and context parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mismatch_plugin.rollout.dumps import values
from mismatch_plugin.rollout.dumps.names import Columns
from mismatch_plugin.rollout.dumps.part import Format, Options, Part
from mismatch_plugin.rollout.dumps.rows import RowReader
from mismatch_plugin.rollout.dumps.source import Row, Source


def _recognises(source: Source) -> bool:
    return source.kind == "torch" and {"rollout_id", "samples"} <= {*source.keys}


def _read(source: Source, options: Options) -> Part:
    samples = source.content.get("samples") if isinstance(source.content, Mapping) else None
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, Mapping) for sample in samples):
        raise ValueError(f"{source.path} holds no list of samples: it is no dump of slime or miles, or it is empty.")
    trained = "dp_shards" in source.keys
    keys = dict.fromkeys(str(key) for sample in samples for key in sample)
    if not trained and all(sample.get("rollout_log_probs") is None for sample in samples):
        raise ValueError(
            f"{source.path}: no sample has rollout_log_probs. Keep what SGLang returned in Sample.rollout_log_probs "
            f"(the built-in rollout functions do; a custom one has to)."
        )
    leave = ("reward", "finish_reason") if trained else ()  # what the trainer normalised is no reward
    columns = Columns([*keys], str(source.path), leave=("step", "total_length", *leave))
    step = source.content.get("rollout_id")
    places = [sample.get("rollout_position") for sample in samples]
    reader = RowReader(columns, options, step=step if isinstance(step, int) else None)
    part = reader.part(_rows(source, samples))
    if part.scored is not None:
        counts = [None if place is None else values.count(place, "rollout_position") for place in places]
        part.indexes = [place if place is None or reader.step is None else (reader.step, place) for place in counts]
    if "rollout_top_p_token_ids" in keys:
        part.notes.append("top-p was on in sampling: the ids it kept are not read")
    return part


def _rows(source: Source, samples: list[Any]) -> Iterator[Row]:
    for number, sample in enumerate(samples):
        yield f"{source.path}, sample {number}", sample
        samples[number] = None  # its lists are larger than its arrays by far


SLIME = Format(
    "slime", "slime's and miles' --save-debug-rollout-data, slime's --save-debug-train-data", _recognises, _read
)
