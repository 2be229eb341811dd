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
        known=_known_table(diagnosis),
        sizes=_size_table(diagnosis),
        quantiles=_quantile_table(diagnosis),
        breakdowns={} if diagnosis.size is None else diagnosis.size.breakdowns,
        headers=HEADERS,
        predictions=_prediction_rows(diagnosis),
        bounds=_bounds_table(diagnosis),
        metrics=_metrics_table(diagnosis),
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


def _known_table(diagnosis: Diagnosis) -> Table:
    """Every known gap of the same kind of pair, next to this one."""
    rows = tuple(
        (of.pair, of.figure, span(of.low, of.high), figure(of.value), of.where, of.what, of.source)
        for of in diagnosis.normal
    )
    headers = ("pair", "figure", "range", "here", "", "model and engines", "source")
    note = f"Up to {LOOSE:g} times above or below a range counts as inside: most are of one run."
    return Table("Known gaps, nats per token", headers, rows, notes=(note,))


def _size_table(diagnosis: Diagnosis) -> Table:
    known, rows = words.known(diagnosis), words.size_rows(diagnosis)
    shown = tuple((name, f"{value} {unit}".strip(), known.get(name, NOTHING)) for name, value, unit in rows)
    return Table("Figures", ("figure", "measured", "known"), shown)


def _quantile_table(diagnosis: Diagnosis) -> Table:
    rows: list[tuple[str, str, str]] = []
    for name, value in diagnosis.size.quantiles.items() if diagnosis.size else ():
        ratio = math.exp(min(max(value, -SAFETY_BOUND), SAFETY_BOUND))
        rows.append((name.removeprefix("p") + " %", compact(value).replace("-", "−", value < 0), compact(ratio)))
    return Table("Quantiles of the tokens", ("share below", "log-ratio", "ratio"), tuple(rows))


def _bounds_table(diagnosis: Diagnosis) -> Table:
    rows = tuple(
        (level.replace("_growing", ", growth 0.5"), kept, compact(lower), compact(upper))
        for level, of in diagnosis.bounds.items()
        for kept, (lower, upper) in of.items()
    )
    headers = ("level", "kept", "lower bound", "upper bound")
    notes = ("growth 0.5: bounds of one token, to the power √n for a product over n tokens (--tis-bound-growth 0.5).",)
    return Table("Bounds that keep a wished share", headers, rows, notes=notes)


def _metrics_table(diagnosis: Diagnosis) -> Table:
    rows = tuple((name, compact(v) if math.isfinite(v) else str(v)) for name, v in sorted(diagnosis.metrics.items()))
    return Table(f"Metrics ({PREFIX}…), as training reports them", ("metric", "value"), rows)


HEADERS = ("setting", "choice", "kept", "kept, A > 0", "kept, A < 0", "kept: short / middle / long", "ESS of weights",
           "mean weight", "largest weight", "noise", "bounds' bias", "groups moved", "second pass")  # fmt: skip


def _prediction_rows(diagnosis: Diagnosis) -> list[list[Cell]]:
    """All predictions, the chosen ones first."""
    marks = {id(item): (place, mark) for place, (mark, item) in enumerate(words.chosen_predictions(diagnosis))}
    rows = sorted(diagnosis.predictions, key=lambda item: marks.get(id(item), (math.inf, ""))[0])
    return [_cells(item, marks.get(id(item), (0, ""))[1]) for item in rows]


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
