"""Megatron-LM RL (train_rl.py): drop-in `calculate_grpo_loss` and `get_logprobs`, and the flags.

The patch replaces the two imports of train_rl.py and hands the loss mask over; the launcher replaces the functions in
`megatron.rl.rl_utils` instead, and then there is no loss mask: token level only, the rest is refused.
Nothing of Megatron is imported until a function needs it.
"""

from __future__ import annotations

import math
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig, MismatchWarning
from mismatch_plugin.config.flags import add_arguments, given_flags
from mismatch_plugin.config.values import dotted_fields_set, merge
from mismatch_plugin.core.units import units_of
from mismatch_plugin.hooks.megatron_rl.loss import (
    WITHOUT_MASK,
    Clip,
    GrpoTerms,
    grpo_terms,
    needs_counting,
    needs_mask,
    pack,
)
from mismatch_plugin.hooks.megatron_rl.step import StepEnd, data_groups, factor_of
from mismatch_plugin.hooks.version import version_line

# Setting → (Megatron's argument, its flag): Megatron's value is the one, ours may repeat it and not contradict it.
OWNED = {
    "ppo.eps_clip_low": ("grpo_clamp_eps_lower", "--grpo-clamp-eps-lower"),
    "ppo.eps_clip_high": ("grpo_clamp_eps_upper", "--grpo-clamp-eps-upper"),
    "terms.kl_coef": ("grpo_kl_beta", "--grpo-kl-beta"),
    "terms.entropy_coef": ("grpo_entropy_term_weight", "--grpo-entropy-term-weight"),
    "tis.upper_bound": ("rl_importance_sampling_truncation_coef", "--rl-importance-sampling-truncation-coef"),
}
_FIXED = {"denominator": ("original", "auto"), "aggregation": ("token-mean",), "terms.kl_type": ("k3",)}
_IS_CORRECTION = "--rl-inference-logprobs-is-correction"
_HALF = (torch.bfloat16, torch.float16)


def settings(args: Namespace) -> MismatchConfig:
    """What Megatron's own values and our flags say together.

    Raises: ValueError where the two contradict each other, where Megatron owns what a flag asks for (denominator,
    aggregation, KL estimator), or where Megatron would keep the inference log-probs from the loss.
    """
    handed = getattr(args, "mismatch_settings", None)
    config = MismatchConfig.from_args(args) if handed is None else MismatchConfig.build(handed)
    given = config.model_dump(exclude_unset=True)
    # A preset may set nothing (`disabled`), and is a wish all the same.
    ours = handed is not None or bool(given_flags(args))
    if not ours and getattr(args, "rl_inference_logprobs_is_correction", False):
        # None of our flags: Megatron's own mean algorithm 2 with token weights, bounded if there is a coefficient.
        given = {"use_tis": True, "tis": {"upper_bound": math.inf}}
        if getattr(args, "rl_importance_sampling_truncation_coef", None) is not None:
            given["tis"] = {}
        config = MismatchConfig.build(given)
    asked = dotted_fields_set(given)
    for path, allowed in _FIXED.items():
        value = _value(given, path)
        if path in asked and value not in allowed:
            raise ValueError(
                f"{path} {value} is not Megatron-LM RL's: its loss_func adds up tokens and divides by the trained ones "
                f"({path} {allowed[0]}). Leave it out."
            )
    own: dict[str, Any] = {"denominator": "original", "ppo": {}, "terms": {}, "tis": {}}
    for path, (name, flag) in OWNED.items():
        value = getattr(args, name, None)
        if value is None or (path == "tis.upper_bound" and not config.weighted):
            continue
        if path in asked and float(_value(given, path)) != float(value):
            raise ValueError(
                f"{path} {_value(given, path):g} contradicts {flag} {value:g}: give {flag} alone, it holds for both."
            )
        section, field = path.split(".")
        own[section][field] = float(value)
    if own["terms"].get("kl_coef"):
        own["terms"]["kl_type"] = "k3"
    if config.algorithm == 3:
        own["ppo"] = {}
    coefficient = getattr(args, "rl_importance_sampling_truncation_coef", None)
    if coefficient is not None and not config.weighted:
        raise ValueError(
            f"--rl-importance-sampling-truncation-coef {coefficient:g} bounds no weight in algorithm "
            f"{config.algorithm}: add --use-tis, or leave it out."
        )
    if (config.algorithm or config.rejects) and not getattr(args, "rl_inference_logprobs_is_correction", False):
        raise ValueError(
            f"algorithm {config.algorithm} with these settings needs the inference log-probs, which Megatron-LM RL "
            f"keeps from the loss without {_IS_CORRECTION}: add it (the launcher does)."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)
        return MismatchConfig.build(merge(given, own))


