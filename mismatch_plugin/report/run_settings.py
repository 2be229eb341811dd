"""Tables of what was run: the settings that all runs share, and those that tell settings and algorithms apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from mismatch_plugin.report.data import RunFolder, describe
from mismatch_plugin.report.table import NOTHING, Table

_OWN_KEYS = ("variant", "setting", "seed")


def settings_tables(folder: RunFolder) -> list[Table]:
    """What was run: the lab's settings, what tells settings and variants apart, versions."""
    flat = {key: dict(_flatten(run.config)) for key, run in sorted(folder.runs.items())}
    names = sorted({name for config in flat.values() for name in config if name not in _OWN_KEYS})

    def differing(index: int) -> list[str]:
        """Settings whose value depends on this part of a run's key while the rest of the key is the same."""
        found = []
        for name in names:
            groups: dict[tuple[object, ...], set[str]] = {}
            for key, config in flat.items():
                groups.setdefault(key[:index] + key[index + 1 :], set()).add(config.get(name, NOTHING))
            if any(len(values) > 1 for values in groups.values()):
                found.append(name)
        return found

    def listed(index: int, label: str, members: Iterable[str], which: list[str]) -> Table:
        rows = []
        for member in members:
            config = next((config for key, config in flat.items() if key[index] == member), None)
            cell = NOTHING if config is None else "; ".join(f"{n} = {config[n]}" for n in which if n in config)
            words = describe(member) if index == 1 else member
            rows.append((words, cell or NOTHING))
        return Table(f"What tells the {label}s apart", (label, "settings"), tuple(rows))

    by_setting, by_variant = differing(0), differing(1)
    shared = dict(_flatten(folder.info.get("lab")))
    first: Mapping[str, str] = next(iter(flat.values()), {})
    own = [name for name in names if name not in {*by_setting, *by_variant, *differing(2)} and name in first]
    shared |= {name: first[name] for name in own if name not in shared}
    tables = [
        Table("The same for all runs", ("setting", "value"), tuple(shared.items())),
        listed(0, "setting", folder.settings, by_setting),
        listed(1, "algorithm", folder.variants, by_variant),
        Table("Versions", ("part", "version"), tuple(_flatten(folder.info.get("versions")))),
    ]
    started = folder.info.get("started")
    run = [("started", str(started))] if started else []
    run.append(("seeds", ", ".join(map(str, folder.seeds)) or NOTHING))
    return [Table("Run", ("what", "value"), tuple(run)), *(table for table in tables if table.rows)]


def _flatten(value: object, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) of every leaf of nested dicts. Of a path only the last part: where a run lay says nothing."""
    if not isinstance(value, dict):
        return []
    leaves: list[tuple[str, str]] = []
    for name, item in value.items():
        if isinstance(item, dict):
            leaves += _flatten(item, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", _text(item)))
    return leaves


def _text(item: Any) -> str:
    if item is None or item in ([], ""):
        return NOTHING
    if isinstance(item, bool):
        return "on" if item else "off"
    if isinstance(item, str):
        for kind in (PurePosixPath, PureWindowsPath):
            if kind(item).is_absolute():
                return kind(item).name
        return item
    return f"{item:g}" if isinstance(item, float) else json.dumps(item, ensure_ascii=False)
