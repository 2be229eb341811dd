"""`mismatch-plugin inspect`: what the metrics of a run say about its mismatch, in one table and two verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.health import HealthWarning, check_health
from mismatch_plugin.core.metrics.registry import METRICS, PLACES, PREFIX
from mismatch_plugin.core.units import units_of
from mismatch_plugin.diagnose.figures import Figures
from mismatch_plugin.diagnose.normal import GATE_TOKENS, gate
from mismatch_plugin.diagnose.result import Gate, Verdict
from mismatch_plugin.diagnose.trends import Trend
from mismatch_plugin.report.table import NOTHING, Table, compact

ROWS = tuple(metric.name for place in PLACES for metric in METRICS if metric.place == place)
"""The table's metrics: each says itself where its place is."""
_BASIC = frozenset(metric.name for metric in METRICS if metric.level == "basic")
SHORT = (
    "kl", "k3_kl", "rollout_is_ratio_mean", "rollout_is_ratio_eff_sample_size", "rollout_is_weight_after_mean",
    "rollout_is_weight_after_eff_sample_size", "accepted_token_fraction",
)  # fmt: skip
"""What the screen shows unless it is asked for all."""
MAX_GROWTH = 100.0
"""Ours: k3 that has grown so many times, to more than QUIET_KL, has a cause to be found, however small it is yet."""
_FULL = tuple(metric.name.split("{")[0] for metric in METRICS if metric.level == "full")
"""How the names of full metrics begin."""
QUIET_KL = 1e-3
"""Below this many nats a token two engines of one precision usually are."""
_SHIFTS = ("kl", "rollout_is_ratio_mean")
"""What all tokens share, and no weight or filter repairs."""
CHECK_KL = 1e-2
"""From here on more than precision may be at work: other weights, filters, temperature."""


@dataclass(frozen=True)
class Inspection:
    """steps: how many. full: the full metrics, None where the run wrote none. figures: the rows of both as numbers, by
    header. warnings: of each kind the newest, with the number of steps that gave it. data: how large the mismatch is.
    correction: what is left of it. grown: k3 has grown more than MAX_GROWTH times, to more than QUIET_KL. k3_kl,
    ess: of the judged steps' tokens, NaN where not recorded; tokens: how many, None where that was not recorded.

    sound: no number is broken, the correction has no warning, no shift is shared by all tokens (|KL|, mean ratio: no
    correction repairs it), k3 has not `grown`, and a mismatch that is large otherwise is not left uncorrected.
    """

    steps: int
    table: Table
    full: Table | None
    figures: tuple[dict[str, str | float], ...]
    warnings: tuple[tuple[HealthWarning, int], ...]
    data: str
    correction: str
    grown: bool
    k3_kl: float
    ess: float
    tokens: int | None
    sound: bool

    @property
    def short(self) -> Table:
        """The table's rows of SHORT, with a note on how many there are more."""
        rows = tuple(row for row in self.table.rows if row[0] in SHORT)
        hidden = len(self.figures) - len(rows)
        return replace(self.table, rows=rows, notes=(f"{hidden} more metrics: --all or --json",) if hidden else ())

    def gate(self, bar: float | None = None) -> Gate:
        """Whether k3_kl of the judged steps is at most the bar (`inspect.gate`); without tokens, by k3_kl alone."""
        return gate(self.k3_kl, GATE_TOKENS if self.tokens is None else self.tokens, bar)

    @property
    def verdict(self) -> str:
        """Both verdicts, a line each."""
        return f"data: {self.data}\ncorrection: {self.correction}"

    @property
    def state(self) -> Verdict:
        """As of a dump: `fault` where numbers are broken or the correction does not hold, else by the data."""
        about = {warning.about for warning, _ in self.warnings}
        return "fault" if about & {"fault", "correction"} else "large" if about or self.grown else "normal"

    def figures_for_rules(self) -> Figures | None:
        """What of the rules' figures the metrics tell; None where they lack k3."""
        if math.isnan(self.k3_kl):
            return None
        ess = 1.0 if math.isnan(self.ess) else self.ess
        return Figures(k3_kl=self.k3_kl, ess=ess, mean_length=math.inf, max_length=math.inf)