def describe(config: MismatchConfig, host_args: Namespace, masked: bool = True) -> list[str]:
    """Lines for the start-up block. masked: the loss mask reaches the loss (patched tree)."""
    said = ("algorithm", "weights: ", "rejection: ", "policies: ")
    lines = [line for line in config.describe().splitlines() if line.startswith(said)]
    per_token = getattr(host_args, "calculate_per_token_loss", False)
    over = "of the whole step" if per_token else "of each micro-batch (add --calculate-per-token-loss for the step's)"
    lines.append(f"denominator: Megatron's own, the trained tokens {over}; rejected tokens stay in it")
    if config.weighted and config.tis.batch_normalize:
        scope = config.tis.batch_normalize_scope
        lines.append(f"batch normalisation over: {'the optimizer step' if scope in ('auto', 'step') else scope}")
    lines.append("old log-probs: Megatron computes them before every step, and the reference's, whatever the algorithm")
    lines.append(f"rollout log-probs: {_IS_CORRECTION} hands Megatron's inference log-probs to the loss")
    if getattr(host_args, "rl_use_sequence_packing", False) and config.rollout_log_prob_policy == "error":
        lines.append("a 0.0 in a bin is a slot that the engine did not report (an appended EOD): ratio 1, as in rows")
    if not masked:
        lines.append("no loss mask without the patch: token level only, no metrics")
    if (getattr(host_args, "bf16", False) or getattr(host_args, "fp16", False)) and _sums_tokens(config):
        lines.append(f"log-probs are {HALF_PRECISION}; nothing to do where that is done")
    temperature = getattr(host_args, "rl_default_temperature", 1.0)
    if temperature != 1.0:
        lines.append(
            f"temperature {temperature:g}: Megatron-LM RL divides no logits by it, so ratios hold for raw ones"
        )
    return lines


HALF_PRECISION = (
    "half precision in Megatron-LM RL, off by up to 0.004 |log p| a token, which adds up over a sequence: apply the "
    "patch of rl_utils.py (mismatch-plugin patch apply --host megatron-lm --optional), or use --batch-invariant-mode"
)


def extra_args_provider(host_provider: Callable[[ArgumentParser], ArgumentParser] | None = None) -> Callable[..., Any]:
    """Megatron's extra_args_provider with our flags added to the host's own: parse_args(extra_args_provider=…).

    Under the launcher, which has read our flags already, it sets `mismatch_settings` on the Namespace as well.
    """

    def provider(parser: ArgumentParser) -> ArgumentParser:
        parser = add_arguments(parser if host_provider is None else host_provider(parser))
        if _Run.handed_over is not None:
            parser.set_defaults(mismatch_settings=_Run.handed_over)
        return parser

    return provider


def install(settings_given: dict[str, Any], patched: bool) -> None:
    """What the launcher does before train_rl.py runs: hand the settings over, and put our functions in place.

    patched: train_rl.py imports them itself.
    """
    _Run.handed_over = settings_given
    if patched:
        return
    rl_utils: Any = import_module("megatron.rl.rl_utils")
    inference: Any = import_module("megatron.inference.utils")
    _Run.host_get_logprobs = rl_utils.get_logprobs
    rl_utils.get_logprobs, rl_utils.calculate_grpo_loss = get_logprobs, calculate_grpo_loss
    inference.add_inference_args = extra_args_provider(inference.add_inference_args)


def start(args: Namespace) -> None:
    """For a patched train_rl.py, right after its arguments are parsed: refuse what cannot run, say what will.

    Raises: SystemExit with one sentence.
    """
    if _Run.handed_over is not None:
        return  # the launcher has said it
    try:
        lines = [*describe(settings(args), args), version_line("megatron-lm")]
    except ValueError as error:
        raise SystemExit(f"mismatch_plugin: {error}") from None
    if getattr(args, "rank", 0) == 0:
        print("\n".join(["mismatch_plugin on megatron-lm:", *(f"  {line}" for line in lines)]), flush=True)


