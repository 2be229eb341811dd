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
from pathlib import Path

from ci.compare import TABLES as COMPARE
from ci.compare import Sentences
from ci.methods import TABLES as METHODS
from ci.speed import TABLES as SPEED
from ci.tables import TABLES
from ci.trainers import TABLES as TRAINERS
from mismatch_plugin.explain.example import explain_table
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

_BLOCK = re.compile(r"(?P<start><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """`text` with every generated block made anew. Raises ValueError for a block that nothing generates."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise ValueError(f"generated block {name!r} is unknown: choose one of {', '.join(sorted(BLOCKS))}.")
        return f"{match['start']}{BLOCKS[name]().to_markdown()}{match['end']}"

    return _BLOCK.sub(block, text)


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
