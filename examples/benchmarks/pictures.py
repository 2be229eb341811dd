"""The pictures of a benchmark, in the style of the other reports. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.benchmarks.results import Row, Section
from mismatch_plugin.report.plots import DASHES, MARKERS, PALETTE, SIZE, STYLE, Picture, legend, png

_OURS, _OTHERS = PALETTE[2], "#B0B0B0"


def pictures(section: Section) -> list[Picture]:
    """Those of one section; none where nothing was measured."""
    rows = section.measured()
    if not rows:
        return []
    if section.name == "log_probs":
        first = [row for row in rows if (row["tokens"], row["vocab"]) == (rows[0]["tokens"], rows[0]["vocab"])]
        with_entropy = [row for row in first if row["entropy"] and row["tp"] == 1]
        size = f"{rows[0]['tokens']} tokens, vocabulary {rows[0]['vocab']}, forward and backward, with entropy."
        return [
            _bars("log_probs_ms", "Log-probs: time", "milliseconds", with_entropy, "ms", size),
            _bars("log_probs_memory", "Log-probs: extra memory", "peak / gradient", with_entropy, "extra_peak", size),
        ]
    if section.name == "correction":
        setting, sequences = rows[0]["setting"], rows[0]["sequences"]
        first = [row for row in rows if (row["setting"], row["sequences"]) == (setting, sequences)]
        caption = f"{setting} with its metrics: {sequences} ragged sequences, {rows[0]['tokens']} tokens."
        return [_bars("correction_ms", "Correction: time", "milliseconds", first, "ms", caption)]
    if section.name == "linear":
        size = max(row["tokens"] for row in rows)
        last = [row for row in rows if row["tokens"] == size and row["entropy"]]
        caption = f"From hidden states of {size} tokens, forward and backward, with entropy."
        return [
            _bars("linear_memory", "Log-probs from hidden states: extra memory", "MiB", last, "extra_peak", caption)
        ]
    if section.name == "whole_step":
        thin = [row for row in rows if row["H"] == rows[0]["H"]]
        caption = "Peak memory of one step beyond weights and gradient buffers, by its tokens."
        return [_lines("whole_step", "A train step: peak memory", "MiB", thin, ("T", "peak_mib"), caption)]
    if section.name == "communication":
        caption = "Bytes that one rank sends in a ring, for a micro-batch (tp, cp) or a step (dp x cp)."
        return [_lines("sent", "Bytes sent", "bytes", section.rows, ("ranks", "sent"), caption)]
    if section.name == "hook_share":
        caption = "One step of the small model with each loss; the correction alone is a part of the hook."
        return [_bars("hook", "A train step", "milliseconds", rows, "ms", caption)]
    return [_scaling(rows)] if section.name == "scaling" else []


def _bars(name: str, title: str, label: str, rows: Sequence[Row], key: str, caption: str) -> Picture:
    with rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], 1.1 + 0.34 * len(rows)), layout="constrained")
        axis = figure.subplots()
        colours = [_OURS if row["name"].startswith("mismatch_plugin") else _OTHERS for row in rows]
        bars = axis.barh(range(len(rows)), [row[key] for row in rows], color=colours, height=0.65)
        axis.bar_label(bars, fmt=lambda v: f"{v:,.0f}" if v >= 100 else f"{v:.3g}", padding=3, fontsize=8)
        axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(label)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        return Picture(f"bench_{name}.png", title, caption, png(figure))


def _lines(name: str, title: str, label: str, rows: Sequence[Row], keys: tuple[str, str], caption: str) -> Picture:
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.subplots()
        names = list(dict.fromkeys(row["name"] for row in rows))
        handles = []
        for index, label_of in enumerate(names):
            mine = [row for row in rows if row["name"] == label_of]
            (line,) = axis.plot(
                [row[keys[0]] for row in mine],
                [row[keys[1]] for row in mine],
                color=PALETTE[index % len(PALETTE)],
                linestyle=DASHES[index % len(DASHES)],
                marker=MARKERS[index % len(MARKERS)],
                label=label_of,
            )
            handles.append(line)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        sizes = sorted({row[keys[0]] for row in rows})
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel(keys[0])
        axis.set_ylabel(label)
        axis.set_title(title)
        legend(figure, handles, columns=1)
        return Picture(f"bench_{name}.png", title, caption, png(figure))


def _scaling(rows: Sequence[Row]) -> Picture:
    series = [
        name for name in dict.fromkeys(row["name"] for row in rows) if any(r["fit"] for r in rows if r["name"] == name)
    ]
    with rc_context({**STYLE, "axes.titlesize": 8.5, "font.size": 8.5}):
        figure = Figure(figsize=(SIZE[0], 4.2), layout="constrained")
        axes = figure.subplots(2, 2, squeeze=False).ravel()
        for axis, name in zip(axes, series, strict=False):
            _fitted(axis, name, [row for row in rows if row["name"] == name])
        for axis in axes[len(series) :]:
            axis.set_visible(False)
        figure.supylabel("milliseconds", fontsize=8.5)
        caption = "Points: measured. Line: least squares of a + b x."
        return Picture("bench_scaling.png", "Scaling", caption, png(figure))


def _fitted(axis: Axes, name: str, rows: Sequence[Row]) -> None:
    sizes = [row["x"] for row in rows]
    axis.plot(sizes, [row["fit"] for row in rows], color="#444444", linewidth=1.0)
    axis.plot(sizes, [row["ms"] for row in rows], color=_OURS, marker="o", linestyle="none")
    axis.set_title(name)
    axis.set_ylim(0, 1.15 * max(row["ms"] for row in rows))