class _Run:
    """What this process keeps from one call to the next: the configuration, the step's end, Megatron's functions."""

    handed_over: dict[str, Any] | None = None
    args: Namespace | None = None
    config: MismatchConfig | None = None
    step_end: StepEnd | None = None
    host_get_logprobs: Callable[..., Tensor] | None = None
    warned = False


def current_settings() -> tuple[MismatchConfig, Namespace]:
    """`settings` of megatron's global arguments, built once."""
    args = import_module("megatron.training").get_args()
    if _Run.config is None or _Run.args is not args:
        _Run.args, _Run.config = args, settings(args)
    return _Run.config, args


def get_logprobs(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Megatron's `get_logprobs`; the first call with gradient attaches the step's end to the model's config."""
    host = _Run.host_get_logprobs or import_module("megatron.rl.rl_utils").get_logprobs
    if _Run.step_end is None and not kwargs.get("no_grad", False):
        config, host_args = current_settings()
        _Run.step_end = StepEnd(config, model.config, data_groups(), host_args)
    return host(model, *args, **kwargs)


def calculate_grpo_loss(
    current_logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    clamp_eps_lower: float,
    clamp_eps_upper: float,
    kl_beta: float,
    entropy_weight: float,
    inference_logprobs: Tensor | None = None,
    is_truncation_coef: float | None = None,
    seq_starts: Sequence[int] | None = None,
    seq_lengths: Sequence[int] | None = None,
    loss_mask: Tensor | None = None,
) -> GrpoTerms:
    """Megatron's `calculate_grpo_loss` with the correction; the same arguments, and the loss mask [b, s − 1].

    Shapes: log-probs [b, s − 1] with advantages [b], or one bin [1, bin − 1] with advantages [sequences] and the
    sequences' starts and lengths in it. is_truncation_coef is `tis.upper_bound` (`settings` reads the argument).
    Returns six tensors of the log-probs' shape, float32 where they were half precision.
    Raises: ValueError where a setting needs the loss mask and there is none. Host syncs and collectives: none.
    """
    config, _ = current_settings()
    step_end = _Run.step_end
    if loss_mask is None:
        config = without_mask(config)
        if step_end is not None:
            step_end.config = config
    if not current_logprobs.shape == old_logprobs.shape == ref_logprobs.shape:
        raise ValueError(
            f"current, old and reference log-probs have shapes {tuple(current_logprobs.shape)}, "
            f"{tuple(old_logprobs.shape)} and {tuple(ref_logprobs.shape)}: they must be those of the same tokens."
        )
    if old_logprobs.dtype in _HALF and _sums_tokens(config) and not _Run.warned:
        _Run.warned = True
        warnings.warn(f"log-probs are {HALF_PRECISION}.", MismatchWarning, stacklevel=2)
    packed = pack(
        config,
        shape=current_logprobs.shape,
        old=old_logprobs.to(current_logprobs.device),
        rollout=inference_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        seq_starts=seq_starts,
        seq_lengths=seq_lengths,
    )
    clip = Clip(clamp_eps_lower, clamp_eps_upper, kl_beta, entropy_weight)
    terms, statistics = grpo_terms(current_logprobs, ref_logprobs, packed, config, clip, factor_of(step_end))
    if step_end is not None and torch.is_grad_enabled():
        step_end.add(statistics)
    return terms


def without_mask(config: MismatchConfig) -> MismatchConfig:
    """The configuration of a loss without mask: metrics off.

    Raises: ValueError where a setting needs the mask to judge a sequence, or asks for what is then not measured.
    """
    for needed, lost in (
        (needs_mask(config), "only single tokens can be judged"),
        (needs_counting(config), "nothing can be measured"),
    ):
        if needed:
            raise ValueError(WITHOUT_MASK.format(lost, ", ".join(needed)))
    return config if config.metrics == "off" else config.model_copy(update={"metrics": "off"})


def _sums_tokens(config: MismatchConfig) -> bool:
    """True where log-ratios are added up over a sequence, so that rounding adds up too."""
    weights = config.weighted and units_of(config).multiplies
    return weights or any(c.aggregate == "sequence_sum" for c in config.criteria)


def _value(given: dict[str, Any], path: str) -> Any:
    part: Any = given
    for name in path.split("."):
        part = part.get(name) if isinstance(part, dict) else None
    return part
