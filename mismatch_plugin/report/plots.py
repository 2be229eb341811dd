"""How pictures look: lines and frames. Import this module only where one is made: it needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

Array = NDArray[np.float64]

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
class Line:
    """A horizontal line at a value that means something; its label is above it, or under it."""

    value: float
    label: str
    under: bool = False


@dataclass(frozen=True)
class Part:
    """One axis of a panel: its label, scale and lines.

    floor: the smallest range that the axis spans, so that rounding is not drawn as if it were a course.
    span: what the axis shows at least.
    """

    label: str
    scale: str = "linear"
    lines: tuple[Line, ...] = ()
    floor: float = 0.02
    span: tuple[float, float] | None = None


def windows(steps: Array, values: Array) -> tuple[Array, Array]:
    """Means of neighbouring steps, at most WINDOWS of them: a step's noise does not hide the course."""
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


def png(figure: Figure) -> bytes:
    """The figure as PNG with a palette: about a third of the size, for a page that carries all of them."""
    from PIL import Image

    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI)
    small = io.BytesIO()
    Image.open(raw).convert("RGB").quantize(colors=128).save(small, format="png", optimize=True)
    return small.getvalue()
