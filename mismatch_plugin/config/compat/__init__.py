"""Settings in the spelling of slime, verl and NeMo-RL, read as a `MismatchConfig`.

What the other system accepts is accepted here; what would have no effect there or here is a MismatchWarning, so that a
configuration that runs today still runs and its owner learns which lines do nothing.
Sources: slime's `mis.yaml` and flags; verl's `rollout_correction` block as of November 2025 and of August 2026.

Where the same settings give other numbers than the peer's code:
batch normalisation in mask mode, slime and verl: their mean runs over all units, the rejected as 0 (slime: as their
    unbounded ratio); here over the accepted. A MismatchWarning says so.
batch normalisation at sequence level, slime: its mean counts a sequence without response tokens as weight 0, which
    multiplies all weights by (sequences / those with response tokens); here it counts nowhere.
"""

from mismatch_plugin.config.compat.slime import from_slime
from mismatch_plugin.config.compat.verl import from_verl

__all__ = ["from_slime", "from_verl"]
