"""From the options of `compare` to what runs: settings, variants, seeds, and the cross-check at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mismatch_plugin.lab import experiments
from mismatch_plugin.lab.compare import Job, Trainer, plan
from mismatch_plugin.lab.experiments import Setting
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.lab.tasks import get_task

MAX_SEEDS = 10_000


@dataclass(frozen=True)
class Chosen:
    """A comparison: shared fields of LabSettings, settings, the variants of each, seeds."""

    trainer: Trainer
    lab: dict[str, Any]
    settings: dict[str, Setting]
    variants: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    cross_check: dict[str, Any] = field(default_factory=dict)
    for_all: str = ""
    """What --lab changed for all runs, as it was written."""

    @property
    def needs_megatron(self) -> bool:
        return self.trainer == "megatron" or bool(self.cross_check)

    def jobs(self, folder: Path) -> tuple[list[Job], list[Job]]:
        """The runs of the comparison, and those of its cross-check. Raises what `plan` raises."""
        changes = {name: setting.changes for name, setting in self.settings.items()}
        jobs = plan(folder, self.variants, self.seeds, changes, self.lab, self.trainer)
        if not self.cross_check:
            return jobs, []
        names: list[str] = self.cross_check["settings"]
        labels: list[str] = self.cross_check["variants"]
        checked = plan(
            folder / self.cross_check["folder"],
            dict.fromkeys(names, labels),
            self.cross_check["seeds"],
            {name: changes[name] for name in names},
            self.lab,
            "megatron",
            warm=folder / ".warm",
        )
        return jobs, checked

    def description(self) -> dict[str, Any]:
        """What `run.json` says of it."""
        changes = {name: dict(setting.changes) for name, setting in self.settings.items()}
        about = {
            name: {
                "title": setting.title,
                "what": setting.what + (f" Changed for all settings: {self.for_all}." if self.for_all else ""),
                "task": get_task(LabSettings(**{**self.lab, **changes[name]}).task).about,
                "changes": changes[name],
            }
            for name, setting in self.settings.items()
        }
        chosen_on = experiments.CHOSEN_ON
        description: dict[str, Any] = {
            "settings": list(self.settings),
            "variants": list(dict.fromkeys(label for labels in self.variants.values() for label in labels)),
            "seeds": list(self.seeds),
            "trainer": self.trainer,
            "plan": {name: list(labels) for name, labels in self.variants.items()},
            "about_settings": about,
            "outcomes": experiments.OUTCOMES,
            "lab": {**self.lab, "of_setting": changes},
            "cross_check": self.cross_check,
        }
        if self.lab.get("engine") == "batched":
            used = sorted(set(self.seeds) & set(chosen_on))
            description["about_seeds"] = (
                f"Learning rate, staleness and precision were chosen on seeds {_listed(chosen_on)}; "
                + (f"of those reported here, {_listed(used)} are among them." if used else "none of them is reported.")
            )
        return {name: value for name, value in description.items() if value != {}}

    def said(self, runs: int, checked: int) -> str:
        """One line of what is going to run."""
        steps = LabSettings(**self.lab).steps
        ends = " to ".join(map(str, sorted({min(self.seeds), max(self.seeds)})))
        also = f", then {checked} through megatron-core" if checked else ""
        return f"{runs} runs of {steps} steps{also}: settings {', '.join(self.settings)}; seeds {ends}"


def choose(
    *,
    trainer: str = "batched",
    engine: str = "batched",
    algorithms: Sequence[str] | None = None,
    seeds: int | None = None,
    first_seed: int | None = None,
    settings: Sequence[str] | None = None,
    steps: int | None = None,
    lab: Sequence[str] = (),
    own: Mapping[str, Any] | None = None,
    layout: Mapping[str, int] | None = None,
    server_dtype: str | None = None,
    full: bool = False,
    quick: bool = False,
    cross_check: bool = True,
) -> Chosen:
    """What the options mean. None: the default of the problem, which the engine decides.

    lab: NAME=VALUE for all runs. own: fields of one setting of one's own, next to the control. server_dtype: precision
    of the server that is to be used.
    Raises ValueError for options that contradict each other or name what is not there.
    """
    if full and (quick or algorithms is not None):
        raise ValueError(f"--full runs every algorithm: leave out {'--quick' if quick else '--algorithms'}.")
    if quick and (engine != "batched" or settings is not None or own):
        raise ValueError("--quick chooses the settings of the batched problem: leave it out, or --engine and settings.")
    if trainer == "batched" and layout:
        raise ValueError(f"--{next(iter(layout))} goes with --trainer megatron: add it.")
    llama = engine != "batched"
    known = experiments.LLAMA_SETTINGS if llama else experiments.SETTINGS | experiments.MORE_SETTINGS
    default = experiments.QUICK if quick else tuple(experiments.SETTINGS)
    default = experiments.LLAMA_DEFAULT[engine] if llama else default
    shared = {"engine": engine, "steps": experiments.LLAMA_STEPS} if llama else dict(experiments.PROBLEM)
    given = _lab_fields(lab)
    options: dict[str, Any] = {**(layout or {}), **({} if steps is None else {"steps": steps})}
    if server_dtype is not None:
        options["rollout_dtype"] = server_dtype
    if twice := given.keys() & options:
        raise ValueError(f"{min(twice)} is given by --lab and by another option: leave one of them out.")
    shared |= options | given
    if server_dtype is not None:
        default = (server_dtype if server_dtype in known else "control",)
    chosen = _settings(settings, default, known, own or {})
    _check_server_dtype(chosen, server_dtype)
    for name, setting in chosen.items():
        if own_too := given.keys() & setting.changes:
            raise ValueError(
                f"--lab {min(own_too)}: setting {name} has its own, {setting.changes[min(own_too)]}, which --lab does "
                f"not change: choose other --settings."
            )
    every = experiments.QUICK_VARIANTS if quick else experiments.VARIANTS
    labels = tuple(algorithms) if algorithms is not None else every if full or quick else None
    count = seeds if seeds is not None else _seeds(llama, quick)
    first = first_seed if first_seed is not None else 0 if llama else experiments.FIRST_SEED
    if count > MAX_SEEDS:
        raise ValueError(f"seeds is {count}: give at most {MAX_SEEDS}.")
    if first < 0:
        raise ValueError(f"first-seed is {first}: give 0 or more.")
    variants = {name: labels if labels is not None else setting.variants for name, setting in chosen.items()}
    checked = set(experiments.CROSS_CHECKED) <= set(variants.get(experiments.COLLAPSE, ()))
    checks = cross_check and trainer == "batched" and not quick and checked and count > 0
    check = {
        "folder": "megatron",
        "settings": [experiments.COLLAPSE],
        "variants": list(experiments.CROSS_CHECKED),
        "seeds": list(range(first, first + min(count, experiments.CROSS_CHECK_SEEDS))),
    }
    return Chosen(
        cast("Trainer", trainer),
        shared,
        chosen,
        variants,
        tuple(range(first, first + count)),
        check if checks else {},
        for_all=", ".join(f"{name}={_words(value)}" for name, value in given.items()),
    )


_OPTIONS = ("seed", "engine")
"""Fields that have options of their own, by which more is chosen than the field."""


def _words(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _seeds(llama: bool, quick: bool) -> int:
    return experiments.LLAMA_SEEDS if llama else experiments.QUICK_SEEDS if quick else experiments.SEEDS


def _lab_fields(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as fields of LabSettings. Raises ValueError for what is no field, or not a value."""
    fields: dict[str, Any] = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in LabSettings.model_fields or name in _OPTIONS:
            known = ", ".join(field for field in LabSettings.model_fields if field not in _OPTIONS)
            raise ValueError(f"--lab {entry}: write NAME=VALUE with one of {known}.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def _settings(
    names: Sequence[str] | None, default: Sequence[str], known: Mapping[str, Setting], own: Mapping[str, Any]
) -> dict[str, Setting]:
    """The chosen mismatch settings by name; with settings of one's own these next to the control."""
    if own and names is not None:
        raise ValueError(f"--settings {','.join(names)} and {', '.join(own)} are two ways to choose: leave one out.")
    if own:
        title = ", ".join(f"{name} {value}" for name, value in own.items())
        what = "A setting given by options."
        chosen = Setting(title, what, dict(own), known["control"].variants)
        return {"control": known["control"], "_".join(f"{value}" for value in own.values()): chosen}
    names = default if names is None else names
    if not names or any(name not in known for name in names):
        raise ValueError(f"settings {','.join(names)!r} names none that exist: choose from {', '.join(known)}.")
    return {name: known[name] for name in names}


def _check_server_dtype(chosen: Mapping[str, Setting], dtype: str | None) -> None:
    """Raises ValueError if a setting asks for another precision than `dtype`, the server's (None: any will do)."""
    for name, setting in chosen.items():
        wanted = setting.changes.get("rollout_dtype", dtype)
        if dtype is not None and wanted != dtype:
            raise ValueError(
                f"setting {name} is rollout_dtype {wanted}, and the server computes in {dtype}: leave it out, or use "
                f"--start-server, which starts one for each precision."
            )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
