"""What slime passes to our TIS function, and its arguments as its parser leaves them."""

from __future__ import annotations

from typing import Any

from mismatch_plugin.hooks.slime.config import ARGUMENTS

TIS_KEYWORDS = (
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
)


def namespace(**changes: Any) -> dict[str, Any]:
    """slime's arguments as its parser leaves them, as far as the loss reads them, with `changes`."""
    values = {name: default for name, (_, default) in ARGUMENTS.items()} | {
        "recompute_loss_function": False,
        "allgather_cp": False,
        "log_probs_chunk_size": -1,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "eps_clip_high": 0.2,
        "rank": 0,
        "grpo_std_normalization": True,
    }
    return values | changes
