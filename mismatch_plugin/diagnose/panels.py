"""The six panels of the rollout-correction guide for one run: what `inspect` draws. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mismatch_plugin.core import health
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.diagnose.run_sources import ABS_GAP

NAME = "six_panels.png"
PANELS: tuple[tuple[str, tuple[str, ...], tuple[float, ...]], ...] = (
    (
        "Mean ratio and mean weight",
        ("rollout_is_ratio_mean", "rollout_is_ratio_unit_mean", "rollout_is_weight_after_mean", "rollout_is_mean"),
        (1.0, *health.MEAN_RANGE),
    ),
    (
        "Effective sample size",
        ("rollout_is_ratio_eff_sample_size", "rollout_is_weight_after_eff_sample_size", "rollout_is_eff_sample_size"),
        (health.MIN_EFFECTIVE_SAMPLE_SIZE,),
    ),
    (
        "Vetoed sequences, rejected tokens (shares)",
        ("rollout_is_veto_fraction", "rollout_is_masked_fraction"),
        (health.MAX_VETO_FRACTION,),
    ),
    ("KL(rollout ‖ train), nats per token", ("kl", "k3_kl", ABS_GAP), (-health.MAX_KL, 0.0, health.MAX_KL)),
    ("Perplexity ratio, training / rollout", ("ppl_ratio",), (1.0,)),
    ("χ² divergence", ("chi2_token", "chi2_seq"), (health.MAX_CHI2,)),
)
"""(title, metrics that are drawn where they were recorded, values that are ideal or that `check_health` warns from)."""


def write_panels(rows: Sequence[Mapping[str, float]], numbers: Sequence[float], folder: Path) -> Path:
    """Write `six_panels.png`; returns its path.

    rows: metrics of each step, with their prefix. numbers: the steps. Raises OSError where it cannot be written.
    """
    order = np.argsort(numbers, kind="stable")
    steps = np.array(numbers)[order]
    figure = Figure(figsize=(15, 8), layout="constrained")
    for axis, (title, names, marks) in zip(figure.subplots(2, 3).ravel(), PANELS, strict=True):
        axis.set(title=title, xlabel="optimizer step")
        for name in names:
            values = np.array([row.get(PREFIX + name, np.nan) for row in rows])[order]
            if (there := np.isfinite(values)).any():
                axis.plot(steps[there], values[there], label=name, marker="." if there.sum() <= 25 else None)
        if axis.lines:
            bottom, top = axis.get_ylim()
            room = 1.5 * (top - bottom)
            for mark in marks:
                if bottom - room <= mark <= top + room:  # one far outside would squeeze the curves flat
                    axis.axhline(mark, color="#555555", linestyle="--", linewidth=0.9)
            axis.legend(fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / NAME, dpi=110)
    return folder / NAME
