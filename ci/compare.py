"""The tables of a comparison that README and docs/compare.md cite, from examples/compare/summary.json.

That file is `RUN/summary.json` of a run of `make compare` with its defaults, and examples/compare/collapse.png is
`RUN/plots/collapse.png` of the same run: its SHA-256 is in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mismatch_plugin.report.data import short
from mismatch_plugin.report.overview import MARKS
from mismatch_plugin.report.statistics import number, p_value, signed
from mismatch_plugin.report.table import NOTHING, Table

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "compare"
_SHORT = ("0", "1", "2:token:truncate")


@cache
def summary() -> dict[str, Any]:
    """The run that is cited."""
    return json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))


def _cell(variants: dict[str, Any], label: str) -> str:
    """Final value, its mark, and how many runs collapsed."""
    found = variants.get(label)
    if found is None:
        return NOTHING
    mark = MARKS.get(found.get("verdict", ""), "")
    collapsed = f" ({found['collapsed']}/{found['runs']})" if found["collapsed"] else ""
    return f"{found['mean']:.2f}{mark}{collapsed}"


def _rows(labels: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    settings = summary()["settings"].values()
    return tuple((entry["title"], *(_cell(entry["variants"], label) for label in labels)) for entry in settings)


def short_table() -> Table:
    """Uncorrected PPO, bypass and token weights in every setting."""
    headers = ("rollout engine and trainer", "0 PPO", "1 bypass PPO", "2 token weights")
    return Table("Final exact match", headers, _rows(_SHORT))


def final_table() -> Table:
    """Every variant in every setting."""
    labels = tuple(dict.fromkeys(label for entry in summary()["settings"].values() for label in entry["variants"]))
    rows = zip(*_rows(labels), strict=True)
    titles, *columns = rows
    table = tuple((short(label), *cells) for label, cells in zip(labels, columns, strict=True))
    seeds = summary()["seeds"]
    notes = (
        f"Mean exact match at the end, seeds {seeds[0]} to {seeds[-1]}. ▲ higher, ▼ lower than algorithm 0 of the same "
        "column, significant after Holm's correction over the column; (c/n): c of n runs collapsed, to less than half "
        "of their own peak. –: not run.",
    )
    return Table("Final exact match", ("algorithm", *titles), table, notes=notes)


def said_table() -> Table:
    """What happened, one sentence a setting."""
    rows = [(entry["title"], entry["what"], entry["headline"]) for entry in summary()["settings"].values()]
    return Table("What happened", ("setting", "what it is", "what happened"), tuple(rows))


def collapse_table() -> Table:
    """The setting with all variants: difference, interval, p."""
    entry = max(summary()["settings"].values(), key=lambda entry: len(entry["variants"]))
    rows = []
    for label, found in entry["variants"].items():
        if "difference" in found:
            low, high = found["interval"]
            collapsed = f"{found['collapsed']}/{found['runs']}"
            interval = f"{signed(low, 2)} to {signed(high, 2)}"
            difference, p = signed(found["difference"], 2), p_value(found["p_holm"])
            rows.append((short(label), number(found["mean"], 2), difference, interval, p, collapsed))
    headers = ("algorithm", "final exact match", "minus algorithm 0", "95 % interval", "p (Holm)", "collapsed")
    return Table(entry["title"], headers, tuple(rows))


def cross_check_table() -> Table:
    """The collapse through real megatron-core, next to the same seeds of the batched trainer."""
    rows = []
    for name, entry in summary()["cross_check"].items():
        batched = summary()["settings"][name]["variants"]
        for label, found in entry["variants"].items():
            here, there = batched[label], f"{found['mean']:.2f}"
            rows.append(
                (
                    short(label),
                    f"{there} ({found['collapsed']}/{found['runs']})",
                    f"{here['mean']:.2f} ({here['collapsed']}/{here['runs']})",
                )
            )
    headers = ("algorithm", "megatron-core", "batched, all seeds")
    return Table("Cross-check", headers, tuple(rows))


TABLES: dict[str, Callable[[], Table]] = {
    "compare-short": short_table,
    "compare-final": final_table,
    "compare-said": said_table,
    "compare-collapse": collapse_table,
    "compare-cross-check": cross_check_table,
}
