"""Configuration files, YAML (and so JSON), as nested dicts: no key twice, and 1e-4 is a number."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from mismatch_plugin.files import MIB, read_text


class _Loader(yaml.SafeLoader):
    """Safe tags, unique keys, no aliases (of which a few lines may stand for gigabytes)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*): write out what that stands for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [name for name, count in keys.items() if count > 1]:  # the last would win in silence
            raise yaml.YAMLError(f"{twice[0]!r} is there twice: keep one of them, with all of its settings")
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-4 for text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)e[-+]?\d+$", re.IGNORECASE), list("-+.0123456789")
)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """What a YAML or JSON file holds; {} if empty. Raises ValueError where it is above 1 MiB, or no mapping."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"configuration file {path} does not exist: check the path given.")
    try:
        text = read_text(path, MIB)
        data = parse_yaml(text.replace("\t", "  ") if path.suffix == ".json" else text)  # JSON may indent by tabs
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"configuration file {path} cannot be read as YAML or JSON: {error}.") from error
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"configuration file {path} holds a {type(data).__name__}, not a mapping of settings.")
    return data or {}


def parse_yaml(text: str) -> Any:
    """YAML, safe tags only, keys unique in each mapping. Raises ValueError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
