"""The training side's file: log-probs of the response tokens as the trainer computed them, one JSON object a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mismatch_plugin.data.read import InputError
from mismatch_plugin.data.served import Text
from mismatch_plugin.files import read_lines
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.responses import Response, Scored, as_floats, as_ids


class TrainingSample(BaseModel):
    """One line of the file. `sample_id` or `index` says which record it belongs to; without either, its line does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_log_probs: list[float | None]
    """log π_train of each response token, natural log, at the sampling temperature. null: none."""
    sample_id: str | None = None
    index: int | None = Field(default=None, ge=0)
    """Place of the record in its file, from 0."""
    token_ids: list[int] | None = None
    """Response ids that the trainer sees."""
    prompt_ids: list[int] | None = None
    """Prompt ids that the trainer sees."""
    loss_mask: list[int] | None = None
    """1 where a response token trains."""
    weight_version: int | str | None = None
    """Of the weights that the trainer holds."""
    weight_fingerprint: Text | None = None
    """Of the weights of that version that it sent to the servers."""
    temperature: float | None = Field(default=None, gt=0)
    """What the trainer divided its logits by."""
    advantages: float | list[float] | None = None
    """Of the response, or of each of its tokens."""

    def scored(self) -> Scored:
        """The same as arrays."""
        values, nulls = as_floats(self.train_log_probs)
        return Scored(
            log_probs=values,
            nulls=nulls,
            token_ids=None if self.token_ids is None else as_ids(self.token_ids),
            prompt_ids=None if self.prompt_ids is None else as_ids(self.prompt_ids),
            loss_mask=None if self.loss_mask is None else np.array(self.loss_mask, dtype=bool),
            weight_version=None if self.weight_version is None else str(self.weight_version),
            weight_fingerprint=self.weight_fingerprint,
            temperature=self.temperature,
            advantages=None if self.advantages is None else np.broadcast_to(self.advantages, len(values)).astype(float),
        )


def read_training(path: Path) -> list[TrainingSample]:
    """Read the file. Raises InputError with line, field and value where it is not what is described above."""
    samples = []
    try:
        for number, line in read_lines(path):
            if line.strip():
                samples.append(_sample(f"{path}, line {number}", line))
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the training file {path}: {error}") from None
    if not samples:
        raise InputError(f"{path} holds no sample.")
    return samples


def _sample(place: str, line: str) -> TrainingSample:
    try:
        return TrainingSample.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the line"
        optional = sorted(name for name, field in TrainingSample.model_fields.items() if not field.is_required())
        raise InputError(
            f"{place}: {where} is {repr(fault['input'])[:80]}: {fault['msg']}. A line is one JSON object with "
            f"train_log_probs and, if wanted, {', '.join(optional)}."
        ) from None


def match(records: Sequence[RolloutRecord | Response], training: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The training samples in the order of the records: by sample_id, else by index, else by line.

    Raises InputError where a record has no partner, or two.
    """
    wanted = {"sample_id": [record.sample_id for record in records], "index": [*range(len(records))]}
    told = {"sample_id": [sample.sample_id for sample in training], "index": [sample.index for sample in training]}
    return [training[at] for at in partners(wanted, told, len(records), len(training))]


def partners(
    wanted: Mapping[str, Sequence[Any]], told: Mapping[str, Sequence[Any]], records: int, samples: int
) -> Sequence[int]:
    """For each record the place of its partner in the training side: by the first name that every sample of the
    training side has, else by order. wanted, told: name → what the records and the samples are called by it.

    Raises InputError where a record has no partner, or two.
    """
    complete = [key for key, values in told.items() if values and None not in values]
    if not complete:
        if any(value is not None for values in told.values() for value in values):
            raise InputError(
                "some lines of the training file have a sample_id or index and some none: give all or none."
            )
        if samples != records:
            raise InputError(
                f"{records} records and {samples} lines of training log-probs: without sample_id or index "
                f"they are matched line by line, so give one line a record."
            )
        return range(records)
    # A dump may give one sample_id to several responses and still tell their places.
    unique = [key for key in complete if len({*told[key]}) == samples and len({*wanted[key]}) == records]
    key = (unique or complete)[0]
    names, values = wanted[key], told[key]
    if all(name is None for name in names):
        raise InputError("the training file names samples by sample_id, but no record has one: use index instead.")
    table = {value: at for at, value in enumerate(values)}
    if len(table) != samples:
        twice = next(value for value, count in Counter(values).items() if count > 1)
        raise InputError(f"the training file has {key} {twice!r} twice.")
    missing = [name for name in names if name not in table]
    if missing:
        raise InputError(f"the training file has no {key} {missing[0]!r} ({len(missing)} records have no partner).")
    if len({*names}) != records:
        raise InputError(f"the records have a {key} twice: it must name one record.")
    return [table[name] for name in names]
