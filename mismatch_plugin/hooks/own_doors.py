"""What trainers with a door of their own share: our settings and what the trainer decides become one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import at, dotted_fields_set, merge, no_notes


def on_host(config: MismatchConfig, host: str, decided: dict[str, Any], lacks: Mapping[str, str]) -> MismatchConfig:
    """The configuration with what the host decides.

    decided: nested settings that are the host's. lacks: start of the path of a setting → why it cannot be had there.
    Raises: ValueError, one sentence, for a setting of `lacks` that was given by hand or by a preset, unless it says
    what the host decides anyway.
    """
    given, default = config.model_dump(exclude_unset=True), MismatchConfig().model_dump()
    paths = dotted_fields_set(given)
    by_hand = paths if config._by_hand is None else config._by_hand
    for path in sorted(paths):
        value = at(given, path)
        if value == at(decided, path) or (path not in by_hand and value == at(default, path)):
            continue
        for start, why in lacks.items():
            if path.startswith(start):
                raise ValueError(f"{path} {value} cannot be had on {host}: {why}.")
    with no_notes():  # said when the configuration was built
        return MismatchConfig.build(merge(given, decided), by_hand)
