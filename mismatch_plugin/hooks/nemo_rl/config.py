"""What NeMo-RL's `loss_fn` section and our block in it, `loss_fn.mismatch`, say together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_plugin.config import MismatchConfig, bound_warnings
from mismatch_plugin.config.compat.nemo_rl import CORRECTION_TYPE, OBJECTIVES, nemo_rl_settings
from mismatch_plugin.config.presets import find_preset
from mismatch_plugin.config.values import dotted_fields_set, get_path, ignore_mismatch_warnings, merge
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.block import BLOCK, plain, settings_given, take_block

# Start of the path of a setting that NeMo-RL owns → where it is set.
_OWNED_BY_NEMO_RL = {
    "terms.entropy_coef": "NeMo-RL's loss gets no entropy",
    "terms.kl": "set loss_fn.reference_policy_kl_penalty and reference_policy_kl_type",
    "aggregation": "set loss_fn.token_level_loss",
    "length_norm": "NeMo-RL has no such norm",
    "rs.max_staleness": "its loss is told no weight versions; set grpo.async_grpo.max_trajectory_age_steps",
    "log_prob_backend": "NeMo-RL computes log-probs itself",
    "inplace_logits": "NeMo-RL computes log-probs itself",
    "fused_head": "NeMo-RL computes log-probs itself",
    "verify_weights": "its weight updates are not watched",
}


def loss_settings(host_config: Any) -> dict[str, Any]:
    """The `loss_fn` section as a dict, from the master configuration or the section itself (model or mapping)."""
    found = host_config.get("loss_fn") if isinstance(host_config, Mapping) else getattr(host_config, "loss_fn", None)
    section: Any = host_config if found is None else found
    return plain(section.model_dump() if hasattr(section, "model_dump") else section)


def settings(host_config: Any) -> MismatchConfig:
    """The configuration that NeMo-RL's own keys and `loss_fn.mismatch` (our settings, or `preset`) give together.

    Objective, clip bounds and aggregation are NeMo-RL's; its correction is read as `nemo_rl_settings` says, and the
    bare switch, which asynchronous GRPO insists on, asks for a correction and not for which. The denominator is
    original, because NeMo-RL counts tokens before the loss.
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
    if name is not None or own.get("use_rollout_log_probs"):
        if kind is not None:
            given = f"preset {name}" if name is not None else "use_rollout_log_probs"
            raise ValueError(f"loss_fn.{CORRECTION_TYPE} {kind} is next to {BLOCK}.{given}: leave one of them out.")
        theirs = {key: theirs[key] for key in ("objective", "ppo", "aggregation") if key in theirs}
    for path, value in settings_given(own, "loss_fn", "NeMo-RL", _OWNED_BY_NEMO_RL):
        fixed = get_path(theirs, path) if kind is not None or path.startswith(("ppo.", "objective")) else None
        if fixed not in (None, value):
            raise ValueError(
                f"{BLOCK}.{path} {value} contradicts NeMo-RL's loss_fn, which makes it {fixed}: set one only."
            )
    data = merge(theirs if name is None else merge(find_preset(name).settings(), theirs), own)
    if data.get("use_tis") and data.get("use_rollout_log_probs"):
        data["ppo"] = own.get("ppo", {})  # REINFORCE has no clip
        if (objective := theirs.get("objective")) not in (None, "reinforce"):
            switch = next(name for name, made in OBJECTIVES.items() if made == objective)
            raise ValueError(
                f"loss_fn.{switch} clips π_θ/π_old, and algorithm 3 is REINFORCE, which has no such ratio: switch it "
                f"off, or leave {BLOCK}.use_tis out (algorithm 1)."
            )
        if "objective" not in own:
            data.pop("objective", None)
    config = MismatchConfig.build(data, dotted_fields_set(own))
    if host.get("use_importance_sampling_correction") and config.algorithm == 0:
        raise ValueError(
            "loss_fn.use_importance_sampling_correction asks for weights, and algorithm 0 of these settings has "
            "none: switch it off, or choose another algorithm."
        )
    if config.rs.group != "keep" and host.get("force_on_policy_ratio"):
        raise ValueError(
            f"{BLOCK}.rs.group {config.rs.group} needs prev_logprobs before advantages, and "
            f"loss_fn.force_on_policy_ratio skips their pass: switch it off, or leave rs.group out."
        )
    if config.denominator == "accepted" and config.rejects:
        raise ValueError(
            f"{BLOCK}.denominator accepted cannot hold: NeMo-RL counts tokens before the loss does. Choose auto or "
            f"original."
        )
    if config.normalizes and config.tis.batch_normalize_scope != "micro_batch":
        raise ValueError(
            f"{BLOCK}.tis.batch_normalize_scope {config.tis.batch_normalize_scope} is not what NeMo-RL gives: its "
            f"loss sees one micro-batch (one sequence when packing): choose micro_batch, or no batch_normalize."
        )
    with ignore_mismatch_warnings():  # said by the first build
        return MismatchConfig.build({**data, "denominator": "original"}, dotted_fields_set(own))


