"""The typed record of one sampled response, and which of its log-probs are invalid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mismatch_plugin.core.validity import FLOOR, POSITIVE_TOLERANCE, ZERO_FILL_GAP
from mismatch_plugin.files import encodable
from mismatch_plugin.rollout.sampling import SamplingParameters, remaining_bias

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

    version: Annotated[str, AfterValidator(encodable)]
    start: int = Field(ge=0)
    end: int = Field(ge=0)


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

    prompt_ids: list[TokenId]
    response_ids: list[TokenId]
    rollout_log_probs: list[float | None]
    """Of `response_ids`, as SGLang returns them: full vocabulary after temperature and penalties, no filter. None: not
    returned, or not a sampled token."""
    loss_mask: list[int] = Field(default_factory=list)
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
        for name in ("loss_mask", "kept_ids", "top_log_probs", "prompt_log_probs"):
            per, advice = "response_ids", "give one a response token"
            if name == "prompt_log_probs":
                per, advice = "prompt_ids", "give one a prompt token, None for the first"
            value, count = getattr(self, name), len(getattr(self, per))
            if value is not None and len(value) != count:
                raise ValueError(f"{name} has {len(value)} entries, {per} {count}{self._called}: {advice}")
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
    ) -> list[Fault]:
        """Every log-prob that is wrong in this record, in order of position.

        Positions with loss_mask 0 are not looked at, and one position has at most one fault a list. 0.0 fills are seen
        only next to `train_log_probs` (one a response token; the training side's log-probs of the same tokens).

        Args:
            sample: how messages call the record; default `sample_id`.
            trained_ids: the response ids that the training side sees.
        """
        found: list[Fault] = []
        sample = self.sample_id if sample is None else sample
        length = len(self.response_ids)

        def add(what: str, position: int, kind: FaultKind, value: float | None, says: str) -> None:
            found.append(Fault(sample, position, kind, value, f"{what} of sample {sample}{says}"))

        def add_length(what: str, count: int, says: str) -> None:
            first = min(count, length)
            says += f", position {first} is the first without a partner (kind length)"
            add(what, first, "length", count, says)

        if trained_ids is not None:
            if len(trained_ids) != length:
                says = f": {length} tokens were sampled, {len(trained_ids)} are trained on"
                add_length("response", len(trained_ids), says)
            for at, (sampled, trained) in enumerate(zip(self.response_ids, trained_ids, strict=False)):
                if sampled != trained:
                    says = f", position {at}: {sampled} was sampled, {trained} is trained on (kind token_ids)"
                    add("token id", at, "token_ids", trained, says)
        for what, values in (("rollout", self.rollout_log_probs), ("behaviour", self.behaviour_log_probs)):
            what += " log-prob"
            if values is None:
                continue
            if len(values) != length:
                add_length(f"{what}s", len(values), f": {len(values)} for {length} response tokens")
                continue
            if train_log_probs is not None and len(train_log_probs) != length:
                raise ValueError(
                    f"train_log_probs of sample {sample} has {len(train_log_probs)} entries, the response {length} "
                    f"tokens: give one a response token"
                )
            for at, (value, mask) in enumerate(zip(values, self.loss_mask, strict=True)):
                kind = _kind(value, None if train_log_probs is None else train_log_probs[at]) if mask else None
                if kind is not None:
                    add(what, at, kind, value, f", position {at} {_WHAT[kind]} (value {value}, kind {kind})")
        return sorted(found, key=lambda fault: fault.position)


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


check_record = RolloutRecord.faults


def check_records(records: Sequence[RolloutRecord], train_log_probs: Sequence[Any] | None = None) -> list[Fault]:
    """All faults of a batch; `train_log_probs` holds one sequence of numbers a record."""
    if train_log_probs is not None and len(train_log_probs) != len(records):
        raise ValueError(f"train_log_probs has {len(train_log_probs)} entries for {len(records)} records.")
    rows = [None] * len(records) if train_log_probs is None else [[float(v) for v in row] for row in train_log_probs]
    both = enumerate(zip(records, rows, strict=True))
    return [fault for index, (record, row) in both for fault in record.faults(index, train_log_probs=row)]
