"""What Megatron-LM RL's own arguments and ours say together, which of them need its loss mask, the start-up block."""

from __future__ import annotations

import warnings
from argparse import Namespace
from typing import Any

from mismatch_plugin.config import MismatchConfig, MismatchWarning, bound_warnings
from mismatch_plugin.config.fields import value_and_default
from mismatch_plugin.config.flags import given_flags
from mismatch_plugin.config.values import dotted_fields_set, lower_epsilon, merge
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import validate_group_advantages, validate_log_prob_settings

IS_CORRECTION = "--rl-inference-logprobs-is-correction"
LOG_PROBS_MODE = "inference_dynamic_batching_logprobs_mode"
COEFFICIENT = "--rl-importance-sampling-truncation-coef"
# Setting → (Megatron's argument, its flag): Megatron's value is the one, ours may repeat it and not contradict it.
OWNED = {
    "ppo.eps_clip_low": ("grpo_clamp_eps_lower", "--grpo-clamp-eps-lower"),
    "ppo.eps_clip_high": ("grpo_clamp_eps_upper", "--grpo-clamp-eps-upper"),
    "terms.kl_coef": ("grpo_kl_beta", "--grpo-kl-beta"),
    "terms.entropy_coef": ("grpo_entropy_term_weight", "--grpo-entropy-term-weight"),
    "tis.upper_bound": ("rl_importance_sampling_truncation_coef", COEFFICIENT),
}
_FIXED = {"denominator": ("original", "auto"), "aggregation": ("token-mean",), "terms.kl_type": ("k3",)}
HALF_PRECISION = (
    "half precision in Megatron-LM RL, off by up to 0.004 |log p| a token, which adds up over a sequence: apply the "
    "patch of rl_utils.py (mismatch-plugin patch apply --host megatron-lm --optional), or use --batch-invariant-mode"
)
_WITHOUT_MASK = (
    "Megatron-LM RL passes no loss mask to its loss, and without it {}: {}. Apply the patch (mismatch-plugin patch "
    "apply --host megatron-lm --root DIR), or leave it out."
)


def settings(args: Namespace) -> MismatchConfig:
    """What Megatron's own values and our flags say together.

    Raises: ValueError where the two contradict each other, where Megatron owns what a flag asks for (denominator,
    aggregation, KL estimator, how log-probs are computed), or where Megatron would keep the inference log-probs from
    the loss.
    """
    handed = getattr(args, "mismatch_settings", None)
    config = MismatchConfig.from_args(args) if handed is None else MismatchConfig.build(handed)
    given = config.model_dump(exclude_unset=True)
    corrects = getattr(args, "rl_inference_logprobs_is_correction", False)
    coefficient = getattr(args, "rl_importance_sampling_truncation_coef", None)
    if corrects and handed is None and not given_flags(args):  # a preset may set nothing, and is a wish all the same
        given = {"use_tis": True}  # none of our flags: Megatron's own mean algorithm 2 with token weights
        config = MismatchConfig.build(given)
    validate_log_prob_settings(config, "Megatron-LM RL")
    validate_group_advantages(
        config, "Megatron-LM RL", "it computes advantages before any log-prob of the training side"
    )
    if config.rs.max_staleness is not None:
        raise ValueError(
            f"--rs-max-staleness {config.rs.max_staleness} cannot be had in Megatron-LM RL, whose loss is not told "
            f"which weights sampled a token (policy_epoch goes to its logs alone): leave it out, and set "
            f"--rl-generation-lag."
        )
    if config.verify_weights != "warn":
        raise ValueError(
            f"--mismatch-verify-weights {config.verify_weights} has no effect on Megatron-LM RL, whose rollouts are of "
            f"its own engine: leave it out."
        )
    asked = dotted_fields_set(given)
    for path, allowed in _FIXED.items():
        value = value_and_default(config, path)[0]
        if path in asked and value not in allowed:
            raise ValueError(
                f"{path} {value} is not Megatron-LM RL's: its loss_func adds up tokens and divides by the trained ones "
                f"({path} {allowed[0]}). Leave it out."
            )
    own: dict[str, Any] = {"denominator": "original", "ppo": {}, "terms": {}, "tis": {}}
    for path, (name, flag) in OWNED.items():
        theirs, ours = getattr(args, name, None), value_and_default(config, path)[0]
        if theirs is None or (path == "tis.upper_bound" and not config.weighted):
            continue
        if path == "ppo.eps_clip_low":
            theirs = lower_epsilon(theirs, name)
        if path in asked and float(ours) != float(theirs):
            raise ValueError(f"{path} {ours:g} contradicts {flag} {theirs:g}: give {flag} alone, it holds for both.")
        section, field = path.split(".")
        own[section][field] = float(theirs)
    if own["terms"].get("kl_coef"):
        own["terms"]["kl_type"] = "k3"
    if config.ratio_bounds is None:  # nothing clips
        own["ppo"] = {}
    if coefficient is not None and not config.weighted:
        raise ValueError(
            f"{COEFFICIENT} {coefficient:g} bounds no weight in algorithm {config.algorithm}: add --use-tis, or leave "
            f"it out."
        )
    if config.needs_rollout_log_probs and not corrects:
        raise ValueError(
            f"algorithm {config.algorithm} with these settings needs the inference log-probs, which Megatron-LM RL "
            f"keeps from the loss without {IS_CORRECTION}: add it (the launcher does)."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)
        return MismatchConfig.build(merge(given, own))


