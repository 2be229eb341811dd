"""The numbers of a comparison in one JSON file, `RUN/summary.json`: what pages that cite it are made from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mismatch_plugin
from mismatch_plugin.files import write_whole
from mismatch_plugin.report.data import RunFolder, describe
from mismatch_plugin.report.findings import SettingSummary, VariantSummary
from mismatch_plugin.report.log import to_json
from mismatch_plugin.report.mechanism import figures
from mismatch_plugin.report.statistics import summarise

SUMMARY = "summary.json"


def write_summary(folder: RunFolder, summaries: Sequence[SettingSummary], picture: Path | None = None) -> Path:
    """Write it. picture: the page's first one, whose SHA-256 is kept, so that a copy can be told from another run's."""
    whole: dict[str, Any] = {
        "command": folder.command,
        "version": mismatch_plugin.__version__,
        "seeds": list(folder.seeds),
        "complete": folder.complete,
        "settings": {summary.setting: _setting(folder, summary) for summary in summaries},
    }
    if folder.diverged:
        whole["diverged"] = [[run.setting, run.variant, run.seed] for run in folder.diverged]
    if folder.cross_check is not None:
        whole["cross_check"] = {
            summary.setting: _setting(folder.cross_check, summary) for summary in summarise(folder.cross_check)
        }
    if picture is not None and picture.exists():
        whole["picture"] = hashlib.sha256(picture.read_bytes()).hexdigest()
    path = folder.root / SUMMARY
    write_whole(path, to_json(whole, indent=2) + "\n")
    return path


def _setting(folder: RunFolder, summary: SettingSummary) -> dict[str, Any]:
    about = folder.about(summary.setting)
    variants = {variant.variant: _variant(variant, summary.measure) for variant in summary.variants}
    for name, found in variants.items():
        found["mechanism"] = {of: _digits(value) for of, value in figures(folder, summary.setting, name).items()}
    return {
        "title": about.title,
        "what": about.what,
        "measure": summary.measure,
        "headline": summary.headline,
        "variants": variants,
    }


def _variant(of: VariantSummary, measure: str) -> dict[str, Any]:
    final = of.final[measure]
    found: dict[str, Any] = {
        "words": describe(of.variant),
        "seeds": final.n,
        "mean": _digits(final.mean),
        "error": _digits(final.error),
        "collapsed": of.collapsed_runs,
        "runs": len(of.collapsed),
        "area": _digits(of.area.mean),
    }
    if of.difference is not None and of.difference.n:
        d = of.difference
        found |= {
            "difference": _digits(d.mean),
            "interval": [_digits(d.low), _digits(d.high)],
            "p": _digits(d.p),
            "p_holm": _digits(d.p_holm),
            "effect_size": _digits(d.effect_size),
            "verdict": d.verdict,
        }
    return found


def _digits(value: float) -> float | None:
    """Six significant digits; None where there is none."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
