"""The pictures of the report: one small panel each, readable on a phone 360 pixels wide, two in a row on paper.

Colours are from Okabe & Ito (2008), less its second blue: people with any colour vision can tell them apart. Line style
and marker differ, too, and names are at the ends of the lines, so that a grey print still reads. Import this module
only where a report is made: it needs matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.report.curves import Line, Panel, Part
from mismatch_plugin.report.data import BASELINE, Array, RunFolder, align, short
from mismatch_plugin.report.statistics import SettingSummary, mean_and_error

PALETTE = ("#000000", "#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#6B3A00", "#7F7F7F")
DASHES = ("solid", (0, (6, 1.5)), (0, (1.2, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1.2)), (0, (6, 1, 1, 1, 1, 1)),
          (0, (10, 3)))  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
WINDOWS = 40
"""A curve of more points is averaged in so many windows."""
SIZE = (4.3, 3.5)
DPI = 170
LABEL_SIZE, LABEL_WIDTH = 8.7, 19
"""Points, and characters of a line, of the names at the ends of lines."""
ZERO = 1e-6
"""A curve that stays within this of 0 is rounding of float32, and not drawn."""
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
        self.runs = {variant: folder.shown(setting, variant) for variant in folder.variants_of(setting)}

    def outcome(self, name: str, seeds_of: str | None = None) -> Picture | None:
        """Reward or exact match against steps, each variant's mean over seeds; None where nothing was recorded.

        seeds_of: a variant whose single seeds are drawn, thin, in place of the errors of all.
        """
        column = self.folder.source(name)
        if not self.has(column):
            return None
        title = "Exact match" if name == "exact" else "Reward"
        where = "on held-out prompts" if column != name else "of the training batches (nothing was held out)"
        caption = f"{title} {where} against optimizer steps, mean over seeds"
        part = Part(column, title.lower(), span=(0.0, 1.0) if name == "exact" else None)
        if seeds_of is None:
            caption += "; bands are ± one standard error."
        else:
            caption += f"; the thin lines are the single seeds of {short(seeds_of)}."
        return self.panel(Panel(name, title, caption, (part,)), seeds_of)

    def panel(self, panel: Panel, seeds_of: str | None = None, bands: bool = True) -> Picture | None:
        """A panel over the steps; None where nothing was recorded for any of its axes, or nothing but zeros."""
        axes_of = [part for part in self._recorded(panel) if not self._zero(part)]
        if not axes_of:
            return None
        with rc_context(STYLE):
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = np.atleast_1d(figure.subplots(len(axes_of), 1, sharex=True))
            drawn: dict[str, Line2D] = {}
            for part, axis in zip(axes_of, axes, strict=True):
                drawn |= self.draw(axis, part, seeds_of, bands)
            axes[0].set_title(panel.title)
            axes[-1].set_xlabel("optimizer step")
            if len(axes_of) == 1:
                label_ends(axes[0], drawn.values())
            else:
                legend(figure, [drawn[variant] for variant in self.runs if variant in drawn])
            return self._picture(figure, panel.name, panel.title, panel.caption)

    def all_zero(self, panel: Panel) -> bool:
        """Whether the panel was recorded, and holds zeros alone."""
        parts = self._recorded(panel)
        return bool(parts) and all(map(self._zero, parts))

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
                filled = colour if d.significant else "white"
                half = [[d.mean - d.low], [d.high - d.mean]]
                axis.errorbar(d.mean, y, xerr=half, color=colour, marker=marker, markerfacecolor=filled,
                              markersize=6.5, capsize=3.5, linewidth=1.6)  # fmt: skip
            names = [plain(fill(short(variant), LABEL_WIDTH)) for variant, _ in rows]
            axis.set_yticks(range(len(rows)), names, fontsize=LABEL_SIZE)
            axis.set_ylim(len(rows) - 0.5, -0.5)
            low, high = axis.get_xlim()
            reach = 0.05 - min(0.05, max(-low, high))  # what is tiny looks tiny
            axis.set_xlim(low - reach, high + reach)
            axis.xaxis.set_major_locator(MaxNLocator(5))
            axis.set_xlabel(f"final {name}, minus algorithm 0")
            figure.suptitle("Difference to algorithm 0", x=0.02, ha="left", fontsize=10.5, fontweight="bold")
            axis.grid(axis="y", visible=False)
            caption = (
                f"Paired by seed, final {name}: mean difference and 95 % interval. Filled: significant after Holm's "
                "correction. Open: not, or too few seeds."
            )
            return self._picture(figure, "difference", "Difference to algorithm 0", caption)

    def quantiles(self) -> Picture | None:
        """Quantiles of the token log-ratio over the steps, an axis a variant; None without `full` metrics, or all 0."""
        names = [f"{PREFIX}rollout_is_ratio_{q}" for q in ("p1", "p50", "p99", "p99_9")]
        tables = {v: [windows(*align(c)) for name in names if (c := self._curves(name)[v])] for v in self.runs}
        tables = {v: parts for v, parts in tables.items() if len(parts) == len(names)}
        if not tables or all((np.abs(values - 1.0) < ZERO).all() for parts in tables.values() for _, values in parts):
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

    def has(self, column: str) -> bool:
        """Whether any run recorded it."""
        return any(self._curves(column).values())

    def draw(self, axis: Axes, part: Part, seeds_of: str | None = None, bands: bool = True) -> dict[str, Line2D]:
        """Draw one axis: every variant over the steps. Returns the lines by variant."""
        drawn = {}
        largest, smallest = -math.inf, math.inf
        centre = np.median if part.largest else np.mean
        for variant, curves in self._curves(part.column).items():
            if not curves:
                continue
            steps, values = windows(*align(curves), "max" if part.largest else "mean")
            values = part.shown(values)
            if not len(steps):
                continue
            colour, dash, marker = self._style(variant)
            middle, spacing = centre(values, axis=0), max(1, len(steps) // 6)
            first = self.folder.variants.index(variant) % spacing
            bold = {"linewidth": 2.4, "zorder": 3} if variant == BASELINE else {}
            (drawn[variant],) = axis.plot(steps, middle, color=colour, linestyle=dash, marker=marker,
                                          markevery=(first, spacing), label=plain(short(variant)), **bold)  # fmt: skip
            if variant == seeds_of:
                axis.plot(steps, values.T, color=colour, linewidth=0.6, alpha=0.5, zorder=1.8)
            elif bands and len(values) > 1 and seeds_of is None and not part.largest:
                error = np.array([mean_and_error(column).error for column in values.T])
                axis.fill_between(steps, middle - error, middle + error, color=colour, alpha=0.13, linewidth=0)
            largest, smallest = max(largest, float(middle.max())), min(smallest, float(middle.min()))
        frame(axis, part, part.lines, smallest, largest)
        return drawn

    def _recorded(self, panel: Panel) -> list[Part]:
        parts = [replace(part, column=self.folder.recorded(part.column, part.older)) for part in panel.parts]
        return [part for part in parts if self.has(part.column)]

    def _zero(self, part: Part) -> bool:
        curves = [curve for many in self._curves(part.column).values() for curve in many]
        return all(bool((np.abs(part.shown(values)) < ZERO).all()) for _, values in curves)

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


def windows(steps: Array, values: Array, of: str = "mean") -> tuple[Array, Array]:
    """Means (or of="max") of neighbouring steps, at most WINDOWS of them: a step's noise does not hide the course."""
    if len(steps) <= WINDOWS:
        return steps, values
    pieces = np.array_split(np.arange(len(steps)), WINDOWS)
    reduce = np.max if of == "max" else np.mean
    return np.array([steps[p].mean() for p in pieces]), np.stack([reduce(values[:, p], 1) for p in pieces], axis=1)


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


