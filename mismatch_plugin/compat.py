"""The settings of slime and verl as ours, under the name of 0.1: see `mismatch_plugin.config.compat`."""

from mismatch_plugin.config.compat import from_slime, from_verl

__all__ = ["from_slime", "from_verl"]