def describe(config: MismatchConfig, host_args: Any) -> list[str]:
    """Lines of the start-up block. host_args: as for `settings`."""
    host = loss_settings(host_args)
    lines = [line for line in config.describe().splitlines() if not line.startswith("loss: ")]
    count = "tokens" if host.get("token_level_loss", True) else "sequences"
    lines.append(f"divided as in NeMo-RL: by the step's {count}; rejected ones still count")
    if host.get("force_on_policy_ratio") and (found := [name for name in OBJECTIVES if host.get(name)]):
        lines.append(f"{', '.join(found)}: no effect next to force_on_policy_ratio, whose ratio is 1")
    if host.get("force_on_policy_ratio"):
        anchor = "rollout log-probs" if config.use_rollout_log_probs else "π_θ itself"
        lines.append(f"second forward pass: no (force_on_policy_ratio); the anchor is {anchor}")
    elif config.use_rollout_log_probs:
        lines.append(
            "second forward pass: yes, unused (loss_fn.force_on_policy_ratio=true skips it when a rollout is one step)"
        )
    else:
        lines.append("second forward pass: yes")
    if host.get("use_importance_sampling_correction") and config.use_rollout_log_probs:
        lines.append("use_importance_sampling_correction has no effect: the rollout policy is the anchor already")
    policy = _policy(host_args)
    lines += filter(None, [_sampling_filter(policy.get("generation") or {})])
    if config.gate_kl is not None:
        lines.append("the gate judges each micro-batch, in the worker that holds it")
    lines.append("metrics: means only, exact over the step; NeMo-RL adds a loss's metrics up")
    length = policy.get("max_total_sequence_length")
    warnings = bound_warnings(config, length)
    return lines + [f"! {warning}" for warning in warnings]


def _policy(host_args: Any) -> dict[str, Any]:
    """The section `policy`, {} where only `loss_fn` is known."""
    policy: Any = host_args.get("policy") if isinstance(host_args, Mapping) else getattr(host_args, "policy", None)
    return plain(policy.model_dump() if hasattr(policy, "model_dump") else policy or {})


def _sampling_filter(generation: Mapping[str, Any]) -> str:
    """What policy.generation's filters leave in the ratio; empty where they are off."""
    if not filter_bias(top_p=generation.get("top_p"), top_k=generation.get("top_k"), renormalised=None):
        return ""
    return (
        f"! sampling filter: top_p {generation.get('top_p')}, top_k {generation.get('top_k')}; NeMo-RL cuts the "
        f"trainer's logits by the same filter, but by its own probabilities: no sampling mask is replayed. E ρ is the "
        f"share that the trainer's filter leaves to the ids that the engine kept (1 if both keep the same, no bound "
        f"else), and a sampled token that the trainer's filter drops has log-prob 0 on the trainer's side, which "
        f"rollout_corr/rollout_is_ratio_mean shows. Set policy.generation.top_p=1.0 and top_k=null"
    )
