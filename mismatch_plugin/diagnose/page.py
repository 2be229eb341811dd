"""From a diagnosis to one HTML file that opens anywhere, loads nothing, and works out other bounds on the same data."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import mismatch_plugin
from mismatch_plugin.config.criteria import LEVEL_TO_AGGREGATE
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.drawing import (
    HEIGHT,
    UNIT_NAMES,
    WIDTH,
    Plot,
    advised,
    distribution,
    outside,
    places_on_range,
    plot,
)
from mismatch_plugin.diagnose.result import Diagnosis, Group, Prediction
from mismatch_plugin.diagnose.words import (
    Controls,
    chosen_predictions,
    controls_of,
    count,
    gate_words,
    headline,
    host_names,
    is_it_normal,
    label,
    published,
    sentence,
    separated,
    share,
    size_rows,
    span,
    times,
    undecided,
    without_advice,
)
from mismatch_plugin.files import write_whole
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.report.table import NOTHING, Table, compact, figure

TEMPLATE = "diagnose/page.html.j2"
FIGURES = {"abs_mean": "mean |Δ log p|", "k3_kl": "KL, k3", "kl": "KL, k1", "ess": "ESS of token ratios"}
"""What a breakdown's bars may show, nats a token but for the last."""
MODES = {
    "truncate": "truncate: min(ρ, upper)",
    "clip": "clip: between the bounds",
    "mask": "mask: rejected outside",
    "reject": "reject outside, weight 1",
}
_DEFAULT = Controls("token", "truncate", None, 2.0)
_DIGITS = 10


@dataclass(frozen=True)
class Cell:
    """Text, and the number that a column is sorted by; None for words."""

    text: str
    value: float | str | None = None


def write_page(diagnosis: Diagnosis, path: Path, *, host: str = "slime") -> Path:
    """Write the page, whole or not at all. host: whose flags are in front.

    Raises ImportError where jinja2 is missing, OSError as `open`.
    """
    from mismatch_plugin.report.templates import environment

    script = files("mismatch_plugin").joinpath("diagnose/page.js").read_text(encoding="utf-8")
    settings = _settings(diagnosis)
    best = advised(diagnosis)
    histograms = diagnosis.histograms
    levels = [] if histograms is None else list(histograms.levels)
    bounds = (None, None) if best is None else (best.lower, best.upper)
    first_level = best.level if best is not None else "token"
    found = {level: distribution(diagnosis, level, _bounds(settings, level)) for level in levels or ["token"]}
    plots = {level: plot(of) for level, of in found.items() if of is not None}
    first = distribution(diagnosis, first_level, bounds)
    data = {"distributions": {level: _bars(drawn) for level, drawn in plots.items()}, "settings": settings}
    if first is not None:
        data["distributions"]["first"] = _bars(plot(first))
    if histograms is not None:
        data["edges"] = list(histograms.edges)
        data["judged"] = list(LEVEL_TO_AGGREGATE)
        data["levels"] = {name: level.model_dump() for name, level in histograms.levels.items()}
    verdict, rest = headline(diagnosis)
    advice = diagnosis.recommendation
    html = (
        environment()
        .get_template(TEMPLATE)
        .render(
            d=diagnosis,
            verdict=verdict,
            headline=rest,
            fault=diagnosis.verdict == "fault",
            normal=is_it_normal(diagnosis),
            why_none=without_advice(diagnosis),
            undecided=undecided(diagnosis),
            separated=separated(diagnosis),
            label=label,
            sentence=sentence,
            outside="" if best is None else outside(best),
            count=count,
            first=None if first is None else plot(first, bounds),
            plots=plots if histograms is not None else {},
            settings=settings,
            modes=MODES,
            unit_names=UNIT_NAMES,
            host=host,
            gate=gate_words(diagnosis.gate, brief=True) if diagnosis.gate else None,
            hosts=host_names(advice.flags) if advice else {},
            ranges=places_on_range(diagnosis.normal),
            size_table=_size_table(diagnosis),
            quantile_table=_quantile_table(diagnosis),
            breakdowns={} if diagnosis.size is None else diagnosis.size.breakdowns,
            figures=FIGURES,
            figures_of=_figures_of,
            headers=HEADERS,
            predictions=_prediction_rows(diagnosis),
            bounds_table=_bounds_table(diagnosis),
            metrics_table=_metrics_table(diagnosis),
            words=partial(re.split, r"(\s+)"),
            figure=figure,
            span=span,
            share=share,
            width=WIDTH,
            height=HEIGHT,
            data=_finite(data),
            script=script,
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
            made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            version=mismatch_plugin.__version__,
        )
    )
    write_whole(path, html)
    return path


