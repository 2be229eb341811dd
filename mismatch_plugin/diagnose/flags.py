"""A configuration as what one pastes: launch flags for each trainer, and an expression in Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.criteria import BUDGETS
from mismatch_plugin.config.fields import leaf_fields, value_and_default
from mismatch_plugin.config.presets import COMPLETE
from mismatch_plugin.config.values import ignore_mismatch_warnings, merge
from mismatch_plugin.hooks.base import METHODS, Lack
from mismatch_plugin.hooks.hosts import HOSTS
from mismatch_plugin.report.presets import as_flags, quiet_preset

ANY, PYTHON = "any", "python"
TITLES = {ANY: "any trainer", **{name: host.title for name, host in HOSTS.items()}, PYTHON: "Python"}
"""What flags are written for → its name as people write it, in the order in which they are shown."""


def trainer_of(format: str) -> str:
    """The trainer that writes dumps of this format; any where several do, or none."""
    return next((name for name, host in HOSTS.items() if format in host.dumps), ANY)


def config_of(settings: Mapping[str, Any]) -> MismatchConfig:
    """Of nested settings, without a warning. Raises ValueError as `build`."""
    with ignore_mismatch_warnings():
        return MismatchConfig.build(settings)


def flags_for(config: MismatchConfig, host: str) -> str:
    """What to paste to run these settings on a host: its own words, with `…` for what is the user's, and our flags,
    which are all for any trainer.

    Settings that a host owns or cannot do are not among the flags; a comment line (#) before the command says so, and
    what to do instead. The flags are a preset's name where it gives these settings, else those that differ from the
    defaults. python: an expression for `import mismatch_plugin as mp`.
    Raises: ValueError for an unknown host.
    """
    if host == PYTHON:
        return _python(config)
    if host == ANY:
        return " ".join(shortest_flags(config))
    if host not in HOSTS:
        raise ValueError(f"host {host!r} is unknown: choose one of {', '.join(TITLES)}.")
    allowed, notes = available(config, host)
    words = " ".join(map(shlex.quote, shortest_flags(allowed)))
    command = HOSTS[host].paste.replace("{flags}", words).replace("{python}", _python(allowed))
    return "\n".join([*(f"# {note}" for note in notes), *[command.strip()] * has_algorithm(host, allowed)])


def has_algorithm(host: str, config: MismatchConfig) -> bool:
    """Whether a trainer can run the algorithm of these settings, whatever it leaves out of them."""
    return host not in HOSTS or all(METHODS[key].paths for key in HOSTS[host].lacking(config))


def saves_the_pass(host: str) -> bool:
    """Whether a trainer makes one optimizer step a batch and no log-probs of π_old."""
    return not has_algorithm(host, MismatchConfig())


def _python(config: MismatchConfig) -> str:
    name = preset_of(config)
    settings = f"MismatchConfig.build({config.model_dump(exclude_unset=True)!r})"
    return f'mp.preset("{name}")' if name else f"mp.{settings}"


def shortest_flags(config: MismatchConfig) -> list[str]:
    """`--mismatch-preset NAME` where a preset gives these settings, else the flags of what is not at its default."""
    name = preset_of(config)
    return as_flags(config) if name is None else ["--mismatch-preset", name]


def preset_of(config: MismatchConfig) -> str | None:
    """The short name of the first preset that gives these settings."""
    return next((short for short, settings in _presets() if settings == config), None)


@cache
def _presets() -> list[tuple[str, MismatchConfig]]:
    return [(record.short, quiet_preset(record.name)) for record in COMPLETE]


def available(config: MismatchConfig, name: str) -> tuple[MismatchConfig, tuple[str, ...]]:
    """(the settings that a host takes from us, sentences on the rest)."""
    host, data, notes = HOSTS[name], config.model_dump(exclude_unset=True), list[str]()
    for field in leaf_fields(MismatchConfig):
        value, default = value_and_default(config, field.path)
        where = next((where for start, where in host.owns.items() if field.path.startswith(start)), None)
        differs = value != default or value != field.default  # the host knows no default of an objective's own
        if differs and where is not None:
            _drop(data, field.path)
            how = f"set it by {where}" if where else "it cannot be had there"
            notes.append(f"{field.path} {value} is {name}'s own: {how}")
    for key, (asked, lack) in host.lacking(config).items():
        for path in METHODS[key].paths:
            _drop(data, path)
        unless = f" without {lack.unless}" if lack.unless else ""
        instead = "" if lack.instead == Lack.instead else f". {lack.instead}"
        note = f"{asked} cannot be had on {name}{unless}: {lack.why}{instead}"
        notes.append(note.replace("<", "").replace(">", ""))
    if config.normalizes:
        wanted, given = config.tis.batch_normalize_scope, host.scope(config)
        if given != "step" and wanted not in ("auto", given):
            data = merge(data, {"tis": {"batch_normalize_scope": given}})
        if given == "micro_batch" != wanted or (given != "step" and wanted not in ("auto", given)):
            notes.append(f"batch normalisation runs over the {given.replace('_', '-')} on {name}")
    if "kl_coef" not in data.get("terms", {}):
        _drop(data, "terms.kl_importance_weighted")
    if host.needs_patch(config):
        notes.append(f"needs the patch: mismatch-plugin patch apply --host {name} --root DIR")
    return config_of(data), tuple(notes)


def _drop(data: dict[str, Any], path: str) -> None:
    """Take a setting out, or all that begin with `path`; `rs.criteria@` are the criteria with a condition,
    `rs.criteria:` budgets, whose criteria stay."""
    *parents, name = path.split(".")
    for parent in parents:
        data = data.get(parent, {})
    if name.endswith("@"):
        data["criteria"] = [each for each in data.get("criteria", ()) if each.get("condition", "any") == "any"]
    if name.endswith(":"):
        data["criteria"] = [
            {key: value for key, value in each.items() if key not in BUDGETS} for each in data["criteria"]
        ]
    for key in [key for key in data if key.startswith(name)]:
        data.pop(key)
