"""Metrics in the form that NeMo-RL adds up: a sum over the micro-batch divided by a count of the whole step."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.loss import PolicyLoss
from mismatch_plugin.core.metrics.formulas import State
from mismatch_plugin.core.metrics.registry import PREFIX, means
from mismatch_plugin.core.objectives import kl_to_reference
from mismatch_plugin.limits import SAFETY_BOUND


def summable_metrics(
    result: PolicyLoss, mask: Tensor, global_valid_seqs: Tensor, global_valid_toks: Tensor, kl_type: str
) -> dict[str, float]:
    """This micro-batch's share of every metric that is declared as a mean, and of what NeMo-RL's trainers read.

    Extremes, deviations, quantiles and sample sizes do not add up. A token without a valid log-prob is counted by
    NeMo-RL also where it is only measured and left out: it adds what the declaration says.
    token_mult_prob_error: mean of exp |log π_train − log π_rollout|. gen_kl_error: mean estimate of KL(π_rollout ‖
    π_train), of kind kl_type. sampling_importance_ratio: mean weight, the rejected ones 0. Raises InvalidLogProbError
    where a log-prob is invalid and the policy is `error`. Host syncs: one.
    """
    correction, tokens = result.correction, result.correction.tokens
    own = (
        (tokens.log_ratio.abs().clamp(max=SAFETY_BOUND).exp() * mask.flatten()).sum(),
        (kl_to_reference(-tokens.log_ratio, torch.zeros_like(tokens.log_ratio), kl_type) * mask.flatten()).sum(),
        correction.applied.sum(),
        global_valid_toks.to(tokens.mask),
        global_valid_seqs.to(tokens.mask),
    )
    names = ("_error", "_kl_error", "_weight", "_tokens", "_sequences")
    statistics = result.statistics.with_vector(names, torch.stack([value.double().reshape(()) for value in own]))
    sums, _ = statistics.on_host()
    divisors = {measure: max(sums[f"_{measure}"], 1.0) for measure in ("tokens", "sequences")}
    metrics = {
        "token_mult_prob_error": sums["_error"] / divisors["tokens"],
        "gen_kl_error": sums["_kl_error"] / divisors["tokens"],
        "sampling_importance_ratio": sums["_weight"] / divisors["tokens"],
    }
    state = State(sums, {}, statistics.config)
    for metric, mean, measure in means(statistics.config):
        if state.has(metric.needs):
            left_out = state.count(measure, trained=True) - state.count(measure)
            metrics[PREFIX + metric.name] = (metric.total(state) + mean.left_out * left_out) / divisors[measure]
    return metrics


def normalizers(config: MismatchConfig, token_level: bool) -> dict[str, str]:
    """Metric → name of NeMo-RL's MetricNormalizer, for every metric that may be returned."""
    whole = "TOKENS" if token_level else "SEQUENCES"
    return {
        "loss": whole,
        "kl_penalty": whole,
        "num_valid_samples": "NONE",
        "token_mult_prob_error": "TOKENS",
        "gen_kl_error": "TOKENS",
        "sampling_importance_ratio": "TOKENS",
        **{PREFIX + metric.name: measure.upper() for metric, _, measure in means(config)},
    }
