"""The block `mismatch` that holds our settings in a host's own configuration, as verl and NeMo-RL have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import dotted_fields_set, get_path, unknown

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

    Raises: ValueError where the block is no mapping.
    """
    own = section.pop(BLOCK, None) or {}
    if not isinstance(own, dict):
        raise ValueError(f"{place}.{BLOCK} is {own!r}, not a mapping of settings: write them under it.")
    return own, own.pop("preset", None)


def settings_given(
    own: Mapping[str, Any], place: str, host: str, owned: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every setting in the block.

    owned: start of the path of a setting that the host owns → what to do instead.
    Raises: ValueError for a setting that does not exist or that the host owns.
    """
    known = dotted_fields_set(MismatchConfig().model_dump())
    for path in sorted(dotted_fields_set(own)):
        if path not in known:
            raise unknown(f"setting of {place}.{BLOCK}", path, sorted(known))
        for prefix, instead in owned.items():
            if path.startswith(prefix):
                raise ValueError(f"{BLOCK}.{path} is {host}'s to set, not the block's: leave it out here ({instead}).")
        yield path, get_path(own, path)
