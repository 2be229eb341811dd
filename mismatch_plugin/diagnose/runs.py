"""What a run's metrics tell: how large the mismatch is, whether it grows, what is left of it after the correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.documents import read_mapping
from mismatch_plugin.core import health
from mismatch_plugin.core.health import HealthWarning, check_health
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose import normal
from mismatch_plugin.diagnose.normal import gate
from mismatch_plugin.diagnose.result import Verdict
from mismatch_plugin.diagnose.run_sources import ABS_GAP, Source, read_source
from mismatch_plugin.diagnose.screen import gate_words
from mismatch_plugin.report.log import METRICS, SETTINGS, to_json
from mismatch_plugin.report.table import NOTHING, Table, figure, printable, terminal

Row = Mapping[str, float]
Mean = Callable[[str], float]
"""A metric without its prefix → its mean over the judged steps, NaN where it was not recorded."""

_K3_ENDS = (normal.SMALL_K3, normal.MODERATE_K3, normal.FAR_K3)
_ABS_ENDS = (normal.SMALL_ABS_MEAN, normal.MODERATE_ABS_MEAN, normal.FAR_ABS_MEAN)
SIZES = {
    "k3_kl": ("k3_kl", _K3_ENDS, 100.0),
    "kl": ("|kl|", _K3_ENDS, 100.0),
    ABS_GAP: ("mean |log ratio|", _ABS_ENDS, 10.0),
}
"""Metrics that tell the size, nats per token: what each is called, the upper ends of small, moderate and noticeable,
and the growth, to more than small, that has a cause to be found (ours; k3 goes as the square of the mean)."""
SHORT = (
    *SIZES,
    *("rollout_is_ratio_mean", "rollout_is_ratio_eff_sample_size", "rollout_is_weight_after_mean"),
    *("rollout_is_weight_after_eff_sample_size", "accepted_token_fraction"),
)
"""What the screen shows."""
_WORDS = (
    "small mismatch, as of two engines in one precision",
    *("moderate mismatch", "noticeable mismatch", "large mismatch"),
)
_SHIFTS = ("kl", "rollout_is_ratio_mean")
"""What all tokens share, and no weight or filter repairs."""
_INSPECT = "mismatch-plugin inspect DUMP"
_MOVES = (
    " In bypass mode this is of the policy that trains, which moves in the steps of a rollout as well: the first step "
    "of each rollout shows what lies between the engines alone."
)
_NONE_LEFT = f"{PREFIX}all_rejected"
_TOKENS = f"{PREFIX}tokens"
_MANY = 10**9
"""Tokens of a run that did not record them: the gate decides by k3_kl alone."""
MIN_STEPS = 20
"""Fewer steps have no trend."""
FIRST_STEPS = 3
"""At least so many show how a run began. With more, a jump early in a short run would be part of its beginning."""
MIN_GROWTH = 1.5
"""Ours: less growth is not told."""


@dataclass(frozen=True)
class Trend:
    """Growth of a metric of SIZES. before, after: medians of the first and of the last steps. began: the step from
    which on it stays above its beginning, single steps aside."""

    metric: str
    before: float
    after: float
    began: float

    @property
    def broke(self) -> bool:
        """Whether it has grown so much that there is a cause to be found."""
        _, (small, *_), growth = SIZES[self.metric]
        return self.after > small and self.after > growth * self.before

    def __str__(self) -> str:
        told = self.before > 1e-4 * self.after  # a beginning of 0 but for rounding has no multiple
        times = f", {figure(self.after / self.before, 2)} times as much" if told else ""
        return (
            f"{SIZES[self.metric][0]} was {figure(self.before, 2)} nats per token in the first steps and is "
            f"{figure(self.after, 2)} in the last{times}; it grows from about step {self.began:g} on"
        )


def trends_of(numbers: Sequence[float], rows: Sequence[Row]) -> list[Trend]:
    """The growth of each metric of SIZES: MIN_GROWTH times, and nine tenths of the last steps are above nine tenths of
    the first. First and last are a tenth of the steps, at least FIRST_STEPS and ten; of a step that is there twice the
    later counts."""
    found = []
    for metric in SIZES:
        values_of = {number: abs(row.get(PREFIX + metric, math.nan)) for number, row in zip(numbers, rows, strict=True)}
        steps = sorted(number for number, value in values_of.items() if math.isfinite(value))
        if len(steps) < MIN_STEPS:
            continue
        values, size = np.array([values_of[step] for step in steps]), judged(len(steps))
        first, last = values[: max(FIRST_STEPS, len(steps) // 10)], values[-size:]
        before, after, low = np.median(first), np.median(last), np.quantile(first, 0.9)
        if after >= MIN_GROWTH * before and np.quantile(last, 0.1) > low:
            width = max(3, min(size // 10, 50))  # neighbours whose median tells, so that single steps do not
            medians = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
            began = int(np.flatnonzero(medians <= low)[-1]) + width // 2 + 1
            found.append(Trend(metric, float(before), float(after), steps[began]))
    return found


def judged(steps: int) -> int:
    """How many of a run's steps are judged: the last tenth, at least ten."""
    return min(steps, max(10, steps // 10))


def judge_run(source: Source, config: MismatchConfig | None) -> dict[str, Any]:
    """Judge a run by its last steps (`judged`), so that a warm-up long past is no alarm: as the JSON has it.

    data: how large the mismatch is. correction: what is left of it. findings: of each kind of warning the newest, and
    growth that has a cause. metrics: all that were recorded. k3_kl, tokens: of the judged steps, NaN or None where not
    recorded. sound: see the exit status of `inspect_run`.
    config: None where nobody knows the settings: then the correction is not judged. Means are over the steps that
    recorded a metric; a step that rejected everything has no weights, though it recorded 0.
    Raises ValueError where the judged steps hold no token.
    """
    weights = f"{PREFIX}rollout_is_weight_after_"
    rows: list[Row] = [
        {name: value for name, value in row.items() if not (row.get(_NONE_LEFT) and name.startswith(weights))}
        for row in source.rows
    ]
    recent = [row for row in rows[-judged(len(rows)) :] if row.get(_TOKENS, 1.0)]  # one without tokens says nothing
    if not recent:
        raise ValueError("the newest steps hold no response token: is every loss mask 0?")

    def mean(name: str) -> float:
        values = [value for row in recent if math.isfinite(value := row.get(PREFIX + name, math.nan))]
        return sum(values) / len(values) if values else math.nan

    given: dict[str, list[HealthWarning]] = {}
    for warning in (warning for row in recent for warning in check_health(row, config or MismatchConfig())):
        if warning.about != "correction" or config is not None:
            given.setdefault(warning.metric.removeprefix(PREFIX), []).append(warning)
    about = {warnings[-1].about for warnings in given.values()}
    warned = [metric for metric, warnings in given.items() if warnings[-1].about == "correction"]
    trends = trends_of(source.numbers, [row if row.get(_TOKENS, 1.0) else {} for row in rows])
    broke = [trend for trend in trends if trend.broke]
    sizes = {metric: value for metric in SIZES if not math.isnan(value := abs(mean(metric)))}
    size = max((sum(value > end for end in SIZES[metric][1]) for metric, value in sizes.items()), default=None)
    large = size == len(_K3_ENDS) or "data" in about or bool(broke)
    shifted = not given.keys().isdisjoint(_SHIFTS)

    word, advice = "not judged" if size is None else _WORDS[size], ""
    if "fault" in about:
        word = "cannot be trusted"
    elif large:
        cause = "No correction repairs a shift that all tokens share: find" if shifted else "Find"
        word, advice = _WORDS[-1], f" {cause} the cause with {_INSPECT}."
        advice += _MOVES if config is not None and config.use_rollout_log_probs else ""
    elif size == 2:
        advice = f" See with {_INSPECT} whether precision alone explains it."
    said = ", ".join(f"{SIZES[metric][0]} {value:.2g}" for metric, value in sizes.items())
    said = f"{said} nats per token" if sizes else "neither KL nor the mean |log ratio| was recorded"
    no_growth = f"no growth of {' or '.join(SIZES[metric][0] for metric in sizes)} in {counted(len(rows))}"
    if len(rows) < MIN_STEPS:
        no_growth = f"too few steps to tell: {len(rows)}, and it takes {MIN_STEPS}"
    elif not sizes:
        no_growth = "not judged, since nothing that tells the size was recorded"
    empty = sum(bool(row.get(_NONE_LEFT)) for row in rows)
    rejected = f" Everything was rejected in {counted(empty)}; means of weights leave these out." if empty else ""
    tokens = sum(row.get(_TOKENS, math.nan) for row in recent)
    verdict: Verdict = "normal" if sizes else "undecided"
    if about & {"fault", "correction"}:
        verdict = "fault"
    elif large:
        verdict = "large"
    return {
        "verdict": verdict,
        "sound": not (about & {"fault", "correction"} or shifted or broke or (large and not _corrects(config))),
        "data": f"{word}: {said} over the last {counted(len(recent))}.{advice}",
        "correction": _correction(mean, warned, config) + rejected,
        "trend": ("; ".join(map(str, trends)) or no_growth) + ".",
        "steps": len(rows),
        "judged": len(recent),
        "k3_kl": mean("k3_kl"),
        "tokens": None if math.isnan(tokens) else int(tokens),
        "trends": [asdict(trend) for trend in trends],
        "findings": [
            *(_finding(name, warnings) for name, warnings in given.items()),
            *({"fault": "growth", "severity": "note", "evidence": str(one), "fix": _INSPECT} for one in broke),
        ],
        "metrics": _metrics(rows, mean, f"mean of the last {len(recent)}"),
    }


def counted(steps: int) -> str:
    """`1 step`, `2 steps`."""
    return f"{steps} step{'s' * (steps != 1)}"


def _corrects(config: MismatchConfig | None) -> bool:
    if config is None or config.dry_run:
        return False
    return config.weighted or config.rejects or config.use_rollout_log_probs


def _finding(name: str, warnings: Sequence[HealthWarning]) -> dict[str, Any]:
    """Of a metric, the newest of its warnings."""
    newest = warnings[-1]
    evidence = f"{newest.value:.3g}: {newest.meaning} ({counted(len(warnings))})"
    severity = "note" if newest.about == "data" else "fault"
    return {"fault": name, "severity": severity, "evidence": evidence, "fix": newest.advice}


def _correction(mean: Mean, warned: Sequence[str], config: MismatchConfig | None) -> str:
    """What is left of it after this correction. warned: metrics that say it does not hold. config: None where nobody
    gave the run's settings."""
    if config is not None and not _corrects(config):
        return "reported only (dry run)." if config.dry_run else "none: the loss takes the data as they are."
    figures = {"tokens kept": mean("accepted_token_fraction")}
    if config is None or config.weighted:
        figures["mean weight"] = mean("rollout_is_weight_after_mean")
    if config is not None and config.weighted:
        figures["effective sample size"] = mean(f"rollout_is_weight_after_{config.unit.ess}eff_sample_size")
    known = ", ".join(f"{label} {value:.2g}" for label, value in figures.items() if not math.isnan(value))
    shown = f" ({known})" if known else ""
    if config is None:
        return f"not judged, since the run's settings are not known: give them with --config{shown}."
    if warned:
        return f"does not hold, by {', '.join(warned)}{shown}."
    return f"holds{shown}." if shown else "not judged: nothing was recorded."


def _metrics(rows: Sequence[Row], mean: Mean, header: str) -> list[dict[str, str | float]]:
    """A row for each metric that is finite at some step, those of SHORT first: header → its name, or a number."""
    recorded = dict.fromkeys(name.removeprefix(PREFIX) for row in rows for name in row)
    table: list[dict[str, str | float]] = []
    for name in [*(name for name in SHORT if name in recorded), *(name for name in recorded if name not in SHORT)]:
        values = [row.get(PREFIX + name, math.nan) for row in rows]
        if finite := [value for value in values if math.isfinite(value)]:
            range_of = {"smallest": min(finite), "largest": max(finite)}
            table.append({"metric": name, "last step": values[-1], header: mean(name), **range_of})
    return table


def inspect_run(
    path: Path,
    own: MismatchConfig | None,
    *,
    run: str | None,
    pictures: Path | None,
    as_json: bool,
    bar: float | None,
) -> int:
    """Judge a run by the metrics that it wrote, print and draw them. Returns the exit status.

    own: the user's settings, where the run wrote none. run: as of `read_source`. pictures: the folder
    of the picture, None for none. bar: of the gate on k3_kl, None for no gate.

    Exit status: 0 sound; 1 where numbers are broken, all tokens share a shift (|KL| above 0.1 or a mean ratio outside
    [0.5, 2] in any judged step), the mismatch has grown 100 times (mean |log ratio|: 10), the correction does not
    hold, a large mismatch is not corrected, or the gate failed; 3 sound, but the gate or the size could not be decided.
    Raises ValueError, OSError where there is nothing to judge.
    """
    source = read_source(path, run)
    written = _written(source.path)
    if own is not None and written is not None and own != written:
        raise ValueError(f"{source.path.parent} has the settings of its run, and those given are others: omit them.")
    body = judge_run(source, written or own)
    verdict = gate(body["k3_kl"], body["tokens"] or _MANY, bar) if bar is not None else None
    passed = True if verdict is None else verdict.passed
    undecided = passed is None or body["verdict"] == "undecided"
    status = 1 if passed is False or not body["sound"] else 3 if undecided else 0
    picture, no_picture = (None, "") if pictures is None else _draw(source, pictures)
    if as_json:
        body |= {"headline": body["data"], "source": str(source.path), "notes": source.notes}
        body |= {"gate": verdict and verdict.model_dump(), "picture": picture and str(picture)}
        typer.echo(to_json(body, indent=2))
        return status
    console = terminal()
    for name in ("data", "correction", "trend"):
        console.print(f"{name}: {body[name]}")
    for note in source.notes:
        console.print(f"note: {printable(note)}.")
    if verdict is not None:
        said, figures = gate_words(verdict)
        console.print(f"gate: {said}: {figures}, over these steps.")
    if rows := [row for row in body["metrics"] if row["metric"] in SHORT]:
        cells = tuple(tuple(map(_cell, row.values())) for row in rows)
        title = f"{counted(body['steps'])}, judged by the last {body['judged']}"
        console.print(Table(title, tuple(rows[0]), cells, code=frozenset({"metric"})).to_rich())
    if others := len(body["metrics"]) - len(rows):
        console.print(f"{others} more metrics: --json")
    for finding in body["findings"]:
        if finding["fault"] != "growth":  # which the trend has told
            console.print(f"{finding['fault']} = {finding['evidence']}. {finding['fix']}")
    if body["verdict"] in ("normal", "large"):
        console.print(f"Which setting fits, a dump tells: {_INSPECT} recommends one.")
    if picture or no_picture:  # a path stays whole
        typer.echo(no_picture or f"picture: {picture}")
    return status


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else figure(value) if math.isfinite(value) else NOTHING


def _written(path: Path) -> MismatchConfig | None:
    """The settings that the run, or `compare`, wrote next to its metrics; None where there are none."""
    if path.name != METRICS:  # an export may lie next to files of anything
        return None
    # Checked when the run began: a preset may hold what has no effect.
    if (file := path.with_name(SETTINGS)).exists():
        return MismatchConfig.build(read_mapping(file))
    file = path.with_name("config.json")
    of_run = read_mapping(file).get("mismatch") if file.exists() else None
    return MismatchConfig.build(of_run) if isinstance(of_run, dict) else None


# The six panels of the rollout-correction guide ----------------------------------------------------------------------

PANELS: tuple[tuple[str, tuple[str, ...], tuple[float, ...]], ...] = (
    ("Mean ratio and mean weight",
        ("rollout_is_ratio_mean", "rollout_is_ratio_unit_mean", "rollout_is_weight_after_mean", "rollout_is_mean"),
        (1.0, *health.MEAN_RANGE)),
    ("Effective sample size",
        ("rollout_is_ratio_eff_sample_size", "rollout_is_weight_after_eff_sample_size", "rollout_is_eff_sample_size"),
        (health.MIN_EFFECTIVE_SAMPLE_SIZE,)),
    ("Vetoed sequences, rejected tokens (shares)", ("rollout_is_veto_fraction", "rollout_is_masked_fraction"),
        (health.MAX_VETO_FRACTION,)),
    ("KL(rollout ‖ train), nats per token", ("kl", "k3_kl", ABS_GAP), (-health.MAX_KL, 0.0, health.MAX_KL)),
    ("Perplexity ratio, training / rollout", ("ppl_ratio",), (1.0,)),
    ("χ² divergence", ("chi2_token", "chi2_seq"), (health.MAX_CHI2,)),
)  # fmt: skip
"""(title, metrics that are drawn where they were recorded, values that are ideal or that `check_health` warns from)."""


def _draw(source: Source, folder: Path) -> tuple[Path | None, str]:
    """`six_panels.png`, or why there is none. The verdict does not need it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return None, f"no picture: {error}: pip install 'mismatch-plugin[lab]'"
    order = np.argsort(source.numbers, kind="stable")
    steps = np.array(source.numbers)[order]
    drawn, path = Figure(figsize=(15, 8), layout="constrained"), folder / "six_panels.png"
    for axis, (title, names, marks) in zip(drawn.subplots(2, 3).ravel(), PANELS, strict=True):
        axis.set(title=title, xlabel="optimizer step")
        for name in names:
            values = np.array([row.get(PREFIX + name, np.nan) for row in source.rows])[order]
            if (there := np.isfinite(values)).any():
                axis.plot(steps[there], values[there], label=name, marker="." if there.sum() <= 25 else None)
        if axis.lines:
            bottom, top = axis.get_ylim()
            for mark in marks:
                if abs(2 * mark - top - bottom) <= 4 * (top - bottom):  # one far outside would squeeze the curves flat
                    axis.axhline(mark, color="#555555", linestyle="--", linewidth=0.9)
            axis.legend(fontsize=8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=110)
    except OSError as error:
        return None, f"no picture: {folder} cannot be written ({error.strerror}); choose another with --out"
    return path, ""
