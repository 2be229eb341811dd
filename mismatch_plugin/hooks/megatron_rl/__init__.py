"""Megatron-LM RL (train_rl.py): drop-in `calculate_grpo_loss` and `get_logprobs`, and the flags.

The patch replaces the two imports of train_rl.py and hands the loss mask over; the launcher makes it in memory.
Nothing of Megatron is imported until a function needs it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.flags import add_arguments, given_flags
from mismatch_plugin.config.values import ignore_mismatch_warnings, lower_epsilon, present
from mismatch_plugin.data.sampling import filter_bias
from mismatch_plugin.hooks.base import Given, Host, Plan, announce, block_lines, peek, resolve
from mismatch_plugin.hooks.hosts import MEGATRON_LM
from mismatch_plugin.hooks.megatron_rl.loss import GrpoTerms, grpo_terms, pack
from mismatch_plugin.hooks.megatron_step import MegatronStep
from mismatch_plugin.parallel.groups import ParallelGroups

IS_CORRECTION = "--rl-inference-logprobs-is-correction"
COEFFICIENT = "--rl-importance-sampling-truncation-coef"


def settings(args: Namespace) -> MismatchConfig:
    """What Megatron's own values and our flags say together. Raises: ValueError as `resolve`, and where Megatron would
    keep the inference log-probs from the loss."""
    handed = getattr(args, "mismatch_settings", None)
    config = MismatchConfig.from_args(args) if handed is None else MismatchConfig.build(handed)
    corrects = getattr(args, "rl_inference_logprobs_is_correction", False)
    if corrects and handed is None and not given_flags(args):  # a preset may set nothing, and is a wish all the same
        config = MismatchConfig.build({"use_tis": True})  # Megatron's own means algorithm 2 with token weights
    own = vars(args)
    low, kl = own.get("grpo_clamp_eps_lower"), own.get("grpo_kl_beta")
    coefficient = own.get("rl_importance_sampling_truncation_coef")
    low = None if low is None else lower_epsilon(low, "grpo_clamp_eps_lower")
    clip = present(eps_clip_low=low, eps_clip_high=own.get("grpo_clamp_eps_upper"))
    theirs = {
        "denominator": "original",
        "aggregation": "token-mean",
        "ppo": {} if config.ratio_bounds is None else clip,
        "terms": present(kl_coef=kl, kl_type="k3" if kl else None, entropy_coef=own.get("grpo_entropy_term_weight")),
        "tis": present(upper_bound=coefficient),
    }
    if coefficient is not None and not config.weighted:
        raise ValueError(
            f"{COEFFICIENT} {coefficient:g} bounds no weight in algorithm {config.algorithm}: add --use-tis, or leave "
            f"it out."
        )
    with ignore_mismatch_warnings():  # said when the flags were read
        config = resolve(MEGATRON_LM, config.model_dump(exclude_unset=True), theirs, by_hand=())
    if config.needs_rollout_log_probs and not corrects:
        raise ValueError(
            f"algorithm {config.algorithm} with these settings needs the inference log-probs, which Megatron-LM RL "
            f"keeps from the loss without {IS_CORRECTION}: add it (the launcher does)."
        )
    return config


def describe(config: MismatchConfig, host_args: Namespace) -> list[str]:
    """Lines for the start-up block."""
    own = vars(host_args)
    each = "each micro-batch's trained tokens (the step's: --calculate-per-token-loss)"
    over = "the step's trained tokens" if own.get("calculate_per_token_loss") else each
    lines = [f"rollout log-probs: Megatron's inference log-probs, by {IS_CORRECTION}"]
    if config.normalizes:
        scope = config.tis.batch_normalize_scope
        lines.append(f"batch normalisation over: {'the optimizer step' if scope in ('auto', 'step') else scope}")
    if own.get("rl_use_sequence_packing") and config.rollout_log_prob_policy == "error":
        lines.append("a 0.0 in a bin is a slot that the engine did not report (an appended EOD): ratio 1, as in rows")
    bias = filter_bias(
        top_p=own.get("rl_default_top_p"),
        top_k=own.get("rl_default_top_k"),
        renormalised=own.get("inference_dynamic_batching_logprobs_mode") == "processed_logprobs",
    )
    if bias:
        bias += ". Megatron-LM RL passes no mask on: leave --rl-default-top-p and --rl-default-top-k out"
    temperature = own.get("rl_default_temperature", 1.0)
    # Log-ratios that are added up over a sequence, and rounding with them; GSPO's narrow clip sees it, too.
    units = [config.unit] * config.weighted + [criterion.unit for criterion in config.criteria]
    notes = list[str]()
    if (own.get("bf16") or own.get("fp16")) and (
        config.policy_objective == "gspo" or any(unit.multiplies for unit in units)
    ):
        notes.append(
            "log-probs are half precision in Megatron-LM RL, off by up to 0.004 |log p| a token, which adds up over a "
            "sequence: apply the patch of rl_utils.py (mismatch-plugin patch apply --host megatron-lm --optional), or "
            "use --batch-invariant-mode; nothing to do where that is done"
        )
    if temperature != 1.0:
        notes.append(f"temperature {temperature:g}: Megatron-LM RL divides no logits by it: ratios hold for raw ones")
    return block_lines(
        config,
        lines,
        divided=f"as in Megatron: by {over}; rejected tokens still count",
        second_pass="yes (in every algorithm, and one for the reference)",
        filtered=bias,
        length=own.get("inference_max_seq_length"),
        notes=notes,
        leave_out=("invalid rollout", "gate: "),
    )


class _Run:
    """What this process keeps from one call to the next: the configuration, Megatron's functions, the step."""

    handed_over: dict[str, Any] | None = None
    args: Namespace | None = None
    config: MismatchConfig | None = None

    def __init__(self) -> None:
        self.step = MegatronStep(_log, is_first=_is_first)


