"""Configuration files, YAML or JSON, as nested dicts: no key twice, and the decimal numbers of YAML 1.2."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mismatch_plugin.files import MIB, read_text

MAX_VALUES = 20_000
"""Keys and values of a YAML file, aliases counted as often as they are used. There are some sixty settings."""


class _Loader(yaml.SafeLoader):
    """Safe tags, unique keys (`<<` merges: a key given by hand wins). YAML 1.1 reads 1:30 as 90 and 010 as 8."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _validate_unique_keys(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        node.value = [*{str(key.value): (key, value) for key, value in node.value}.values()]


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag not in (_INT, _FLOAT)]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?\d+$", re.ASCII), list("-+0123456789"))
_NUMBER = re.compile(r"([-+]?(\.\d+|\d+(\.\d*)?)(e[-+]?\d+)?|[-+]?\.inf|\.nan)$", re.ASCII | re.IGNORECASE)
_Loader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))
_Loader.add_constructor(_INT, lambda _, node: int(node.value))


def read_file(path: str | Path) -> dict[str, Any]:
    """A configuration file as a dict. Raises ValueError for a missing file or one that holds no mapping of ours."""
    data = read_mapping(path)
    names = {str(name) for name in data}
    verl = names & {"algorithm", "rollout_correction", "rollout_is", "rollout_rs"}
    if verl or any(name == "use_rs" or name.startswith(("tis_", "rs_")) for name in names):
        host = "verl" if verl else "slime"
        raise ValueError(
            f"configuration file {path} is in {host}'s form: read it with mismatch_plugin.compat.from_{host}, or write "
            f"our settings, nested (tis: {{level: sequence}}); {host} itself takes it where it always did."
        )
    return data


def read_mapping(path: str | Path) -> dict[str, Any]:
    """What a YAML file holds, or a JSON file (suffix .json); {} for an empty one.

    Raises ValueError for a file that is missing, not a regular file, damaged, too large, or that holds no mapping.
    """
    path = Path(path)
    if not path.exists() or path.is_dir():
        raise ValueError(f"configuration file {path} does not exist: check the path given.")
    try:
        text = read_text(path, MIB)
    except OSError as error:
        raise ValueError(f"configuration file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"configuration file {path} is not valid YAML or JSON: {error}.") from None
    try:
        data = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"configuration file {path} is not valid YAML or JSON: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"configuration file {path} holds a {type(data).__name__}, not a mapping of settings.")
    return data


def parse_json(text: str) -> Any:
    """JSON whose keys are unique. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _validate_unique_keys(key for key, _ in pairs)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None


def parse_yaml(text: str) -> Any:
    """YAML, safe tags only, keys unique in each mapping, aliases that end. Raises ValueError."""
    try:
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None
    seen, waiting = 0, [data]
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES} keys and values, each alias (*) counted in full.")
        waiting += [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return data


def _validate_unique_keys(keys: Iterable[str]) -> None:
    """The last of two equal keys would win in silence."""
    for name, count in Counter(keys).items():
        if count > 1:
            raise ValueError(f"{name[:80]!r} is there twice: keep one of them, with all of its settings.")