def describe(config: MismatchConfig, host_args: Namespace, masked: bool = True) -> list[str]:
    """Lines for the start-up block. masked: the loss mask reaches the loss (patched tree)."""

    def on(name: str) -> bool:
        return bool(getattr(host_args, name, False))

    said = ("algorithm", "weights: ", "rejection: ", "policies: ", "advantages: ", "objective: ", "penalty: ")
    lines = [line for line in config.describe().splitlines() if line.startswith(said)]
    each = "each micro-batch's trained tokens (the step's: --calculate-per-token-loss)"
    over = "the step's trained tokens" if on("calculate_per_token_loss") else each
    lines.append(f"divided as in Megatron: by {over}; rejected tokens still count")
    if config.normalizes:
        scope = config.tis.batch_normalize_scope
        lines.append(f"batch normalisation over: {'the optimizer step' if scope in ('auto', 'step') else scope}")
    lines.append("second forward pass: yes (in every algorithm, and one for the reference)")
    lines.append(f"rollout log-probs: Megatron's inference log-probs, by {IS_CORRECTION}")
    if on("rl_use_sequence_packing") and config.rollout_log_prob_policy == "error":
        lines.append("a 0.0 in a bin is a slot that the engine did not report (an appended EOD): ratio 1, as in rows")
    bias = filter_bias(
        top_p=getattr(host_args, "rl_default_top_p", None),
        top_k=getattr(host_args, "rl_default_top_k", None),
        renormalised=getattr(host_args, LOG_PROBS_MODE, "raw_logprobs") == "processed_logprobs",
    )
    if bias:
        lines.append(
            f"! sampling filter: {bias}. Megatron-LM RL passes no mask on: leave --rl-default-top-p and "
            f"--rl-default-top-k out"
        )
    if not masked:
        lines.append("! no loss mask without the patch: token level only, no metrics")
    if (on("bf16") or on("fp16")) and sums_tokens(config):
        lines.append(f"! log-probs are {HALF_PRECISION}; nothing to do where that is done")
    temperature = getattr(host_args, "rl_default_temperature", 1.0)
    if temperature != 1.0:
        lines.append(
            f"! temperature {temperature:g}: Megatron-LM RL divides no logits by it, so ratios hold for raw ones"
        )
    longest = getattr(host_args, "inference_max_seq_length", None)
    return lines + [f"! {warning}" for warning in bound_warnings(config, longest)]


def sums_tokens(config: MismatchConfig) -> bool:
    """True where log-ratios are added up over a sequence, and rounding with them, or GSPO's narrow clip sees it."""
    weights = config.weighted and config.unit.multiplies
    return weights or config.policy_objective == "gspo" or any(c.unit.multiplies for c in config.criteria)


def without_mask(config: MismatchConfig, metrics_asked: bool = False) -> MismatchConfig:
    """The configuration of a loss that is not told which tokens train: metrics off.

    metrics_asked: metrics were asked for by flag; at their default they are no wish, as most runs leave them there.
    Raises: ValueError where a setting judges whole sequences or counts tokens, or asks for what is then not measured.
    """
    tis, metrics = config.tis, config.metrics
    judging = {
        f"--mismatch-objective {config.objective}": config.policy_objective == "gspo",
        f"level {tis.level}": config.weighted and not config.unit.per_token,
        "batch normalisation": config.normalizes,
        **{f"criterion {c.name}": not c.judges_tokens for c in config.criteria},
        "the veto": config.rs.veto_threshold is not None,
        "--rollout-log-prob-policy drop-sequence": config.rollout_log_prob_policy == "drop-sequence",
    }
    counting = {
        f"--mismatch-metrics {metrics}": metrics == "full" or (metrics_asked and metrics != "off"),
        "--mismatch-report-dir": config.report_dir is not None,
        "--mismatch-gate-kl": config.gate_kl is not None,
        "--mismatch-dry-run": config.dry_run,
    }
    for settings_, lost in ((judging, "only single tokens can be judged"), (counting, "nothing can be measured")):
        found = ", ".join(name for name, needs_mask in settings_.items() if needs_mask)
        if found:
            raise ValueError(_WITHOUT_MASK.format(lost, found))
    return config if metrics == "off" else config.model_copy(update={"metrics": "off"})


def validate_effect(config: MismatchConfig, metrics_asked: bool) -> None:
    """Raises ValueError for settings of which an unpatched tree could do nothing, or not all."""
    without_mask(config, metrics_asked)
    idle = config.objective == "ppo" and not config.terms.rollout_kl_coef
    if config.algorithm == 0 and not config.rejects and idle:
        what = "these settings correct nothing (algorithm 0, no rejection)"
        raise ValueError(_WITHOUT_MASK.format("nothing can be measured", what))
