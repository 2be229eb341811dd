"""Megatron-LM RL: drop-in `calculate_grpo_loss` and `get_logprobs`, and the flags."""

from mismatch_plugin.hooks.megatron_rl.adapter import (
    calculate_grpo_loss,
    describe,
    extra_args_provider,
    get_logprobs,
    settings,
    start,
)

__all__ = ["calculate_grpo_loss", "describe", "extra_args_provider", "get_logprobs", "settings", "start"]