def data_groups() -> ParallelGroups:
    """The groups of a running Megatron-LM. Under context parallelism it holds whole sequences on every rank of the
    group, so that statistics are summed over DP alone."""
    groups = ParallelGroups.from_megatron()
    return ParallelGroups(tp=groups.tp, dp=groups.dp, dp_cp=groups.dp, pp=groups.pp)


def _is_first(groups: ParallelGroups) -> bool:
    """The rank of the last stage that is first in its DP and TP groups, and in its context-parallel group."""
    from megatron.core import parallel_state

    ranks = [group.rank() for group in (groups.dp, groups.tp) if group is not None]
    return not any(ranks) and parallel_state.get_context_parallel_rank() == 0


def _log(args: Any, metrics: dict[str, float], number: int, first: bool) -> None:
    """To Megatron's TensorBoard and W&B writers where this rank has one."""
    training = import_module("megatron.training")
    board, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
    if board is not None:
        for name, value in metrics.items():
            board.add_scalar(name, value, number)
    if wandb:
        wandb.log(metrics, number)


RUN = _Run()


def extra_args_provider(host_provider: Callable[[ArgumentParser], ArgumentParser] | None = None) -> Callable[..., Any]:
    """Megatron's extra_args_provider with our flags added to the host's own: parse_args(extra_args_provider=…). Under
    the launcher, which has read our flags already, it sets `mismatch_settings` on the Namespace as well."""

    def provider(parser: ArgumentParser) -> ArgumentParser:
        parser = add_arguments(parser if host_provider is None else host_provider(parser))
        if RUN.handed_over is not None:
            parser.set_defaults(mismatch_settings=RUN.handed_over)
        return parser

    return provider


def start(args: Namespace) -> None:
    """For a patched train_rl.py, right after its arguments are parsed: refuse what cannot run, by SystemExit with one
    sentence, and say what will."""
    if RUN.handed_over is not None:
        return  # the launcher has said it
    try:
        lines = describe(settings(args), args)
    except ValueError as error:
        raise SystemExit(f"mismatch_plugin: {error}") from None
    if getattr(args, "rank", 0) == 0:
        announce(MEGATRON_LM, lines)


def _current_settings() -> tuple[MismatchConfig, Namespace]:
    """`settings` of megatron's global arguments, built once."""
    args = import_module("megatron.training").get_args()
    if RUN.config is None or RUN.args is not args:
        RUN.args, RUN.config = args, settings(args)
    return RUN.config, args


