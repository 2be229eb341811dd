"""Responses as arrays: what files and dumps are read into, several times leaner than the lists of a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import Served
from mismatch_plugin.files import encodable
from mismatch_plugin.rollout.records import LogProbsOf, RolloutRecord, WeightSpan, versions_by_token

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Response:
    """One sampled response. n = response tokens; log-probs in nats, float64, NaN where the list held null or NaN.

    rollout_log_probs: as long as the server's list, which may differ from n. nulls: where it held null; None: nowhere.
    asked: `sampling` is what was asked for; False: nothing tells that, and its temperature is the server's, if told.
    advantages: [n]. group: responses of one group share a baseline (GRPO). step: the training step or rollout id.
    All else as in `RolloutRecord`.
    """

    response_ids: Ints
    rollout_log_probs: Floats
    loss_mask: Bools
    prompt_ids: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    nulls: Bools | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    asked: bool = True
    log_probs_of: LogProbsOf = "tempered"
    weight_versions: tuple[WeightSpan, ...] = ()
    behaviour_log_probs: Floats | None = None
    advantages: Floats | None = None
    sample_id: str | None = None
    group: str | int | None = None
    step: int | None = None
    server: str | None = None
    dp_rank: int | None = None
    served: Served | None = None
    reward: float | None = None
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        for name in ("sample_id", "group", "server"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, encodable(value))

    @classmethod
    def of(cls, record: RolloutRecord) -> Response:
        """A record as arrays."""
        values, nulls = as_floats(record.rollout_log_probs)
        behaviour = record.behaviour_log_probs
        asked = "sampling" in record.model_fields_set
        applied = None if asked or record.served is None else record.served.temperature
        return cls(
            response_ids=as_ids(record.response_ids),
            rollout_log_probs=values,
            loss_mask=np.array(record.loss_mask, dtype=bool),
            prompt_ids=as_ids(record.prompt_ids),
            nulls=nulls,
            sampling=record.sampling if applied is None else SamplingParameters(temperature=applied),
            asked=asked,
            log_probs_of=record.log_probs_of,
            weight_versions=tuple(record.weight_versions),
            behaviour_log_probs=None if behaviour is None else as_floats(behaviour)[0],
            sample_id=record.sample_id,
            server=record.server,
            dp_rank=record.dp_rank,
            served=record.served,
            reward=record.reward,
            finish_reason=record.finish_reason,
        )

    @property
    def version_of_token(self) -> list[str | None]:
        """The weight version of each response token; None where no span covers it."""
        return versions_by_token(self.weight_versions, len(self.response_ids))

    @property
    def worker(self) -> tuple[str | None, int | None]:
        """(server, data-parallel rank) that sampled it, as the server itself tells: the address on record may be a
        router's."""
        return (self.server, self.dp_rank) if self.served is None else self.served.worker

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of the log-probs: what the server tells, else `SamplingParameters.log_prob_temperature`."""
        told = None if self.served is None else self.served.temperature
        return self.sampling.log_prob_temperature if told is None else told


@dataclass(frozen=True, eq=False, kw_only=True)
class Scored:
    """What the training side tells of one response: log π_train [n] in nats, float64, NaN where null or NaN, and
    optionally the ids, mask, weight version and temperature that the trainer used. weight_fingerprint: of the weights
    that it sent to the servers (`fingerprints`). advantages, entropy: [n]."""

    log_probs: Floats
    nulls: Bools | None = None
    token_ids: Ints | None = None
    prompt_ids: Ints | None = None
    loss_mask: Bools | None = None
    weight_version: str | None = None
    weight_fingerprint: str | None = None
    temperature: float | None = None
    advantages: Floats | None = None
    entropy: Floats | None = None


@dataclass(frozen=True, eq=False)
class Dump:
    """What a file or folder holds. scored: the training side, one a response, None where the dump has none. format: the
    adapter that read it. notes: what a reader must know (what was left out and why, what was assumed)."""

    responses: Sequence[Response]
    scored: Sequence[Scored] | None = None
    format: str = "records"
    notes: tuple[str, ...] = ()


def as_ids(values: Sequence[int]) -> Ints:
    """int32 where all ids fit, else int64."""
    ids = np.asarray(values, dtype=np.int64)
    return ids if len(ids) and ids.max(initial=0) >= 2**31 else ids.astype(np.int32)


def as_floats(values: Sequence[float | None]) -> tuple[Floats, Bools | None]:
    """(float64, NaN for null; where there was null, None for nowhere)."""
    numbers = np.array(values, dtype=np.float64)
    if not np.isnan(numbers).any():
        return numbers, None
    nulls = np.array([value is None for value in values], dtype=bool)
    return numbers, nulls if nulls.any() else None
