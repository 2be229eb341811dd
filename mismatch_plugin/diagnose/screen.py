"""A diagnosis on one screen of a terminal: verdict, cause, size, what to set, and what that would do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_plugin.diagnose.result import Diagnosis
from mismatch_plugin.diagnose.words import (
    chosen_predictions,
    count,
    gate_words,
    headline,
    host_names,
    is_it_normal,
    label,
    plain,
    published,
    size_rows,
    times,
    undecided,
    without_advice,
)
from mismatch_plugin.report.table import NOTHING, figure, printable, shows_unicode

if TYPE_CHECKING:
    from rich.console import Console

SMALLEST, LARGEST = 24, 35
"""Lines of a terminal that are used: one is left for the prompt."""
_TO = "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}"
"""Keeps two bounds on one line."""
STYLES = {"fault": "bold red", "large": "bold yellow", "normal": "bold green", "undecided": "bold cyan"}


@dataclass
class _Line:
    """rank: where the screen is too low, the largest goes first, with its whole block; 0 stays. whole: never broken,
    since it is copied; the terminal may wrap it."""

    text: str = ""
    rank: int = 0
    style: str = ""
    whole: bool = False
    block: int = 0


@dataclass
class _Screen:
    """height: None where no terminal shows it: nothing is cut or left out then."""

    width: int
    height: int | None
    unicode: bool
    lines: list[_Line] = field(default_factory=list)

    @property
    def cut(self) -> str:
        """Where something was cut off."""
        return "…" if self.unicode else "..."

    def add(self, lines: Iterable[str], rank: int = 0, style: str = "", whole: bool = False) -> None:
        """Lines that stay or go together."""
        block = len(self.lines)
        self.lines += [_Line(line, rank, style, whole, block) for line in lines]

    def say(self, text: str, rank: int = 0, most: int | None = None, style: str = "", indent: str = "") -> None:
        """Words. most: lines of a terminal that they may take; what is cut ends in an ellipsis."""
        self.add(self.wrapped(" ".join(text.split()), self.width, indent, 2 * indent, most), rank, style)

    def wrapped(self, text: str, width: int, first: str = "", rest: str = "", most: int | None = None) -> list[str]:
        """Lines of at most this width; at most so many on a terminal."""
        return textwrap.wrap(
            printable(text, self.unicode), width, initial_indent=first, subsequent_indent=rest,
            max_lines=None if self.height is None else most, placeholder=" " + self.cut, break_on_hyphens=False,
        )  # fmt: skip

    def table(
        self, headers: Sequence[tuple[str, ...]], rows: Sequence[tuple[str, ...]], ranks: Sequence[int],
        marks: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Columns; all but the first to the right, and the first wrapped into what room there is. headers: lines, which
        stay as long as the first row does."""
        cells = [tuple(printable(cell, self.unicode) for cell in row) for row in (*headers, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        if self.height is not None:
            widths[0] = max(12, min(widths[0], self.width - sum(widths[1:]) - 2 * len(widths)))
        block = len(self.lines)
        for number, row in enumerate(cells, -len(headers)):
            rest = "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            first, *more = textwrap.wrap(
                row[0].replace(" to ", _TO), widths[0], subsequent_indent="    ", break_on_hyphens=False
            ) or [""]
            style = "bold" if number < 0 or (marks and marks[number] == ">") else ""
            block = len(self.lines) if number > 0 else block
            for line in (f"  {first:<{widths[0]}}{rest}", *(f"  {line}" for line in more)):
                line = line.replace(_TO, " to ").rstrip()
                self.lines.append(_Line(line, ranks[max(number, 0)], style, block=block))

    def shortened(self, text: str, width: int) -> str:
        """As much of it as there is room for, and then an ellipsis."""
        whole = len(text) <= width or self.height is None
        return text if whole else text[: width - len(self.cut)] + self.cut

    def fitted(self) -> list[_Line]:
        """At most as many lines as there is room for: blocks of the highest rank go, from the end."""
        lines = list(self.lines)
        while self.height and len(lines) > self.height and (worst := max(line.rank for line in lines)) > 0:
            block = [line.block for line in lines if line.rank == worst][-1]
            lines = [line for line in lines if line.block != block]
        return lines


def show(diagnosis: Diagnosis, console: Console, *, host: str = "slime", report: Path | None = None) -> None:
    """Print the summary: no wider than the terminal, but for what is copied, and no higher (24 to 35 lines) unless the
    cause and its fix need more. Where no terminal shows it nothing is left out.

    host: whose flags are shown. report: where the page is. Raises ValueError where the recommendation has no flags for
    the host.
    """
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    unicode = shows_unicode(console.encoding)
    height = min(max(console.height, SMALLEST), LARGEST) - 1 if console.is_terminal else None
    screen = _Screen(console.width, height, unicode)
    _verdict(screen, diagnosis)
    _findings(screen, diagnosis)
    _size(screen, diagnosis)
    _advice(screen, diagnosis, host)
    _predictions(screen, diagnosis)
    if report is not None:
        screen.add([f"Report: {report}"], whole=True)
    for line in screen.fitted():
        text = printable(line.text, unicode)
        if height and not line.whole and cell_len(text) > console.width:  # some letters are two wide
            text = set_cell_size(text, console.width - 3) + "..."
        console.print(Text(text, style=line.style), soft_wrap=True)


def _verdict(screen: _Screen, diagnosis: Diagnosis) -> None:
    verdict, sentence = headline(diagnosis)
    screen.say(f"{verdict.upper()}: {sentence}", style=STYLES[diagnosis.verdict])
    screen.say(is_it_normal(diagnosis))
    if (gate := diagnosis.gate) is not None:
        said, figures = gate_words(gate, brief=True)
        screen.say(f"Gate {said.upper()}: {figures}.")
    counted = f"{count(diagnosis.samples)} samples, {count(diagnosis.tokens)} tokens"
    screen.say(f"{counted} of {diagnosis.source} ({diagnosis.format}).", rank=8, most=1)


def _findings(screen: _Screen, diagnosis: Diagnosis) -> None:
    first, *others = diagnosis.findings or (None,)
    if first is not None:
        screen.add([""], rank=9)
        later = 0 if first.severity == "fault" else 5  # a note needs no fix at once
        screen.say(f"{label(first)}: {first.kind} ({first.confidence}). {plain(first.evidence)}", style="bold")
        if first.first is not None:
            screen.say(f"first: {first.first}", rank=later, indent="  ", most=2)
        screen.say(f"fix: {plain(first.fix)}", rank=later, indent="  ")
    for item in others:
        also = "also" if item.severity == "fault" else "note"
        screen.say(f"{also} {item.kind} ({item.confidence}): {plain(item.evidence)}", rank=6, most=1)
    if diagnosis.recommendation is not None and diagnosis.next_step:
        screen.say(f"Next: {diagnosis.next_step}")
    for reason in undecided(diagnosis):
        screen.say(f"not decided: {reason}", rank=0 if diagnosis.verdict == "undecided" else 7, most=2)


def _size(screen: _Screen, diagnosis: Diagnosis) -> None:
    rows = size_rows(diagnosis)
    if not rows:
        return
    screen.add([""], rank=9)
    known = published(diagnosis)
    room = max(12, screen.width - 42)
    ranges = [screen.shortened(known.get(title, ""), room) for title, *_ in rows]
    table = [(title, f"{value} {unit}".strip(), text) for (title, value, unit), text in zip(rows, ranges, strict=True)]
    ranks = [8 if title.startswith("χ²") else 4 if title in known or not n else 6 for n, (title, *_) in enumerate(rows)]
    screen.table([("size", "measured", "published" if known else "")], table, ranks)


def _advice(screen: _Screen, diagnosis: Diagnosis, host: str) -> None:
    advice = diagnosis.recommendation
    screen.add([""], rank=9)
    if advice is None:
        screen.say(without_advice(diagnosis), style="bold")
        return
    names = host_names(advice.flags)
    if host not in names:
        raise ValueError(f"there are no flags for host {host!r}: choose {', '.join(names)}.")
    screen.say(f"Recommended: {advice.setting}. {advice.reasons[0] if advice.reasons else ''}", style="bold")
    others = ", ".join(name for name in names if name != host)
    screen.say(f"{names[host]} (--host {others} for the others):")
    screen.add(advice.flags[host].splitlines(), whole=True, style="cyan")
    for watched in advice.watch[:1]:
        screen.say(f"Watch in the first ten steps: {watched}.", rank=3)


def _predictions(screen: _Screen, diagnosis: Diagnosis) -> None:
    chosen = chosen_predictions(diagnosis)
    if not chosen:
        return
    screen.add([""], rank=9)
    marks = tuple(">" if "recommended" in mark else "*" if mark else " " for mark, _ in chosen)
    names = [item.setting.replace("algorithm ", "alg ") for _, item in chosen]
    where = "alg: docs/algorithms.md" if any(name.startswith("alg ") for name in names) else ""
    headers = [
        (where, "", "ESS of", "", "", "bounds'", "2nd"),
        ("> recommended  * yours", "kept %", "weights", "mean w", "noise", "bias", "pass"),
    ]
    rows = [
        (
            f"{sign} {name}",
            _percent(item.kept),
            f"{_percent(item.ess)} %",
            figure(item.mean_weight),
            times(item.noise),
            figure(item.bias, 2),
            "yes" if item.second_pass else NOTHING,
        )
        for sign, name, (_, item) in zip(marks, names, chosen, strict=True)
    ]
    ranks = [2 if mark == " " else 1 for mark in marks]
    screen.table(headers, rows, ranks, marks)


def _percent(value: float) -> str:
    """One digit after the point, and 100 only where nothing is missing."""
    text = f"{100 * value:.1f}"
    return text if text not in ("100.0", "0.0") or value in (0.0, 1.0) else ">99.9" if value > 0.5 else "<0.1"
