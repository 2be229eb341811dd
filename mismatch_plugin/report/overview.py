"""The one picture to look at first: what was learned, setting by setting. It needs matplotlib."""

from __future__ import annotations

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mismatch_plugin.report.curves import Part
from mismatch_plugin.report.data import RunFolder
from mismatch_plugin.report.plots import STYLE, Picture, Plotter, legend, plain, png

WIDTH, HEIGHT = 3.1, 3.3


def overview(folder: RunFolder) -> Picture | None:
    """Exact match against steps, one axis a setting on one scale; None where nothing was recorded."""
    column = folder.source("exact")
    plotters = [Plotter(folder, setting) for setting in folder.settings]
    plotters = [plotter for plotter in plotters if plotter.has(column)]
    if not plotters:
        return None
    with rc_context(STYLE):
        figure = Figure(figsize=(max(1.6, len(plotters)) * WIDTH, HEIGHT), layout="constrained")
        drawn: dict[str, Line2D] = {}
        shared = figure.subplots(1, len(plotters), sharey=True, squeeze=False)[0]
        for plotter, axis in zip(plotters, shared, strict=True):
            drawn |= plotter.draw(axis, Part(column, "exact match", span=(0.0, 1.0)))
            axis.set_title(plain(plotter.setting))
            axis.set_xlabel("optimizer step")
            axis.label_outer()
        legend(figure, [drawn[v] for v in folder.variants if v in drawn], columns=4)
        where = "on held-out prompts" if column != "exact" else "of the training batches (nothing was held out)"
        caption = f"Exact match {where} in every setting: mean over seeds, band = ± one standard error."
        return Picture("overview.png", "Exact match in every setting", caption, png(figure))
