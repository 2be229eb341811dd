"""What Megatron-LM RL's own arguments and ours say together, and the start-up block."""

from __future__ import annotations

from argparse import Namespace

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.flags import given_flags
from mismatch_plugin.config.values import ignore_mismatch_warnings, lower_epsilon
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import block_lines, resolve
from mismatch_plugin.hooks.hosts import MEGATRON_LM

IS_CORRECTION = "--rl-inference-logprobs-is-correction"
COEFFICIENT = "--rl-importance-sampling-truncation-coef"
HALF_PRECISION = (
    "half precision in Megatron-LM RL, off by up to 0.004 |log p| a token, which adds up over a sequence: apply the "
    "patch of rl_utils.py (mismatch-plugin patch apply --host megatron-lm --optional), or use --batch-invariant-mode"
)


def settings(args: Namespace) -> MismatchConfig:
    """What Megatron's own values and our flags say together.

    Raises: ValueError as `resolve`, and where Megatron would keep the inference log-probs from the loss.
    """
    handed = getattr(args, "mismatch_settings", None)
    config = MismatchConfig.from_args(args) if handed is None else MismatchConfig.build(handed)
    corrects = getattr(args, "rl_inference_logprobs_is_correction", False)
    if corrects and handed is None and not given_flags(args):  # a preset may set nothing, and is a wish all the same
        config = MismatchConfig.build({"use_tis": True})  # Megatron's own means algorithm 2 with token weights
    low, high = getattr(args, "grpo_clamp_eps_lower", None), getattr(args, "grpo_clamp_eps_upper", None)
    low = None if low is None else lower_epsilon(low, "grpo_clamp_eps_lower")
    kl, entropy = getattr(args, "grpo_kl_beta", None), getattr(args, "grpo_entropy_term_weight", None)
    terms = {"kl_coef": kl, "kl_type": "k3" if kl else None, "entropy_coef": entropy}
    coefficient = getattr(args, "rl_importance_sampling_truncation_coef", None)
    sections = {
        "ppo": {} if config.ratio_bounds is None else {"eps_clip_low": low, "eps_clip_high": high},
        "terms": terms,
        "tis": {"upper_bound": coefficient},
    }
    given = {section: {k: v for k, v in values.items() if v is not None} for section, values in sections.items()}
    if coefficient is not None and not config.weighted:
        raise ValueError(
            f"{COEFFICIENT} {coefficient:g} bounds no weight in algorithm {config.algorithm}: add --use-tis, or leave "
            f"it out."
        )
    with ignore_mismatch_warnings():  # said when the flags were read
        config = resolve(
            MEGATRON_LM,
            config.model_dump(exclude_unset=True),
            {"denominator": "original", "aggregation": "token-mean", **given},
            by_hand=(),
        )
    if config.needs_rollout_log_probs and not corrects:
        raise ValueError(
            f"algorithm {config.algorithm} with these settings needs the inference log-probs, which Megatron-LM RL "
            f"keeps from the loss without {IS_CORRECTION}: add it (the launcher does)."
        )
    return config


def describe(config: MismatchConfig, host_args: Namespace) -> list[str]:
    """Lines for the start-up block."""

    def on(name: str) -> bool:
        return bool(getattr(host_args, name, False))

    each = "each micro-batch's trained tokens (the step's: --calculate-per-token-loss)"
    over = "the step's trained tokens" if on("calculate_per_token_loss") else each
    lines = [f"rollout log-probs: Megatron's inference log-probs, by {IS_CORRECTION}"]
    if config.normalizes:
        scope = config.tis.batch_normalize_scope
        lines.append(f"batch normalisation over: {'the optimizer step' if scope in ('auto', 'step') else scope}")
    if on("rl_use_sequence_packing") and config.rollout_log_prob_policy == "error":
        lines.append("a 0.0 in a bin is a slot that the engine did not report (an appended EOD): ratio 1, as in rows")
    bias = filter_bias(
        top_p=getattr(host_args, "rl_default_top_p", None),
        top_k=getattr(host_args, "rl_default_top_k", None),
        renormalised=getattr(host_args, "inference_dynamic_batching_logprobs_mode", "") == "processed_logprobs",
    )
    if bias:
        bias += ". Megatron-LM RL passes no mask on: leave --rl-default-top-p and --rl-default-top-k out"
    temperature = getattr(host_args, "rl_default_temperature", 1.0)
    notes = {
        f"log-probs are {HALF_PRECISION}; nothing to do where that is done": (on("bf16") or on("fp16"))
        and sums_tokens(config),
        f"temperature {temperature:g}: Megatron-LM RL divides no logits by it, so ratios hold for raw ones": (
            temperature != 1.0
        ),
    }
    return block_lines(
        config,
        lines,
        divided=f"as in Megatron: by {over}; rejected tokens still count",
        second_pass="yes (in every algorithm, and one for the reference)",
        filtered=bias,
        length=getattr(host_args, "inference_max_seq_length", None),
        notes=[note for note, there in notes.items() if there],
        leave_out=("invalid rollout", "gate: "),
    )


def sums_tokens(config: MismatchConfig) -> bool:
    """True where log-ratios are added up over a sequence, and rounding with them, or GSPO's narrow clip sees it."""
    weights = config.weighted and config.unit.multiplies
    return weights or config.policy_objective == "gspo" or any(c.unit.multiplies for c in config.criteria)
