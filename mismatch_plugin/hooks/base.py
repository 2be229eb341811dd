"""What the launcher asks of a host, what it hands over, and what the hosts share on the way from flags to a run."""

from __future__ import annotations

import importlib.util
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from mismatch_plugin.config import MismatchConfig

HOSTS = {
    "slime": "slime",
    "miles": "miles",
    "megatron-lm": "megatron_rl",
    "verl": "verl",
    "nemo-rl": "nemo_rl",
}
"""Name of a host → its folder here, whose `launch.HOST` says the rest."""
MINIMUM_MEGATRON = (0, 16)
"""Oldest megatron-core whose finalize_model_grads and DDP.scale_gradients the hooks were run with."""


@dataclass(frozen=True)
class Given:
    """What was typed. config: of our flags alone. settings: the nested ones among them that were given by flag, preset
    or file. flags: those that were typed, in their first spelling. host_argv: every other token, in order."""

    config: MismatchConfig
    settings: dict[str, Any]
    flags: tuple[str, ...]
    host: str | None
    explain_only: bool
    host_argv: tuple[str, ...]


class Parser(ArgumentParser):
    """argparse whose mistakes are ValueErrors, one sentence each."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message[0].upper() + message[1:] + ".")


def peek(argv: Sequence[str], table: dict[str, dict[str, Any]]) -> tuple[Namespace, set[str]]:
    """The values of some of the host's own flags, with the host's defaults, and the destinations that were typed.

    table: flag → options of add_argument. Everything else on the line is passed over; the host's parser reads it.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    actions = [parser.add_argument(flag, **options) for flag, options in table.items()]
    values, _ = parser.parse_known_args(list(argv))
    tokens = {token.partition("=")[0] for token in argv}
    typed = {action.dest for action in actions if tokens.intersection(action.option_strings)}
    return values, typed


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    argv: the host's command line. added: what of it the launcher added. lines: the start-up block. install: called
    with the script's folder on sys.path, right before the script runs; it replaces functions of the host. settle: what
    a host's Namespace goes through once it is parsed, for hosts that have one. ours: False for a run without us. read:
    asked when the script has ended, whether what was installed was ever called.
    """

    argv: tuple[str, ...]
    added: tuple[str, ...]
    lines: tuple[str, ...]
    install: Callable[[], None]
    settle: Callable[[Namespace], None] = lambda namespace: None
    ours: bool = True
    read: Callable[[], bool] = lambda: True

    @classmethod
    def untouched(cls, host: str, given: Given) -> Plan:
        """The run as it is without the launcher."""
        line = f"none of the plugin's flags is given: {host} runs as it is"
        return cls(given.host_argv, (), (line,), lambda: None, ours=False)


@dataclass(frozen=True)
class Host:
    """One host. packages: whose import in the script tells it. flags: those near ours that it declares itself.

    plan(given, script): the run. Raises ValueError for what cannot mean anything there.
    """

    name: str
    packages: tuple[str, ...]
    flags: frozenset[str]
    plan: Callable[[Given, Path | None], Plan]


def megatron_core_version(folders: Sequence[Path] = ()) -> tuple[str, tuple[int, int]] | None:
    """(version, (major, minor)) of the megatron-core that the script will import, read and not imported.

    folders: looked at first, as sys.path will have them. None where there is none, or its version cannot be read.
    """
    for path in [*(folder / "megatron" / "core" / "package_info.py" for folder in folders), _installed_package_info()]:
        if path is not None and path.is_file():
            numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", path.read_text(encoding="utf-8"), re.M))
            if {"MAJOR", "MINOR"} <= numbers.keys():
                major, minor = int(numbers["MAJOR"]), int(numbers["MINOR"])
                return f"{major}.{minor}.{numbers.get('PATCH', 0)}", (major, minor)
    return None


def refuse_old_megatron(folders: Sequence[Path] = ()) -> None:
    """Raises ValueError where the megatron-core that will be imported is older than the hooks work with."""
    found = megatron_core_version(folders)
    if found is not None and found[1] < MINIMUM_MEGATRON:
        needed = ".".join(map(str, MINIMUM_MEGATRON))
        raise ValueError(
            f"megatron-core {found[0]} is too old: the correction ends each step inside finalize_model_grads as "
            f"megatron-core {needed} has it. Put Megatron {needed} or newer first on PYTHONPATH."
        )


def settled(parse: Callable[..., Namespace], settle: Callable[[Namespace], None]) -> Callable[..., Namespace]:
    """A host's argument parser that hands its Namespace to `settle` before it returns it.

    Where `settle` raises ValueError the program ends with that sentence, before training starts.
    """

    @wraps(parse)
    def parse_and_settle(*args: Any, **kwargs: Any) -> Namespace:
        namespace = parse(*args, **kwargs)
        try:
            settle(namespace)
        except ValueError as error:
            stop(str(error))
        return namespace

    return parse_and_settle


def refuse_log_prob_settings(config: MismatchConfig, host: str) -> MismatchConfig:
    """The configuration, on a host that computes log-probs before our loss.

    Raises: ValueError for settings of how they are computed.
    """
    if config.log_prob_backend != "auto":
        raise ValueError(
            f"--mismatch-log-prob-backend {config.log_prob_backend} has no effect on {host}, which computes log-probs "
            f"itself: leave it out."
        )
    return config


def stop(message: str) -> NoReturn:
    """End the program with one sentence, before training starts."""
    print(f"mismatch_plugin: {message}", file=sys.stderr)
    raise SystemExit(2)


def _installed_package_info() -> Path | None:
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name("package_info.py")


def find_host(name: str) -> Host:
    """What the host of that name declares."""
    return import_module(f"mismatch_plugin.hooks.{HOSTS[name]}.launch").HOST
