"""Settings as people write them: numbers, switches, nested dicts, and the sentences of errors about them."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MAX_SHOWN = 200  # characters of a value in an error


class MismatchWarning(UserWarning):
    """A setting that is legal but has no effect, or is outside the range in which it is known to work."""


@contextmanager
def ignore_mismatch_warnings() -> Iterator[None]:
    """No MismatchWarning inside: for a configuration of which another build says what has no effect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)
        yield


def get_path(nested: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    value: Any = nested
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def nested(path: str, value: Any) -> dict[str, Any]:
    """The value at a dotted path, and nothing else: {"tis": {"mode": "clip"}}."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def dotted_fields_set(data: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Dotted paths of every leaf of a nested dict."""
    paths: set[str] = set()
    for name, value in data.items():
        paths |= dotted_fields_set(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return paths


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on top, nested dicts merged key by key. Neither argument is changed."""
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def number(value: Any, name: str = "the value") -> float:
    """A number, or a string that spells one; not "1_2", 12 to Python, two bounds to verl. Raises ValueError."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if plain or (isinstance(value, str) and "_" not in value):
        try:
            return float(value)
        except (ValueError, OverflowError):  # an integer of 400 digits
            pass
    raise ValueError(f"{name} is {short_repr(value)}, which is not a number: write one, for example 2.0.")


def lower_epsilon(value: Any, name: str) -> float:
    """ε of a clip bound 1 − ε, at most 1, which turns the bound off: no ratio is below 0. Raises as `number`."""
    return min(number(value, name), 1.0)


def bounds(value: Any, name: str) -> tuple[float | None, float]:
    """(lower, upper) of a number, which is the upper bound, or of verl's "lower_upper" string, such as "0.5_2.0"."""
    if isinstance(value, str) and "_" in value:
        lower, upper = (number(part, name) for part in value.split("_", 1))
        return lower, upper
    return None, number(value, name)


def parse_bool(value: Any, name: str) -> bool:
    """True or false, also as 1 and 0 or as a string; None is false. Raises ValueError naming `name` and the value."""
    if value is None or value in (0, 1):
        return bool(value)
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError(f"{name} is {value!r}: write true or false.")


def short_repr(value: object) -> str:
    """The value as an error names it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def unknown(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """A one-sentence error for a name that does not exist: the close ones, or else all there are."""
    names = list(known)
    close = difflib.get_close_matches(str(given)[:MAX_SHOWN], names, n=3, cutoff=0.6)
    there = f"there is {', '.join(names)}." if names else "leave it out, or check its spelling."
    fix = f"did you mean {' or '.join(close)}?" if close else there
    return ValueError(f"{kind} {short_repr(str(given))} is unknown: {fix}")


def known_only(mapping: Mapping[str, Any], keys: tuple[str, ...], kind: str) -> dict[str, Any]:
    """The settings as a dict. Raises ValueError for a key that is not among `keys`, with the nearest that is."""
    for key in mapping:
        if key not in keys:
            raise unknown(kind, key, keys)
    return dict(mapping)


def present(**settings: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def note(sentence: str) -> None:
    """A MismatchWarning."""
    warnings.warn(sentence, MismatchWarning, stacklevel=4)
