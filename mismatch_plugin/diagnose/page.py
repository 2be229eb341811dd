"""From a diagnosis to one HTML file that opens anywhere, loads nothing, and works out other bounds on the same data."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

import mismatch_plugin
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose import words
from mismatch_plugin.diagnose.flags import HOSTS
from mismatch_plugin.diagnose.normal import LOOSE, span
from mismatch_plugin.diagnose.result import Diagnosis, Prediction
from mismatch_plugin.files import write_whole
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.report.table import NOTHING, Table, compact, figure

MODES = {
    "truncate": "truncate: min(ρ, upper)",
    "clip": "clip: between the bounds",
    "mask": "mask: rejected outside",
    "reject": "reject outside, weight 1",
}
UNIT_NAMES = {
    "token": "tokens",
    "turn": "turns (sum of log-ratios)",
    "sequence": "responses (sum of log-ratios)",
    "geometric": "responses (mean log-ratio)",
    "prefix": "prefixes (sum of log-ratios up to each token)",
}
OUTSIDE = {"truncate": "weights are cut to the upper bound", "clip": "weights are cut to the bounds"}
"""What becomes of the units in the pale areas; in other modes they are rejected."""
_DIGITS = 10
Cell = tuple[str, float | str | None]
"""Text, and the number that a column is sorted by; None for words."""


def write_page(diagnosis: Diagnosis, path: Path, *, host: str | None = None) -> Path:
    """Write the page, whole or not at all. host: whose flags are in front; default: our flags alone.

    Raises ImportError where jinja2 is missing, OSError as `open`.
    """
    from mismatch_plugin.report.templates import environment

    template = environment().get_template("diagnose/page.html.j2")
    script = files("mismatch_plugin").joinpath("diagnose/page.js").read_text(encoding="utf-8")
    verdict, rest = words.headline(diagnosis)
    advice, histograms, data = diagnosis.recommendation, diagnosis.histograms, None
    advised = words.controls_of(advice.settings) if advice else None
    settings = _settings(diagnosis)
    counted = UNIT_NAMES[advised.level if advised else "token"]
    caption = f"How far {counted} are from agreement (0), counts on a logarithmic scale"
    if advised:
        caption += f"; in the pale area {OUTSIDE.get(advised.mode, 'they are rejected')}, as recommended"
    if histograms is not None:
        first = (advised or words.Controls("token", "none", None, None))._asdict()
        data = histograms | {"settings": settings, "first": first, "judged": list(RS_LEVELS), "units": UNIT_NAMES}
        data = _finite(data)
    flags = dict[str, tuple[str, str]]()
    if advice:
        flags = {name: (HOSTS.get(name, name), text) for name, text in advice.flags.items()}
        flags = flags if host else {"": ("any trainer", words.neutral_flags(advice.settings))} | flags
    html = template.render(
        d=diagnosis,
        verdict=verdict,
        headline=rest,
        fault=diagnosis.verdict == "fault",
        normal=words.is_it_normal(diagnosis),
        undecided=words.undecided(diagnosis),
        caption=caption,
        settings=settings,
        modes=MODES,
        host=host or "",
        gate=words.gate_words(diagnosis.gate) if diagnosis.gate else None,
        flags=flags,
        **_tables(diagnosis),
        breakdowns={} if diagnosis.size is None else diagnosis.size.breakdowns,
        headers=HEADERS,
        predictions=_prediction_rows(diagnosis),
        pieces=lambda flags: re.split(r"(\s+)", flags),
        words=words,
        figure=figure,
        data=data,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=mismatch_plugin.__version__,
    )
    write_whole(path, html)
    return path


def _settings(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The settings that the controls can start from, the recommended one first."""
    best = diagnosis.recommendation.setting if diagnosis.recommendation else None
    found = []
    for item in diagnosis.predictions:
        at = words.controls_of(item.settings)
        if at is not None and item.algorithm != 1:  # there PPO-clip's own ratio is a weight, which no control has
            found.append({"name": item.setting + " (recommended)" * (item.setting == best), **at._asdict()})
    return sorted(found, key=lambda item: not item["name"].endswith(" (recommended)"))


