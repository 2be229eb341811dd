"""prime-rl: a custom loss, `[trainer.loss] type = "custom"`, whose keyword arguments are our settings.

```toml
[trainer.loss]
type = "custom"
import_path = "mismatch_plugin.hooks.prime_rl.policy_loss"

[trainer.loss.kwargs]
preset = "pg_is"
```
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.hooks.base import announce, block_lines, given_settings, resolve
from mismatch_plugin.hooks.hosts import PRIME_RL
from mismatch_plugin.limits import SAFETY_BOUND


class LossOutputs(NamedTuple):
    """loss: 0-d, a sum over tokens, which prime-rl divides by the step's. metrics: [trained tokens] each."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(inputs: Any, **kwargs: Any) -> LossOutputs:
    """Σ_t of the corrected loss of one sequence, algorithm 1 or 3, terms included. kwargs: see `settings`.

    inputs: prime-rl's, each [T]: trainer_logprobs, inference_logprobs, ref_logprobs (or None), advantages, loss_mask
    (bool), and loss_weights (or None), which multiply the losses of tokens.

    Metrics are values of tokens, of which prime-rl logs mean, median, deviation and extremes over the step and all
    ranks. Collectives: none. Host syncs: one, besides those of the metrics.
    Raises: ValueError as `settings`; InvalidLogProbError.
    """
    config = settings(**kwargs)
    packed = PackedSequences(
        loss_mask=inputs.loss_mask,
        lengths=(inputs.loss_mask.numel(),),
        rollout_log_probs=inputs.inference_logprobs.detach(),
        ref_log_probs=inputs.ref_logprobs,
        advantages=inputs.advantages,
    )
    token = token_loss(inputs.trainer_logprobs, packed, config)
    token.correction.statistics.on_host()  # raises where a log-prob is invalid
    losses, correction = token.total(), token.correction
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights
    if config.metrics == "off":
        return LossOutputs(losses.sum(), {})
    log_ratio = correction.tokens.log_ratio
    columns = {
        "kl": -log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND),
        "k3_kl": k3(log_ratio),
        "rollout_is_ratio_mean": bounded_exp(log_ratio),
        "rollout_is_weight_after_mean": correction.applied,
        "rollout_is_masked_fraction": 1.0 - correction.keep,  # with the veto's
    }
    columns |= {f"actor_{name}": column.float() for name, column in token.clip_columns()}
    return LossOutputs(losses.sum(), {PREFIX + name: column[token.selected] for name, column in columns.items()})


def settings(**kwargs: Any) -> MismatchConfig:
    """The configuration of `[trainer.loss.kwargs]`: our settings, nested, `preset` among them; or `flags`, a string.

    The start-up block is printed once, by the first rank.
    Raises: ValueError, one sentence, for what prime-rl cannot give.
    """
    return _resolved(json.dumps(kwargs, sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _resolved(text: str) -> MismatchConfig:
    own = json.loads(text)
    ours, base = given_settings(own["flags"] if own.keys() == {"flags"} else own)
    config = resolve(PRIME_RL, ours, {"denominator": "original"}, base=base)
    if os.environ.get("RANK", "0") == "0":
        announce(PRIME_RL, describe(config))
    return config


def describe(config: MismatchConfig) -> list[str]:
    """Lines of the start-up block."""
    divided = "as in prime-rl: by the step's tokens; rejected ones still count"
    return block_lines(config, [], divided=divided, second_pass="no")
