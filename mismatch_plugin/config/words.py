"""Flags as a person types them outside of a launch line, in `explain` and `inspect`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from mismatch_plugin.config.flags import add_arguments
from mismatch_plugin.config.model import MismatchConfig


class _Once(Namespace):
    """Refuses a flag with two values, of which argparse would take the last."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, name, None)
        if before is not None and before != value and not isinstance(value, list):  # those that may be repeated
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {value} contradicts {flag} {before}, give it once")
        super().__setattr__(name, value)


def config_of_words(words: Sequence[str], where: str = "the settings") -> MismatchConfig:
    """The configuration of the words of a launch line: `config_of_words(["--use-tis"])`.

    where: what an error calls them.
    Raises ValueError for a word that is no flag of this package, a flag with two values, and as
    `MismatchConfig.from_args`.
    """
    parser = ArgumentParser(prog=where, add_help=False, allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    try:
        known, unknown = parser.parse_known_args(list(words), _Once())
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where}: {error}.") from None
    if unknown:
        raise ValueError(f"{where}: {unknown[0]} is no flag of this package, leave it out.")
    if getattr(known, "mismatch_explain_only", None):
        raise ValueError(f"{where}: --mismatch-explain-only is for a launch line, leave it out.")
    return MismatchConfig.from_args(known)