def _finite(value: Any) -> Any:
    """The same with numbers that JSON and a page can hold: ten digits, null for what is no finite number."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: item if name == "edges" else _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _tables(diagnosis: Diagnosis) -> dict[str, Table]:
    """known: every known gap of the same kind of pair, next to this one. sizes, quantiles, bounds, metrics."""
    known = [
        (of.pair, of.figure, span(of.low, of.high), figure(of.value), of.where, of.what, of.source)
        for of in diagnosis.normal
    ]
    ranges = words.known(diagnosis)
    sizes = [
        (name, f"{value} {unit}".strip(), ranges.get(name, NOTHING)) for name, value, unit in words.size_rows(diagnosis)
    ]
    quantiles = [
        (f"{name.removeprefix('p')} %", compact(value).replace("-", "−", value < 0), compact(_ratio(value)))
        for name, value in (diagnosis.size.quantiles if diagnosis.size else {}).items()
    ]
    bounds = [
        (level.replace("_growing", ", growth 0.5"), kept, compact(lower), compact(upper))
        for level, of in diagnosis.bounds.items()
        for kept, (lower, upper) in of.items()
    ]
    metrics = [(name, compact(v) if math.isfinite(v) else str(v)) for name, v in sorted(diagnosis.metrics.items())]
    pair = ("pair", "figure", "range", "here", "", "model and engines", "source")
    loose = f"Up to {LOOSE:g} times above or below a range counts as inside: most are of one run."
    grown = "growth 0.5: bounds of one token, to the power √n for a product over n tokens (--tis-bound-growth 0.5)."
    level = ("level", "kept", "lower bound", "upper bound")
    return {
        "known": Table("Known gaps, nats per token", pair, tuple(known), notes=(loose,)),
        "sizes": Table("Figures", ("figure", "measured", "known"), tuple(sizes)),
        "quantiles": Table("Quantiles of the tokens", ("share below", "log-ratio", "ratio"), tuple(quantiles)),
        "bounds": Table("Bounds that keep a wished share", level, tuple(bounds), notes=(grown,)),
        "metrics": Table(f"Metrics ({PREFIX}…), as training reports them", ("metric", "value"), tuple(metrics)),
    }


def _ratio(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -SAFETY_BOUND), SAFETY_BOUND))


HEADERS = ("setting", "choice", "kept", "kept, A > 0", "kept, A < 0", "kept: short / middle / long", "ESS of weights",
           "mean weight", "largest weight", "noise", "bounds' bias", "groups moved", "second pass")  # fmt: skip


def _prediction_rows(diagnosis: Diagnosis) -> list[list[Cell]]:
    """All predictions, the chosen ones first."""
    chosen = words.chosen_predictions(diagnosis)
    others = [item for item in diagnosis.predictions if all(item is not other for _, other in chosen)]
    return [_cells(item, mark) for mark, item in [*chosen, *(("", item) for item in others)]]


def _cells(item: Prediction, mark: str) -> list[Cell]:
    def part(value: float | None) -> Cell:
        return (NOTHING, "") if value is None else (words.share(value), value)

    by_length = " / ".join(map(words.share, item.kept_by_length)) or NOTHING
    return [
        (item.setting, None),
        (mark, None),
        *map(part, (item.kept, item.kept_positive, item.kept_negative)),
        (by_length, min(item.kept_by_length, default="")),
        part(item.ess),
        *((figure(value), value) for value in (item.mean_weight, item.max_weight)),
        (words.times(item.noise), item.noise),
        (figure(item.bias), item.bias),
        part(item.groups_changed),
        ("yes" if item.second_pass else "no", None),
    ]
