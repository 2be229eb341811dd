"""The typed record of one sampled response, and which of its log-probs are invalid."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP
from mismatch_plugin.data.sampling import SamplingParameters, remaining_bias
from mismatch_plugin.data.served import Served, ServedWeights
from mismatch_plugin.data.versions import WeightSpan

__all__ = [
    "Fault",
    "FaultKind",
    "FinishReason",
    "LogProbsOf",
    "RolloutRecord",
    "SamplingParameters",
    "WeightSpan",
    "check_record",
    "check_records",
]

FinishReason = Literal["stop", "length", "abort"]
LogProbsOf = Literal["raw", "tempered", "filtered"]
"""What `rollout_log_probs` are of: the logits as they are, after temperature and penalties (SGLang), or after filters
too, renormalised (vLLM's processed log-probs)."""
FaultKind = Literal["missing", "nan", "positive_infinite", "positive", "floor", "zero_fill", "length", "token_ids"]

TokenId = Annotated[int, Field(ge=0, lt=2**63)]
"""What an int64 holds: tensors, numpy and Parquet take no other."""


def _in_range(ids: list[int]) -> list[int]:
    """A check of every id by itself costs as much as parsing it: most lists fit 32 bits, which is seen at once."""
    try:
        struct.pack(f"{len(ids)}I", *ids)
    except struct.error:
        return _EACH.validate_python(ids)  # its errors name position and value
    return ids


_EACH = TypeAdapter(list[TokenId])
TokenIds = Annotated[list[int], AfterValidator(_in_range)]
if TYPE_CHECKING:
    _Mask = list[int]
else:  # null stands for the default, and no record has it any more
    _Mask = list[int] | None

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


def versions_by_token(spans: Sequence[WeightSpan], length: int) -> list[str | None]:
    """The weight version of each response token; None where no span covers it."""
    versions: list[str | None] = [None] * length
    for span in spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


class RolloutRecord(BaseModel):
    """One sampled response with everything the correction needs to know about its log-probs.

    Lists per token are as long as `response_ids`. Log-probs are in nats. JSON writes NaN and infinities as strings.
    `rollout_log_probs` and `behaviour_log_probs` may hold anything a server returns: `faults` says what is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    prompt_ids: TokenIds
    response_ids: TokenIds
    rollout_log_probs: list[float | None]
    """Of `response_ids`, as SGLang returns them: full vocabulary after temperature and penalties, no filter. None: not
    returned, or not a sampled token."""
    loss_mask: _Mask = Field(default_factory=list)
    """1 where a token trains; 0 for tool and environment tokens. Default: all 1."""
    sampling: SamplingParameters = SamplingParameters()
    log_probs_of: LogProbsOf = "tempered"
    """What the rollout log-probs are of; vLLM's are `raw` by default and `filtered` with logprobs_mode processed."""
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
    served: Served | None = None
    """What our SGLang plugin told: the weights that really made the tokens, and what the log-probs are of. None: the
    server has no such plugin."""
    reward: float | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RolloutRecord:
        length = len(self.response_ids)
        if self.loss_mask is None or "loss_mask" not in self.model_fields_set:
            object.__setattr__(self, "loss_mask", [1] * length)
            self.model_fields_set.add("loss_mask")
        elif (ones := self.loss_mask.count(1)) != len(self.loss_mask) != ones + self.loss_mask.count(0):
            position, value = next((at, value) for at, value in enumerate(self.loss_mask) if value not in (0, 1))
            raise ValueError(
                f"loss_mask holds {value} at position {position}{self._called}: 1 where a token trains, else 0"
            )
        for name in ("loss_mask", "kept_ids", "top_log_probs", "prompt_log_probs"):
            per, advice = "response_ids", "give one a response token"
            if name == "prompt_log_probs":
                per, advice = "prompt_ids", "give one a prompt token, None for the first"
            value, count = getattr(self, name), len(getattr(self, per))
            if value is not None and len(value) != count:
                raise ValueError(f"{name} has {len(value)} entries, {per} {count}{self._called}: {advice}")
        self._check_spans([(f"weight version {span.version!r}", span) for span in self.weight_versions])
        if self.served is not None:
            self._check_spans([(f"served.weights: {span.fingerprint!r}", span) for span in self.served.weights])
        return self

    def _check_spans(self, named: Sequence[tuple[str, WeightSpan | ServedWeights]]) -> None:
        """Raise ValueError for spans that overlap, are out of order, or leave the response."""
        end, length = 0, len(self.response_ids)
        for name, span in named:
            if not end <= span.start <= span.end <= length:
                raise ValueError(
                    f"{name} spans [{span.start}, {span.end}) after token {end} of {length}{self._called}: spans are "
                    f"half-open, in order and inside the response"
                )
            end = span.end

    @property
    def _called(self) -> str:
        return f" (sample {self.sample_id})" if self.sample_id is not None else ""

    @property
    def version_of_token(self) -> list[str | None]:
        """The weight version of each response token; None where no span covers it."""
        return versions_by_token(self.weight_versions, len(self.response_ids))

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
        limit: int | None = None,
    ) -> list[Fault]:
        """The log-probs that are wrong in this record, in order of position.

        Positions with loss_mask 0 are not looked at, and one position has at most one fault a list. 0.0 fills are seen
        only next to `train_log_probs` (one a response token; the training side's log-probs of the same tokens).

        Args:
            sample: how messages call the record; default `sample_id`.
            trained_ids: the response ids that the training side sees.
            limit: name the first ones only; `count_faults` counts them all.
        """
        sample = self.sample_id if sample is None else sample
        faults = [fault for found in self._found(sample, trained_ids, train_log_probs) for fault in found.first(limit)]
        return sorted(faults, key=lambda fault: fault.position)[:limit]

    def count_faults(
        self, *, trained_ids: Sequence[int] | None = None, train_log_probs: Sequence[float] | None = None
    ) -> int:
        """How many `faults` there are, without an object for each."""
        return sum(len(found.positions) for found in self._found(self.sample_id, trained_ids, train_log_probs))

    def _found(
        self, sample: object, trained_ids: Sequence[int] | None, train_log_probs: Sequence[float] | None
    ) -> Iterator[_Found]:
        """What is wrong, list by list."""
        length = len(self.response_ids)

        def wrong_length(what: str, count: int, says: str) -> _Found:
            first = min(count, length)
            says = f"{what} of sample {sample}{says}, position {first} is the first without a partner (kind length)"
            return _Found([first], lambda at: Fault(sample, at, "length", count, says))

        if trained_ids is not None:
            if len(trained_ids) != length:
                says = f": {length} tokens were sampled, {len(trained_ids)} are trained on"
                yield wrong_length("response", len(trained_ids), says)
            shared = min(length, len(trained_ids))
            ours, theirs = np.asarray(self.response_ids[:shared]), np.asarray(trained_ids[:shared])

            def other_id(at: int) -> Fault:
                sampled, trained = self.response_ids[at], trained_ids[at]
                says = f", position {at}: {sampled} was sampled, {trained} is trained on (kind token_ids)"
                return Fault(sample, at, "token_ids", trained, f"token id of sample {sample}{says}")

            yield _Found(np.flatnonzero(ours != theirs).tolist(), other_id)
        for what, values in (("rollout", self.rollout_log_probs), ("behaviour", self.behaviour_log_probs)):
            if values is None:
                continue
            if len(values) != length:
                yield wrong_length(f"{what} log-probs", len(values), f": {len(values)} for {length} response tokens")
                continue
            if train_log_probs is not None and len(train_log_probs) != length:
                raise ValueError(
                    f"train_log_probs of sample {sample} has {len(train_log_probs)} entries, the response {length} "
                    f"tokens: give one a response token"
                )
            yield _Found(_wrong(values, self.loss_mask, train_log_probs), partial(_named, sample, what, values))


