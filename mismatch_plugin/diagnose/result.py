"""What `inspect` says of a dump, as data: the form of `--json`; the terminal's summary and the page are made of it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mismatch_plugin.data.sample import LogProbSide, Sample
from mismatch_plugin.report.table import figure

FaultName = str
"""A name in `detectors.run.FAULTS`."""
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


TOO_FEW = "not enough tokens to tell"


def too_few(what: str, *faults: FaultName) -> Undecided:
    """The data are too few to tell. what: how many there are, and how many are needed."""
    return Undecided(faults=faults, reason=f"{TOO_FEW}: {what}")


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
        return f"mean |Δ log p| {figure(self.abs_mean)}, k3 {figure(self.k3_kl)} nats per token"


# All of it ------------------------------------------------------------------------------------------------------------

Verdict = Literal["fault", "large", "normal", "undecided"]
VERDICTS = {"fault": "Fault found", "large": "Above normal", "normal": "Normal", "undecided": "Not decided"}
"""As a headline begins."""


class Prediction(Frozen):
    """What a setting would do to these data, without training. ess, noise, bias: as in `predict`.

    setting: a preset, else flags as one types them. settings: as a file for --mismatch-config has them.
    kept: share of the response tokens that stay in the loss; _positive, _negative: of those with A > 0 and A < 0, None
    without such.
    unit: what has one weight: token, turn or sequence. groups_changed: share of groups whose advantages change if
    rejected responses leave mean and deviation of their group; None where nothing rejects or groups are unknown.
    second_pass: a forward pass for π_old is needed. own: of the user's own settings.
    """

    setting: str
    settings: dict[str, Any]
    algorithm: int
    kept: float
    kept_positive: float | None = None
    kept_negative: float | None = None
    mean_weight: float
    max_weight: float
    ess: float
    bias: float
    noise: float = 1.0
    unit: str = "token"
    groups_changed: float | None = None
    second_pass: bool
    own: bool = False


class Recommendation(Frozen):
    """One setting. flags: what to paste, by host (`flags.TITLES`). watch: what to look at in the first ten steps.
    preset: its name where one gives the settings."""

    setting: str
    preset: str | None
    settings: dict[str, Any]
    flags: dict[str, str]
    reasons: tuple[str, ...]
    watch: tuple[str, ...]


class Gate(Frozen):
    """bar: the largest k3 that passes, nats per token. passed: None where the tokens are too few to tell. source: where
    the bar comes from."""

    value: float
    bar: float
    passed: bool | None
    source: str


class Group(Frozen):
    """One bucket of a breakdown: tokens, mean |Δ log p|, KL (k1) and k3, nats per token; ess: of the tokens' ratios."""

    name: str
    tokens: int
    abs_mean: float
    kl: float
    k3_kl: float
    ess: float


class Size(Frozen):
    """How large the mismatch is. quantiles: of the log-ratio, by "p0.1" … "p99.9". breakdowns: by what → groups,
    versions from the newest on."""

    quantiles: dict[str, float]
    breakdowns: dict[str, tuple[Group, ...]]


class Histogram(Frozen):
    """Log-ratios of the units of a level: counts between edges. lower, upper: bounds on ρ; 0 and inf are none."""

    level: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    lower: float
    upper: float


class Diagnosis(Frozen):
    """All of it. headline: one sentence, which begins with the verdict in words. next_step: what more would tell.

    findings: those that count first, else in the order of cause and effect. mismatch: as the two sides were given;
    fixed: with what the findings explain undone, where that is possible and changes anything.
    metrics: as training reports them, for the user's settings; level: whose units they count.
    normality: whether the gap is of a known size, in one sentence. bounds: level or criterion → (lower, upper),
    which keep 99 % of its units. histogram: for the page and not in the JSON. one_sided: there is no training
    side. host: whose flags are shown first.
    """

    verdict: Verdict
    headline: str
    next_step: str = ""
    source: str
    format: str
    host: str
    samples: int
    tokens: int
    findings: tuple[Finding, ...] = ()
    undecided: tuple[Undecided, ...] = ()
    one_sided: bool = False
    mismatch: Mismatch | None = None
    fixed: Mismatch | None = None
    metrics: dict[str, float] = Field(default={})
    level: str = "token"
    size: Size | None = None
    normality: str = ""
    predictions: tuple[Prediction, ...] = ()
    bounds: dict[str, tuple[float, float]] = Field(default={})
    recommendation: Recommendation | None = None
    gate: Gate | None = None
    histogram: Histogram | None = Field(default=None, exclude=True, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 nothing wrong, 1 a fault or a failed gate, 3 not decided."""
        passed = True if self.gate is None else self.gate.passed
        if self.verdict == "fault" or passed is False:
            return 1
        return 3 if self.verdict == "undecided" or passed is None else 0
