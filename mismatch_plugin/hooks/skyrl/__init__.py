"""SkyRL: a registered policy loss, `trainer.algorithm.policy_loss_type=mismatch`, from an entry script of one's own.

```python
cfg = SkyRLTrainConfig.from_cli_overrides(overrides)
register(cfg, mp.preset("token_is"))  # before validate_cfg and initialize_ray
```
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.values import merge
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import announce, block_lines, given_settings, resolve
from mismatch_plugin.hooks.hosts import SKYRL

NAME = "mismatch"


def register(cfg: Any, given: MismatchConfig | Mapping[str, Any] | str) -> MismatchConfig:
    """Register the loss `mismatch` with these settings; SkyRL's registry takes it to the workers. Prints the block.

    cfg: SkyRL's whole configuration. given: ours, as a configuration, a mapping, flags in a string, or the path of a
    file. The package must be importable where workers run.
    Returns what will run. Raises: ValueError, one sentence, as `settings`.
    """
    config = settings(cfg, given)
    registry = import_module("skyrl.backends.skyrl_train.utils.ppo_utils").PolicyLossRegistry
    registry.register(NAME, partial(policy_loss, mismatch=config))
    announce(SKYRL, describe(config, cfg))
    return config


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any = None,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    *,
    mismatch: MismatchConfig,
) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's policy loss: (Σ of the corrected loss over the micro-batch, metrics that it averages).

    All [B, S] padded; log_probs carries gradient. Advantages arrive divided by the mini-batch's tokens or sequences
    (`loss_reduction`), so the plain sum is the mini-batch's mean. config: SkyRL's, read by `register` already.
    Collectives: none. Host syncs: one for the metrics, as in SkyRL's own losses, and one for a clip.
    Raises: ValueError where rollout log-probs are missing; InvalidLogProbError; GateError.
    """
    if rollout_logprobs is None and mismatch.needs_rollout_log_probs:
        raise ValueError(
            f"algorithm {mismatch.algorithm} needs the engine's log-probs, and the batch has none: set "
            f"generator.sampling_params.logprobs=1, and let a generator of your own return rollout_logprobs."
        )
    mask = torch.ones_like(log_probs).bool() if loss_mask is None else loss_mask != 0
    count, width = log_probs.shape
    packed = PackedSequences(
        loss_mask=mask.flatten(),
        lengths=(width,) * count,
        rollout_log_probs=None if rollout_logprobs is None else rollout_logprobs.detach().flatten(),
        old_log_probs=None if mismatch.use_rollout_log_probs else old_log_probs.detach().flatten(),
        advantages=advantages.detach().flatten(),
        padded_width=width,
    )
    token = token_loss(log_probs, packed, mismatch)
    metrics = token.correction.statistics.metrics(averaged_only=True)  # raises where a log-prob is invalid
    if clipped := dict(token.clip_columns()):
        active = (clipped["clip_high"] | clipped["clip_low"]) & packed.loss_mask
        metrics["clip_ratio"] = float(active.sum() / packed.loss_mask.sum().clamp(min=1))
    return token.total().sum(), metrics


def settings(cfg: Any, given: MismatchConfig | Mapping[str, Any] | str) -> MismatchConfig:
    """Ours with SkyRL's clip bounds. Its old log-probs are π_old; in algorithms 1 and 3 they enter nothing. Raises:
    ValueError, one sentence, for what contradicts SkyRL's configuration or cannot be had there."""
    algorithm = cfg.trainer.algorithm
    if algorithm.policy_loss_type != NAME:
        raise ValueError(
            f"trainer.algorithm.policy_loss_type is {algorithm.policy_loss_type}, and SkyRL would run that loss: set "
            f"it to {NAME}."
        )
    if algorithm.use_tis or algorithm.off_policy_correction != type(algorithm.off_policy_correction)():
        raise ValueError(
            f"trainer.algorithm.off_policy_correction is set, and the loss {NAME} does not read it: leave it out."
        )
    ours, base = given_settings(given)
    both, decided = merge(base, ours), dict[str, Any](denominator="original")
    reinforce = both.get("use_tis") and both.get("use_rollout_log_probs")
    if not reinforce and both.get("objective") != "sapo":  # these have no clip
        low, high = algorithm.eps_clip_low, algorithm.eps_clip_high
        if both.get("objective") == "cispo":
            low, high = algorithm.cispo.cispo_eps_clip_low, algorithm.cispo.cispo_eps_clip_high
        decided["ppo"] = {"eps_clip_low": min(low, 1.0), "eps_clip_high": high}
    config = resolve(SKYRL, ours, decided, base=base)
    if config.needs_rollout_log_probs and cfg.generator.sampling_params.logprobs is None:
        raise ValueError(
            f"algorithm {config.algorithm} needs the engine's log-probs: set generator.sampling_params.logprobs=1."
        )
    return config


def describe(config: MismatchConfig, cfg: Any) -> list[str]:
    """Lines of the start-up block: what will run, and what of it is SkyRL's."""
    lines = ["metrics are SkyRL's plain mean over micro-batches; extremes, deviations, quantiles are left out"]
    if config.gate_kl is not None:
        lines.append("the gate judges each micro-batch, in the worker that holds it")
    sampling, engine, notes = cfg.generator.sampling_params, cfg.generator.inference_engine, list[str]()
    if sampling.temperature != 1.0 and "logprobs_mode" not in (engine.engine_init_kwargs or {}):
        notes.append(
            f"temperature {sampling.temperature:g}: vLLM returns log-probs from before it, and the trainer divides by "
            f"it. Set generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs"
        )
    return block_lines(
        config,
        lines,
        divided=f"as in SkyRL, {cfg.trainer.algorithm.loss_reduction}: rejected tokens still count",
        second_pass=f"yes{', unused' if config.use_rollout_log_probs else ''}",
        filtered=filter_bias(top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, renormalised=None),
        length=sampling.max_generate_length,
        notes=notes,
    )
