"""A section's rows as tables of text, and in a few sentences what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from examples.benchmarks.communication import LINKS
from examples.benchmarks.results import MEASURED, Row, Section
from mismatch_plugin.report.statistics import number
from mismatch_plugin.report.table import NOTHING, Table

Column = tuple[str, str, Callable[[float], str]]
"""Header, key of the row, and how its number is written."""


def digits(count: int, factor: float = 1.0) -> Callable[[float], str]:
    """So many digits behind the point."""
    return lambda value: number(factor * value, count)


def whole(value: float) -> str:
    """No digits behind the point."""
    return f"{value:.0f}"


def power(value: float) -> str:
    """Two digits and the power of ten."""
    if not value:
        return "0"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


_LOG_PROBS: tuple[Column, ...] = (
    ("ms", "ms", digits(1)),
    ("times torch", "times_torch", digits(2)),
    ("GB/s", "gb_s", digits(1)),
    ("share of a copy, %", "copy_share", digits(0, 100)),
    ("extra peak / gradient", "extra_peak", digits(2)),
    ("kernels", "kernels", whole),
    ("syncs", "syncs", whole),
    ("tensor bytes a logit", "bytes_a_logit", digits(0)),
    ("error", "error", power),
)
_CORRECTION: tuple[Column, ...] = (
    ("sequences", "sequences", whole),
    ("tokens", "tokens", whole),
    ("ms", "ms", digits(1)),
    ("times ours", "times_ours", digits(2)),
    ("kernels", "kernels", whole),
    ("syncs", "syncs", whole),
    ("bytes a token", "bytes_a_token", digits(0)),
    ("metrics", "metrics", whole),
    ("largest deviation", "deviation", power),
    ("tokens judged otherwise", "differing", whole),
)
_COMMUNICATION: tuple[Column, ...] = (
    ("ranks", "ranks", whole),
    ("collectives", "collectives", whole),
    ("payload, bytes", "payload", whole),
    ("counted, bytes", "counted", whole),
    ("sent, bytes", "sent", whole),
    *((f"us, {link.name}", f"us, {link.name}", digits(0)) for link in LINKS),
)
_HOOK: tuple[Column, ...] = (
    ("ms a step", "ms", digits(1)),
    ("wall ms", "wall_ms", digits(1)),
    ("share of the step, %", "share", digits(1, 100)),
)
_SERIES: tuple[Column, ...] = (("size", "x", whole), ("ms", "ms", digits(2)), ("fit, ms", "fit", digits(2)))
_TERMS = ("log-probs", "tp all-gather", "correction", "cp SUM", "step's statistics", "all")
_FORMULA: tuple[Column, ...] = (
    *((name, name, whole) for name in ("R", "N", "V", "tp", "cp", "dp")),
    ("P, 1e9", "P", digits(0, 1e-9)),
    *((f"{name}, us", f"us, {name}", digits(0)) for name in _TERMS),
    ("share of the step, %", "share", digits(2, 100)),
)


SHORT = frozenset(
    {
        *("", "figures", "sequences", "ranks", "size", "ms", "ms a step", "times torch", "times ours", "fit, ms"),
        *("kernels", "counted, bytes", "sent, bytes", "share of the step, %", "all, us"),
    }
)
"""Headers of the columns that a terminal has room for; the page has all."""


def tables(section: Section) -> list[Table]:
    """The section's tables, its notes below the last one."""
    made: list[Table] = []
    if section.name == "log_probs":
        keys = ("tokens", "vocab", "dtype", "tp", "entropy")
        for values in dict.fromkeys(tuple(row[key] for key in keys) for row in section.rows):
            rows = [row for row in section.rows if tuple(row[key] for key in keys) == values]
            made.append(_table(_title(*values), rows, _LOG_PROBS))
    elif section.name == "scaling":
        made.append(_table("Measured", section.measured(), _SERIES))
        made.append(_table("By formula", [row for row in section.rows if row["status"] != MEASURED], _FORMULA))
    else:
        columns = {"correction": _CORRECTION, "communication": _COMMUNICATION, "hook_share": _HOOK}[section.name]
        made.append(_table(section.title, section.rows, columns))
    facts = ", ".join(f"{name} {_text(value)}" for name, value in section.facts.items())
    notes = (*([f"{facts[0].upper()}{facts[1:]}."] if facts else []), *section.notes)
    made[-1] = Table(made[-1].title, made[-1].headers, made[-1].rows, notes=notes)
    return made


