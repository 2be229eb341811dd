"""miles: what its path arguments name; only what differs from slime is here."""

from mismatch_plugin.hooks.miles.host import (
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
