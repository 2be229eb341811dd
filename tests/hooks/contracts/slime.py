"""What the adapter relies on in slime, recorded at one commit; a checkout is compared with it."""

from __future__ import annotations

from typing import Any

from mismatch_plugin.hooks.slime.config import ARGUMENTS

COMMIT = "624b824a898ab0ec1fcb4d373004c7f3852bf515"

LOSS = "slime/backends/megatron_utils/loss.py"
MODEL = "slime/backends/megatron_utils/model.py"
ACTOR = "slime/backends/megatron_utils/actor.py"

TIS_KEYWORDS = (
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
)
# (file, function that calls, name called, arguments as written there); the adapter's function takes as many.
CALLS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "policy_loss": (LOSS, "loss_function", "func", ("args", "batch", "logits", "sum_of_sample_mean")),
    "rollout_data_postprocess": (
        ACTOR,
        "train_actor",
        "self.rollout_data_postprocess",
        ("self.args", "rollout_id", "rollout_data"),
    ),
    "before_train_step": (
        MODEL,
        "train_one_step",
        "custom_before_train_step_hook",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    ),
    "init": ("slime/backends/megatron_utils/initialize.py", "init", "custom_init", ("args",)),
    "group_advantages": (LOSS, "compute_advantages_and_returns", "custom_adv_fn", ("args", "rollout_data")),
}
# How the reducer that --custom-pg-loss-reducer-function-path names is called, with the masks that tis_function returns.
REDUCER = ("total_lengths", "response_lengths", "pg_loss_masks", "args.calculate_per_token_loss")
BATCH_KEYS = (
    *("total_lengths", "response_lengths", "loss_masks", "log_probs", "ref_log_probs", "advantages"),
    *("rollout_log_probs", "rollout_mask_sums"),
)
# Functions of slime's that the adapter calls: file, name, parameters that it passes.
CALLED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        LOSS,
        "get_log_probs_and_entropy",
        ("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy"),
    ),
    (LOSS, "get_rollout_top_p_logprob_kwargs", ("args", "batch")),
    ("slime/observability/logging_utils.py", "log", ("args", "metrics", "step_key")),
)
LOG_PROB_RESULT = "torch.empty((0,), device=device), res"


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
