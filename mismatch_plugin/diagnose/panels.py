"""The six panels of the rollout-correction guide for one run: what `inspect` draws. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mismatch_plugin.core import health
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.report.plots import SIZE, STYLE, WINDOWS, Array, Line, Part, frame, png, windows

ALL = "six_panels.png"
"""All of them in one picture."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73")
_DASHES = ("solid", (0, (5, 1.5)), (0, (1, 1)))
_MARKERS = ("o", "s", "^")
_FEW = 25
"""So many steps are marked one by one."""


@dataclass(frozen=True)
class Series:
    """One line: the first metric of `names` that was recorded, and what the legend calls it."""

    label: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """A picture of one axis. older: drawn where none of `series` was recorded; the axis's lines do not judge it."""

    name: str
    title: str
    axis: Part
    series: tuple[Series, ...]
    older: Series | None = None


def _axis(label: str, *lines: Line, floor: float = 0.02, span: tuple[float, float] | None = None) -> Part:
    return Part(label, "symlog", lines, floor, span)


_LOW, _HIGH = health.MEAN_RANGE
_ESS, _KL = health.MIN_EFFECTIVE_SAMPLE_SIZE, health.MAX_KL
# fmt: off
PANELS = (
    Panel("mean_weight", "Mean ratio and mean weight",
          _axis("π_train / π_rollout", Line(1.0, "ideal 1"), Line(_LOW, f"warning below {_LOW:g}", under=True),
                Line(_HIGH, f"warning above {_HIGH:g}")),
          (Series("ratio, before bounding", ("rollout_is_ratio_mean", "rollout_is_mean")),
           Series("ratio of the sequences, before bounding", ("rollout_is_ratio_unit_mean",)),
           Series("weights used in the loss", ("rollout_is_weight_after_mean",)))),
    Panel("effective_sample_size", "Effective sample size",
          _axis("share", Line(0.5, "good above 0.5"), Line(_ESS, f"warning below {_ESS:g}", under=True),
                span=(0.0, 1.0)),
          (Series("ratio of the tokens", ("rollout_is_ratio_eff_sample_size",)),
           Series("ratio of the sequences", ("rollout_is_ratio_unit_eff_sample_size",)),
           Series("weights used in the loss", ("rollout_is_weight_after_eff_sample_size",))),
          Series("ratio clamped to [1/hi, hi]: not judged", ("rollout_is_eff_sample_size",))),
    Panel("veto", "Vetoed sequences and rejected tokens",
          _axis("share", Line(health.MAX_VETO_FRACTION, f"warning: veto above {health.MAX_VETO_FRACTION:g}"),
                span=(0.0, 0.12)),
          (Series("vetoed sequences", ("rollout_is_veto_fraction",)),
           Series("tokens that a criterion rejects", ("rollout_is_masked_fraction", "rollout_rs_masked_fraction")))),
    Panel("kl", "KL(rollout ‖ train)",
          _axis("nat a token", Line(0.0, ""), Line(_KL, f"warning above {_KL:g}"),
                Line(-_KL, f"warning below −{_KL:g}", under=True), floor=1e-5),
          (Series("KL: mean of −log ratio", ("kl",)), Series("k3: never negative", ("k3_kl",)))),
    Panel("ppl_ratio", "Perplexity ratio, training / rollout", _axis("ratio", Line(1.0, "ideal 1"), floor=1e-3),
          (Series("perplexity ratio", ("ppl_ratio",)),)),
    Panel("chi2", "χ² divergence",
          _axis("second moment of the ratio − 1",
                Line(health.MAX_CHI2, f"warning: tokens above {health.MAX_CHI2:g}"), floor=1e-4),
          (Series("tokens", ("chi2_token",)), Series("whole sequences", ("chi2_seq",)))),
)
# fmt: on
_OF_WEIGHTS = "rollout_is_weight_after_{}eff_sample_size"
"""What is judged, in the units that have one weight each: see `units.ess`."""