def get_logprobs(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Megatron's `get_logprobs`; the first call with gradient of a step begins it, on every pipeline stage.

    Raises ValueError where batch normalisation over the step meets another source of gradient: here its factor is known
    after the step in algorithm 2 as well.
    """
    host = import_module("megatron.rl.rl_utils").get_logprobs
    if not RUN.step.begun and not kwargs.get("no_grad", False):
        config, host_args = _current_settings()
        # Megatron's own count, as of its log line: `curr_iteration` is what was done before.
        number = int(getattr(host_args, "curr_iteration", 0)) + 1
        RUN.step.begin(host_args, config, data_groups(), model.config, number, compare=False)
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
    *,
    loss_mask: Tensor,
) -> GrpoTerms:
    """Megatron's `calculate_grpo_loss` with the correction; the same arguments, and the loss mask [b, s − 1].

    Shapes: log-probs [b, s − 1] with advantages [b], or one bin [1, bin − 1] with advantages [sequences] and the
    sequences' starts and lengths in it. ε, β, entropy weight and is_truncation_coef are in the settings
    already, which `settings` read from Megatron's arguments.
    Returns six tensors of the log-probs' shape, float32 where they were half precision.
    Host syncs and collectives: none.
    """
    config, _ = _current_settings()
    old = old_logprobs.to(current_logprobs.device)
    packed = pack(config, old, inference_logprobs, advantages, loss_mask, seq_starts, seq_lengths)
    terms, statistics = grpo_terms(
        current_logprobs, ref_logprobs, packed, config, RUN.step.factor(config), RUN.step.thresholds
    )
    if torch.is_grad_enabled():
        RUN.step.add(statistics)
    return terms


# The launcher ---------------------------------------------------------------------------------------------------------

_NO_CORRECTION = "--no-rl-inference-logprobs-is-correction"
_SWITCH: dict[str, Any] = {"action": "store_true", "default": False}
TABLE: dict[str, dict[str, Any]] = {
    "--grpo-clamp-eps-lower": {"type": float, "default": 0.01},
    "--grpo-clamp-eps-upper": {"type": float, "default": 0.01},
    "--grpo-kl-beta": {"type": float, "default": 0.001},
    "--grpo-entropy-term-weight": {"type": float, "default": 0.0},
    COEFFICIENT: {"type": float, "default": None},
    "--rl-default-temperature": {"type": float, "default": 1.0},
    "--rl-default-top-p": {"type": float, "default": 0.0},
    "--rl-default-top-k": {"type": int, "default": -1},
    "--inference-max-seq-length": {"type": int, "default": 2560},
    "--inference-dynamic-batching-logprobs-mode": {"type": str, "default": "raw_logprobs"},
    **dict.fromkeys(("--rl-use-sequence-packing", "--calculate-per-token-loss", "--bf16", "--fp16"), _SWITCH),
    **dict.fromkeys((IS_CORRECTION, _NO_CORRECTION), _SWITCH),
}
FLAGS = frozenset(TABLE)


def plan(host: Host, given: Given, script: Path | None) -> Plan:
    """The run of train_rl.py. Raises: ValueError where Megatron's own correction flags and ours disagree."""
    if not given.flags:
        return Plan.untouched(host, given)
    args, _ = peek(given.host_argv, TABLE)
    if args.no_rl_inference_logprobs_is_correction:
        raise ValueError(
            f"{_NO_CORRECTION} keeps the inference log-probs from the loss: leave it out, as the launcher sets "
            f"the opposite."
        )
    corrects, coefficient = args.rl_inference_logprobs_is_correction, args.rl_importance_sampling_truncation_coef
    for flag, there in {IS_CORRECTION: corrects, COEFFICIENT: coefficient is not None}.items():
        if there and not given.config.use_tis:
            raise ValueError(
                f"{flag} weighs the loss (algorithm 2), but the plugin's flags choose algorithm "
                f"{given.config.algorithm}: add --use-tis, or leave {flag} out (the launcher adds what it needs)."
            )
    added = () if corrects else (IS_CORRECTION,)
    args.rl_inference_logprobs_is_correction, args.mismatch_settings = True, given.settings
    config = settings(args)
    lines = tuple(describe(config, args))
    return Plan((*given.host_argv, *added), added, lines, partial(setattr, RUN, "handed_over", given.settings), config)
