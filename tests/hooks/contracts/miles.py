"""What the adapter relies on in miles, recorded at one commit; a checkout is compared with it."""

from __future__ import annotations

from typing import Any

from tests.hooks.contracts import slime

COMMIT = "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"

LOSSES = "miles/backends/training_utils/loss_hub/losses.py"
MODEL = "miles/backends/megatron_utils/model.py"
ACTOR = "miles/backends/megatron_utils/actor.py"
LOSS = "miles/backends/training_utils/loss.py"
PARALLEL = "miles/backends/training_utils/parallel.py"

TIS_KEYWORDS = (*slime.TIS_KEYWORDS, "parallel_state", "max_seq_lens")
CALLS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "policy_loss": (LOSS, "loss_function", "func", ("args", "batch", "logits", "sum_of_sample_mean")),
    "rollout_data_postprocess": (ACTOR, "train_actor", "self.rollout_data_postprocess", ("self.args",)),
    "before_train_step": (
        MODEL,
        "train_one_step",
        "custom_before_train_step_hook",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    ),
    "init": ("miles/backends/megatron_utils/initialize.py", "init", "custom_init", ("args",)),
}
BATCH_KEYS = (*slime.BATCH_KEYS, "max_seq_lens")
CALLED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "miles/backends/training_utils/loss_hub/logit_processors.py",
        "get_log_probs_and_entropy",
        (
            *("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths"),
            *("with_entropy", "entropy_requires_grad", "max_seq_lens"),
        ),
    ),
    (PARALLEL, "get_parallel_state", ()),
)
LOG_PROB_RESULT = "res"
PARALLEL_FIELDS = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "indep_dp")


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
