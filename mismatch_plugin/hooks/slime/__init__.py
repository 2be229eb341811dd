"""slime: what its path arguments name (`host`), the loss (`adapter`), the arguments (`config`), the launcher's plan."""

from mismatch_plugin.hooks.slime.host import (
    ADAPTER,
    before_train_step,
    check,
    describe,
    init,
    policy_loss,
    rollout_data_postprocess,
    settings,
    tis_function,
)

__all__ = [
    "ADAPTER",
    "before_train_step",
    "check",
    "describe",
    "init",
    "policy_loss",
    "rollout_data_postprocess",
    "settings",
    "tis_function",
]
