"""A diagnosis on one screen of a terminal: verdict, cause, size, what to set, and what that would do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_plugin.inspect.result import Diagnosis
from mismatch_plugin.inspect.words import (
    chosen_predictions,
    count,
    gate_words,
    headline,
    host_names,
    is_it_normal,
    published,
    size_rows,
)
from mismatch_plugin.report.table import NOTHING, compact

if TYPE_CHECKING:
    from rich.console import Console

SMALLEST, LARGEST = 24, 35
"""Lines of a terminal that are used: one is left for the prompt."""
STYLES = {"fault": "bold red", "large": "bold yellow", "normal": "bold green", "undecided": "bold cyan"}
_ASCII = {"–": "-", "—": "-", "−": "-", "…": "...", "≤": "<=", "≥": ">=", "‖": "||", "±": "+-", "·": "*", "²": "^2",
          "Δ": "d", "π": "pi", "ρ": "rho", "χ": "chi", "θ": "theta", "Σ": "sum", "→": "->", "’": "'", "“": '"',
          "”": '"'}  # fmt: skip


@dataclass
class _Line:
    """rank: where the screen is too low, the largest goes first; 0 stays. whole: never cut or broken, since it is
    copied; the terminal may wrap it."""

    text: str = ""
    rank: int = 0
    style: str = ""
    whole: bool = False


@dataclass
class _Screen:
    width: int
    most: int
    unicode: bool
    lines: list[_Line] = field(default_factory=list)

    @property
    def cut(self) -> str:
        """Where something was cut off."""
        return "…" if self.unicode else "..."

    def say(self, text: str, rank: int = 0, most: int = 3, style: str = "", indent: str = "") -> None:
        """Words, on at most so many lines; what is cut ends in an ellipsis."""
        wrapped = textwrap.wrap(
            _printable(" ".join(text.split()), self.unicode), self.width, initial_indent=indent,
            subsequent_indent=2 * indent, max_lines=min(most, self.most), placeholder=" " + self.cut,
            break_on_hyphens=False,
        )  # fmt: skip
        self.lines += [_Line(line, rank, style) for line in wrapped]

    def table(self, rows: Iterable[tuple[str, ...]], rank: int, marks: tuple[str, ...] = ()) -> None:
        """Columns; all but the first to the right, and as much of the first as there is room for."""
        cells = [tuple(_printable(cell, self.unicode) for cell in row) for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        widths[0] = min(widths[0], self.width - sum(widths[1:]) - 2 * len(widths))
        for number, row in enumerate(cells):
            rest = "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            style = "bold" if not number or (marks and marks[number - 1] == ">") else ""
            first = self.shortened(row[0], widths[0])
            self.lines.append(_Line(f"  {first:<{widths[0]}}{rest}".rstrip(), rank + (number > 3), style))

    def shortened(self, text: str, width: int) -> str:
        """As much of it as there is room for, and then an ellipsis."""
        return text if len(text) <= width else text[: width - len(self.cut)] + self.cut

    def fitted(self, height: int) -> list[_Line]:
        """At most so many lines: those of the highest rank go, from the end."""
        lines = list(self.lines)
        while len(lines) > height and (worst := max(line.rank for line in lines)) > 0:
            del lines[max(place for place, line in enumerate(lines) if line.rank == worst)]
        return lines


def show(diagnosis: Diagnosis, console: Console, *, host: str = "slime", report: Path | None = None) -> None:
    """Print the summary: at most as high as the terminal (24 to 35 lines), and no wider, but for what is copied.

    host: whose flags are shown. report: where the page is. Raises ValueError where the recommendation has no flags for
    the host.
    """
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    unicode = console.encoding.lower().replace("-", "").startswith("utf")
    height = min(max(console.height, SMALLEST), LARGEST) - 1
    for line in _lines(diagnosis, _Screen(console.width, 9, unicode), height, host, report):
        text = _printable(line.text, unicode)
        if not line.whole and cell_len(text) > console.width:  # some letters are two wide
            text = set_cell_size(text, console.width - 3) + "..."
        console.print(Text(text, style=line.style), soft_wrap=True)


def _lines(diagnosis: Diagnosis, empty: _Screen, height: int, host: str, report: Path | None) -> list[_Line]:
    """What fits: where it does not otherwise, sentences are cut to two lines, or to one."""
    screen = empty
    for most in (9, 2, 1):
        screen = replace(empty, most=most, lines=[])
        _verdict(screen, diagnosis)
        _cause(screen, diagnosis)
        _size(screen, diagnosis)
        _advice(screen, diagnosis, host)
        _predictions(screen, diagnosis)
        if report is not None:
            screen.lines.append(_Line(f"Report: {report}", whole=True))
        if sum(line.rank <= 1 for line in screen.lines) <= height:
            break
    return screen.fitted(height)


def _printable(text: str, unicode: bool) -> str:
    """Without control characters: a sample's id could hold a terminal's commands."""
    if not unicode:
        text = "".join(_ASCII.get(c, c) for c in text).encode("ascii", "replace").decode()
    return "".join(c if c.isprintable() else "?" for c in text)


def _verdict(screen: _Screen, diagnosis: Diagnosis) -> None:
    verdict, sentence = headline(diagnosis)
    screen.say(f"{verdict.upper()}: {sentence}", style=STYLES[diagnosis.verdict], most=2)
    screen.say(is_it_normal(diagnosis))
    if (gate := diagnosis.gate) is not None:
        said, figures = gate_words(gate)
        screen.say(f"Gate {said.upper()}: {figures}.", most=1)
    counted = f"{count(diagnosis.samples)} samples, {count(diagnosis.tokens)} tokens"
    screen.say(f"Of {diagnosis.source} ({diagnosis.format}): {counted}.", rank=6, most=1)


def _cause(screen: _Screen, diagnosis: Diagnosis) -> None:
    first, *others = diagnosis.findings or (None,)
    if first is not None:
        screen.lines.append(_Line(rank=9))
        screen.say(f"Cause: {first.kind} ({first.confidence}). {first.evidence}", style="bold")
        if first.first is not None:
            screen.say(f"first: {first.first}", indent="  ", most=2)
        screen.say(f"fix: {first.fix}", indent="  ", most=4)
    for item in others:
        screen.say(f"also {item.kind} ({item.confidence}): {item.evidence}", rank=3, most=1)
    for reason in diagnosis.undecided:
        screen.say(f"not decided: {reason}", rank=0 if diagnosis.verdict == "undecided" else 5, most=2)


def _size(screen: _Screen, diagnosis: Diagnosis) -> None:
    rows = size_rows(diagnosis)
    if not rows:
        return
    screen.lines.append(_Line(rank=9))
    known = published(diagnosis)
    room = max(12, screen.width - 42)
    ranges = [screen.shortened(known.get(title, ""), room) for title, *_ in rows]
    table = [(title, f"{value} {unit}".strip(), text) for (title, value, unit), text in zip(rows, ranges, strict=True)]
    screen.table([("size", "measured", "published" if known else ""), *table], rank=2)


def _advice(screen: _Screen, diagnosis: Diagnosis, host: str) -> None:
    advice = diagnosis.recommendation
    screen.lines.append(_Line(rank=9))
    if advice is None:
        without = {
            "fault": "No setting is recommended: fix the fault first, then inspect again.",
            "undecided": "No setting is recommended on so few tokens: inspect a larger dump.",
        }
        screen.say(without.get(diagnosis.verdict, "No setting is recommended."), style="bold")
        return
    names = host_names(advice.flags)
    if host not in names:
        raise ValueError(f"there are no flags for host {host!r}: choose {', '.join(names)}.")
    screen.say(f"Recommended: {advice.setting}. {advice.reasons[0] if advice.reasons else ''}", style="bold")
    others = ", ".join(name for name in names if name != host)
    screen.say(f"{names[host]} (--host {others} for the others):", most=2)
    screen.lines += [_Line(line, whole=True, style="cyan") for line in advice.flags[host].splitlines()]
    for watched in advice.watch[:1]:
        screen.say(f"Watch in the first ten steps: {watched}.", rank=4, most=1)


def _predictions(screen: _Screen, diagnosis: Diagnosis) -> None:
    chosen = chosen_predictions(diagnosis)
    if not chosen:
        return
    screen.lines.append(_Line(rank=9))
    marks = tuple(">" if "recommended" in mark else "*" if mark else " " for mark, _ in chosen)
    header = ("> recommended  * yours", "kept %", "ESS %", "mean w", "variance", "bias", "2nd pass")
    rows = [
        (
            f"{sign} {item.setting.replace('algorithm ', 'alg ')}",
            _percent(item.kept),
            _percent(item.ess),
            *(compact(float(f"{value:.3g}")) for value in (item.mean_weight, item.variance, item.bias)),
            "yes" if item.second_pass else NOTHING,
        )
        for sign, (_, item) in zip(marks, chosen, strict=True)
    ]
    screen.table([header, *rows], rank=1, marks=marks)


def _percent(value: float) -> str:
    """One digit after the point, and 100 only where nothing is missing."""
    text = f"{100 * value:.1f}"
    return text if text not in ("100.0", "0.0") or value in (0.0, 1.0) else ">99.9" if value > 0.5 else "<0.1"
