"""From a diagnosis to one HTML file that loads nothing else. Importing this needs jinja2."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from pathlib import Path

import mismatch_plugin
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose import screen
from mismatch_plugin.diagnose.flags import TITLES
from mismatch_plugin.diagnose.result import Diagnosis
from mismatch_plugin.files import write_whole
from mismatch_plugin.limits import SAFETY_BOUND
from mismatch_plugin.report.table import NOTHING, Table, compact, figure
from mismatch_plugin.report.templates import environment

UNITS = {
    "token": "tokens",
    "turn": "turns (sum of log-ratios)",
    "sequence": "responses (sum of log-ratios)",
    "geometric": "responses (mean log-ratio)",
    "prefix": "prefixes (sum of log-ratios up to each token)",
}


def write_page(diagnosis: Diagnosis, path: Path) -> Path:
    """Write the page, whole or not at all; returns its path. Raises OSError as `open`."""
    verdict, _, rest = diagnosis.headline.partition(": ")
    advice = diagnosis.recommendation
    html = (
        environment()
        .get_template("diagnose/page.html.j2")
        .render(
            d=diagnosis,
            verdict=verdict,
            headline=rest,
            normal=screen.is_it_normal(diagnosis),
            undecided=screen.undecided(diagnosis),
            gate=screen.gate_words(diagnosis.gate) if diagnosis.gate else None,
            flags=sorted(advice.flags.items(), key=lambda item: item[0] != diagnosis.host) if advice else (),
            titles=TITLES,
            units=UNITS,
            tables=_tables(diagnosis),
            predictions=_predictions(diagnosis),
            breakdowns={} if diagnosis.size is None else diagnosis.size.breakdowns,
            screen=screen,
            figure=figure,
            math=math,
            made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            version=mismatch_plugin.__version__,
        )
    )
    write_whole(path, html)
    return path


def _tables(diagnosis: Diagnosis) -> dict[str, Table]:
    """Those that have rows."""
    quantiles = [
        (f"{name.removeprefix('p')} %", compact(value), compact(math.exp(min(max(value, -SAFETY_BOUND), SAFETY_BOUND))))
        for name, value in (diagnosis.size.quantiles if diagnosis.size else {}).items()
    ]
    bounds = [(level, compact(lower), compact(upper)) for level, (lower, upper) in diagnosis.bounds.items()]
    metrics = [(name, compact(v) if math.isfinite(v) else str(v)) for name, v in sorted(diagnosis.metrics.items())]
    of_level = ("level or criterion", "lower bound", "upper bound")
    every = {
        "sizes": Table("Figures", ("figure", "measured"), tuple(screen.size_rows(diagnosis))),
        "quantiles": Table("Quantiles of the tokens", ("share below", "log-ratio", "ratio"), tuple(quantiles)),
        "bounds": Table("Bounds that keep 99 % of your data", of_level, tuple(bounds)),
        "metrics": Table(f"Metrics ({PREFIX}…), as training reports them", ("metric", "value"), tuple(metrics)),
    }
    return {name: table for name, table in every.items() if table.rows}


HEADERS = ("setting", "choice", "kept", "kept, A > 0", "kept, A < 0", "ESS of weights", "mean weight", "largest weight",
           "noise", "bounds' bias", "groups moved", "second pass")  # fmt: skip


def _predictions(diagnosis: Diagnosis) -> Table:
    """All predictions, the chosen ones first."""
    chosen = screen.chosen_predictions(diagnosis)
    others = [item for item in diagnosis.predictions if all(item is not other for _, other in chosen)]
    rows = []
    for mark, item in [*chosen, *(("", item) for item in others)]:
        shares = (item.kept, item.kept_positive, item.kept_negative, item.ess, item.groups_changed)
        *kept, moved = (NOTHING if value is None else screen.share(value) for value in shares)
        weights = (figure(item.mean_weight), figure(item.max_weight), screen.times(item.noise), figure(item.bias))
        rows.append((item.setting, mark, *kept, *weights, moved, "yes" if item.second_pass else "no"))
    return Table("Predictions", HEADERS, tuple(rows))