@dataclass(frozen=True)
class _Window:
    """The steps that are judged. together: their metrics as of one batch, where their statistics were written."""

    steps: Sequence[Mapping[str, float]]
    together: Mapping[str, float]

    def mean(self, name: str) -> float:
        """As of one batch; else over the steps where the metric is finite; NaN where there is none."""
        if math.isfinite(exact := self.together.get(PREFIX + name, math.nan)):
            return exact
        values = [value for step in self.steps if math.isfinite(value := step.get(PREFIX + name, math.nan))]
        return sum(values) / len(values) if values else math.nan

    @property
    def header(self) -> str:
        """Of the column that says it."""
        return f"the last {len(self.steps)} together" if self.together else f"mean of the last {len(self.steps)}"


def judged(steps: int) -> int:
    """How many of a run's steps are judged: the last tenth, at least ten."""
    return min(steps, max(10, steps // 10))


def inspect_steps(
    steps: Sequence[Mapping[str, float]],
    config: MismatchConfig,
    config_known: bool = True,
    together: Mapping[str, float] | None = None,
    trend: Trend | None = None,
) -> Inspection:
    """Judge a run by its last steps (`judged`), so that a warm-up long past is no alarm.

    config_known: False where `config` stands in for settings that nobody gave: then the correction is not judged.
    together: metrics of the judged steps as of one batch, in the place of means over steps. trend: `trend_of` the run.
    Raises ValueError where no step holds a metric of ours.
    """
    steps = [step for step in steps if any(name.startswith(PREFIX) for name in step)]
    if not steps:
        raise ValueError(f"no step holds a metric that begins with {PREFIX}: is --mismatch-metrics off?")
    recent = steps[-judged(len(steps)) :]
    recent = [step for step in recent if step.get(f"{PREFIX}tokens", 1.0)]  # a step without tokens says nothing
    if not recent:
        raise ValueError("the newest steps hold no response token: is every loss mask 0?")
    counts: Counter[str] = Counter()
    newest: dict[str, HealthWarning] = {}
    for step in recent:
        for warning in check_health(step, config):
            if warning.about == "correction" and not config_known:
                continue
            counts[warning.metric] += 1
            newest[warning.metric] = warning
    window = _Window(recent, together or {})
    figures = _figures(ROWS, steps, window)
    table = _table(f"{counted(len(steps))}, judged by the last {len(recent)}", figures)
    seen = dict.fromkeys(name.removeprefix(PREFIX) for step in steps for name in step if name.startswith(PREFIX))
    basic = {name for name in seen if name.startswith("rollout_rs_") and name.endswith("masked_fraction")} | {*_BASIC}
    named = [name for start in _FULL for name in seen if name.startswith(start) and name not in basic]
    names = [*dict.fromkeys(named)]  # several families begin alike
    more = _figures(names, steps, window)
    full = _table("full metrics", more) if names else None
    warnings = tuple((newest[name], count) for name, count in counts.most_common())
    about = {warning.about for warning, _ in warnings}
    shifted = any(warning.metric.removeprefix(PREFIX) in _SHIFTS for warning, _ in warnings)
    corrected = config_known and _corrects(config)
    grown = trend is not None and trend.times > MAX_GROWTH and trend.after > QUIET_KL
    sound = (
        not shifted
        and not grown
        and not about & ({"fault", "correction"} if corrected else {"fault", "correction", "data"})
    )
    moves = config_known and config.use_rollout_log_probs
    data = _data_verdict(window, warnings, shifted, trend if grown else None, moves)
    correction = _correction_verdict(window, warnings, config if config_known else None)
    tokens = sum(step.get(f"{PREFIX}tokens", math.nan) for step in recent)
    judged_by = window.mean("k3_kl"), window.mean("rollout_is_ratio_eff_sample_size")
    counted_tokens = int(tokens) if math.isfinite(tokens) else None
    about_all = (len(steps), table, full, (*figures, *more), warnings, data, correction)
    return Inspection(*about_all, grown, *judged_by, counted_tokens, sound)


def counted(steps: int) -> str:
    """`1 step`, `2 steps`."""
    return f"{steps} step{'s' * (steps != 1)}"


def _figures(
    names: Iterable[str], steps: Sequence[Mapping[str, float]], window: _Window
) -> list[dict[str, str | float]]:
    """A row for each metric that is finite at some step: header → its name, or a number."""
    rows: list[dict[str, str | float]] = []
    for name in names:
        values = [step[PREFIX + name] for step in steps if PREFIX + name in step]
        if finite := [value for value in values if math.isfinite(value)]:
            row = {"last step": values[-1], window.header: window.mean(name)}
            rows.append({"metric": name, **row, "smallest": min(finite), "largest": max(finite)})
    return rows


def _table(title: str, figures: Sequence[Mapping[str, str | float]]) -> Table:
    headers = tuple(figures[0]) if figures else ("metric",)
    rows = tuple(tuple(v if isinstance(v, str) else _cell(v) for v in row.values()) for row in figures)
    return Table(title, headers, rows, code=frozenset({"metric"}))


def _corrects(config: MismatchConfig) -> bool:
    return (config.weighted or config.rejects or config.use_rollout_log_probs) and not config.dry_run


def _named(warnings: Sequence[tuple[HealthWarning, int]], *about: str) -> str:
    """`2 warnings (kl, chi2_token)`, or nothing."""
    names = [warning.metric.removeprefix(PREFIX) for warning, _ in warnings if warning.about in about]
    return f"{len(names)} warning{'s' * (len(names) > 1)} ({', '.join(names)})" if names else ""


_MOVES = (
    "In bypass mode this is of the policy that trains, which moves in the steps of a rollout as well: the first step "
    "of each rollout shows what lies between the engines alone."
)


def _data_verdict(
    window: _Window, warnings: Sequence[tuple[HealthWarning, int]], shifted: bool, grown: Trend | None, moves: bool
) -> str:
    """How large the mismatch is, whatever is done about it.

    grown: the trend where k3 has grown too much. moves: the trainer's side is π_θ, which changes within a rollout.
    """
    kl = abs(window.mean("kl"))
    figure = "KL not recorded" if math.isnan(kl) else f"|mean kl| {kl:.2g} nat a token"
    figure += f" over the last {counted(len(window.steps))}"
    if faults := _named(warnings, "fault"):
        return f"cannot be trusted: {faults}; {figure}."
    found = _named(warnings, "data")
    if grown is not None:
        since = "" if grown.kind == "higher" else f" since step {grown.began:g}"
        figure = f"k3_kl has grown {compact(grown.times)} times{since}, more than precision explains; {figure}"
    if found or grown is not None:
        figure += f", {found}" if found else ""
        cause = "No correction repairs a shift that all tokens share: find" if shifted else "Find"
        said = f"large mismatch: {figure}. {cause} the cause (mismatch-plugin check)."
        return f"{said} {_MOVES}" if moves else said
    if kl < QUIET_KL:
        return f"small mismatch, as of two engines in one precision: {figure}."
    if kl < CHECK_KL:
        return f"moderate mismatch: {figure}."
    if math.isnan(kl):
        return f"no warning; {figure}."
    return f"noticeable mismatch: {figure}. See whether precision alone explains it: mismatch-plugin check."


def _correction_verdict(
    window: _Window,
    warnings: Sequence[tuple[HealthWarning, int]],
    config: MismatchConfig | None,
) -> str:
    """What is left of it after this correction. config: None where nobody gave the run's settings."""
    found = _named(warnings, "correction")
    if config is not None and not _corrects(config):
        what = "reported only (dry run)" if config.dry_run else "none: the loss takes the data as they are"
        return f"{what}; {found}." if found else f"{what}."
    figures = {"mean weight": "rollout_is_weight_after_mean", "tokens kept": "accepted_token_fraction"}
    if config is not None:
        size = {"effective sample size": f"rollout_is_weight_after_{units_of(config).ess}eff_sample_size"}
        figures = {"mean weight": figures["mean weight"], **size, **figures}
    means = {label: window.mean(name) for label, name in figures.items()}
    shown = ", ".join(f"{label} {value:.2g}" for label, value in means.items() if not math.isnan(value))
    if config is not None and found:
        return f"does not hold: {found}{f'; {shown}' if shown else ''}."
    unknown = "not judged, since the run's settings are not known: give them with --config"
    return f"{'holds' if config else unknown}{f' ({shown})' if shown else ''}."


def _cell(value: float) -> str:
    return compact(value) if math.isfinite(value) else NOTHING
