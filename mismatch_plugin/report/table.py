"""A table as data, its two renderings, markdown and rich, and the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

NOTHING = "–"
"""A cell that says: there is none."""
NARROW = 5
"""A table of at most so many columns has room on a terminal for names that are not broken."""

_ASCII = {"–": "-", "—": "-", "−": "-", "…": "...", "≤": "<=", "≥": ">=", "‖": "||", "±": "+-", "·": "*", "²": "^2",
          "Δ": "d", "π": "pi", "ρ": "rho", "χ": "chi", "θ": "theta", "Σ": "sum", "→": "->", "’": "'", "“": '"',
          "”": '"'}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Column headers and rows of text.

    code: headers of the columns whose cells are names as one types them (flags, metrics). A cell of such a column
    may hold several, separated by ", ". notes: sentences below the table.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    code: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(
                    f"table {self.title!r}: row {row} has {len(row)} cells for {len(self.headers)} columns."
                )

    def column(self, header: str) -> list[str]:
        """All cells of one column."""
        index = self.headers.index(header)
        return [row[index] for row in self.rows]

    def only(self, *headers: str) -> Table:
        """The same rows with these columns, in this order."""
        columns = zip(*(self.column(header) for header in headers), strict=True)
        return replace(self, headers=headers, rows=tuple(columns), code=self.code & set(headers))

    def to_markdown(self) -> str:
        """GitHub's markdown; code columns in backticks, `|` escaped, one line a row, notes as a list below."""
        lines = [_line(self.headers), _line("---" for _ in self.headers)]
        lines += [_line(map(self.cell, self.headers, row)) for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def to_rich(self) -> RichTable:
        """A table for `rich.print`, without the notes."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), show_edge=False
        )
        for header in self.headers:
            is_code = header in self.code
            keep_whole = is_code and len(self.headers) <= NARROW
            table.add_column(header, style="cyan" if is_code else None, overflow="fold", no_wrap=keep_whole)
        for row in self.rows:
            cells = zip(self.headers, row, strict=True)
            shown = [cell.replace(", ", "\n") if header in self.code else cell for header, cell in cells]
            table.add_row(*map(Text, shown))  # Text, since brackets in a cell are no markup
        return table

    def cell(self, header: str, cell: str) -> str:
        """A cell in markdown."""
        if header not in self.code or cell == NOTHING:
            return cell
        return ", ".join(f"`{part}`" for part in cell.split(", ") if part)


def compact(value: float) -> str:
    """A finite number in at most nine characters: up to four digits, so that a table fits on 80 columns."""
    for digits in (4, 3, 2, 1):
        text = f"{value + 0.0:.{digits}g}"  # + 0.0: no minus zero
        if "e" not in text and len(text) > 9:  # -0.0001235
            text = f"{value:.{digits - 1}e}"
        text = re.sub(r"e([+-])0*(\d)", r"e\1\2", text)
        if len(text) <= 9:
            break
    return text


def figure(value: float, digits: int = 3) -> str:
    """A number in so many digits, as people write it: 6.4e-5, 0.0123, 300, 15,000; from a million on 8e13."""
    if abs(value) < 999_500:  # not NaN, nor what rounds to a million
        value = float(f"{value:.{digits}g}") + 0.0
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    else:
        text = f"{value:.0e}"
    return re.sub(r"e([+-])0*(\d)", lambda found: "e" + found[1].strip("+") + found[2], text)


def number(value: float, digits: int = 3) -> str:
    """Fixed digits, the minus sign a real one; zero has none; – where there is no value."""
    if not math.isfinite(value):
        return NOTHING
    text = f"{value:.{digits}f}"
    return text.replace("-", "−" if float(text) else "")


def signed(value: float, digits: int = 3) -> str:
    """The same with a plus sign where it is positive."""
    text = number(value, digits)
    return f"+{text}" if 0 < value < math.inf and float(text) else text


def p_value(p: float) -> str:
    """Three digits, or `< 0.001`; – where there is none."""
    if math.isnan(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def printable(text: str, unicode: bool = True, keep: str = "") -> str:
    """Without control characters but those to keep: what a file holds could hold a terminal's commands.

    unicode: whether the terminal shows more than ASCII.
    """
    if not unicode:
        text = "".join(_ASCII.get(c, c) for c in text).encode("ascii", "replace").decode()
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def shows_unicode(encoding: str) -> bool:
    """Whether a terminal of this encoding shows more than ASCII."""
    return encoding.lower().replace("-", "").startswith("utf")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def terminal() -> Console:
    """Rich's, which prints text as it is: names such as token:tv:0.1 hold no markup and no emoji."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def show(table: Table, markdown: bool = False) -> None:
    """Print a table: rich, or GitHub's markdown."""
    import typer

    if markdown:
        typer.echo(table.to_markdown(), nl=False)
        return
    console = terminal()
    console.print(table.to_rich())
    for note in table.notes:
        console.print(note, soft_wrap=" --" in note)  # flags, which one may want to copy, stay on one line
