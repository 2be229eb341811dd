"""PNGs of a diagnosis: the distribution with the bounds, the breakdowns, the predictions. They need matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from mismatch_plugin.diagnose.drawing import UNIT_NAMES, advised, distribution, outside
from mismatch_plugin.diagnose.result import Diagnosis
from mismatch_plugin.diagnose.words import chosen_predictions
from mismatch_plugin.report.plots import DASHES, MARKERS, PALETTE, SIZE, STYLE, Picture, plain, png, save

_LEGEND = 68
"""Characters of a line of the legend."""


def pictures(diagnosis: Diagnosis) -> list[Picture]:
    """Those that the diagnosis has something for."""
    with rc_context(STYLE):
        drawn = [_distribution(diagnosis), _breakdown(diagnosis, "position"), _predictions(diagnosis)]
    return [picture for picture in drawn if picture is not None]


def write_pictures(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write them as files; returns their paths. Raises OSError where the folder cannot be written."""
    drawn = pictures(diagnosis)
    save(drawn, folder)
    return [folder / picture.name for picture in drawn]


def _distribution(diagnosis: Diagnosis) -> Picture | None:
    best = advised(diagnosis)
    bounds = () if best is None else (best.lower, best.upper)
    of = distribution(diagnosis, best.level if best else "token", bounds)
    if of is None:
        return None
    figure = Figure(figsize=(1.25 * SIZE[0], SIZE[1]), layout="constrained")
    axis = figure.subplots()
    axis.bar(of.edges[:-1], of.counts, np.diff(of.edges), align="edge", color=PALETTE[2])
    axis.set_yscale("log")
    axis.set_ylim(0.5, of.top)
    for name, bound in zip(("lower", "upper"), bounds, strict=False):
        if bound and of.edges[0] < (at := math.log(bound)) < of.edges[-1]:
            side = (of.edges[0], at) if name == "lower" else (at, of.edges[-1])
            axis.axvspan(*side, facecolor="white", alpha=0.65, hatch="///", edgecolor="#777777", linewidth=0)
            axis.axvline(at, color="black", linestyle=DASHES[1], label=f"{name} bound {bound:.6g}")
            axis.legend(loc="upper left")
    axis.set_xlim(of.edges[0], of.edges[-1])
    axis.set_xlabel("log(π_train/π_rollout), nat")
    counted = UNIT_NAMES.get(of.level, of.level)
    axis.set_ylabel(counted)
    axis.set_title("Log-ratio")
    caption = f"Log-ratios of {counted}, counts on a logarithmic scale"
    caption += f"; {outside(best)}, as recommended." if best else "."
    return Picture("distribution.png", "Log-ratio", caption, png(figure))


def _breakdown(diagnosis: Diagnosis, by: str) -> Picture | None:
    groups = () if diagnosis.size is None else diagnosis.size.breakdowns.get(by, ())
    if not groups:
        return None
    figure = Figure(figsize=(SIZE[0], 1.3 + 0.32 * len(groups)), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(groups)), [group.abs_mean for group in groups], color=PALETTE[2], height=0.65)
    axis.set_yticks(range(len(groups)), [plain(group.name) for group in groups])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("mean |Δ log p|, nat a token")
    axis.set_title(f"Mismatch by {plain(by)}")
    return Picture(f"by_{by}.png", f"Mismatch by {by}", f"Mean |Δ log p| of the tokens by {by}.", png(figure))


def _predictions(diagnosis: Diagnosis) -> Picture | None:
    """Kept against ESS; the chosen ones have a marker and a name each, the others are small open circles."""
    if not diagnosis.predictions:
        return None
    figure = Figure(figsize=(1.25 * SIZE[0], 1.15 * SIZE[1]), layout="constrained")
    axis = figure.subplots()
    chosen = chosen_predictions(diagnosis)
    others = [item for item in diagnosis.predictions if all(item is not named for _, named in chosen)]
    axis.plot([item.kept for item in others], [item.ess for item in others], "o", markerfacecolor="none",
              markeredgecolor="#555555", label="other settings", linestyle="none")  # fmt: skip
    for number, (mark, item) in enumerate(chosen):
        label = "\n".join(wrap(plain(item.setting) + (f" ({mark})" if mark else ""), _LEGEND))
        axis.plot([item.kept], [item.ess], MARKERS[number + 1], color=PALETTE[number % len(PALETTE)], label=label,
                  markersize=13 - 2 * number, markerfacecolor="none", markeredgewidth=1.6, linestyle="none",
                  zorder=3)  # fmt: skip
    axis.margins(0.08)
    axis.set_xlabel("share of tokens kept")
    axis.set_ylabel("effective sample size, share")
    axis.set_title("What each setting would do")
    figure.legend(loc="outside lower center", ncols=1)
    caption = "Share of tokens kept against effective sample size of the weights: the upper right corner loses nothing."
    return Picture("predictions.png", "What each setting would do", caption, png(figure))