def write_panels(
    rows: Sequence[Mapping[str, float]], numbers: Sequence[float], folder: Path, *, units: str = ""
) -> list[Path]:
    """Write `six_panels.png` and one PNG for each panel that has something to show; returns their paths.

    rows: metrics of each step, with their prefix. numbers: the steps; of a step that is there twice the later counts.
    units: `Units.ess` of the weights.
    Raises OSError where the folder cannot be written.
    """
    last = dict(zip(numbers, rows, strict=True))
    steps = np.array(sorted(last), dtype=np.float64)
    columns = {
        name: np.array([last[step].get(PREFIX + name, np.nan) for step in steps])
        for panel in PANELS
        for series in (*panel.series, *([panel.older] if panel.older else []))
        for name in series.names
    }
    values = np.array([last[step].get(PREFIX + _OF_WEIGHTS.format(units), np.nan) for step in steps])
    if np.isfinite(values).any():
        columns[_OF_WEIGHTS.format("")] = values
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.1 * SIZE[0], 2.1 * SIZE[1]), layout="constrained")
        for panel, axis in zip(PANELS, figure.subplots(2, 3).ravel(), strict=True):
            _draw(axis, panel, steps, columns)
        paths = [folder / ALL]
        paths[0].write_bytes(png(figure))
        for panel in PANELS:
            figure = Figure(figsize=(1.25 * SIZE[0], 1.05 * SIZE[1]), layout="constrained")
            if _draw(figure.subplots(), panel, steps, columns):
                paths.append(folder / f"{panel.name}.png")
                paths[-1].write_bytes(png(figure))
    return paths


def _draw(axis: Axes, panel: Panel, steps: Array, columns: Mapping[str, Array]) -> bool:
    """Draw one panel, and say in it where nothing was recorded. Returns whether something was."""
    axis.set_title(panel.title)
    axis.set_xlabel("optimizer step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axis.margins(y=0.09)
    recorded = [(series.label, _recorded(series, columns)) for series in panel.series]
    chosen = [(label, values) for label, values in recorded if values is not None]
    lines = panel.axis.lines
    if not chosen and panel.older is not None and (values := _recorded(panel.older, columns)) is not None:
        chosen, lines = [(panel.older.label, values)], ()
    if not chosen:
        axis.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axis.transAxes, color="#555555")
        axis.set_xticks([])
        axis.set_yticks([])
        return False
    drawn = [_line(axis, index, label, steps, values) for index, (label, values) in enumerate(chosen)]
    shown = np.concatenate(drawn)
    smallest, largest = float(shown.min()), float(shown.max())
    frame(axis, panel.axis, lines, smallest, largest)
    lost = int((~np.isfinite(np.stack([values for _, values in chosen]))).any(0).sum())
    if lost:
        axis.annotate(f"no finite value at {lost} of {len(steps)} steps", (0.0, 1.0), xycoords="axes fraction",
                      xytext=(2, -2), textcoords="offset points", va="top", fontsize=7.5, color="#333333")  # fmt: skip
    axis.legend(loc="upper left", bbox_to_anchor=(0.0, -0.17), ncols=1, borderaxespad=0.0, handlelength=3.0)
    return True


def _recorded(series: Series, columns: Mapping[str, Array]) -> Array | None:
    return next((columns[name] for name in series.names if np.isfinite(columns[name]).any()), None)


def _line(axis: Axes, index: int, label: str, steps: Array, values: Array) -> Array:
    """One series; where there are many steps a pale line of all and a strong one of means. Returns what was drawn."""
    there = np.isfinite(values)
    colour, dash = _COLOURS[index], _DASHES[index]
    if there.sum() > 2 * WINDOWS:
        axis.plot(steps[there], values[there], color=colour, linewidth=0.7, alpha=0.3)
        at, means = windows(steps[there], values[None, there])
        axis.plot(at, means[0], color=colour, linestyle=dash, label=label, linewidth=1.8)
    else:
        marker = _MARKERS[index] if there.sum() <= _FEW else None
        axis.plot(steps[there], values[there], color=colour, linestyle=dash, label=label, marker=marker)
    return values[there]
