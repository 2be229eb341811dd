"""The typed record of one sampled response, and which of its log-probs are invalid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP
from mismatch_plugin.rollout.sampling import SamplingParameters, remaining_bias

__all__ = [
    "Fault",
    "FaultKind",
    "FinishReason",
    "RolloutRecord",
    "SamplingParameters",
    "WeightSpan",
    "check_record",
    "check_records",
]

FinishReason = Literal["stop", "length", "abort"]
FaultKind = Literal["missing", "nan", "positive_infinite", "positive", "floor", "zero_fill", "length", "token_ids"]

TokenId = Annotated[int, Field(ge=0, lt=2**63)]
"""What an int64 holds: tensors, numpy and Parquet take no other."""

_WHAT = {
    "missing": "is missing",
    "nan": "is NaN",
    "positive_infinite": "is +inf",
    "positive": f"is above 0 by more than rounding ({POSITIVE_TOLERANCE:g})",
    "floor": f"is −inf or a floor (at most {FLOOR:g})",
    "zero_fill": "is exactly 0.0 where the training side is far from 0: a fill, not a certain token",
}


@dataclass(frozen=True)
class Fault:
    """One invalid log-prob. sample: the record's place in its batch, or its `sample_id`. position: counts response
    tokens from 0; for `length` the first position that one of the two lists lacks."""

    sample: object
    position: int
    kind: FaultKind
    value: float | int | None
    message: str

    def __str__(self) -> str:
        return self.message


class WeightSpan(BaseModel):
    """Response tokens [start, end) were sampled from the weights called `version`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class RolloutRecord(BaseModel):
    """One sampled response with everything the correction needs to know about its log-probs.

    Lists per token are as long as `response_ids`. Log-probs are in nats. JSON writes NaN and infinities as strings.
    `rollout_log_probs` and `behaviour_log_probs` may hold anything a server returns: `faults` says what is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    rollout_log_probs: list[float | None]
    """Of `response_ids`, as SGLang returns them: full vocabulary after temperature and penalties, no filter. None: not
    returned, or not a sampled token."""
    loss_mask: list[int] = Field(default_factory=list)
    """1 where a token trains; 0 for tool and environment tokens. Default: all 1."""
    sampling: SamplingParameters = SamplingParameters()
    finish_reason: FinishReason | None = None
    weight_versions: list[WeightSpan] = Field(default_factory=list)
    """In order, without overlap. Empty where the server told none."""
    kept_ids: list[list[TokenId]] | None = None
    """The ids that the filters left to choose from (SGLang's sampling mask). An empty list: unfiltered."""
    behaviour_log_probs: list[float | None] | None = None
    """Renormalised over `kept_ids`: what the token was really drawn from."""
    prompt_log_probs: list[float | None] | None = None
    """Of `prompt_ids`, always at temperature 1; the first is None."""
    top_log_probs: list[list[tuple[float, TokenId]]] | None = None
    """The most likely (log-prob, id) pairs at each response token."""
    text: str | None = None
    request_id: str | None = None
    sample_id: str | None = None
    server: str | None = None
    """Address of the server that sampled it, without credentials."""
    dp_rank: int | None = None
    """Which data-parallel worker of the server sampled it. None: not told, or there is one only."""
    reward: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_loss_mask(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("loss_mask") is None:
            ids = data.get("response_ids")
            return {**data, "loss_mask": [1] * len(ids) if isinstance(ids, (list, tuple)) else []}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> RolloutRecord:
        length = len(self.response_ids)
        for name in ("loss_mask", "kept_ids", "top_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(
                    f"{name} has {len(value)} entries, response_ids {length}{self._called}: give one a response token"
                )
        if self.prompt_log_probs is not None and len(self.prompt_log_probs) != len(self.prompt_ids):
            raise ValueError(
                f"prompt_log_probs has {len(self.prompt_log_probs)} entries, prompt_ids {len(self.prompt_ids)}"
                f"{self._called}: give one a prompt token, None for the first"
            )
        for position, value in enumerate(self.loss_mask):
            if value not in (0, 1):
                raise ValueError(
                    f"loss_mask holds {value} at position {position}{self._called}: 1 where a token trains, else 0"
                )
        end = 0
        for span in self.weight_versions:
            if not end <= span.start <= span.end <= length:
                raise ValueError(
                    f"weight version {span.version!r} spans [{span.start}, {span.end}) after token {end} of {length}"
                    f"{self._called}: spans are half-open, in order and inside the response"
                )
            end = span.end
        return self

    @property
    def _called(self) -> str:
        return f" (sample {self.sample_id})" if self.sample_id is not None else ""

    @property
    def version_of_token(self) -> list[str | None]:
        """The weight version of each response token; None where no span covers it."""
        versions: list[str | None] = [None] * len(self.response_ids)
        for span in self.weight_versions:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        return versions

    @property
    def note(self) -> str:
        """What bias the sampling leaves in this record's log-probs (`sampling.remaining_bias`); empty if none."""
        return remaining_bias(self.sampling, has_kept_ids=self.kept_ids is not None)

    def faults(
        self,
        sample: object = None,
        *,
        trained_ids: Sequence[int] | None = None,
        train_log_probs: Sequence[float] | None = None,
    ) -> list[Fault]:
        """Every log-prob that is wrong in this record, in order of position.

        Positions with loss_mask 0 are not looked at, and one position has at most one fault a list. 0.0 fills are seen
        only next to `train_log_probs` (one a response token; the training side's log-probs of the same tokens).

        Args:
            sample: how messages call the record; default `sample_id`.
            trained_ids: the response ids that the training side sees.
        """
        sample = self.sample_id if sample is None else sample
        found = [*self._id_faults(sample, trained_ids)]
        lists = [("rollout log-prob", self.rollout_log_probs)]
        if self.behaviour_log_probs is not None:
            lists.append(("behaviour log-prob", self.behaviour_log_probs))
        for name, values in lists:
            if len(values) != len(self.response_ids):
                position = min(len(values), len(self.response_ids))
                message = (
                    f"{name}s of sample {sample}: {len(values)} for {len(self.response_ids)} response tokens, position "
                    f"{position} is the first without a partner (kind length)"
                )
                found.append(Fault(sample, position, "length", len(values), message))
                continue
            found += self._value_faults(name, values, sample, train_log_probs)
        return sorted(found, key=lambda fault: fault.position)

    def _id_faults(self, sample: object, trained_ids: Sequence[int] | None) -> Iterator[Fault]:
        if trained_ids is None:
            return
        ours = self.response_ids
        if len(trained_ids) != len(ours):
            position = min(len(trained_ids), len(ours))
            message = (
                f"response of sample {sample}: {len(ours)} tokens were sampled, {len(trained_ids)} are trained on, "
                f"position {position} is the first without a partner (kind length)"
            )
            yield Fault(sample, position, "length", len(trained_ids), message)
        for position, (sampled, trained) in enumerate(zip(ours, trained_ids, strict=False)):
            if sampled != trained:
                message = (
                    f"token id of sample {sample}, position {position}: {sampled} was sampled, {trained} is trained on "
                    f"(kind token_ids)"
                )
                yield Fault(sample, position, "token_ids", trained, message)

    def _value_faults(
        self, name: str, values: Sequence[float | None], sample: object, train: Sequence[float] | None
    ) -> Iterator[Fault]:
        if train is not None and len(train) != len(values):
            raise ValueError(
                f"train_log_probs of sample {sample} has {len(train)} entries, the response {len(values)} tokens: give "
                f"one a response token"
            )
        for position, (value, mask) in enumerate(zip(values, self.loss_mask, strict=True)):
            kind = _kind(value, None if train is None else train[position]) if mask else None
            if kind is not None:
                message = f"{name} of sample {sample}, position {position} {_WHAT[kind]} (value {value}, kind {kind})"
                yield Fault(sample, position, kind, value, message)


def _kind(value: float | None, train: float | None) -> FaultKind | None:
    """The same bounds as `core.validity.classify`, split finer."""
    if value is None:
        return "missing"
    if math.isnan(value):
        return "nan"
    if value > POSITIVE_TOLERANCE:
        return "positive_infinite" if math.isinf(value) else "positive"
    if value <= FLOOR:
        return "floor"
    if value == 0.0 and train is not None and train < -ZERO_FILL_GAP:
        return "zero_fill"
    return None


def check_record(record: RolloutRecord, index: int) -> list[Fault]:
    """The record's faults without a training side, called by its place in the batch."""
    return record.faults(index)


def check_records(records: Sequence[RolloutRecord], train_log_probs: Sequence[Any] | None = None) -> list[Fault]:
    """All faults of a batch; `train_log_probs` holds one sequence of numbers a record."""
    if train_log_probs is not None and len(train_log_probs) != len(records):
        raise ValueError(f"train_log_probs has {len(train_log_probs)} entries for {len(records)} records.")
    found: list[Fault] = []
    for index, record in enumerate(records):
        train = None if train_log_probs is None else [float(value) for value in train_log_probs[index]]
        found += record.faults(index, train_log_probs=train)
    return found
