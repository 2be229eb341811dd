"""What the launcher asks of a host, what it hands over, and what the hosts share on the way from flags to a run.

`hooks/README.md` says how to add a host.
"""

from __future__ import annotations

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
    "nemo-rl": "nemo_rl",
    "verl": "verl",
}
"""Name of a host → its folder here, whose `launch.HOST` says the rest."""


@dataclass(frozen=True)
class Given:
    """What was typed.

    config: of our flags alone.
    settings: the nested ones among them that were given by flag, preset or file.
    flags: those that were typed, each once, in their first spelling.
    host: the value of --mismatch-host.
    explain_only: whether to stop after the block.
    host_argv: every other token, in order.
    """

    config: MismatchConfig
    settings: dict[str, Any]
    flags: tuple[str, ...]
    host: str | None
    explain_only: bool
    host_argv: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    argv: the host's command line.
    added: what of it the launcher added.
    lines: the start-up block, see `start_block`.
    install: called with the script's folder on sys.path, right before the script runs; it changes the host's
        functions.
    config: the configuration that will run; None for a run without us.
    settle: what a host's Namespace goes through once it is parsed, for hosts that have one.
    """

    argv: tuple[str, ...]
    added: tuple[str, ...]
    lines: tuple[str, ...]
    install: Callable[[], None]
    config: MismatchConfig | None = None
    settle: Callable[[Namespace], None] = lambda namespace: None

    @classmethod
    def untouched(cls, host: str, given: Given) -> Plan:
        """The run as it is without the launcher."""
        line = f"none of the plugin's flags is given: {host} runs as it is"
        return cls(given.host_argv, (), (line,), lambda: None)


@dataclass(frozen=True, kw_only=True)
class Host:
    """One trainer, declared as `HOST` in the `launch.py` of its folder. Nothing of the trainer is imported for it.

    name: as --mismatch-host takes it.
    packages: a script that imports one of them, or something inside, is this host's.
    plan: plan(given, script), the run; script is None where a patched tree asks. Raises ValueError for what cannot mean
        anything there.
    reads: (module, function) pairs; a call of one means that the command line has been read in this process.
    flags: those that look like ours and that the host declares itself.
    trainer: what the launcher is put before.
    starters: modules that only scripts import whose trainer runs in another program.
    hands_on: for hosts whose patched parser takes our flags in any process, where such scripts have them written.
    inside: a folder that only its tree has, relative to the root.
    version_file: the file that declares its version, relative to the root.
    distribution: its name on PyPI; "" where it is `name`.
    """

    name: str
    packages: tuple[str, ...]
    plan: Callable[[Given, Path | None], Plan]
    reads: tuple[tuple[str, str], ...]
    inside: str
    version_file: str
    distribution: str = ""
    flags: frozenset[str] = frozenset()
    trainer: str = "train.py"
    starters: tuple[str, ...] = ()
    hands_on: str = ""


def find_host(name: str) -> Host:
    """What the host of that name declares."""
    return import_module(f"mismatch_plugin.hooks.{HOSTS[name]}.launch").HOST


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
    return values, {action.dest for action in actions if tokens.intersection(action.option_strings)}


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


def replace_function(module: str, name: str, new: Callable[..., Any]) -> Callable[..., Any]:
    """Put `new` in the place of a host's function, also in modules of its package that have imported it by name.

    Returns the host's own. What a script imports later, it gets from one of these modules.
    """
    own, package = getattr(import_module(module), name), module.split(".")[0]
    for path, loaded in list(sys.modules.items()):
        if path.split(".")[0] == package and vars(loaded).get(name) is own:
            setattr(loaded, name, new)
    return own


def validate_log_prob_settings(config: MismatchConfig, host: str) -> MismatchConfig:
    """The configuration, on a host that computes log-probs before our loss.

    Raises: ValueError for settings of how they are computed.
    """
    asked = {
        f"--mismatch-log-prob-backend {config.log_prob_backend}": config.log_prob_backend != "auto",
        f"--mismatch-inplace-logits {config.inplace_logits}": config.inplace_logits != "auto",
        "--mismatch-fused-head": config.fused_head,
    }
    for flag, given in asked.items():
        if given:
            raise ValueError(f"{flag} has no effect on {host}, which computes log-probs itself: leave it out.")
    return config


def validate_group_advantages(config: MismatchConfig, host: str, why: str) -> MismatchConfig:
    """The configuration, on a host where rejection comes after the advantages. why: what the host does.

    Raises: ValueError for `rs.group` other than keep.
    """
    if config.rs.group != "keep":
        raise ValueError(
            f"--rs-group {config.rs.group} cannot be had in {host}: {why}. Leave it out: rejected responses then "
            f"count in their groups."
        )
    return config


def start_block(host: str, lines: Sequence[str]) -> str:
    """What is printed before training starts. Lines that begin with "! " are warnings."""
    shown = (line if line.startswith("! ") else f"  {line}" for line in lines)
    return "\n".join([f"mismatch_plugin on {host}:", *shown])


def stop(message: str) -> NoReturn:
    """End the program with one sentence, before training starts."""
    print(f"mismatch_plugin: {message}", file=sys.stderr)
    raise SystemExit(2)