def label_ends(axis: Axes, lines: Iterable[Line2D]) -> None:
    """Each line's name at its right end, on several lines where it is long, moved apart where they would overlap."""
    to_axes = axis.transData + axis.transAxes.inverted()
    ends: list[tuple[float, float, Line2D, str]] = []
    for line in lines:
        x, y = to_axes.transform((np.asarray(line.get_xdata())[-1], np.asarray(line.get_ydata())[-1]))
        ends.append((float(x), float(y), line, fill(str(line.get_label()), LABEL_WIDTH)))
    share = 1.25 / (72.0 * 0.78 * SIZE[1])  # of the axis, a point of a line of text
    heights = [(text.count("\n") + 1) * share * LABEL_SIZE for *_, text in ends]
    for (x, y, line, text), at in zip(ends, spread([y for _, y, *_ in ends], heights), strict=True):
        colour = line.get_color()
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0}
        axis.annotate(text, (x, y), (1.07, at), xycoords="axes fraction", textcoords="axes fraction", color=colour,
                      fontsize=LABEL_SIZE, va="center", linespacing=1.1, annotation_clip=False,
                      arrowprops=leader)  # fmt: skip


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Centres of labels of these heights, in the order wanted, none over another, each moved as little as need be."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    sizes = [heights[i] for i in order]
    offsets = [sum(sizes[:rank]) + 0.5 * sizes[rank] for rank in range(len(order))]
    groups: list[tuple[float, int]] = []  # mean of wanted − offset, and of how many labels: pooled while they fall
    for i, offset in zip(order, offsets, strict=True):
        groups.append((wanted[i] - offset, 1))
        while len(groups) > 1 and groups[-1][0] < groups[-2][0]:
            (second, m), (first, n) = groups.pop(), groups.pop()
            groups.append(((first * n + second * m) / (n + m), n + m))
    levels = [mean for mean, count in groups for _ in range(count)]
    placed = [0.0] * len(wanted)
    for i, offset, level in zip(order, offsets, levels, strict=True):
        placed[i] = level + offset
    return placed


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
