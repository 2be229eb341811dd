"""A section's rows as tables of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from examples.benchmarks.communication import LINKS
from examples.benchmarks.results import MEASURED, Row, Section
from mismatch_plugin.report.table import NOTHING, Table, number

Column = tuple[str, str, Callable[[Any], str]]
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


TIME = "ms"
"""Header that `tables` completes by what was timed: user + system CPU time, CUDA events, wall time."""
_LOG_PROBS: tuple[Column, ...] = (
    (TIME, "ms", digits(1)),
    ("time / ours", "time_ours", digits(2)),
    ("extra memory / gradient", "extra_peak", digits(2)),
    ("memory / ours", "memory_ours", digits(2)),
    ("of it system ms", "system_ms", digits(1)),
    ("wall ms", "wall_ms", digits(1)),
    ("first call, s", "first_s", digits(1)),
    ("GB/s", "gb_s", digits(1)),
    ("share of a copy, %", "copy_share", digits(0, 100)),
    ("kernels", "kernels", whole),
    ("syncs", "syncs", whole),
    ("tensor bytes a logit", "bytes_a_logit", digits(0)),
    ("error", "error", power),
)
_CORRECTION: tuple[Column, ...] = (
    (TIME, "ms", digits(1)),
    ("time / ours", "time_ours", digits(2)),
    ("wall ms", "wall_ms", digits(1)),
    ("kernels", "kernels", whole),
    ("syncs", "syncs", whole),
    ("bytes a token", "bytes_a_token", digits(0)),
    ("metrics", "metrics", whole),
    ("largest deviation", "deviation", power),
    ("tokens judged otherwise", "differing", whole),
)
_LINEAR: tuple[Column, ...] = (
    (TIME, "ms", digits(1)),
    ("time / ours", "time_ours", digits(2)),
    ("extra MiB", "extra_peak", digits(0)),
    ("memory / ours", "memory_ours", digits(2)),
    ("logits, MiB", "logits_mib", digits(0)),
    ("of it system ms", "system_ms", digits(1)),
    ("wall ms", "wall_ms", digits(1)),
)
_WHOLE_STEP: tuple[Column, ...] = (
    (TIME, "ms", digits(0)),
    ("time / in place", "time_default", digits(2)),
    ("peak MiB", "peak_mib", digits(0)),
    ("peak / in place", "memory_default", digits(2)),
    ("logits MiB, by formula", "formula_mib", digits(0)),
    ("fourth product, % of the step", "fourth_share", digits(1, 100)),
    ("of it system ms", "system_ms", digits(0)),
    ("wall ms", "wall_ms", digits(0)),
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
    (TIME, "ms", digits(1)),
    ("wall ms", "wall_ms", digits(1)),
    ("share of the step, %", "share", digits(1, 100)),
)
_SERIES: tuple[Column, ...] = (("size", "x", whole), (TIME, "ms", digits(2)), ("fit, ms", "fit", digits(2)))
_TERMS = ("log-probs", "tp all-gather", "correction", "cp SUM", "step's statistics", "all")
_FORMULA: tuple[Column, ...] = (
    *((name, name, whole) for name in ("R", "N", "V", "tp", "cp", "dp")),
    ("P, 1e9", "P", digits(0, 1e-9)),
    *((f"{name}, us", f"us, {name}", digits(0)) for name in _TERMS),
    ("share of the step, %", "share", digits(2, 100)),
)


SHORT = frozenset(
    {
        *("", "figures", "sequences", "ranks", "size", "V", "time / ours", "memory / ours", "fit, ms"),
        *("extra memory / gradient", "extra MiB", "time / in place", "peak MiB", "peak / in place"),
        *("logits MiB, by formula", "kernels", "counted, bytes", "sent, bytes", "share of the step, %", "all, us"),
    }
)
"""Headers of the columns that a terminal has room for, next to the time; the page has all."""


def is_short(header: str) -> bool:
    """Whether the terminal shows this column."""
    return header in SHORT or header.startswith(f"{TIME}, ")


def timed(section: Section) -> str:
    """What the section's `ms` are."""
    return str(section.machine.get("clock", "user + system"))


def tables(section: Section) -> list[Table]:
    """The section's tables, its notes below the last one."""
    made: list[Table] = []
    by: dict[str, tuple[tuple[str, ...], Callable[..., str], tuple[Column, ...]]] = {
        "log_probs": (("tokens", "vocab", "dtype", "tp", "entropy"), problem, _LOG_PROBS),
        "correction": (("setting", "sequences", "tokens"), batch_of, _CORRECTION),
        "linear": (("tokens", "entropy"), of_hidden, _LINEAR),
        "whole_step": (("T", "V", "H"), step, _WHOLE_STEP),
    }
    clock = timed(section)
    if section.name in by:
        keys, title, columns = by[section.name]
        for values in dict.fromkeys(tuple(row.get(key) for key in keys) for row in section.rows):
            rows = [row for row in section.rows if tuple(row.get(key) for key in keys) == values]
            heading = section.title if None in values else _capital(title(*values))
            made.append(_table(heading, rows, columns, clock))
    elif section.name == "scaling":
        made.append(_table("Measured", section.measured(), _SERIES, clock))
        made.append(_table("By formula", [row for row in section.rows if row["status"] != MEASURED], _FORMULA, clock))
    elif section.name in _PLAIN:
        made.append(_table(section.title, section.rows, _PLAIN[section.name], clock))
    else:  # a part that brings its own columns: every figure of its rows
        keys = dict.fromkeys(key for row in section.rows for key in row if key not in ("name", "status"))
        made.append(_table(section.title, section.rows, tuple((key, key, _text) for key in keys), clock))
    facts = ", ".join(f"{name} {_text(value)}" for name, value in section.facts.items())
    notes = (*([_capital(f"{facts}.")] if facts else []), *section.notes)
    made[-1] = Table(made[-1].title, made[-1].headers, made[-1].rows, notes=notes)
    return made


_PLAIN = {"communication": _COMMUNICATION, "hook_share": _HOOK}


def problem(tokens: int, vocab: int, dtype: str, tp: int, entropy: bool) -> str:
    """What a table of log-probs is of."""
    over = "" if tp == 1 else f" over tp {tp}"
    return f"{tokens} tokens, vocabulary {vocab}{over}, {dtype}, {'with' if entropy else 'without'} entropy"


def batch_of(setting: str, sequences: int, tokens: int) -> str:
    """What a table of corrections is of."""
    return f"{setting}: {sequences} sequences, {tokens} tokens"


def of_hidden(tokens: int, entropy: bool) -> str:
    """What a table of log-probs from hidden states is of."""
    return f"from hidden states of {tokens} tokens, {'with' if entropy else 'without'} entropy"


def step(tokens: int, vocab: int, hidden: int) -> str:
    """What a table of whole steps is of."""
    return f"a step of {tokens} tokens, {vocab} columns of logits, hidden size {hidden}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column], clock: str) -> Table:
    """One row each; why there are no figures is in the last column."""
    lines = []
    for row in rows:
        values = [row.get(key) for _, key, _ in columns]
        cells = [
            NOTHING if value is None or (isinstance(value, float) and not math.isfinite(value)) else write(value)
            for value, (_, _, write) in zip(values, columns, strict=True)
        ]
        lines.append((row["name"], *cells, row["status"]))
    headers = (f"{header}, {clock}" if header == TIME else header for header, _, _ in columns)
    return Table(title, ("", *headers, "figures"), tuple(lines))
