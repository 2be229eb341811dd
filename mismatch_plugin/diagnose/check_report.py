"""A check's result on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_plugin.diagnose.findings import CheckResult, Finding, Mismatch
from mismatch_plugin.report.table import NOTHING, Table, printable, shows_unicode

if TYPE_CHECKING:
    from rich.console import Console


def findings_table(result: CheckResult) -> Table:
    """One row a finding: what, how much, and the first place."""
    rows = tuple(
        (
            _named(item),
            item.side or NOTHING,
            f"{item.samples} of {item.of_samples}",
            f"{item.tokens} of {item.of_tokens}",
            NOTHING if item.first is None else str(item.first),
        )
        for item in result.findings
    )
    return Table("findings", ("fault", "side", "samples", "tokens", "first seen"), rows)


def mismatch_table(result: CheckResult) -> Table | None:
    """The level of mismatch as given, and once what was found is undone."""
    if result.mismatch is None:
        return None
    levels = {"as given": result.mismatch, "once fixed": result.fixed}
    shown = {header: level for header, level in levels.items() if level is not None}
    rows = tuple(
        (field.title, *(_number(getattr(level, name)) for level in shown.values()))
        for name, field in Mismatch.model_fields.items()
        if field.title
    )
    return Table("mismatch of the two sides", ("figure", *shown), rows)


def show(result: CheckResult, console: Console) -> None:
    """Print everything, the verdict last."""
    unicode = shows_unicode(console.encoding)

    def said(text: str) -> str:
        return printable(text, unicode)

    for note in result.notes:
        console.print(said(note), soft_wrap=True)  # a path or an address stays whole
    level = mismatch_table(result)
    if level is not None:
        console.print(level.printable(unicode).to_rich())
    if result.findings:
        console.print(findings_table(result).printable(unicode).to_rich())
    for number, item in enumerate(result.findings, start=1):
        first = said(f"{number}. {_named(item)}, {item.confidence}: {item.evidence}")
        console.print(f"{first}\n   Fix: {said(item.fix)}")
    for item in result.undecided:
        console.print(said(f"not decided: {', '.join(item.faults)}: {item.reason}."))
    console.print(said(result.verdict))


def _named(item: Finding) -> str:
    why = "accepted" if item.accepted else "" if item.severity == "fault" else item.severity
    return f"{item.fault} ({why})" if why else item.fault


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
