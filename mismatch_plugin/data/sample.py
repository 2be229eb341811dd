"""One response with everything that is known of it, from the server's side and the trainer's."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from mismatch_plugin.data import arrays
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.data.served import Served, ServedWeights, Text
from mismatch_plugin.data.versions import WeightSpan

FinishReason = Literal["stop", "length", "abort"]
LogProbsOf = Literal["raw", "tempered", "filtered"]
"""What `rollout_log_probs` are of: the logits as they are, after temperature and penalties (SGLang), or after filters
too, renormalised (vLLM's processed log-probs)."""
LogProbSide = Literal["rollout", "training"]

_LISTED = PlainSerializer(arrays.listed)
Ids = Annotated[arrays.Ids, PlainValidator(arrays.as_ids), _LISTED]
Floats = Annotated[arrays.Floats, PlainValidator(arrays.as_floats), _LISTED]
Bools = Annotated[arrays.Bools, PlainValidator(arrays.as_mask), _LISTED]
Experts = Annotated[arrays.Ints, PlainValidator(arrays.as_experts), _LISTED]
PerToken = Annotated[arrays.Floats, PlainValidator(arrays.one_or_many), _LISTED]
TokenId = Annotated[int, Field(ge=0, lt=2**63)]


def _nothing(kind: type) -> Any:
    empty = np.zeros(0, dtype=kind)
    return Field(default_factory=lambda: empty)


class Sample(BaseModel):
    """One sampled response. n = its tokens. Log-probs are in nats, [n] float64, `arrays.NULL` where none was returned.

    What is not known is empty (lists) or None. Log-probs may hold anything an engine returns, and be of another number
    than the response: `pack` refuses what is invalid, `inspect` names it. All else is checked here, once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # What the rollout engine sampled.
    response_ids: Ids = _nothing(np.int32)
    prompt_ids: Ids = _nothing(np.int32)
    loss_mask: Bools = _nothing(np.bool_)
    """1 where a token trains; 0 for tool and environment tokens. Default: all 1."""
    rollout_log_probs: Floats = _nothing(np.float64)
    """Of `response_ids`; what they are of, `log_probs_of` says."""
    sampling: SamplingParameters = SamplingParameters()
    """What was asked for. Left out where nothing tells it."""
    log_probs_of: LogProbsOf = "tempered"
    """What the rollout log-probs are of; vLLM's are `raw` by default and `filtered` with logprobs_mode processed."""
    weight_versions: tuple[WeightSpan, ...] = ()
    """In order, without overlap. Empty where the server told none."""
    kept_ids: list[list[TokenId]] | None = None
    """The ids that the filters left to choose from (SGLang's sampling mask). An empty list: unfiltered."""
    behaviour_log_probs: Floats | None = None
    """Renormalised over `kept_ids`: what the token was really drawn from."""
    cached_tokens: int | None = Field(default=None, ge=0)
    """Prompt tokens whose keys and values came out of the server's cache."""
    routed_experts: Experts | None = None
    """[prompt + response − 1, layers, k] experts that computed each position (SGLang's routed_experts)."""
    finish_reason: FinishReason | None = None
    text: Text | None = None
    request_id: Text | None = None
    sample_id: Text | None = Field(default=None, coerce_numbers_to_str=True)
    server: Text | None = None
    """Address of the server that sampled it, without credentials."""
    dp_rank: int | None = None
    """Which data-parallel worker of the server sampled it. None: not told, or there is one only."""
    served: Served | None = None
    """What our SGLang plugin told: the weights that really made the tokens, and what the log-probs are of."""
    group: Text | int | None = None
    """Responses of one group share a baseline (GRPO)."""
    reward: float | None = None
    step: int | None = None
    """The training step or rollout id."""
    index: int = Field(default=0, ge=0)
    """Place in its file or batch, from 0."""

    # What the trainer says of it.
    train_log_probs: Floats = _nothing(np.float64)
    """log π_train, as long as the trainer's list. Empty: there is no training side."""
    ref_log_probs: Floats | None = None
    """Under the reference policy: the weights that the run began with."""
    advantages: PerToken | None = None
    """Of the tokens that the trainer sees; one number is of every token."""
    entropy: PerToken | None = None
    trained_ids: Ids | None = None
    """The response ids that the trainer sees. None: not told."""
    trained_prompt_ids: Ids | None = None
    trained_mask: Bools | None = None
    """1 where a token trains, of the tokens that the trainer sees."""
    trainer_version: Annotated[Text, BeforeValidator(lambda v: str(v) if isinstance(v, int) else v)] | None = None
    """Of the weights that computed `train_log_probs`."""
    trainer_fingerprint: Text | None = None
    """Of the weights of that version that it sent to the servers (`sglang.fingerprints`)."""
    trainer_temperature: float | None = Field(default=None, gt=0)
    """What it divided its logits by."""
    trained_experts: Experts | None = None
    """As `routed_experts`: those that computed `train_log_probs`, chosen or replayed."""

    def __init__(self, **fields: Any) -> None:
        """A list, tensor or array of numbers will do for each array. Raises ValueError naming field and value."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(_plain(error, type(self).model_fields)) from None

    def __eq__(self, other: object) -> bool:
        return self is other  # arrays have no one truth value

    def __hash__(self) -> int:
        return id(self)

    @model_validator(mode="after")
    def _consistent(self) -> Sample:
        n = len(self)
        trained = n or len(self.train_log_probs) if self.trained_ids is None else len(self.trained_ids)
        if "loss_mask" not in self.model_fields_set:
            object.__setattr__(self, "loss_mask", np.ones(n, dtype=bool))
        for name in ("advantages", "entropy"):
            value = getattr(self, name)
            if value is not None and value.ndim == 0:
                object.__setattr__(self, name, np.full(trained, value))
            elif value is not None and len(value) not in (n, trained, len(self.train_log_probs)):
                raise ValueError(f"{name} has {len(value)} entries, the response {n} tokens: give one for each, or one")
        for name in ("loss_mask", "kept_ids"):
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise ValueError(f"{name} has {len(value)} entries, response_ids {n}: give one for each, in its order")
        for name in ("routed_experts", "trained_experts"):
            value, count = getattr(self, name), len(self.prompt_ids) + n - 1
            if value is not None and n and len(value) != count:
                raise ValueError(f"{name} has {len(value)} entries: give one for each of the first {count} tokens")
        self._check_spans([(f"weight version {span.version!r}", span) for span in self.weight_versions])
        if self.served is not None:
            self._check_spans([(f"served.weights: {span.fingerprint!r}", span) for span in self.served.weights])
        return self

    def _check_spans(self, named: list[tuple[str, WeightSpan | ServedWeights]]) -> None:
        end = 0
        for name, span in named:
            if not end <= span.start <= span.end <= len(self):
                raise ValueError(
                    f"{name} spans [{span.start}, {span.end}) after token {end} of {len(self)}: spans are half-open, "
                    f"in order and inside the response"
                )
            end = span.end

    def __len__(self) -> int:
        return len(self.response_ids)

    def replace(self, **fields: Any) -> Sample:
        """The same with some fields replaced, checked again."""
        return Sample(**{name: getattr(self, name) for name in self.model_fields_set} | fields)

    def without(self, names: Iterable[str]) -> Sample:
        """The same, and nothing is known of these fields."""
        return Sample(**{name: getattr(self, name) for name in self.model_fields_set - {*names}})

    def with_fields(self, **fields: Any) -> Sample:
        """The same with some fields replaced, unchecked: for arrays that are already of this form."""
        copied = self.model_copy(update=fields)
        for name in vars(copied).keys() - type(self).model_fields.keys():  # properties that were worked out before
            del vars(copied)[name]
        return copied

    @property
    def asked(self) -> bool:
        """`sampling` is what was asked for; else nothing tells that."""
        return "sampling" in self.model_fields_set

    @property
    def worker(self) -> tuple[str | None, int | None]:
        """(server, data-parallel rank) that sampled it, as the server itself tells: the address may be a router's."""
        return (self.server, self.dp_rank) if self.served is None else self.served.worker

    @property
    def temperature(self) -> float:
        """That the sampler was asked for; where nothing tells, what the server says it divided by."""
        told = None if self.asked or self.served is None else self.served.temperature
        return self.sampling.temperature if told is None else told

    @property
    def log_prob_temperature(self) -> float:
        """Of the log-probs: what the server tells, else `SamplingParameters.log_prob_temperature`."""
        told = None if self.served is None else self.served.temperature
        return self.sampling.log_prob_temperature if told is None else told

    @cached_property
    def mask(self) -> arrays.Bools:
        """[n] tokens that train: of both sides' masks where they are of one length."""
        if self.trained_mask is None or len(self.trained_mask) != len(self):
            return self.loss_mask
        return self.loss_mask & self.trained_mask

    def values(self, side: LogProbSide) -> arrays.Floats:
        """The log-probs of one side."""
        return self.rollout_log_probs if side == "rollout" else self.train_log_probs

    @property
    def comparable(self) -> bool:
        """Both lists are as long as the response."""
        return len(self.train_log_probs) == len(self.rollout_log_probs) == len(self)

    @cached_property
    def usable(self) -> arrays.Bools:
        """[n] tokens that train and have a number on both sides; all False where lengths differ."""
        if not self.comparable:
            return np.zeros(len(self), dtype=bool)
        return self.mask & np.isfinite(self.rollout_log_probs) & np.isfinite(self.train_log_probs)


def _plain(error: ValidationError, known: Iterable[str]) -> str:
    """What is wrong first, with its field and value."""
    fault = error.errors()[0]
    field, given = ".".join(map(str, fault["loc"])), fault["input"]
    if fault["type"] == "extra_forbidden":
        near = get_close_matches(field, known, 1, 0.75)
        return f"{field} is no field of a sample" + (f": did you mean {near[0]}?" if near else "")
    value = f" (value {given!r:.60})" if field and isinstance(given, (str, int, float)) else ""
    message = fault["msg"].removeprefix("Value error, ")
    return f"{field}: {message}{value}" if field else message
