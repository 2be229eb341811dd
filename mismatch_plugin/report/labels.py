"""What a configuration does to the loss in a few words, as labels of pictures and tables have room for."""

from __future__ import annotations

import math
from functools import cache

from mismatch_plugin.config import Criterion, MismatchConfig
from mismatch_plugin.config.presets import preset_names
from mismatch_plugin.report.presets import quiet_preset

_AGGREGATES = {"token": "token", "sequence_sum": "sequence", "sequence_mean": "mean", "sequence_max": "largest"}


@cache
def preset_words(name: str) -> tuple[int, tuple[str, ...], tuple[str, ...]] | None:
    """(algorithm, its corrections in words, the same without bounds) of a preset; None for another name."""
    if name not in preset_names():
        return None
    config = quiet_preset(name)
    return config.algorithm, corrections(config), corrections(config, bounds=False)


def corrections(config: MismatchConfig, *, bounds: bool = True) -> tuple[str, ...]:
    """Weights, rejections, veto and dual clip, one entry each: ("IcePop 0.5 to 5",)."""
    tis, words = config.tis, list[tuple[str, str]]()
    if config.weighted:
        icepop = (tis.level, tis.mode) == ("token", "mask")
        within = f"at most {tis.upper:.4g}" if tis.mode == "truncate" else _range(tis.lower, tis.upper)
        words.append(("IcePop" if icepop else f"{tis.level} {tis.mode}", within))
    words += [_rejection(criterion) for criterion in config.criteria]
    if config.rs.veto_threshold is not None:
        words.append(("veto", f"below {config.rs.veto_threshold:g}"))
    if config.ppo.dual_clip is not None:
        words.append(("dual clip", f"at {config.ppo.dual_clip:g}"))
    return tuple(f"{name} {limits}" if bounds else name for name, limits in words)


def _rejection(criterion: Criterion) -> tuple[str, str]:
    lower, upper = criterion.lower_bound, criterion.upper_bound or 0.0
    kind = "ratio" if criterion.in_log_space else criterion.statistic.replace("_", " ")
    name = f"{_AGGREGATES.get(criterion.aggregate, criterion.aggregate.replace('_', ' '))} {kind}"
    name = "geometric" if name == "mean ratio" else name
    if upper == math.inf:
        return f"{name} rejection", f"below {lower:.4g}"
    return f"{name} rejection", f"outside {_range(lower, upper)}" if lower else f"above {upper:.4g}"


def _range(lower: float, upper: float) -> str:
    return f"{lower:.4g} to {upper:.4g}"
