"""What README and docs/compare.md say of the comparison, from two files in examples/compare.

summary.json, collapse.png: of a run of `make compare` with its defaults; the picture's SHA-256 is in the file.
evidence.json: final values of the same variants on 24 seeds, and on six of them at other learning rates. Made once:

    python -m ci.compare 1=RUN,RUN 0.7=RUN 1.4=RUN
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mismatch_plugin.compare.report import cell, conclusion, final_table, listed
from mismatch_plugin.compare.statistics import LEVEL, Results, Variant, judged, read_folder, summarise
from mismatch_plugin.files import write_whole
from mismatch_plugin.report.table import Table, number, p_value, signed

FOLDER = Path(__file__).parents[1] / "examples" / "compare"
EVIDENCE = FOLDER / "evidence.json"


@dataclass(frozen=True)
class Sentences:
    """A generated list."""

    sentences: Sequence[str]

    def to_markdown(self) -> str:
        """One sentence an entry."""
        return "".join(f"- {sentence}\n" for sentence in self.sentences)


@cache
def summary() -> dict[str, Any]:
    """The run that is cited."""
    return json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))


@cache
def band() -> dict[str, Results]:
    """Factor of the learning rate (`1`, of all 24 seeds, is the first) → results."""
    found: dict[str, Results] = {}
    for rate, settings in json.loads(EVIDENCE.read_text(encoding="utf-8"))["rates"].items():
        for setting, kept in settings.items():
            variants = []
            for name, of in kept.items():
                finals = dict(zip(of["seeds"], of["finals"], strict=True))
                variants.append(Variant(name, finals, {seed: seed in of["collapsed"] for seed in finals}))
            found.setdefault(rate, {})[setting] = judged(variants)
    return found


def survivors(band: Mapping[str, Results]) -> list[str]:
    """What holds at every learning rate: differences that are significant at × 1, and the order of the means."""
    first, others, told = band["1"], {rate: of for rate, of in band.items() if rate != "1"}, list[str]()
    for verdict, what in (("better", "Gains"), ("worse", "Losses")):
        found: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
        for setting, name in [(s, name) for s in first for name, v in first[s].items() if v.verdict == verdict]:
            at = [d for of in others.values() if (d := of[setting][name].difference)]
            held = all(d.p < LEVEL and (d.mean > 0) == (verdict == "better") for d in at)
            found[held].setdefault(name, []).append(setting)
        rates = f"× {' and × '.join(sorted(others, key=float))} (same sign, p < {LEVEL} at each)"
        for held, how in ((True, f"hold at {rates}"), (False, "not at each of these")):
            if where := [f"{name} in {listed(settings)}" for name, settings in found[held].items()]:
                told.append(f"{what} that are significant at × 1 and {how}: {'; '.join(where)}.")
    most, groups, start = max(first, key=lambda s: len(first[s])), list[str](), 0
    orders = [sorted(first[most], key=lambda name: -of[most][name].mean) for of in band.values()]
    for end in range(1, len(orders[0]) + 1):
        if len({frozenset(order[:end]) for order in orders}) == 1:
            group, start = orders[0][start:end], end
            groups.append(group[0] if len(group) == 1 else f"({', '.join(group)})")
    inside = "; inside brackets it changes" if any("(" in group for group in groups) else ""
    return [*told, f"Order of the means in {most} at every rate: {' > '.join(groups)}{inside}."]


def write_evidence(runs: dict[str, list[Path]]) -> None:
    """Final values and collapsed seeds of finished run folders by factor of the learning rate. All must be complete."""
    rates: dict[str, dict[str, dict[str, Any]]] = {}
    for rate, folders in runs.items():
        settings = rates.setdefault(rate, {})
        for read in map(read_folder, folders):
            if read.missing:
                raise ValueError(f"a run at × {rate} is not complete: {read.missing[0]}")
            for setting, variants in summarise(read).items():
                for name, of in variants.items():
                    empty: dict[str, list[Any]] = {"seeds": [], "finals": [], "collapsed": []}
                    kept = settings.setdefault(setting, {}).setdefault(name, empty)
                    kept["seeds"] += of.finals
                    kept["finals"] += [float(f"{value:.6g}") for value in of.finals.values()]
                    kept["collapsed"] += [seed for seed, collapsed in of.collapsed.items() if collapsed]
    write_whole(EVIDENCE, json.dumps({"rates": rates}).replace("}, ", "},\n") + "\n")


def said_list() -> Sentences:
    """The conclusion that 24 seeds carry."""
    return Sentences(conclusion(band()["1"]))


def settings_table() -> Table:
    """What each setting is."""
    rows = [(f"`{setting}`: {entry['title']}", entry["what"]) for setting, entry in summary()["settings"].items()]
    return Table("Settings", ("setting", "what it is"), tuple(rows))


def collapse_table() -> Table:
    """The setting with all variants: difference, interval, p."""
    results = band()["1"]
    setting = max(results, key=lambda name: len(results[name]))
    rows = []
    for name, of in results[setting].items():
        if (d := of.difference) is not None:
            interval, fell = f"{signed(d.low, 2)} to {signed(d.high, 2)}", f"{of.fell}/{len(of.finals)}"
            rows.append((name, number(of.mean, 2), signed(d.mean, 2), interval, p_value(d.p_holm), fell))
    headers = ("algorithm", "final exact match", "minus PPO", "95 % interval", "p (Holm)", "collapsed")
    return Table(setting, headers, tuple(rows), frozenset({"algorithm"}))


def band_table() -> Table:
    """Every variant at every learning rate."""
    rates = sorted(band(), key=float)

    def shown(rate: str, setting: str, name: str) -> str:
        text = cell(band()[rate][setting].get(name))
        return text if rate == "1" else text.replace(" ▲", "").replace(" ▼", "")

    rows = [
        (setting, name, *(shown(rate, setting, name) for rate in rates))
        for setting, of in band()["1"].items()
        for name in of
    ]
    headers = ("setting", "algorithm", *(f"learning rate × {rate}" for rate in rates))
    return Table("Learning rates", headers, tuple(rows), frozenset({"setting", "algorithm"}))


TABLES: dict[str, Callable[[], Table | Sentences]] = {
    "compare-said": said_list,
    "compare-settings": settings_table,
    "compare-final": lambda: final_table(band()["1"]),
    "compare-collapse": collapse_table,
    "compare-band": band_table,
    "compare-survives": lambda: Sentences(survivors(band())),
}

if __name__ == "__main__":
    write_evidence(
        {rate: [*map(Path, folders.split(","))] for rate, _, folders in (a.partition("=") for a in sys.argv[1:])}
    )
