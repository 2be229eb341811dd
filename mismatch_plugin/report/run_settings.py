"""What was run: task, algorithms and seeds in words, and tables of what all runs share and what tells them apart."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from pydantic import ValidationError

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.report.data import BASELINE, RunFolder, describe, short
from mismatch_plugin.report.labels import corrections
from mismatch_plugin.report.run_info import AboutSetting, mapping
from mismatch_plugin.report.table import NOTHING, Table

_OWN_KEYS = ("variant", "setting", "seed")
_LOSSES = (
    "PPO, clipped around π_old",
    "PPO, clipped around π_rollout",
    "PPO, clipped around π_old",
    "REINFORCE, no clip",
)
"""By algorithm."""
_WEIGHTS = {2: "π_old/π_rollout", 3: "π_θ/π_rollout"}


def about_algorithms(folder: RunFolder) -> list[tuple[str, str]]:
    """(name, loss and corrections in words) of every variant whose configuration was kept."""
    found = []
    for variant in folder.variants:
        run = next((run for (_, v, _), run in sorted(folder.runs.items()) if v == variant), None)
        config = _config(mapping(run.config.get("mismatch"))) if run is not None else None
        if config is None:
            continue
        words = list(corrections(config))
        if config.weighted:  # the weights come first
            words[0] = f"times the weight {_WEIGHTS[config.algorithm]}, {words[0]}"
        bare = ["no correction"] if variant == BASELINE and not words else []
        found.append((short(variant), "; ".join([_LOSSES[config.algorithm], *words, *bare])))
    return found


def _config(settings: dict[str, Any]) -> MismatchConfig | None:
    """A configuration as it was written; None for one that this version does not read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)
        try:
            return MismatchConfig.build(settings) if settings else None
        except (ValidationError, ValueError, TypeError):
            return None


def about_task(folder: RunFolder, setting: str) -> str:
    """The task in a sentence (of `run.json`, else its name), and how it is trained; empty if unknown."""
    first = next((run.config for (s, _, _), run in sorted(folder.runs.items()) if s == setting), {})
    lab = {**mapping(folder.info.get("lab")), **first, **mapping(first.get("settings"))}
    task = folder.about(setting).task or (f"Task {lab['task']}." if lab.get("task") else "")
    names = ("prompts_per_batch", "samples_per_prompt", "mini_batches", "steps", "lr")
    if not all(isinstance(lab.get(name), (int, float)) for name in names):
        return task
    prompts, samples, parts, steps, lr = (f"{lab[name]:g}" for name in names)
    return (
        f"{task} A rollout batch is {prompts} prompts with {samples} responses each, trained on in {parts} "
        f"mini-batches; {steps} optimizer steps at learning rate {lr}."
    ).strip()


def about_seeds(folder: RunFolder) -> str:
    """Which seeds are reported, and what `run.json` says of how parameters were chosen (`about_seeds`)."""
    seeds = list(folder.seeds)
    if not seeds:
        return ""
    whole = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    listed = f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))
    return f"Seeds reported: {listed}. {folder.info.get('about_seeds') or ''}".strip()


def changes(about: AboutSetting) -> str:
    """What a setting changes, as its settings are written."""
    return ", ".join(f"{name} = {value}" for name, value in _flatten(about.changes))


class SettingsTables(NamedTuple):
    """Tables with at least one row. short: when, on which seeds and versions; long: every setting, one a row."""

    short: list[Table]
    long: list[Table]


def settings_tables(folder: RunFolder) -> SettingsTables:
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
    shared = {name: value for name, value in _flatten(folder.info.get("lab")) if name not in _OWN_KEYS}
    first: Mapping[str, str] = next(iter(flat.values()), {})
    own = [name for name in names if name not in {*by_setting, *by_variant, *differing(2)} and name in first]
    shared |= {name: first[name] for name in own if name not in shared}
    started = folder.info.get("started")
    run = [("started", str(started))] if started else []
    run.append(("seeds", ", ".join(map(str, folder.seeds)) or NOTHING))
    run += _flatten(folder.info.get("versions"))
    long = [
        listed(0, "setting", folder.settings, by_setting),
        listed(1, "algorithm", folder.variants, by_variant),
        Table("The same for all runs", ("setting", "value"), tuple(shared.items())),
    ]
    return SettingsTables([Table("Run", ("what", "value"), tuple(run))], [table for table in long if table.rows])


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