def _title(tokens: int, vocab: int, dtype: str, tp: int, entropy: bool) -> str:
    over = "" if tp == 1 else f" over tp {tp}"
    return f"{tokens} tokens, vocabulary {vocab}{over}, {dtype}, {'with' if entropy else 'without'} entropy"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """One row each; why there are no figures stands in the last column."""
    lines = []
    for row in rows:
        values = [row.get(key) for _, key, _ in columns]
        cells = [
            NOTHING if value is None or not math.isfinite(value) else write(value)
            for value, (_, _, write) in zip(values, columns, strict=True)
        ]
        lines.append((row["name"], *cells, row["status"]))
    headers = ("", *(header for header, _, _ in columns), "figures")
    return Table(title, headers, tuple(lines))


def findings(section: Section) -> list[str]:
    """The comparisons that matter, as sentences with the figures of this run."""
    if section.name == "log_probs":
        return _log_prob_findings(section)
    if section.name == "correction":
        return _correction_findings(section)
    if section.name == "hook_share":
        rows = {row["name"]: row for row in section.measured()}
        if "mismatch_plugin hook" not in rows:
            return []
        hook, own = rows["mismatch_plugin hook"], rows["megatron-core cross entropy"]
        return [
            f"The hook takes {100 * hook['share']:.2g} % of a step of this small model; megatron-core's own cross "
            f"entropy would take {100 * own['share']:.2g} %, and the correction alone "
            f"{100 * rows['correction alone']['share']:.2g} %."
        ]
    if section.name == "communication":
        wrong = [row for row in section.measured() if row["counted"] != row["payload"]]
        verdict = "differ from" if wrong else "equal"
        return [f"The bytes counted over gloo {verdict} the formula in {len(section.measured())} cases."]
    return []


def _log_prob_findings(section: Section) -> list[str]:
    first = section.rows[0]
    keys = ("tokens", "vocab", "dtype")
    here = [row for row in section.measured() if all(row[key] == first[key] for key in keys)]
    sentences = []
    for tp, entropy in dict.fromkeys((row["tp"], row["entropy"]) for row in here):
        rows = {row["name"]: row for row in here if (row["tp"], row["entropy"]) == (tp, entropy)}
        ours = rows.get("mismatch_plugin")
        others = [row for name, row in rows.items() if not name.startswith("mismatch_plugin")]
        if ours is None or not others:
            continue
        shares = ", ".join(f"{ours['ms'] / row['ms']:.2f} of {row['name']}" for row in others)
        peak = f"; the extra peak memory {ours['extra_peak']:.2f} of the gradient" if "extra_peak" in ours else ""
        sentences.append(
            f"{_title(first['tokens'], first['vocab'], first['dtype'], tp, entropy)}: time {shares}{peak}."
        )
    return sentences


def _correction_findings(section: Section) -> list[str]:
    sentences = []
    for sequences in dict.fromkeys(row["sequences"] for row in section.rows):
        rows = {row["name"]: row for row in section.measured() if row["sequences"] == sequences}
        if "mismatch_plugin" not in rows:
            continue
        ours = rows.pop("mismatch_plugin")
        times = ", ".join(
            f"{row['times_ours']:.1f} times that for {name}"
            + (f" with {row['kernels']} kernels and {row['syncs']} syncs" if row["kernels"] is not None else "")
            for name, row in rows.items()
        )
        sentences.append(
            f"{sequences} sequences, {ours['tokens']} tokens: {ours['ms']:.1f} ms with {ours['kernels']} kernels and "
            f"{ours['syncs']} syncs; {times or 'nothing to compare with'}."
        )
    return sentences
