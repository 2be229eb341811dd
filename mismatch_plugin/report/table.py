"""A table as data, and its two renderings: markdown and rich."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOTHING = "–"
"""A cell that says: there is none."""
NARROW = 5
"""A table of at most so many columns has room on a terminal for names that are not broken."""


@dataclass(frozen=True)
class Table:
    """Column headers and rows of text.

    code: headers of the columns whose cells are names as one types them (flags, metrics). A cell of such a column
    may hold several, separated by ", ". notes: sentences that stand below the table.
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
        if unknown := self.code - set(self.headers):
            raise ValueError(f"table {self.title!r}: no column is called {', '.join(sorted(unknown))}.")

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
        lines += [_line(map(self._cell, self.headers, row)) for row in self.rows]
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
            cells = [
                cell.replace(", ", "\n") if header in self.code else cell
                for header, cell in zip(self.headers, row, strict=True)
            ]
            table.add_row(*map(Text, cells))  # Text, since brackets in a cell are no markup
        return table

    def _cell(self, header: str, cell: str) -> str:
        if header not in self.code or cell == NOTHING:
            return cell
        return ", ".join(f"`{part}`" for part in cell.split(", ") if part)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
