"""Write the generated blocks of the pages in docs/ again, or check that they are current.

    python -m ci.docs            # writes
    python -m ci.docs --check    # exits 1 with a diff where a block is stale

A block stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of `BLOCKS`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ci.compare import TABLES as COMPARE
from ci.compare import Sentences
from ci.methods import TABLES as METHODS
from ci.speed import TABLES as SPEED
from ci.tables import TABLES
from ci.trainers import TABLES as TRAINERS
from mismatch_plugin.explain.account import explain_table
from mismatch_plugin.report.table import Table

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCKS: dict[str, Callable[[], Table | Sentences]] = {
    **TABLES,
    **METHODS,
    **COMPARE,
    **SPEED,
    **TRAINERS,
    "example": explain_table,
}

WIDEST = 120
_BLOCK = re.compile(r"(?P<start><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """`text` with every generated block made anew. Raises ValueError for a block that nothing generates."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise ValueError(f"generated block {name!r} is unknown: choose one of {', '.join(sorted(BLOCKS))}.")
        made = BLOCKS[name]()
        table = made if isinstance(made, Sentences) else narrowed(made)
        return f"{match['start']}{table.to_markdown()}{match['end']}"

    return _BLOCK.sub(block, text)


def narrowed(table: Table) -> Table:
    """Cells of at most WIDEST characters. What is longer goes on in a note below the table, under the row's name."""
    rest: dict[str, list[str]] = {}
    rows, first = [], [row[0] for row in table.rows]
    name = 0 if len(set(first)) == len(first) else 1
    for row in table.rows:
        cells = [table.cell(header, text) for header, text in zip(table.headers, row, strict=True)]
        for place, text in enumerate(cells):
            if len(text) > WIDEST:
                cells[place], more = _cut(text)
                column = "" if table.headers[0] else f", {table.headers[place]}"  # of a table that compares columns
                rest.setdefault(more, []).append(cells[name] + column)
        rows.append(tuple(cells))
    notes = (f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in rest.items())
    return replace(table, rows=tuple(rows), code=frozenset(), notes=(*notes, *table.notes))


def _cut(text: str) -> tuple[str, str]:
    """A long cell at a sentence, else at a clause, but never inside of code or brackets."""
    for mark in (". ", "; ", ": ", ", "):
        start = text.rfind(mark, 0, WIDEST - 4) + len(mark)
        kept = text[:start]
        if start > WIDEST // 4 and kept.count("`") % 2 == 0 and kept.count("(") == kept.count(")"):
            return f"{kept.rstrip(' ;:,')} …", f"… {text[start:]}"
    return "below", text


def block_names(text: str) -> list[str]:
    """The names of the generated blocks in `text`, in order."""
    return [match["name"] for match in _BLOCK.finditer(text)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the generated blocks of the documentation again.")
    parser.add_argument("--check", action="store_true", help="only say what is stale; exit 1 if anything is")
    parser.add_argument("paths", nargs="*", type=Path, help="the files (README.md and docs/*.md)")
    options = parser.parse_args(arguments)
    stale = 0
    for path in options.paths or PAGES:
        old = path.read_text(encoding="utf-8")
        new = render(old)
        if old == new:
            continue
        if options.check:
            stale = 1
            names = (path.name, f"{path.name} (generated)")
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), *names))
        else:
            path.write_text(new, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
