"""Files of an own loop: any dict of padded or ragged columns, or rows, whose names are in `names.NAMES`."""

from __future__ import annotations

from mismatch_plugin.rollout.dumps.columns import read_columns
from mismatch_plugin.rollout.dumps.part import Format

GENERIC = Format(
    "generic",
    "columns or rows with known names, .pt, .npz, .parquet, .json or .jsonl",
    lambda source: True,  # the last that is asked: what it cannot read, it says with the names it knows
    lambda source, options: read_columns(source, source.content, options),
)