def _settings(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The settings that the controls can start from, the recommended one first, with what is predicted for them."""
    advice = diagnosis.recommendation
    found: list[dict[str, Any]] = []
    for item in diagnosis.predictions:
        at = controls_of(item.settings)
        if at is not None and item.algorithm != 1:  # there PPO-clip's own ratio is a weight, which no control has
            names = ("kept", "kept_positive", "kept_negative", "mean_weight", "ess")
            figures = {name: getattr(item, name) for name in names}
            best = advice is not None and advice.setting == item.setting
            found.append({"name": item.setting, **vars(at), "figures": figures, "recommended": best})
    if not found:
        name = "algorithm 2, token, truncate 2"
        found.append({"name": name, **vars(_DEFAULT), "figures": None, "recommended": False})
    return sorted(found, key=lambda item: not item["recommended"])


def _bounds(settings: list[dict[str, Any]], level: str) -> tuple[float | None, ...]:
    return tuple(item[side] for item in settings if item["level"] == level for side in ("lower", "upper"))


def _bars(drawn: Plot) -> dict[str, Any]:
    return {"edges": drawn.of.edges, "counts": drawn.of.counts, "beyond": drawn.of.beyond}


def _finite(value: Any) -> Any:
    """The same with numbers that JSON and a page can hold: ten digits, null for what is no finite number."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: item if name == "edges" else _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _figures_of(group: Group) -> dict[str, float | None]:
    return _finite({name: getattr(group, name) for name in FIGURES})


def _size_table(diagnosis: Diagnosis) -> Table:
    known = published(diagnosis)
    rows = tuple(
        (title, f"{value} {unit}".strip(), known.get(title, NOTHING)) for title, value, unit in size_rows(diagnosis)
    )
    return Table("Figures", ("figure", "measured", "published"), rows)


def _quantile_table(diagnosis: Diagnosis) -> Table | None:
    if diagnosis.size is None or not diagnosis.size.quantiles:
        return None
    rows: list[tuple[str, str, str]] = []
    for name, value in diagnosis.size.quantiles.items():
        ratio = math.exp(min(max(value, -SAFETY_BOUND), SAFETY_BOUND))
        rows.append((name.removeprefix("p") + " %", compact(value).replace("-", "−", value < 0), compact(ratio)))
    return Table("Quantiles of the tokens", ("share below", "log-ratio", "ratio"), tuple(rows))


def _bounds_table(diagnosis: Diagnosis) -> Table | None:
    rows = tuple(
        (level.replace("_growing", ", growth 0.5"), kept, compact(lower), compact(upper))
        for level, of in diagnosis.bounds.items()
        for kept, (lower, upper) in of.items()
    )
    headers = ("level", "kept", "lower bound", "upper bound")
    notes = ("growth 0.5: bounds of one token, to the power √n for a product over n tokens (--tis-bound-growth 0.5).",)
    return Table("Bounds that keep a wished share", headers, rows, notes=notes) if rows else None


def _metrics_table(diagnosis: Diagnosis) -> Table | None:
    rows = tuple((name, compact(v) if math.isfinite(v) else str(v)) for name, v in sorted(diagnosis.metrics.items()))
    return Table(f"Metrics ({PREFIX}…), as training reports them", ("metric", "value"), rows) if rows else None


HEADERS = ("setting", "choice", "kept", "kept, A > 0", "kept, A < 0", "kept: short / middle / long", "ESS of weights",
           "mean weight", "largest weight", "noise", "bounds' bias", "groups moved", "second pass")  # fmt: skip


def _prediction_rows(diagnosis: Diagnosis) -> list[list[Cell]]:
    """All predictions, the chosen ones first."""
    marks = {id(item): (place, mark) for place, (mark, item) in enumerate(chosen_predictions(diagnosis))}
    rows = sorted(diagnosis.predictions, key=lambda item: marks.get(id(item), (math.inf, ""))[0])
    return [_cells(item, marks.get(id(item), (0, ""))[1]) for item in rows]


def _cells(item: Prediction, mark: str) -> list[Cell]:
    def part(value: float | None) -> Cell:
        return Cell(NOTHING, "") if value is None else Cell(share(value), value)

    def number(value: float) -> Cell:
        return Cell(figure(value), value)

    lengths = Cell(" / ".join(map(share, item.kept_by_length)) or NOTHING, min(item.kept_by_length, default=""))
    return [
        Cell(item.setting),
        Cell(mark),
        *map(part, (item.kept, item.kept_positive, item.kept_negative)),
        lengths,
        part(item.ess),
        *map(number, (item.mean_weight, item.max_weight)),
        Cell(times(item.noise), item.noise),
        number(item.bias),
        part(item.groups_changed),
        Cell("yes" if item.second_pass else "no"),
    ]
