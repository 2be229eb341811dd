"""The pictures of the report: one small panel each, so that a phone shows it whole and a printer six on a page.

Colours are those of Okabe & Ito (2008), which people with any colour vision can tell apart; line style and marker
differ too, so that a grey print still reads. Import this module only where a report is made: it needs matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.report.curves import Line, Panel, Part
from mismatch_plugin.report.data import Array, RunFolder, align, mean_seconds, short
from mismatch_plugin.report.statistics import SettingSummary, mean_and_error

PALETTE = ("#000000", "#D55E00", "#0072B2", "#56B4E9", "#CC79A7", "#009E73", "#E69F00", "#7F7F7F")
DASHES = ("solid", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (7, 2)), (0, (2, 1)), (0, (6, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
WINDOWS = 40
"""A curve of more points is averaged in so many windows."""
SIZE = (4.3, 3.5)
DPI = 170
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "figure.facecolor": "white",
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 5),
}


@dataclass(frozen=True)
class Picture:
    """A PNG with its file name, its title, and what it shows in words (also its alternative text)."""

    name: str
    title: str
    caption: str
    png: bytes


class Plotter:
    """Draws one setting's pictures. Every variant keeps its colour, line style and marker in all of them."""

    def __init__(self, folder: RunFolder, setting: str) -> None:
        self.folder, self.setting = folder, setting
        self.runs = {variant: folder.shown(setting, variant) for variant in folder.variants}

    def outcome(self, name: str, title: str) -> Picture | None:
        """Reward or exact match against steps, mean and standard error over seeds."""
        column = self.folder.source(name)
        where = "on held-out prompts" if column != name else "of the training batches (nothing was held out)"
        caption = f"{title} {where}: mean over seeds, band = ± one standard error."
        return self.panel(Panel(name, title, caption, (Part(column, title.lower()),)))

    def panel(self, panel: Panel) -> Picture | None:
        """A panel over the steps; None where nothing was recorded for any of its axes."""
        parts = [replace(part, column=self.folder.recorded(part.column, part.older)) for part in panel.parts]
        axes_of = [part for part in parts if self.has(part.column)]
        if not axes_of:
            return None
        with rc_context(STYLE):
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = np.atleast_1d(figure.subplots(len(axes_of), 1, sharex=True))
            drawn: dict[str, Line2D] = {}
            for part, axis in zip(axes_of, axes, strict=True):
                drawn |= self.draw(axis, part)
            axes[0].set_title(panel.title)
            axes[-1].set_xlabel("optimizer step")
            legend(figure, [drawn[v] for v in self.folder.variants if v in drawn])
            return self._picture(figure, panel.name, panel.title, panel.caption)

    def differences(self, summary: SettingSummary) -> Picture | None:
        """Paired difference to algorithm 0 with its interval, one row a variant; None where nothing is compared."""
        rows = [(s.variant, s.difference) for s in summary.variants if s.difference is not None and s.difference.n > 1]
        if not rows:
            return None
        name = "exact match" if summary.measure == "exact" else "reward"
        with rc_context(STYLE):
            figure = Figure(figsize=(SIZE[0], 1.3 + 0.32 * len(rows)), layout="constrained")
            axis = figure.subplots()
            axis.axvline(0.0, color="#444444", linewidth=1.0)
            for y, (variant, d) in enumerate(rows):
                colour, _, marker = self._style(variant)
                filled = colour if d.verdict == "significant" else "white"
                half = [[d.mean - d.low], [d.high - d.mean]]
                axis.errorbar(d.mean, y, xerr=half, color=colour, marker=marker, markerfacecolor=filled,
                              markersize=6.5, capsize=3.5, linewidth=1.6)  # fmt: skip
            axis.set_yticks(range(len(rows)), [plain(short(variant)) for variant, _ in rows])
            axis.set_ylim(len(rows) - 0.5, -0.5)
            axis.set_xlabel(f"{name} at the end, minus algorithm 0")
            axis.set_title("Difference to algorithm 0")
            axis.grid(axis="y", visible=False)
            caption = (
                f"Paired on the same seeds, {name} at the end: mean difference and 95 % interval. Filled: significant "
                "after Holm's correction. Open: not, or too few seeds."
            )
            return self._picture(figure, "difference", "Difference to algorithm 0", caption)

    def quantiles(self) -> Picture | None:
        """Quantiles of the token log-ratio over the steps, one small axis a variant; None without `full` metrics."""
        names = [f"{PREFIX}rollout_is_ratio_{q}" for q in ("p1", "p50", "p99", "p99_9")]
        tables = {v: [windows(*align(c)) for name in names if (c := self._curves(name)[v])] for v in self.runs}
        tables = {v: parts for v, parts in tables.items() if len(parts) == len(names)}
        if not tables:
            return None
        with rc_context({**STYLE, "axes.titlesize": 8.5, "font.size": 8.5}):
            high = math.ceil(len(tables) / 2)
            figure = Figure(figsize=(SIZE[0], 0.7 + 1.35 * high), layout="constrained")
            grid = figure.subplots(high, 2, sharex=True, sharey=True, squeeze=False).ravel()
            for axis, (variant, parts) in zip(grid, tables.items(), strict=False):
                colour, _, _ = self._style(variant)
                low, middle, top, far = (np.log(np.clip(values.mean(0), 1e-9, None)) for _, values in parts)
                steps = parts[0][0]
                axis.axhline(0.0, color="#444444", linewidth=0.8)
                axis.fill_between(steps, low, top, color=colour, alpha=0.25, linewidth=0)
                axis.plot(steps, middle, color=colour)
                axis.plot(steps, far, color=colour, linestyle=(0, (1, 1)), linewidth=1.2)
                axis.set_title(plain(short(variant)))
            for axis in grid[len(tables) :]:
                axis.set_visible(False)
            grid[len(tables) - (1 if len(tables) % 2 == 0 or len(tables) == 1 else 2)].tick_params(labelbottom=True)
            bottom, top = grid[0].get_ylim()
            grid[0].set_ylim(min(bottom, -0.01), max(top, 0.01))
            figure.supylabel("log(π_train/π_rollout), nat", fontsize=8.5)
            figure.supxlabel("optimizer step", fontsize=8.5)
            caption = (
                "Log-ratio of tokens: line = median, band = 1 % to 99 %, dotted = 99.9 %. Mean over seeds. At 0 the "
                "two engines agree."
            )
            return self._picture(figure, "quantiles", "Log-ratio quantiles", caption)

    def seconds(self) -> Picture | None:
        """Mean wall time of a step by part, one bar a variant; None where no time was recorded."""
        rows = {variant: mean_seconds(runs) for variant, runs in self.runs.items() if runs}
        rows = {variant: parts for variant, parts in rows.items() if sum(parts.values()) > 0}
        if not rows:
            return None
        fills = {"rollout": ("#56B4E9", "", "rollout"), "old_log_probs": ("#E69F00", "////", "old log-probs"),
                 "train": ("#4D4D4D", "", "train")}  # fmt: skip
        with rc_context(STYLE):
            figure = Figure(figsize=(SIZE[0], 1.5 + 0.3 * len(rows)), layout="constrained")
            axis = figure.subplots()
            left = np.zeros(len(rows))
            bars = []
            for part, (colour, hatch, label) in fills.items():
                width = np.array([parts[part] for parts in rows.values()])
                bars.append(axis.barh(range(len(rows)), width, left=left, color=colour, hatch=hatch, label=label,
                                      edgecolor="white", height=0.65))  # fmt: skip
                left += width
            axis.set_yticks(range(len(rows)), [plain(short(variant)) for variant in rows])
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
            axis.set_xlabel("seconds a step")
            axis.set_title("Wall time a step")
            figure.legend(handles=bars, loc="outside lower center", ncols=3)
            caption = (
                "Mean wall time of an optimizer step. A variant without an orange part skips the old-log-prob pass."
            )
            return self._picture(figure, "seconds", "Wall time a step", caption)

    def has(self, column: str) -> bool:
        """Whether any run recorded it."""
        return any(self._curves(column).values())

    def draw(self, axis: Axes, part: Part) -> dict[str, Line2D]:
        """Draw one axis: mean and standard error of every variant. Returns the lines by variant."""
        drawn = {}
        largest, smallest = -math.inf, math.inf
        for variant, curves in self._curves(part.column).items():
            if not curves:
                continue
            steps, values = windows(*align(curves))
            values = part.shown(values)
            if not len(steps):
                continue
            colour, dash, marker = self._style(variant)
            mean, spacing = values.mean(0), max(1, len(steps) // 6)
            first = self.folder.variants.index(variant) % spacing
            (drawn[variant],) = axis.plot(steps, mean, color=colour, linestyle=dash, marker=marker,
                                          markevery=(first, spacing), label=plain(short(variant)))  # fmt: skip
            if len(values) > 1:
                error = np.array([mean_and_error(column).error for column in values.T])
                axis.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
            largest, smallest = max(largest, float(mean.max())), min(smallest, float(mean.min()))
        frame(axis, part, part.lines, smallest, largest)
        return drawn

    def _curves(self, column: str) -> dict[str, list[tuple[Array, Array]]]:
        curves = {variant: [run.curve(column) for run in runs] for variant, runs in self.runs.items()}
        return {variant: [curve for curve in many if curve[0].size] for variant, many in curves.items()}

    def _style(self, variant: str) -> tuple[str, object, str]:
        i = self.folder.variants.index(variant)
        return PALETTE[i % len(PALETTE)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]

    def _picture(self, figure: Figure, name: str, title: str, caption: str) -> Picture:
        return Picture(f"{self.setting}_{name}.png", title, caption, png(figure))


def save(pictures: Iterable[Picture], folder: Path) -> None:
    """Write every picture as a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / picture.name).write_bytes(picture.png)


def windows(steps: Array, values: Array) -> tuple[Array, Array]:
    """Means of neighbouring steps, at most WINDOWS of them, so that a step's noise does not hide the course."""
    if len(steps) <= WINDOWS:
        return steps, values
    pieces = np.array_split(np.arange(len(steps)), WINDOWS)
    return np.array([steps[p].mean() for p in pieces]), np.stack([values[:, p].mean(1) for p in pieces], axis=1)


def frame(axis: Axes, part: Part, lines: Sequence[Line], smallest: float, largest: float) -> None:
    """Scale, range, lines of meaning and label of an axis on which values from smallest to largest are drawn."""
    if part.scale == "symlog" and max(largest, -smallest) > 10.0:
        axis.set_yscale("symlog", linthresh=1.0)
    elif part.scale == "log" and smallest > 0 and largest > 20 * smallest:
        axis.set_yscale("log")
    if part.span is not None:
        smallest, largest = min(smallest, part.span[0]), max(largest, part.span[1])
        axis.set_ylim(smallest - 0.02 * (largest - smallest), largest + 0.02 * (largest - smallest))
    _threshold_lines(axis, lines, smallest, largest)
    bottom, top = axis.get_ylim()
    missing = max(part.floor - (top - bottom), 0.0)
    axis.set_ylim(bottom - 0.5 * missing, top + 0.5 * missing)
    if "share" in part.label:  # a share's axis ends a little outside what a share can be
        axis.set_ylim(max(axis.get_ylim()[0], -0.01), min(axis.get_ylim()[1], 1.01))
    axis.set_ylabel(part.label)


def _threshold_lines(axis: Axes, lines: Sequence[Line], smallest: float, largest: float) -> None:
    """Lines of meaning that lie near the data; one far outside would squeeze the curves flat."""
    room = max(largest - smallest, 0.25 * max(abs(largest), abs(smallest)), 0.02)
    for line in lines:
        if smallest - 1.5 * room <= line.value <= largest + 1.5 * room:
            axis.axhline(line.value, color="#444444", linewidth=0.9, linestyle=(0, (3, 3)), zorder=1.5)
            label = axis.annotate(
                line.label,
                (1.0, line.value),
                xycoords=("axes fraction", "data"),
                xytext=(0, -2.5 if line.under else 2.5),
                ha="right",
                va="top" if line.under else "bottom",
                textcoords="offset points",
                fontsize=7.5,
                color="#333333",
                zorder=5,
            )
            label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # readable across a curve


def legend(figure: Figure, handles: Sequence[Line2D], columns: int = 2) -> None:
    """Below the figure."""
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)) or 1,
                  handlelength=3.2, columnspacing=1.2, labelspacing=0.3)  # fmt: skip


def plain(name: str) -> str:
    """A name as matplotlib shows it letter by letter: between two dollar signs it would read mathematics."""
    return name.replace("$", r"\$")


def png(figure: Figure) -> bytes:
    """The figure as PNG with a palette: about a third of the size, for a page that carries all of them."""
    from PIL import Image

    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI)
    small = io.BytesIO()
    Image.open(raw).convert("RGB").quantize(colors=128).save(small, format="png", optimize=True)
    return small.getvalue()
