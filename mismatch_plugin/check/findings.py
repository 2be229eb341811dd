"""What a check can say: the faults it knows, one finding with its evidence, and the result of a whole check."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

FaultName = Literal[
    "missing",
    "nan",
    "infinite",
    "positive",
    "floor",
    "zero_fill",
    "length",
    "token_ids",
    "prompt_ids",
    "eos_appended",
    "boundary",
    "shift_by_one",
    "swapped_samples",
    "sign",
    "probabilities",
    "log_base",
    "temperature",
    "truncation",
    "penalty",
    "mixed_versions",
    "staleness",
    "bf16",
    "fp16",
    "rounded",
    "unrelated",
]
FAULTS: tuple[str, ...] = get_args(FaultName)
Side = Literal["rollout", "training", "both"]
Status = Literal["clean", "faults"]


class Place(BaseModel):
    """Where a fault is seen first. sample: place in the file, from 0. position: response token, from 0, or None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample: int
    sample_id: str | None = None
    position: int | None = None
    rollout: float | int | str | None = None
    training: float | int | str | None = None

    def __str__(self) -> str:
        name = f"sample {self.sample}" + (f" ({self.sample_id})" if self.sample_id is not None else "")
        where = "" if self.position is None else f", position {self.position}"
        sides = (("rollout", self.rollout), ("training", self.training))
        values = ", ".join(f"{side} {_shown(value)}" for side, value in sides if value is not None)
        return f"{name}{where}" + (f": {values}" if values else "")


class Finding(BaseModel):
    """One fault, why it is believed, and what to change.

    evidence: one sentence with the numbers. statistics: the same numbers by name. samples, tokens: how many are
    affected; of_samples, of_tokens: how many were looked at. accepted: the user said that this fault is meant.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    fault: FaultName
    side: Side | None = None
    evidence: str
    statistics: dict[str, float] = {}
    samples: int
    of_samples: int
    tokens: int
    of_tokens: int
    first: Place | None = None
    fix: str
    accepted: bool = False


class Undecided(BaseModel):
    """A fault that could be neither found nor excluded, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[FaultName, ...]
    reason: str


class Mismatch(BaseModel):
    """How far apart the two sides are, over the tokens that both have. d = log π_train − log π_rollout, in nats.

    kl: mean of −d (the k1 estimate of KL(rollout ‖ training)). k3_kl: mean of e^d − 1 − d. Both with d clamped to ±20.
    abs_*: mean, quantiles and largest of |d|. correlation: of the two sides' log-probs, NaN if one is constant.
    effective_sample_size: (Σρ)² / (n Σρ²) of ρ = e^d.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    tokens: int
    samples: int
    kl: float
    k3_kl: float
    abs_mean: float
    abs_p50: float
    abs_p90: float
    abs_p99: float
    abs_max: float
    correlation: float
    effective_sample_size: float


class CheckResult(BaseModel):
    """All of it. mismatch: as the two sides were given; fixed: with what the findings explain undone, where that is
    possible and changes anything. notes: what was read, and what does not count as a fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    status: Status
    verdict: str
    samples: int
    tokens: int
    findings: tuple[Finding, ...]
    undecided: tuple[Undecided, ...] = ()
    mismatch: Mismatch | None = None
    fixed: Mismatch | None = None
    notes: tuple[str, ...] = ()


def _shown(value: float | int | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
