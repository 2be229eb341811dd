"""What a section's figures say, as sentences: in what this package is ahead, in what it is behind, by how much.

Every sentence is made from the rows alone, names its setting, and says what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from examples.benchmarks.correction import IN_VERL, PADDED
from examples.benchmarks.log_prob_cases import IN_PLACE, OURS
from examples.benchmarks.results import Row, Section
from examples.benchmarks.tables import batch_of, of_hidden, problem, step, timed
from examples.benchmarks.whole_step import COMPUTED, FUSED
from examples.benchmarks.whole_step import IN_PLACE as STEP_IN_PLACE
from examples.benchmarks.whole_step import NEW as STEP_NEW

FORMS = {OURS: "packed", PADDED: "from padded tensors and back", IN_VERL: "as our hook in verl's driver"}
LEVEL = 0.05
"""Figures that differ by less than this share are called level."""


def findings(section: Section) -> list[str]:
    """The comparisons of a section; none where nothing was measured."""
    makes: dict[str, Callable[[Section], list[str]]] = {
        "log_probs": _log_probs,
        "correction": _correction,
        "linear": _linear,
        "whole_step": _whole_step,
        "hook_share": _hook_share,
        "communication": _communication,
        "records": _records,
    }
    return makes[section.name](section) if section.name in makes else []


def standing(ours: float, others: dict[str, float], unit: str) -> str:
    """`ahead of A (2.00); level with B (1.02); behind C (0.50)`; "none" where nothing is ahead or behind.

    The figures are theirs divided by ours of one quantity of which less is better; unit: its name.
    """
    if not others:
        return "nothing to compare with"
    ratios = {name: value / ours for name, value in others.items()}
    kinds = {
        "ahead of": {n: r for n, r in ratios.items() if r > 1 + LEVEL},
        "level with": {n: r for n, r in ratios.items() if 1 - LEVEL <= r <= 1 + LEVEL},
        "behind": {n: r for n, r in ratios.items() if r < 1 - LEVEL},
    }
    parts = []
    for word, found in kinds.items():
        listed = [f"{name} ({_times(ratio)})" for name, ratio in sorted(found.items(), key=lambda item: item[1])]
        if listed or word != "level with":
            parts.append(f"{word} {', '.join(listed) or 'none'}")
    return f"{'; '.join(parts)} (their {unit} / ours)"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}"


def _groups(section: Section, keys: Sequence[str]) -> list[tuple[tuple[Any, ...], dict[str, Row]]]:
    """The measured rows that share these values, by name, in the order in which they were measured."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in section.measured():
        found.setdefault(tuple(row[key] for key in keys), {})[row["name"]] = row
    return list(found.items())


def _log_probs(section: Section) -> list[str]:
    """Ours against what keeps the logits, and ours in place against what overwrites them."""
    sentences = []
    for values, rows in _groups(section, ("tokens", "vocab", "dtype", "tp", "entropy")):
        title = _capital(problem(*values))
        for name, overwrites in ((OURS, False), (IN_PLACE, True)):
            if name not in rows:
                continue
            ours = rows.pop(name)
            others = {n: r for n, r in rows.items() if bool(r.get("overwrites")) is overwrites and n != IN_PLACE}
            place = " in place" if overwrites else ""
            time = standing(ours["ms"], {n: row["ms"] for n, row in others.items()}, "time")
            sentences.append(f"{title}: time{place} {ours['ms']:.0f} ms {timed(section)}: {time}.")
            if "extra_peak" in ours:
                peaks = {n: row["extra_peak"] for n, row in others.items() if "extra_peak" in row}
                # Ratios to next to nothing would say nothing.
                memory = "" if overwrites else f": {standing(ours['extra_peak'], peaks, 'memory')}"
                listed = ", ".join(f"{n} {peak:.2f}" for n, peak in peaks.items()) if overwrites else ""
                own = f"extra memory{place} {ours['extra_peak']:.2f} of the gradient"
                sentences.append(f"{title}: {own}{memory}{f' ({listed})' if listed else ''}.")
    return sentences


def _correction(section: Section) -> list[str]:
    sentences = []
    for values, rows in _groups(section, ("setting", "sequences", "tokens")):
        if OURS not in rows:
            continue
        others = {name: row["ms"] for name, row in rows.items() if not name.startswith(OURS)}
        title = _capital(batch_of(*values))
        for name, form in FORMS.items():
            # To be set against what starts from one tensor a sequence, padded tensors would be a detour.
            compared = others if name == OURS else {n: ms for n, ms in others.items() if n.startswith("verl")}
            if name in rows and compared:
                row = rows[name]
                counts = f", {row['kernels']} kernels, {row['syncs']} syncs"
                own = f"{form} {row['ms']:.1f} ms {timed(section)}{counts}"
                sentences.append(f"{title}: {own}: {standing(row['ms'], compared, 'time')}.")
    return sentences


