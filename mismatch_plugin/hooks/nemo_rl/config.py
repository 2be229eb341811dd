"""What NeMo-RL's `loss_fn` section and our block in it, `loss_fn.mismatch`, say together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.compat.nemo_rl import CORRECTION_TYPE, OBJECTIVES, nemo_rl_settings
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import merge
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import block_lines, resolve
from mismatch_plugin.hooks.hosts import NEMO_RL
from mismatch_plugin.hooks.tree import BLOCK, plain, take_block


def section(host_config: Any, name: str, otherwise: Any = None) -> dict[str, Any]:
    """A section of NeMo-RL's configuration (models or mappings) as a dict, or `otherwise` where it is not there."""
    found: Any = host_config.get(name) if isinstance(host_config, Mapping) else getattr(host_config, name, None)
    found = otherwise if found is None else found
    return plain(found.model_dump() if hasattr(found, "model_dump") else found or {})


def loss_settings(host_config: Any) -> dict[str, Any]:
    """The section `loss_fn`, of the master configuration or given itself."""
    return section(host_config, "loss_fn", host_config)


def settings(host_config: Any) -> MismatchConfig:
    """The configuration that NeMo-RL's own keys and `loss_fn.mismatch` (our settings, or `preset`) give together.

    Objective, clip bounds and aggregation are NeMo-RL's; its correction is read as `nemo_rl_settings` says, and the
    bare switch, which asynchronous GRPO insists on, asks for a correction and not for which. The denominator is
    original, because NeMo-RL counts tokens before the loss; batch normalisation runs over a micro-batch, of one
    sequence when packing.
    Raises: ValueError, one sentence, where the two contradict each other or NeMo-RL would run another loss.
    """
    host = loss_settings(host_config)
    own, name = take_block(host, "loss_fn")
    if weight := host.get("positive_example_nll_weight"):
        raise ValueError(
            f"loss_fn.positive_example_nll_weight {weight} makes another loss (a likelihood term on correct samples): "
            f"switch it off."
        )
    kind, theirs = host.get(CORRECTION_TYPE), nemo_rl_settings(host)
    correction = {key: theirs.pop(key) for key in ("use_tis", "tis", "rs") if key in theirs}
    base: dict[str, Any] = {}
    if name is not None or own.get("use_rollout_log_probs"):
        if kind is not None:
            given = f"preset {name}" if name is not None else "use_rollout_log_probs"
            raise ValueError(f"loss_fn.{CORRECTION_TYPE} {kind} is next to {BLOCK}.{given}: leave one of them out.")
        base = {} if name is None else find_preset(name).settings()
    elif kind is None:
        base = correction
    else:
        theirs |= correction
    both = merge(merge(base, theirs), own)
    if both.get("use_tis") and both.get("use_rollout_log_probs"):
        theirs.pop("ppo")  # REINFORCE has no clip
        if (objective := theirs.pop("objective", "reinforce")) != "reinforce":
            switch = next(name for name, made in OBJECTIVES.items() if made == objective)
            raise ValueError(
                f"loss_fn.{switch} clips π_θ/π_old, and algorithm 3 is REINFORCE, which has no such ratio: switch it "
                f"off, or leave {BLOCK}.use_tis out (algorithm 1)."
            )
    theirs["denominator"] = "original"
    config = resolve(NEMO_RL, own, theirs, base=base)
    if host.get("use_importance_sampling_correction") and config.algorithm == 0:
        raise ValueError(
            "loss_fn.use_importance_sampling_correction asks for weights, and algorithm 0 of these settings has "
            "none: switch it off, or choose another algorithm."
        )
    return config


def describe(config: MismatchConfig, host_args: Any) -> list[str]:
    """Lines of the start-up block. host_args: as for `settings`."""
    host, bypass = loss_settings(host_args), config.use_rollout_log_probs
    forced = host.get("force_on_policy_ratio")
    lines: list[str] = []
    if forced and (found := [name for name in OBJECTIVES if host.get(name)]):
        lines.append(f"{', '.join(found)}: no effect next to force_on_policy_ratio, whose ratio is 1")
    if host.get("use_importance_sampling_correction") and bypass:
        lines.append("use_importance_sampling_correction has no effect: the rollout policy is the anchor already")
    if config.gate_kl is not None:
        lines.append("the gate judges each micro-batch, in the worker that holds it")
    if config.normalizes:
        lines.append("batch normalisation over: each micro-batch (one sequence when packing)")
    lines.append("metrics: means only, exact over the step; NeMo-RL adds a loss's metrics up")
    second = "yes"
    if forced:
        anchor = "rollout log-probs" if bypass else "π_θ itself"
        second = f"no (force_on_policy_ratio); the anchor is {anchor}"
    elif bypass:
        second = "yes, unused (loss_fn.force_on_policy_ratio=true skips it when a rollout is one step)"
    count = "tokens" if host.get("token_level_loss", True) else "sequences"
    policy = section(host_args, "policy")
    return block_lines(
        config,
        lines,
        divided=f"as in NeMo-RL: by the step's {count}; rejected ones still count",
        second_pass=second,
        filtered=_sampling_filter(policy.get("generation") or {}),
        length=policy.get("max_total_sequence_length"),
    )


def _sampling_filter(generation: Mapping[str, Any]) -> str:
    """What policy.generation's filters leave in the ratio; empty where they are off."""
    if not filter_bias(top_p=generation.get("top_p"), top_k=generation.get("top_k"), renormalised=None):
        return ""
    return (
        f"top_p {generation.get('top_p')}, top_k {generation.get('top_k')}; NeMo-RL cuts the trainer's logits by the "
        f"same filter, but by its own probabilities: no sampling mask is replayed. E ρ is the share that it leaves to "
        f"the ids that the engine kept, which rollout_corr/rollout_is_ratio_mean shows. Set "
        f"policy.generation.top_p=1.0 and top_k=null"
    )
