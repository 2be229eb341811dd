"""verl: the policy loss `mismatch`, the driver's correction, and how they are registered."""

from mismatch_plugin.hooks.verl.adapter import mismatch_loss, register
from mismatch_plugin.hooks.verl.config import describe, settings

__all__ = ["describe", "mismatch_loss", "register", "settings"]