def _linear(section: Section) -> list[str]:
    sentences = []
    for values, rows in _groups(section, ("tokens", "entropy")):
        if OURS not in rows:
            continue
        ours = rows.pop(OURS)
        title = _capital(of_hidden(*values))
        for key, unit, own in (
            ("ms", "time", f"{ours['ms']:.0f} ms {timed(section)}"),
            ("extra_peak", "memory", f"{ours['extra_peak']:.0f} MiB extra, logits would be {ours['logits_mib']:.0f}"),
        ):
            others = {name: row[key] for name, row in rows.items() if row.get(key) is not None}
            sentences.append(f"{title}: {unit} {own}: {standing(ours[key], others, unit)}.")
    return sentences


def _whole_step(section: Section) -> list[str]:
    sentences, pays = [], []
    for values, rows in _groups(section, ("T", "V", "H")):
        if not {STEP_NEW, STEP_IN_PLACE, FUSED} <= rows.keys():
            continue
        fused, in_place, new = rows[FUSED], rows[STEP_IN_PLACE], rows[STEP_NEW]
        peaks = {STEP_IN_PLACE: in_place["peak_mib"], STEP_NEW: new["peak_mib"]}
        times = {STEP_IN_PLACE: in_place["ms"], STEP_NEW: new["ms"]}
        tokens, vocab, hidden = values
        at = f"{_capital(step(tokens, vocab, hidden))}, with the fused head:"
        sentences.append(f"{at} peak {fused['peak_mib']:.0f} MiB: {standing(fused['peak_mib'], peaks, 'peak')}.")
        clock = timed(section)
        sentences.append(f"{at} time {fused['ms']:.0f} ms {clock}: {standing(fused['ms'], times, 'time')}.")
        pays.append((hidden, tokens, fused["peak_mib"] < (1 - LEVEL) * in_place["peak_mib"]))
    if pays:
        hidden = pays[0][0]
        series = [(tokens, paid) for of, tokens, paid in pays if of == hidden]
        first = next((i for i in range(len(series)) if all(paid for _, paid in series[i:])), None)
        where = "at no T measured" if first is None else f"from T = {series[first][0]} on, of those measured"
        sentences.append(f"At hidden size {hidden} the fused head takes less memory than logits in place {where}.")
    for row in section.rows:
        if (row["status"], row["name"]) == (COMPUTED, FUSED):
            whole = {r["name"]: r["formula_mib"] for r in section.rows if r.get("where") == row["where"]}
            sentences.append(
                f"Computed, not measured: {row['where']}, {step(row['T'], row['V'], row['H'])}, bfloat16: logits and "
                f"gradient {whole[STEP_NEW]:.0f} MiB in new memory, {whole[STEP_IN_PLACE]:.0f} in place, "
                f"{row['formula_mib']:.0f} with the fused head, whose fourth product adds "
                f"{100 * row['fourth_share']:.1f} % to the step's products."
            )
    return sentences


def _hook_share(section: Section) -> list[str]:
    rows = {row["name"]: row for row in section.measured()}
    if "mismatch_plugin hook" not in rows:
        return []
    hook, own = rows["mismatch_plugin hook"], rows["megatron-core cross entropy"]
    return [
        f"To a step of this small model whose loss is the plain sum of the logits ({timed(section)}) the hook adds "
        f"{100 * hook['share']:.2g} %, megatron-core's own cross entropy {100 * own['share']:.2g} %, the correction "
        f"alone {100 * rows['correction alone']['share']:.2g} %."
    ]


def _communication(section: Section) -> list[str]:
    measured = section.measured()
    wrong = [row for row in measured if row["counted"] != row["payload"]]
    verdict = f"differ from the formula in {len(wrong)} of" if wrong else "equal the formula in all of"
    return [f"The bytes counted over gloo {verdict} {len(measured)} cases."] if measured else []


def _records(section: Section) -> list[str]:
    sentences = []
    for (task,), rows in _groups(section, ("task",)):
        if OURS not in rows:
            continue
        own = {name: row["ns"] for name, row in rows.items() if name.startswith(OURS)}
        others = {name: row["ns"] for name, row in rows.items() if name not in own}
        listed = ", ".join(f"{ns:.0f} ns a token{name.removeprefix(OURS)}" for name, ns in own.items())
        compared = f": {standing(own[OURS], others, 'time')}" if others else ""
        sentences.append(f"{_capital(task)}: {listed}, {timed(section)}{compared}.")
    return sentences


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
