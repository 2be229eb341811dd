"""NeMo-RL (7ea279a): train_data_step*.jsonl of its logger, or its train data saved as tensors.

Whole sequences [B, S] padded on the right; entry t of generation_logprobs and prev_logprobs is of token t, and entry 0
is 0 (the loss reads [:, 1:]). The response begins at the first token of token_mask. A line of the log holds a batch of
one: each value in a list. prev_logprobs is 0 everywhere where NeMo-RL skipped it (force_on_policy_ratio).
"""

from __future__ import annotations

from collections.abc import Iterator

from mismatch_plugin.rollout.dumps.columns import read_columns
from mismatch_plugin.rollout.dumps.names import Columns
from mismatch_plugin.rollout.dumps.part import Format, Options, Part
from mismatch_plugin.rollout.dumps.rows import RowReader
from mismatch_plugin.rollout.dumps.source import Row, Source


def _read(source: Source, options: Options) -> Part:
    if source.kind != "jsonl":
        return read_columns(source, source.content, options, padded=["sequence"])
    columns = Columns(source.keys, str(source.path), leave=["sample_id"])  # idx is the place in the file
    return RowReader(columns, options, padded=["sequence"]).part(_rows(source, columns))


def _rows(source: Source, columns: Columns) -> Iterator[Row]:
    names = {*columns.found.values()}
    for place, row in source.rows():
        one = {name: value for name, value in row.items() if name in names}
        if any(isinstance(value, list) and len(value) != 1 for value in one.values()):
            raise ValueError(f"{place} is not one sample: NeMo-RL's log has lists of one in each line.")
        yield place, {name: value[0] if isinstance(value, list) else value for name, value in one.items()}


NEMO_RL = Format(
    "nemo_rl",
    "NeMo-RL's train_data_step*.jsonl, or its input_ids, token_mask, generation_logprobs, prev_logprobs",
    lambda source: "generation_logprobs" in source.keys,
    _read,
)
