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
from mismatch_plugin.report.curves import Line
from mismatch_plugin.report.data import Array
from mismatch_plugin.report.plots import SIZE, STYLE, WINDOWS, png, threshold_lines, windows

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

    names: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Panel:
    """One axis. floor: the smallest range that it spans, so that rounding is not drawn as if it were a course.

    span: of a share, what the axis shows at least; it ends a little outside 0 and 1.
    """

    name: str
    title: str
    label: str
    series: tuple[Series, ...]
    lines: tuple[Line, ...] = ()
    floor: float = 0.02
    span: tuple[float, float] | None = None
    older: Series | None = None
    """Drawn where none of `series` was recorded; `lines` do not judge it."""


_LOW, _HIGH = health.MEAN_RANGE
PANELS = (
    Panel(
        "mean_weight",
        "Mean ratio and mean weight",
        "π_train / π_rollout",
        (
            Series(("rollout_is_ratio_mean", "rollout_is_mean"), "ratio, before bounding"),
            Series(("rollout_is_ratio_unit_mean",), "ratio of the sequences, before bounding"),
            Series(("rollout_is_weight_after_mean",), "weights used in the loss"),
        ),
        (
            Line(1.0, "ideal 1"),
            Line(_LOW, f"warning below {_LOW:g}", under=True),
            Line(_HIGH, f"warning above {_HIGH:g}"),
        ),
    ),
    Panel(
        "effective_sample_size",
        "Effective sample size",
        "share",
        (
            Series(("rollout_is_ratio_eff_sample_size",), "ratio of the tokens"),
            Series(("rollout_is_ratio_unit_eff_sample_size",), "ratio of the sequences"),
            Series(("rollout_is_weight_after_eff_sample_size",), "weights used in the loss"),
        ),
        (
            Line(0.5, "good above 0.5"),
            Line(health.MIN_EFFECTIVE_SAMPLE_SIZE, f"warning below {health.MIN_EFFECTIVE_SAMPLE_SIZE:g}", under=True),
        ),
        span=(0.0, 1.0),
        older=Series(("rollout_is_eff_sample_size",), "ratio clamped to [1/hi, hi]: not judged"),
    ),
    Panel(
        "veto",
        "Vetoed sequences and rejected tokens",
        "share",
        (
            Series(("rollout_is_veto_fraction",), "vetoed sequences"),
            Series(("rollout_is_masked_fraction", "rollout_rs_masked_fraction"), "tokens that a criterion rejects"),
        ),
        (Line(health.MAX_VETO_FRACTION, f"warning: veto above {health.MAX_VETO_FRACTION:g}"),),
        span=(0.0, 0.12),
    ),
    Panel(
        "kl",
        "KL(rollout ‖ train)",
        "nat a token",
        (Series(("kl",), "KL: mean of −log ratio"), Series(("k3_kl",), "k3: never negative")),
        (
            Line(0.0, ""),
            Line(health.MAX_KL, f"warning above {health.MAX_KL:g}"),
            Line(-health.MAX_KL, f"warning below −{health.MAX_KL:g}", under=True),
        ),
        floor=1e-5,
    ),
    Panel(
        "ppl_ratio",
        "Perplexity ratio, training / rollout",
        "ratio",
        (Series(("ppl_ratio",), "perplexity ratio"),),
        (Line(1.0, "ideal 1"),),
        floor=1e-3,
    ),
    Panel(
        "chi2",
        "χ² divergence",
        "second moment of the ratio − 1",
        (Series(("chi2_token",), "tokens"), Series(("chi2_seq",), "whole sequences")),
        (Line(health.MAX_CHI2, f"warning: tokens above {health.MAX_CHI2:g}"),),
        floor=1e-4,
    ),
)


_OF_SEQUENCES = {"rollout_is_weight_after_eff_sample_size": "rollout_is_weight_after_seq_eff_sample_size"}
"""What is judged where all tokens of a sequence have one weight."""


def write_panels(
    rows: Sequence[Mapping[str, float]], numbers: Sequence[float], folder: Path, *, by_token: bool = True
) -> list[Path]:
    """Write `six_panels.png` and one PNG for each panel that has something to show; returns their paths.

    rows: metrics of each step, with their prefix. numbers: the steps; of a step that is there twice the later counts.
    by_token: whether each token has a weight of its own.
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
    if not by_token:
        for name, other in _OF_SEQUENCES.items():
            values = np.array([last[step].get(PREFIX + other, np.nan) for step in steps])
            columns[name] = values if np.isfinite(values).any() else columns[name]
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
    lines = panel.lines
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
    if max(largest, -smallest) > 10.0:
        axis.set_yscale("symlog", linthresh=1.0)
    if panel.span is not None:
        smallest, largest = min(smallest, panel.span[0]), max(largest, panel.span[1])
    threshold_lines(axis, lines, smallest, largest)
    bottom, top = axis.get_ylim()
    missing = max(panel.floor - (top - bottom), 0.0)
    axis.set_ylim(bottom - 0.5 * missing, top + 0.5 * missing)
    if panel.span is not None:
        axis.set_ylim(smallest - 0.02 * (largest - smallest), largest + 0.02 * (largest - smallest))
    lost = int((~np.isfinite(np.stack([values for _, values in chosen]))).any(0).sum())
    if lost:
        axis.annotate(f"no finite value at {lost} of {len(steps)} steps", (0.0, 1.0), xycoords="axes fraction",
                      xytext=(2, -2), textcoords="offset points", va="top", fontsize=7.5, color="#333333")  # fmt: skip
    axis.set_ylabel(panel.label)
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
