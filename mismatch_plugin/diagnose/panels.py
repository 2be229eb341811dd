"""The six panels of the rollout-correction guide for one run: what `inspect` draws. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mismatch_plugin.core import health
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.run_sources import ABS_GAP
from mismatch_plugin.report.plots import SIZE, STYLE, WINDOWS, Array, Line, Part, frame, png, windows

NAME = "six_panels.png"
_LOOKS = (("#0072B2", "solid", "o"), ("#D55E00", (0, (5, 1.5)), "s"), ("#009E73", (0, (1, 1)), "^"))
"""Colour, dash and marker of the lines of a panel."""
_FEW = 25
"""So many steps are marked one by one."""


class Panel(NamedTuple):
    """series: metric → its name in the legend; those that were recorded are drawn. older: drawn where none of them was;
    the axis's lines do not judge it."""

    title: str
    axis: Part
    series: Mapping[str, str]
    older: Mapping[str, str] = {}


def _axis(label: str, *lines: Line, floor: float = 0.02, span: tuple[float, float] | None = None) -> Part:
    return Part(label, "symlog", lines, floor, span)


_LOW, _HIGH = health.MEAN_RANGE
_ESS, _KL = health.MIN_EFFECTIVE_SAMPLE_SIZE, health.MAX_KL
_OF_WEIGHTS = "rollout_is_weight_after_{}eff_sample_size"
# fmt: off
PANELS = (
    Panel("Mean ratio and mean weight",
          _axis("π_train / π_rollout", Line(1.0, "ideal 1"), Line(_LOW, f"warning below {_LOW:g}", under=True),
                Line(_HIGH, f"warning above {_HIGH:g}")),
          {"rollout_is_ratio_mean": "ratio, before bounding",
           "rollout_is_ratio_unit_mean": "ratio of the sequences, before bounding",
           "rollout_is_weight_after_mean": "weights used in the loss"},
          {"rollout_is_mean": "ratio as its writer has it: not judged"}),
    Panel("Effective sample size",
          _axis("share", Line(0.5, "good above 0.5"), Line(_ESS, f"warning below {_ESS:g}", under=True),
                span=(0.0, 1.0)),
          {"rollout_is_ratio_eff_sample_size": "ratio of the tokens",
           "rollout_is_ratio_unit_eff_sample_size": "ratio of the sequences",
           _OF_WEIGHTS.format(""): "weights used in the loss"},
          {"rollout_is_eff_sample_size": "ratio clamped to [1/hi, hi]: not judged"}),
    Panel("Vetoed sequences and rejected tokens",
          _axis("share", Line(health.MAX_VETO_FRACTION, f"warning: veto above {health.MAX_VETO_FRACTION:g}"),
                span=(0.0, 0.12)),
          {"rollout_is_veto_fraction": "vetoed sequences",
           "rollout_is_masked_fraction": "tokens that a criterion rejects"},
          {"rollout_rs_masked_fraction": "tokens that a criterion rejects"}),
    Panel("KL(rollout ‖ train)",
          _axis("nats per token", Line(0.0, ""), Line(_KL, f"warning above {_KL:g}"),
                Line(-_KL, f"warning below −{_KL:g}", under=True), floor=1e-5),
          {"kl": "KL: mean of −log ratio", "k3_kl": "k3: never negative"},
          {ABS_GAP: "mean |log ratio|"}),
    Panel("Perplexity ratio, training / rollout", _axis("ratio", Line(1.0, "ideal 1"), floor=1e-3),
          {"ppl_ratio": "perplexity ratio"}),
    Panel("χ² divergence",
          _axis("second moment of the ratio − 1",
                Line(health.MAX_CHI2, f"warning: tokens above {health.MAX_CHI2:g}"), floor=1e-4),
          {"chi2_token": "tokens", "chi2_seq": "whole sequences"}),
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
    with rc_context(STYLE):
        figure = Figure(figsize=(3.1 * SIZE[0], 2.1 * SIZE[1]), layout="constrained")
        for panel, axis in zip(PANELS, figure.subplots(2, 3).ravel(), strict=True):
            _draw(axis, panel, steps, columns)
        (folder / NAME).write_bytes(png(figure))
    return folder / NAME


def _draw(axis: Axes, panel: Panel, steps: Array, columns: Mapping[str, Array]) -> None:
    """Draw one panel, and say in it where nothing was recorded."""
    axis.set_title(panel.title)
    axis.set_xlabel("optimizer step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axis.margins(y=0.09)
    chosen = {name: label for name, label in panel.series.items() if name in columns}
    lines = panel.axis.lines if chosen else ()
    chosen = chosen or {name: label for name, label in panel.older.items() if name in columns}
    if not chosen:
        axis.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axis.transAxes, color="#555555")
        axis.set_xticks([])
        axis.set_yticks([])
        return
    for (name, label), (colour, dash, marker) in zip(chosen.items(), _LOOKS, strict=False):
        there = np.isfinite(columns[name])
        at, values = steps[there], columns[name][there]
        if len(at) > 2 * WINDOWS:  # a pale line of all, a strong one of means
            axis.plot(at, values, color=colour, linewidth=0.7, alpha=0.3)
            at, means = windows(at, values[None])
            axis.plot(at, means[0], color=colour, linestyle=dash, label=label, linewidth=1.8)
        else:
            mark = marker if len(at) <= _FEW else None
            axis.plot(at, values, color=colour, linestyle=dash, label=label, marker=mark)
    drawn = np.stack([columns[name] for name in chosen])
    frame(axis, panel.axis, lines, float(drawn[np.isfinite(drawn)].min()), float(drawn[np.isfinite(drawn)].max()))
    if lost := int((~np.isfinite(drawn)).any(0).sum()):
        axis.annotate(f"no finite value at {lost} of {len(steps)} steps", (0.0, 1.0), xycoords="axes fraction",
                      xytext=(2, -2), textcoords="offset points", va="top", fontsize=7.5, color="#333333")  # fmt: skip
    axis.legend(loc="upper left", bbox_to_anchor=(0.0, -0.17), ncols=1, borderaxespad=0.0, handlelength=3.0)