class _Found(NamedTuple):
    """Positions that are wrong in one list, and what names one of them."""

    positions: list[int]
    fault: Callable[[int], Fault]

    def first(self, limit: int | None) -> list[Fault]:
        return [self.fault(at) for at in self.positions[:limit]]


def _wrong(values: Sequence[float | None], mask: Sequence[int], train: Sequence[float] | None) -> list[int]:
    """Where a token trains and its log-prob is none, by the same bounds as `core.validity.classify`."""
    numbers = np.array(values, dtype=np.float64)  # None is NaN
    wrong = ~((numbers > FLOOR) & (numbers <= POSITIVE_TOLERANCE))
    if train is not None:
        wrong |= (numbers == 0.0) & (as_numbers(train) < -ZERO_FILL_GAP)
    return np.flatnonzero(wrong & np.array(mask, dtype=bool)).tolist()


def _named(sample: object, what: str, values: Sequence[float | None], at: int) -> Fault:
    """The fault of a value that `_wrong` found."""
    value = values[at]
    kind: FaultKind = "zero_fill"
    if value is None:
        kind = "missing"
    elif math.isnan(value):
        kind = "nan"
    elif value > POSITIVE_TOLERANCE:
        kind = "positive_infinite" if math.isinf(value) else "positive"
    elif value <= FLOOR:
        kind = "floor"
    says = f"position {at} {_WHAT[kind]} (value {value}, kind {kind})"
    return Fault(sample, at, kind, value, f"{what} log-prob of sample {sample}, {says}")


check_record = RolloutRecord.faults


def check_records(
    records: Sequence[RolloutRecord], train_log_probs: Sequence[Any] | None = None, *, limit: int | None = None
) -> list[Fault]:
    """All faults of a batch, or the first `limit`; `train_log_probs` holds one sequence of numbers a record."""
    if train_log_probs is not None and len(train_log_probs) != len(records):
        raise ValueError(f"train_log_probs has {len(train_log_probs)} entries for {len(records)} records.")
    found: list[Fault] = []
    for index, record in enumerate(records):
        if limit is not None and len(found) >= limit:
            break
        row = None if train_log_probs is None else as_numbers(train_log_probs[index])
        found += record.faults(index, train_log_probs=row, limit=None if limit is None else limit - len(found))
    return found


def as_numbers(row: Any) -> Any:
    """[n] float64 of a tensor on any device, or of a list."""
    return np.asarray(row.detach().double().cpu() if hasattr(row, "detach") else row, dtype=np.float64)
