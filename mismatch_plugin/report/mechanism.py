"""What goes with the collapse: gradient norm, KL and impossible tokens of the setting where algorithm 0 collapses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.report.curves import GRADIENT, IMPOSSIBLE, Panel, Part
from mismatch_plugin.report.data import BASELINE, Array, Run, RunFolder, short
from mismatch_plugin.report.plots import Picture, Plotter
from mismatch_plugin.report.statistics import final_value, number
from mismatch_plugin.report.table import figure

KL = f"{PREFIX}kl"


class Shown(NamedTuple):
    """A picture and the sentence of what it shows, with its numbers."""

    picture: Picture
    sentence: str


class _View(NamedTuple):
    panel: Panel
    of_run: Callable[[Array], float]
    over_seeds: Callable[[list[float]], float]
    what: str
    words: Callable[[float], str]


def _percent(share: float) -> str:
    return f"{number(100 * share, 1)} %"


_VIEWS = (
    _View(
        Panel("mechanism_grad_norm", "Largest gradient norm", "Before clipping, the largest of neighbouring steps; "
              "median over seeds. What is below 0.01 is drawn there.", (GRADIENT,)),
        lambda values: float(values.max()), lambda runs: float(np.median(runs)),
        "Largest gradient norm of a run, median over seeds", lambda value: figure(value, 2),
    ),
    _View(
        Panel("mechanism_kl", "KL a token", "Mean of log π_rollout − log π_train over sampled tokens and seeds.",
              (Part(KL, "nat a token", floor=0.01),)),
        final_value, lambda runs: float(np.mean(runs)), "KL a token at the end, nat", lambda value: number(value, 2),
    ),
    _View(
        Panel("mechanism_impossible", "All but impossible tokens", "Share of sampled tokens to which the trainer gives "
              "a probability below 1e-4, mean over seeds.", (IMPOSSIBLE,)),
        final_value, lambda runs: float(np.mean(runs)),
        "Sampled tokens that the trainer gives less than 1e-4, at the end", _percent,
    ),
)  # fmt: skip


def mechanism(folder: RunFolder, setting: str) -> list[Shown]:
    """The pictures for which something was recorded, each with every variant's number, from the largest down."""
    plotter = Plotter(folder, setting)
    shown = []
    for view in _VIEWS:
        picture = plotter.panel(view.panel, bands=False)
        if picture is None:
            continue
        found: dict[str, float] = {}
        for variant, runs in plotter.runs.items():
            if values := _values(runs, view):
                found[variant] = view.over_seeds(values)
        shown.append(Shown(picture, _sentence(view, found)))
    return shown


def figures(folder: RunFolder, setting: str, variant: str) -> dict[str, float]:
    """The numbers of one variant, `grad_norm`, `kl` and `impossible`, as far as they were recorded."""
    runs = folder.finished(setting, variant)
    names = [view.panel.name.removeprefix("mechanism_") for view in _VIEWS]
    found = {name: (view, _values(runs, view)) for name, view in zip(names, _VIEWS, strict=True)}
    return {name: view.over_seeds(values) for name, (view, values) in found.items() if values}


def _values(runs: list[Run], view: _View) -> list[float]:
    curves = [run.curve(view.panel.parts[0].column)[1] for run in runs]
    return [view.of_run(values) for values in curves if len(values)]


def _sentence(view: _View, found: dict[str, float]) -> str:
    others = sorted((v for v in found if v != BASELINE), key=lambda v: -found[v])
    parts = [f"{view.what}."]
    if BASELINE in found:
        below = sum(found[v] < found[BASELINE] for v in others)
        rank = {len(others): ", the highest", 0: ", the lowest"}.get(below, f", above {below} of {len(others)} others")
        parts.append(f"Algorithm 0: {view.words(found[BASELINE])}{rank if others else ''}.")
    if others:
        parts.append(f"{', '.join(f'{short(variant)}: {view.words(found[variant])}' for variant in others)}.")
    return " ".join(parts)
