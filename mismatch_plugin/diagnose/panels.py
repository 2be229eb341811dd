"""The six panels of the rollout-correction guide for one run: what `inspect` draws. Importing this needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from PIL import Image

from mismatch_plugin.core import health
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.data.arrays import Floats
from mismatch_plugin.diagnose.run_sources import ABS_GAP

NAME = "six_panels.png"
_STYLE: dict[Any, Any] = {
    "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.5, "lines.markersize": 4.0,
    "legend.frameon": False, "legend.fontsize": 8.0, "figure.facecolor": "white", "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 5),
}  # fmt: skip
_LOOKS = (("#0072B2", "solid", "o"), ("#D55E00", (0, (5, 1.5)), "s"), ("#009E73", (0, (1, 1)), "^"))
"""Colour, dash and marker of the lines of a panel."""
_FEW, _WINDOWS = 25, 40
"""So many steps are marked one by one; of twice so many as _WINDOWS, means of as many neighbours are drawn."""


class Line(NamedTuple):
    """A horizontal line at a value that means something; its label is above it, or under it."""

    value: float
    label: str
    under: bool = False


class Panel(NamedTuple):
    """series: metric → its name in the legend; those that were recorded are drawn. older: drawn where none of them was;
    the lines do not judge it. floor: the smallest range of the axis, so that rounding is not drawn as if it were a
    course. span: what the axis shows at least; with one it is of shares."""

    title: str
    label: str
    lines: tuple[Line, ...]
    series: Mapping[str, str]
    older: Mapping[str, str] = {}
    floor: float = 0.02
    span: tuple[float, float] | None = None


_LOW, _HIGH = health.MEAN_RANGE
_ESS, _KL = health.MIN_EFFECTIVE_SAMPLE_SIZE, health.MAX_KL
_OF_WEIGHTS = "rollout_is_weight_after_{}eff_sample_size"
# fmt: off
PANELS = (
    Panel("Mean ratio and mean weight", "π_train / π_rollout",
          (Line(1.0, "ideal 1"), Line(_LOW, f"warning below {_LOW:g}", under=True),
           Line(_HIGH, f"warning above {_HIGH:g}")),
          {"rollout_is_ratio_mean": "ratio, before bounding",
           "rollout_is_ratio_unit_mean": "ratio of the sequences, before bounding",
           "rollout_is_weight_after_mean": "weights used in the loss"},
          {"rollout_is_mean": "ratio as its writer has it: not judged"}),
    Panel("Effective sample size", "share",
          (Line(0.5, "good above 0.5"), Line(_ESS, f"warning below {_ESS:g}", under=True)),
          {"rollout_is_ratio_eff_sample_size": "ratio of the tokens",
           "rollout_is_ratio_unit_eff_sample_size": "ratio of the sequences",
           _OF_WEIGHTS.format(""): "weights used in the loss"},
          {"rollout_is_eff_sample_size": "ratio clamped to [1/hi, hi]: not judged"}, span=(0.0, 1.0)),
    Panel("Vetoed sequences and rejected tokens", "share",
          (Line(health.MAX_VETO_FRACTION, f"warning: veto above {health.MAX_VETO_FRACTION:g}"),),
          {"rollout_is_veto_fraction": "vetoed sequences",
           "rollout_is_masked_fraction": "tokens that a criterion rejects"},
          {"rollout_rs_masked_fraction": "tokens that a criterion rejects"}, span=(0.0, 0.12)),
    Panel("KL(rollout ‖ train)", "nats per token",
          (Line(0.0, ""), Line(_KL, f"warning above {_KL:g}"), Line(-_KL, f"warning below −{_KL:g}", under=True)),
          {"kl": "KL: mean of −log ratio", "k3_kl": "k3: never negative"}, {ABS_GAP: "mean |log ratio|"}, floor=1e-5),
    Panel("Perplexity ratio, training / rollout", "ratio", (Line(1.0, "ideal 1"),),
          {"ppl_ratio": "perplexity ratio"}, floor=1e-3),
    Panel("χ² divergence", "second moment of the ratio − 1",
          (Line(health.MAX_CHI2, f"warning: tokens above {health.MAX_CHI2:g}"),),
          {"chi2_token": "tokens", "chi2_seq": "whole sequences"}, floor=1e-4),
)
# fmt: on


def write_panels(
    rows: Sequence[Mapping[str, float]], numbers: Sequence[float], folder: Path, *, units: str = ""
) -> Path:
    """Write `six_panels.png`; returns its path.

    rows: metrics of each step, with their prefix. numbers: the steps; of a step that is there twice the later counts.
    units: `Unit.ess` of the weights: the effective sample size that is judged is theirs.
    Raises OSError where the folder cannot be written.
    """
    last = dict(zip(numbers, rows, strict=True))
    steps = np.array(sorted(last), dtype=np.float64)
    columns = {
        name: np.array([last[step].get(PREFIX + name, np.nan) for step in steps])
        for panel in PANELS
        for name in (*panel.series, *panel.older, _OF_WEIGHTS.format(units))
    }
    columns = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    if (of_units := _OF_WEIGHTS.format(units)) in columns:
        columns[_OF_WEIGHTS.format("")] = columns[of_units]
    folder.mkdir(parents=True, exist_ok=True)
    raw = io.BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(13.33, 7.35), layout="constrained")
        for panel, axis in zip(PANELS, figure.subplots(2, 3).ravel(), strict=True):
            _draw(axis, panel, steps, columns)
        figure.savefig(raw, format="png", dpi=170)
    Image.open(raw).convert("RGB").quantize(colors=128).save(folder / NAME, optimize=True)  # a third of the size
    return folder / NAME


def _draw(axis: Axes, panel: Panel, steps: Floats, columns: Mapping[str, Floats]) -> None:
    """Draw one panel, and say in it where nothing was recorded."""
    axis.set_title(panel.title)
    axis.set_xlabel("optimizer step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axis.margins(y=0.09)
    chosen = {name: label for name, label in panel.series.items() if name in columns}
    lines = panel.lines if chosen else ()
    chosen = chosen or {name: label for name, label in panel.older.items() if name in columns}
    if not chosen:
        axis.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axis.transAxes, color="#555555")
        axis.set_xticks([])
        axis.set_yticks([])
        return
    for (name, label), (colour, dash, marker) in zip(chosen.items(), _LOOKS, strict=False):
        there = np.isfinite(columns[name])
        at, values = steps[there], columns[name][there]
        if len(at) > 2 * _WINDOWS:  # a pale line of all, a strong one of means: a step's noise does not hide the course
            axis.plot(at, values, color=colour, linewidth=0.7, alpha=0.3)
            at, means = ([part.mean() for part in np.array_split(every, _WINDOWS)] for every in (at, values))
            axis.plot(at, means, color=colour, linestyle=dash, label=label, linewidth=1.8)
        else:
            mark = marker if len(at) <= _FEW else None
            axis.plot(at, values, color=colour, linestyle=dash, label=label, marker=mark)
    drawn = np.stack([columns[name] for name in chosen])
    finite = drawn[np.isfinite(drawn)]
    _frame(axis, panel, lines, float(finite.min()), float(finite.max()))
    if lost := int((~np.isfinite(drawn)).any(0).sum()):
        axis.annotate(f"no finite value at {lost} of {len(steps)} steps", (0.0, 1.0), xycoords="axes fraction",
                      xytext=(2, -2), textcoords="offset points", va="top", fontsize=7.5, color="#333333")  # fmt: skip
    axis.legend(loc="upper left", bbox_to_anchor=(0.0, -0.17), ncols=1, borderaxespad=0.0, handlelength=3.0)


def _frame(axis: Axes, panel: Panel, lines: Sequence[Line], smallest: float, largest: float) -> None:
    """Scale, range, label and lines of an axis on which values from smallest to largest are drawn."""
    if max(largest, -smallest) > 10.0:
        axis.set_yscale("symlog", linthresh=1.0)
    if panel.span is not None:
        smallest, largest = min(smallest, panel.span[0]), max(largest, panel.span[1])
        axis.set_ylim(smallest - 0.02 * (largest - smallest), largest + 0.02 * (largest - smallest))
    room = max(largest - smallest, 0.25 * max(abs(largest), abs(smallest)), 0.02)
    for line in lines:
        if smallest - 1.5 * room <= line.value <= largest + 1.5 * room:  # one far outside would squeeze the curves flat
            axis.axhline(line.value, color="#444444", linewidth=0.9, linestyle=(0, (3, 3)), zorder=1.5)
            label = axis.annotate(line.label, (1.0, line.value), xycoords=("axes fraction", "data"), ha="right",
                                  xytext=(0, -2.5 if line.under else 2.5), va="top" if line.under else "bottom",
                                  textcoords="offset points", fontsize=7.5, color="#333333", zorder=5)  # fmt: skip
            label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # readable across a curve
    bottom, top = axis.get_ylim()
    missing = max(panel.floor - (top - bottom), 0.0)
    axis.set_ylim(bottom - 0.5 * missing, top + 0.5 * missing)
    if panel.span is not None:  # a share's axis ends a little outside what a share can be
        axis.set_ylim(max(axis.get_ylim()[0], -0.01), min(axis.get_ylim()[1], 1.01))
    axis.set_ylabel(panel.label)
