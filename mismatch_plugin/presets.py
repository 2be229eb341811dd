"""The presets, under the name of 0.1: see `mismatch_plugin.config.presets`."""

from mismatch_plugin.config.model import preset
from mismatch_plugin.config.presets import PRESETS, Preset, find_preset, preset_names

__all__ = ["PRESETS", "Preset", "find_preset", "preset", "preset_names"]
