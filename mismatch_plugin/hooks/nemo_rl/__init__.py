"""NeMo-RL: a loss object in the place of the one that GRPO's `setup` makes."""

from mismatch_plugin.hooks.nemo_rl.adapter import MismatchLoss, describe, install, settings

__all__ = ["MismatchLoss", "describe", "install", "settings"]
