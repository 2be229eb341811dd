"""What `inspect` says of a dump, as data: the form of `--json`; the terminal's summary and the page are made of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mismatch_plugin.diagnose.findings import Finding, Frozen, Mismatch, Undecided

Verdict = Literal["fault", "large", "normal", "undecided"]
VERDICTS: dict[Verdict, str] = {
    "fault": "Fault found",
    "large": "Above normal",
    "normal": "Normal",
    "undecided": "Not decided",
}
"""As a headline begins."""
EXIT_STATUS: dict[Verdict, int] = {"normal": 0, "large": 0, "fault": 1, "undecided": 3}
"""Of a dump; 1 as well where a gate failed, 2 where something cannot be read."""


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
    """One setting. flags: what to paste, by host (slime, miles, megatron-lm, verl, nemo-rl, python). watch: what to
    look at in the first ten steps. preset: its name where one gives the settings."""

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
    """How large the mismatch is. quantiles: of the log-ratio, by "p0.1" … "p99.9". breakdowns: by what → groups."""

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
    normality: whether the gap is of a known size, in one sentence. bounds: level → (lower, upper) on the ratio that
    keep 99 % of its units. histogram: for the page and not in the JSON. one_sided: there is no training side.
    """

    verdict: Verdict
    headline: str
    next_step: str = ""
    source: str
    format: str
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
        status = EXIT_STATUS[self.verdict]
        if self.gate is None or self.gate.passed or status == 1:
            return status
        return 1 if self.gate.passed is False else 3
