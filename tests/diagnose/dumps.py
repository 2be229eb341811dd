"""Responses with both sides, as a dump is read into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mismatch_plugin.data.sample import Sample
from mismatch_plugin.diagnose.batch import Batch, make_batch

Rows = Sequence[Sequence[float]]


def batch_of(
    rollout: Rows,
    training: Rows,
    responses: Sequence[dict[str, Any]] | None = None,
) -> Batch:
    """One sample a row. responses: further fields of each."""
    none: list[dict[str, Any]] = [{} for _ in rollout]
    given = zip(rollout, training, responses or none, strict=True)
    made = [
        Sample(
            response_ids=np.arange(len(values), dtype=np.int32),
            rollout_log_probs=np.array(values, dtype=float),
            train_log_probs=np.array(train, dtype=float),
            **fields,
        )
        for values, train, fields in given
    ]
    return make_batch(made)


def drawn(sequences: int = 40, spread: float = 0.05, seed: int = 0, longest: int = 60, **fields: Any) -> Batch:
    """Responses of 1 to `longest` tokens whose training side is normally distributed around the rollout's."""
    generator = np.random.default_rng(seed)
    rollout = [-generator.exponential(0.7, generator.integers(1, longest + 1)) - 1e-3 for _ in range(sequences)]
    training = [np.minimum(row + generator.normal(0, spread, len(row)), 0.0) for row in rollout]
    return batch_of([row.tolist() for row in rollout], [row.tolist() for row in training], **fields)
