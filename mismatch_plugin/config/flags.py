"""The argparse group: one flag for each setting, generated from the models, and what of it a person typed."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from mismatch_plugin.config.fields import FieldInfo, leaf_fields
from mismatch_plugin.config.settings import Settings
from mismatch_plugin.config.units import RS_LEVELS
from mismatch_plugin.config.values import merge, nested, number

_CRITERIA = "rs.criteria"
_USE_RS = "--use-rs"
_RATIO: dict[str, Any] = {"type": number, "metavar": "RATIO"}
# Flags that are no setting of their own: together they are one criterion, or they say where settings come from.
_MORE_FLAGS: list[tuple[str, dict[str, Any], str]] = [
    (_USE_RS, {"action": "store_true"}, "reject what is outside bounds of the ratio: one criterion, see --rs-level"),
    ("--rs-level", {"choices": list(RS_LEVELS)}, "how the ratios of --use-rs are aggregated; token if absent"),
    ("--rs-lower-bound", _RATIO, "lower bound of the criterion of --use-rs; 1/hi if absent, 0 turns it off"),
    ("--rs-upper-bound", _RATIO, "upper bound of the criterion of --use-rs; the TIS upper bound if absent"),
    ("--mismatch-preset", {"metavar": "NAME"}, "preset to start from (mismatch-plugin presets lists them)"),
    ("--mismatch-config", {"metavar": "FILE"}, "YAML or JSON settings; flags win over them, they over the preset"),
    ("--mismatch-explain-only", {"action": "store_true"}, "print what these settings do, and stop"),
]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of the correction to a parser, as one group, and return the parser.

    The default of every flag is None: not given. Each is also taken with underscores (`--use_tis`), which --help does
    not list. A flag or destination that the parser has already is left as it is and used; its other spellings are
    added to it. Works with `allow_abbrev=False`, and twice on one parser.

    Raises: ValueError where the parser keeps one of our flags under a destination that nothing here would read.
    """
    group: Any = None
    for spellings, options in _all_flags():
        dests, taken = _dests(spellings), parser._option_string_actions
        there = [taken[name] for name in spellings if name in taken]
        there += [action for action in parser._actions if action.dest in dests]
        dest, default = (there[0].dest, there[0].default) if there else (dests[0], None)
        if dest not in dests:
            raise ValueError(
                f"the parser keeps {spellings[0]} under {dest!r}, where it would not be found: keep it under "
                f"{dests[0]!r}."
            )
        if missing := [spelling for spelling in spellings if spelling not in taken]:
            group = group or parser.add_argument_group(
                "training-inference mismatch", "Correction of the difference between rollout and training log-probs."
            )
            group.add_argument(*missing, dest=dest, default=default, **options)
        if underscored := [spelling for spelling in underscored_spellings(spellings) if spelling not in taken]:
            parser.add_argument(*underscored, dest=dest, default=default, **{**options, "help": SUPPRESS})
    return parser


def underscored_spellings(spellings: Sequence[str]) -> list[str]:
    """The spellings with underscores, which argparse users type as well: `--use_tis` for `--use-tis`."""
    found = [f"--{spelling[2:].replace('-', '_')}" for spelling in spellings]
    return [spelling for spelling in dict.fromkeys(found) if spelling not in spellings]


def destinations() -> tuple[str, ...]:
    """Every attribute under which a Namespace may hold one of our flags."""
    return tuple(dict.fromkeys(dest for spellings, _ in _all_flags() for dest in _dests(spellings)))


def given_flags(namespace: Namespace) -> dict[str, Any]:
    """What a person typed, as nested settings, and under "preset" and "config" the names of a preset and a file. A
    switch that is False counts as not given. Raises ValueError for bounds or level of rejection without --use-rs."""
    values = vars(namespace)
    given: dict[str, Any] = {}
    for leaf in leaf_fields(Settings):
        value = _read(values, _spellings(leaf), off=None if leaf.annotation is bool else False)
        if isinstance(value, str) and leaf.path == _CRITERIA:  # one criterion as a plain string, in a host's YAML
            value = [value]
        if value is not None:
            given = merge(given, nested(leaf.path, value))
    rejection = {"aggregate": "--rs-level", "lower_bound": "--rs-lower-bound", "upper_bound": "--rs-upper-bound"}
    criterion = {name: value for name, flag in rejection.items() if (value := _read(values, [flag])) is not None}
    if _read(values, [_USE_RS]):
        criteria = [*given.get("rs", {}).get("criteria", ()), {"aggregate": "token", **criterion}]
        given = merge(given, {"rs": {"criteria": criteria}})
    elif criterion:
        typed = ", ".join(f"{rejection[name]} {value}" for name, value in criterion.items())
        raise ValueError(f"{typed} rejects nothing without {_USE_RS}: add {_USE_RS}, or leave it out.")
    named = {name: _read(values, [f"--mismatch-{name}"]) for name in ("preset", "config")}
    return given | {name: value for name, value in named.items() if value is not None}


def _all_flags() -> list[tuple[list[str], dict[str, Any]]]:
    """(spellings, options of add_argument) of every flag, the rejection flags before --rs-criterion."""
    flags = [(_spellings(leaf), _options(leaf)) for leaf in leaf_fields(Settings)]
    at = next(index for index, (spellings, _) in enumerate(flags) if "--rs-criterion" in spellings)
    more = [([flag], {**options, "help": text}) for flag, options, text in _MORE_FLAGS]
    return [*flags[:at], *more[:4], *flags[at:], *more[4:]]


def _spellings(leaf: FieldInfo) -> list[str]:
    return [leaf.meta["flag"], *leaf.meta["aliases"]]


def _dests(spellings: list[str]) -> list[str]:
    """The destinations that argparse would derive from the spellings, the flag's own first."""
    return list(dict.fromkeys(spelling.lstrip("-").replace("-", "_") for spelling in spellings))


def _options(leaf: FieldInfo) -> dict[str, Any]:
    """Options of add_argument for a setting, from its type and metadata."""
    unit = leaf.meta["unit"]
    shown = f"{leaf.description} [{unit}]" if unit else leaf.description
    default = f" (default: {leaf.default})" if leaf.default not in (None, False, ()) else ""
    options: dict[str, Any] = {"help": f"{shown}{default}".replace("%", "%%")}
    if leaf.path == _CRITERIA:
        return options | {"action": "append", "metavar": "AGGREGATE:STATISTIC:[LOWER:]UPPER[:BUDGET][@CONDITION]"}
    if leaf.annotation is bool:
        return options | {"action": "store_true"}
    if int in (leaf.annotation, *get_args(leaf.annotation)):
        return options | {"type": int, "metavar": unit.upper()}
    if float in (leaf.annotation, *get_args(leaf.annotation)):
        return options | {"type": number, "metavar": unit.upper() if unit.isalpha() else "NUMBER"}
    if get_origin(leaf.annotation) is Literal:
        return options | {"choices": list(get_args(leaf.annotation))}
    return options | {"metavar": "PATH"}


def _read(values: Mapping[str, Any], spellings: list[str], off: bool | None = None) -> Any:
    """The value under any destination of the spellings; None where there is none or an empty list. off: what False is
    read as: not given (None) for a switch, itself elsewhere, since YAML reads a bare off as false."""
    found = (values.get(dest) for dest in _dests(spellings))
    read = (off if value is False else value for value in found)
    return next((value for value in read if value is not None and value != []), None)
