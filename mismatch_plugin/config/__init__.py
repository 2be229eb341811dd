"""The user's door: the settings, how they are read (file, flags, preset, another system's), and what is refused."""

from mismatch_plugin.config.criteria import Criterion
from mismatch_plugin.config.model import MismatchConfig, preset
from mismatch_plugin.config.rules import bound_warnings
from mismatch_plugin.config.sections import ImportanceSampling, PPOClip, Terms
from mismatch_plugin.config.settings import ALGORITHM_NAMES
from mismatch_plugin.config.values import MismatchWarning

__all__ = [
    "ALGORITHM_NAMES",
    "Criterion",
    "ImportanceSampling",
    "MismatchConfig",
    "MismatchWarning",
    "PPOClip",
    "Terms",
    "bound_warnings",
    "preset",
]
