"""A command line cut in two: the flags of the correction, and all the rest, which is the host's and stays as it is."""

from __future__ import annotations

import difflib
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.flags import add_arguments, underscored_spellings
from mismatch_plugin.hooks.base import Given, Parser

HOST_FLAG = "--mismatch-host"
# Nothing else begins like this in any host but the flags that the host itself declares.
_FAMILIES = ("--tis-", "--rs-", "--mismatch-", "--use-tis", "--use-rs", "--use-rollout-log", "--rollout-log-prob")
_SIMILAR = 0.88
_DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−"), "-")  # what editors and web pages make of one
_SWITCHED = ("true", "false", "yes", "no", "on", "off", "0", "1")
_OF_THE_LAUNCHER = (HOST_FLAG, "--mismatch-explain-only")


def read_command_line(argv: Sequence[str], host_flags: Collection[str] = ()) -> Given:
    """Take our flags out of a command line.

    host_flags: those that the host declares itself; the ones it shares with us (slime's --use-tis) are still ours to
    read. Raises: ValueError for a flag that looks like one of ours and is none (with the one that may be meant), one
    given twice with two values, a value that is none, and whatever `MismatchConfig.from_args` refuses.
    """
    parser = _parser()
    ours, theirs, tokens = _divide(parser, argv)
    for token in tokens:
        _refuse_misspelt(token.partition("=")[0], parser, host_flags)
    namespace = _parse(parser, ours)
    host, explain_only = namespace.mismatch_host, bool(namespace.mismatch_explain_only)
    namespace.mismatch_explain_only = None
    config = MismatchConfig.from_args(namespace)
    flags = _typed(parser, ours)
    return Given(config, config.model_dump(mode="json", exclude_unset=True), flags, host, explain_only, tuple(theirs))


def help_text(usage: str, description: str) -> str:
    """What --help prints: usage, description, and every flag of ours."""
    parser = _parser()
    parser.usage, parser.description = usage, description
    return parser.format_help()


def script_position(argv: Sequence[str]) -> int:
    """Index of the first token that is no flag of ours nor its value: the training script, or -m."""
    return len(argv) - len(_divide(_parser(), argv, stop=True)[1])


def named_host(argv: Sequence[str]) -> str | None:
    """The value of --mismatch-host."""
    names = Parser(add_help=False, allow_abbrev=False)
    names.add_argument(HOST_FLAG, *underscored_spellings([HOST_FLAG]), default=None)
    return names.parse_known_args(list(argv))[0].mismatch_host


def _parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument(HOST_FLAG, metavar="NAME", default=None, help="host that the script starts, named by hand")
    parser.add_argument(*underscored_spellings([HOST_FLAG]), default=None, help=SUPPRESS)
    return parser


def _divide(parser: ArgumentParser, argv: Sequence[str], stop: bool = False) -> tuple[list[str], list[str], list[str]]:
    """(ours with their values, theirs, those of theirs that may be misspelt); stop: at the first that is not ours."""
    ours: list[str] = []
    theirs: list[str] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        action = parser._option_string_actions.get(token.partition("=")[0])
        if token == "--" or (stop and action is None):  # what follows belongs to the host, whatever it looks like
            return ours, [*theirs, *argv[index:]], theirs
        index += 1
        if action is None:
            theirs.append(token)
            continue
        ours.append(token)
        if action.nargs == 0 and index < len(argv) and argv[index].lower() in _SWITCHED:
            raise ValueError(
                f"{token} is a switch and takes no value, but {argv[index]} follows it: write {token} alone to switch "
                f"it on, and leave it out to have it off."
            )
        if action.nargs != 0 and "=" not in token and index < len(argv) and not _is_flag(argv[index]):
            ours.append(argv[index])
            index += 1
    return ours, theirs, theirs


def _is_flag(token: str) -> bool:
    return token.startswith("--")


def _refuse_misspelt(flag: str, parser: ArgumentParser, host_flags: Collection[str]) -> None:
    spelled = flag.translate(_DASHES)
    if not spelled.startswith("-") or flag in host_flags:
        return
    known = sorted(name for name in parser._option_string_actions if "_" not in name)
    plain = f"--{spelled.lstrip('-')}".replace("_", "-")
    if not _is_flag(flag) and plain in host_flags and plain not in known:
        return
    meant = difflib.get_close_matches(plain, known, n=1, cutoff=_SIMILAR)
    # With other dashes it may be a value, which begins like a flag of ours by chance.
    if not meant and not (_is_flag(flag) and plain.startswith(_FAMILIES)):
        return
    # What is misspelt may also be the host's: --tis_clip for slime's --tis-clip.
    meant = difflib.get_close_matches(plain, [*known, *host_flags], n=1, cutoff=0.5) or meant
    fix = f"did you mean {meant[0]}?" if meant else "mismatch-plugin has no such flag."
    raise ValueError(f"{flag} is unknown: {fix} (The host would ignore it, or stop.)")


def _parse(parser: ArgumentParser, ours: list[str]) -> Namespace:
    """Parse, refusing one flag with two values: scripts that add flags up would run with the last one silently."""
    once: dict[str, tuple[str, Any]] = {}
    for tokens in _groups(ours):
        flag = tokens[0].partition("=")[0]
        action = parser._option_string_actions[flag]
        if _appends(action):
            continue
        value = getattr(parser.parse_args(tokens), action.dest)
        if action.dest in once and once[action.dest][1] != value:
            raise ValueError(f"{flag} {value} contradicts {once[action.dest][0]} {once[action.dest][1]}: give it once.")
        once[action.dest] = (flag, value)
    return parser.parse_args(ours)


def _groups(ours: list[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for token in ours:
        if _is_flag(token):
            groups.append([token])
        else:
            groups[-1].append(token)
    return groups


def _appends(action: Action) -> bool:
    return type(action).__name__ == "_AppendAction"


def _typed(parser: ArgumentParser, ours: list[str]) -> tuple[str, ...]:
    """The first spelling of every flag that was typed, each once."""
    first: dict[str, str] = {}  # destination → spelling; those with underscores come behind
    for action in parser._actions:
        first.setdefault(action.dest, action.option_strings[0])
    flags = (tokens[0].partition("=")[0] for tokens in _groups(ours))
    spelled = dict.fromkeys(first[parser._option_string_actions[flag].dest] for flag in flags)
    return tuple(flag for flag in spelled if flag not in _OF_THE_LAUNCHER)
