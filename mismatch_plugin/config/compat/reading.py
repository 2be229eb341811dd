"""What reading slime's and verl's settings has in common."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config.values import MismatchWarning, parse_bool, unknown


def known_only(mapping: Mapping[str, Any], keys: tuple[str, ...], kind: str) -> dict[str, Any]:
    """The settings as a dict. Raises ValueError for a key that is not among `keys`, with the nearest that is."""
    for key in mapping:
        if key not in keys:
            raise unknown(kind, key, keys)
    return dict(mapping)


def switch_of(given: Mapping[str, Any], key: str) -> bool:
    """A switch's value, False where it is absent. Raises ValueError for what is neither true nor false."""
    return parse_bool(given.get(key), key)


def either(given: Mapping[str, Any], *keys: str) -> bool:
    """A switch with two spellings. Raises ValueError where both are there and differ."""
    values = {key: switch_of(given, key) for key in keys if key in given}
    if len(set(values.values())) > 1:
        raise ValueError(f"{' and '.join(keys)} are two spellings of one switch and differ: leave one of them out.")
    return any(values.values())


def present(**settings: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def note(sentence: str) -> None:
    """A MismatchWarning."""
    warnings.warn(sentence, MismatchWarning, stacklevel=4)
