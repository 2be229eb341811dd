"""Hosts whose configuration is a tree: Hydra overrides on a command line, and our block `mismatch` in the tree."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_plugin.config.documents import parse_yaml

BLOCK = "mismatch"


def plain(value: Any) -> Any:
    """Nested mappings and sequences (OmegaConf's, verl's dataclasses) as dicts and lists, Hydra's keys left out."""
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in value if not str(key).startswith("_")}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def take_block(section: dict[str, Any], place: str) -> tuple[dict[str, Any], str | None]:
    """(our settings, the preset they name), taken out of the section of the host's configuration that is at `place`.
    Raises: ValueError where the block is no mapping."""
    own = section.pop(BLOCK, None) or {}
    if not isinstance(own, dict):
        raise ValueError(f"{place}.{BLOCK} is {own!r}, not a mapping of settings: write them under it.")
    return own, own.pop("preset", None)


def read_overrides(argv: Sequence[str]) -> dict[str, Any]:
    """Hydra's overrides on the line: dotted name → value, the last one of a name."""
    found: dict[str, Any] = {}
    for token in argv:
        name, equals, value = token.partition("=")
        name = name.lstrip("+~")
        if equals and not name.startswith("-"):
            try:  # Hydra needs no space behind a colon, YAML does
                found[name] = parse_yaml(re.sub(r":(?=\S)", ": ", value) if value.startswith("{") else value)
            except ValueError:
                found[name] = value
    return found


def text(value: Any) -> str:
    """A value as Hydra's override grammar writes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}: {text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(text(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, str) and not value.replace("_", "").replace("-", "").isalnum():
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value)


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a value at a dotted name, making the mappings on the way."""
    *parents, last = name.split(".")
    for parent in parents:
        if not isinstance(tree.get(parent), dict):
            tree[parent] = {}
        tree = tree[parent]
    tree[last] = value
