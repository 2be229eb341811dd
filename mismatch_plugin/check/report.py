"""A check's result on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_plugin.check.findings import CheckResult, Finding, Mismatch
from mismatch_plugin.report.table import Table

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = (
    ("tokens compared", "tokens"),
    ("KL(rollout ‖ training), k1, nat a token", "kl"),
    ("the same, k3", "k3_kl"),
    ("|gap| mean, nat", "abs_mean"),
    ("|gap| p50, nat", "abs_p50"),
    ("|gap| p90, nat", "abs_p90"),
    ("|gap| p99, nat", "abs_p99"),
    ("|gap| largest, nat", "abs_max"),
    ("correlation", "correlation"),
    ("effective sample size", "effective_sample_size"),
)


def findings_table(result: CheckResult) -> Table:
    """One row a finding: what, how much, and the first place."""
    rows = tuple(
        (
            f"{item.fault} (accepted)" if item.accepted else item.fault,
            item.side or "–",
            f"{item.samples} of {item.of_samples}",
            f"{item.tokens} of {item.of_tokens}",
            "–" if item.first is None else str(item.first),
        )
        for item in result.findings
    )
    return Table("findings", ("fault", "side", "samples", "tokens", "first seen"), rows)


def mismatch_table(result: CheckResult) -> Table | None:
    """The level of mismatch as given, and once what was found is undone."""
    if result.mismatch is None:
        return None
    columns = [result.mismatch] + ([result.fixed] if result.fixed is not None else [])
    headers = ("figure", "as given", "once fixed")[: len(columns) + 1]
    rows = tuple((title, *(_number(column, name) for column in columns)) for title, name in _ROWS)
    return Table("mismatch of the two sides", headers, rows)


def show(result: CheckResult, console: Console) -> None:
    """Print everything, the verdict last."""
    for note in result.notes:
        console.print(note, soft_wrap=True)  # a path or an address stays whole
    level = mismatch_table(result)
    if level is not None:
        console.print(level.to_rich())
    if result.findings:
        console.print(findings_table(result).to_rich())
        for number, item in enumerate(result.findings, start=1):
            _explain(number, item, console)
    for item in result.undecided:
        console.print(f"not decided: {', '.join(item.faults)}: {item.reason}.")
    console.print(result.verdict)


def _explain(number: int, item: Finding, console: Console) -> None:
    console.print(f"{number}. {item.fault}: {item.evidence}")
    console.print(f"   Fix: {item.fix}")


def _number(level: Mismatch, name: str) -> str:
    value = getattr(level, name)
    return str(value) if isinstance(value, int) else f"{value:.4g}"
