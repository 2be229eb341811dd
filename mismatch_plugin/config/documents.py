"""Configuration files, YAML or JSON, as nested dicts: keys are unique, aliases and merge keys expand within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from mismatch_plugin.files import MIB, read_text

MAX_VALUES = 20_000
"""Keys and values of a file, aliases counted as often as they are used. There are some sixty settings."""
MAX_DEPTH = 32


def read_file(path: str | Path) -> dict[str, Any]:
    """A configuration file as a dict. Raises ValueError for a missing file or one that holds no mapping of ours."""
    data = read_mapping(path)
    names = {str(name) for name in data}
    if names & {"algorithm", "rollout_correction", "rollout_is", "rollout_rs"}:
        raise ValueError(f"configuration file {path} is in verl's form: read it with mismatch_plugin.compat.from_verl.")
    if "use_rs" in names or any(name.startswith(("tis_", "rs_")) for name in names):
        raise ValueError(
            f"configuration file {path} is in slime's form: read it with mismatch_plugin.compat.from_slime."
        )
    return data


def read_mapping(path: str | Path) -> dict[str, Any]:
    """What a YAML file holds, or a JSON file (suffix .json); {} for an empty one.

    Raises ValueError for a file that is missing, not a regular file, damaged, too large, nested too deeply, whose
    aliases expand without end, or that holds no mapping.
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
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None
    _refuse_large(data, _values)
    return data


def parse_yaml(text: str) -> Any:
    """YAML, safe tags only, keys unique in each mapping (`<<` merges as YAML 1.1 says: a key given by hand wins).

    The size is counted before anything is built: merge keys would be expanded while building.
    Raises ValueError.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_large(node, _children)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None


class _Loader(yaml.SafeLoader):
    """A loader that stops where the text alone, without its aliases, is too much."""

    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise _too_many()
        return super().compose_node(parent, index)


def _refuse_large(root: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    """Walk everything as often as it is used. Raises ValueError beyond MAX_VALUES or MAX_DEPTH."""
    seen, waiting = 0, [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise _too_many()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep, or an alias (*) holds itself.")
        waiting += [(child, depth + 1) for child in children(value)]


def _too_many() -> ValueError:
    return ValueError(f"it holds more than {MAX_VALUES} keys and values, each alias (*) counted in full.")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return node.value
    if not isinstance(node, yaml.MappingNode):
        return []
    named = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    _refuse_twice([(key.tag, key.value) for key in named], [key.value for key in named])
    return [part for pair in node.value for part in pair]


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    _refuse_twice(names, names)
    return dict(pairs)


def _refuse_twice(keys: Sequence[Any], names: Sequence[str]) -> None:
    """The last of two equal keys would win in silence."""
    if len(set(keys)) == len(keys):
        return
    seen: set[Any] = set()
    for key, name in zip(keys, names, strict=True):
        if key in seen:
            raise ValueError(f"{name[:80]!r} is there twice: keep one of them, with all of its settings.")
        seen.add(key)
