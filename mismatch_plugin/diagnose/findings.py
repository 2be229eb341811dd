"""What a check can say: one finding with its evidence, what could not be told, and all of it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from mismatch_plugin.data.sample import Sample

FaultName = str
"""A key of `detectors.run.FAULTS`."""
LogProbSide = Literal["rollout", "training"]
SIDES: tuple[LogProbSide, ...] = get_args(LogProbSide)
Side = Literal["rollout", "training", "both"]
Severity = Literal["fault", "note"]
"""note: a cause that is named without being wrong, such as routers of a MoE model at an ordinary size of the gap: it
does not make a batch faulty."""
Confidence = Literal["certain", "likely", "possible"]
"""certain: the values themselves show it (an id, a null, an exact form). likely: statistics that nothing else known
here gives. possible: they fit it, and other causes too."""


class Frozen(BaseModel):
    """What the JSON is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Place(Frozen):
    """Where a fault is seen first. sample: place in the file, from 0. position: response token, from 0, or None."""

    sample: int
    sample_id: str | None = None
    position: int | None = None
    rollout: float | int | str | None = None
    training: float | int | str | None = None

    def __str__(self) -> str:
        name = f"sample {self.sample}" + (f" ({self.sample_id})" if self.sample_id is not None else "")
        where = "" if self.position is None else f", position {self.position}"
        sides = (("rollout", self.rollout), ("training", self.training))
        shown = [(side, f"{value:.6g}" if isinstance(value, float) else value) for side, value in sides]
        values = ", ".join(f"{side} {value}" for side, value in shown if value is not None)
        return f"{name}{where}" + (f": {values}" if values else "")


def place_of(sample: Sample, position: int | None = None, *, rollout: Any = None, training: Any = None) -> Place:
    """A sample of a batch as the place of a fault, with both values at the position where they exist."""
    told = {"rollout": rollout, "training": training}
    for side in SIDES:
        if told[side] is None and position is not None and position < len(sample.values(side)):
            told[side] = float(sample.values(side)[position])
    return Place(sample=sample.index, sample_id=sample.sample_id, position=position, **told)


def called(worker: Hashable) -> str:
    """A server, or a server and its data-parallel rank, in words."""
    server, rank = worker if isinstance(worker, tuple) else (worker, None)
    names = [None if server is None else str(server), None if rank is None else f"dp_rank {rank}"]
    return " ".join(name for name in names if name)


class Finding(Frozen):
    """One fault, why it is believed, and what to change.

    evidence: one sentence with the numbers. statistics: the same numbers by name. samples, tokens: how many are
    affected; of_samples, of_tokens: how many were looked at. accepted: the user said that this fault is meant.
    """

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
    confidence: Confidence = "likely"
    severity: Severity = "fault"
    accepted: bool = False

    @property
    def counts(self) -> bool:
        """It makes the batch faulty."""
        return self.severity == "fault" and not self.accepted


class Undecided(Frozen):
    """Faults that could be neither found nor excluded, and why."""

    faults: tuple[FaultName, ...]
    reason: str


Item = Finding | Undecided


def too_few(what: str, *faults: FaultName) -> Undecided:
    """The data are too few to tell. what: how many there are, and how many are needed."""
    return Undecided(faults=faults, reason=f"not enough tokens to tell: {what}")


class Mismatch(Frozen):
    """How far apart the two sides are, over the tokens that both have. d = log π_train − log π_rollout, in nats.

    kl: mean of −d (the k1 estimate of KL(rollout ‖ training)). k3_kl: mean of e^d − 1 − d. Both with d clamped to ±20.
    abs_*: mean, quantiles and largest of |d|. correlation: of the two sides' log-probs, NaN if one is constant.
    effective_sample_size: (Σρ)² / (n Σρ²) of ρ = e^d.
    """

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

    def __str__(self) -> str:
        return f"k3 {self.k3_kl:.3g}, 99 % of gaps below {self.abs_p99:.3g} nats"


class CheckResult(NamedTuple):
    """Fields of `Diagnosis`. compared: tokens on both sides once the faults are undone."""

    findings: tuple[Finding, ...]
    undecided: tuple[Undecided, ...]
    mismatch: Mismatch | None
    fixed: Mismatch | None
    compared: int
