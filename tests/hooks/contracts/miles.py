"""What miles passes to our TIS function, and its arguments as its parser leaves them."""

from __future__ import annotations

from typing import Any

from tests.hooks.contracts import slime

TIS_KEYWORDS = (*slime.TIS_KEYWORDS, "parallel_state", "max_seq_lens")


def namespace(**changes: Any) -> dict[str, Any]:
    """miles's arguments as its parser leaves them, as far as the loss reads them, with `changes`."""
    own = {
        "qkv_format": "thd",
        "true_on_policy_mode": False,
        "skip_actor_forward_only": False,
        "observe_training_entropy": False,
        "global_batch_size": 0,
        "use_dynamic_global_batch_size": False,
        "dump_details": None,
    }
    return slime.namespace(**{**own, **changes})
