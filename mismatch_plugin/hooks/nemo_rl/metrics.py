"""Metrics in the form that NeMo-RL adds up: a sum over the micro-batch divided by a count of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.loss import PolicyLoss
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.core.units import acting_bounds

_TOKENS, _SEQUENCES, _NONE = "TOKENS", "SEQUENCES", "NONE"
_Sums = Mapping[str, float]


def _left_out(sums: _Sums, what: str = "tokens") -> float:
    """Tokens (sequences) without a valid log-prob where these are only measured: here they count with ratio 1."""
    return sums.get(f"trained_{what}", sums[f"one@{what}"]) - sums[f"one@{what}"]


# Metric → (count that divides it, the row it is formed from, its sum). Means only: extremes, deviations, quantiles and
# sample sizes do not add up.
_MEANS: dict[str, tuple[str, str, Callable[[_Sums], float]]] = {
    "kl": (_TOKENS, "log_ratio", lambda s: -s["log_ratio@tokens"]),
    "k3_kl": (_TOKENS, "k3", lambda s: s["k3@tokens"]),
    "chi2_token": (_TOKENS, "ratio_squared", lambda s: s["ratio_squared@tokens"] + 2.0 * s["ratio@tokens"]),
    "training_ppl": (_SEQUENCES, "training_ppl", lambda s: s["training_ppl@sequences"]),
    "rollout_ppl": (_SEQUENCES, "rollout_ppl", lambda s: s["rollout_ppl@sequences"]),
    "training_log_ppl": (_SEQUENCES, "train", lambda s: -s["train@sequences"]),
    "rollout_log_ppl": (_SEQUENCES, "rollout", lambda s: -s["rollout@sequences"]),
    "log_ppl_diff": (_SEQUENCES, "log_ratio", lambda s: -s["log_ratio@sequences"]),
    "log_ppl_abs_diff": (_SEQUENCES, "log_ratio_abs", lambda s: s["log_ratio_abs@sequences"]),
    "rollout_is_ratio_mean": (
        _TOKENS,
        "ratio",
        lambda s: s["ratio@tokens"] + s["one@tokens"] + _left_out(s),
    ),  # a row holds ρ − 1
    "rollout_is_masked_fraction": (_TOKENS, "masked", lambda s: s["masked@tokens"]),
    "rollout_is_seq_masked_fraction": (_SEQUENCES, "masked_any", lambda s: s["masked_any@sequences"]),
    "rollout_is_veto_fraction": (_SEQUENCES, "vetoed", lambda s: s["vetoed@sequences"]),
    "accepted_token_fraction": (_TOKENS, "kept", lambda s: s["kept@tokens"] + _left_out(s)),
    "accepted_seq_fraction": (_SEQUENCES, "kept_any", lambda s: s["kept_any@sequences"] + _left_out(s, "sequences")),
    "pg_clipfrac": (_TOKENS, "clip_high", lambda s: s["clip_high"] + s["clip_low"]),
    "pg_clipfrac_lower": (_TOKENS, "clip_high", lambda s: s.get("clip_dual", 0.0)),
    "pg_clipfrac_high_side": (_TOKENS, "clip_high", lambda s: s["clip_high"]),
    "pg_clipfrac_low_side": (_TOKENS, "clip_low", lambda s: s["clip_low"]),
    "ppo_kl": (_TOKENS, "ppo_kl", lambda s: s["ppo_kl"]),
}
_OUTSIDE = {"rollout_is_ratio_fraction_high": "high", "rollout_is_ratio_fraction_low": "low"}


def summable_metrics(
    result: PolicyLoss, mask: Tensor, global_valid_seqs: Tensor, global_valid_toks: Tensor, token_level: bool
) -> dict[str, float]:
    """This micro-batch's share of every metric, under the guide's names and the names that NeMo-RL's trainers read.

    token_mult_prob_error: mean of exp |log π_train − log π_rollout|. sampling_importance_ratio: mean weight, the
    rejected ones 0. Raises InvalidLogProbError where a log-prob is invalid and the policy is `error`. Host syncs: two.
    """
    correction, statistics = result.correction, result.statistics
    statistics.metrics()  # raises
    tokens = correction.tokens
    own = torch.stack(
        [
            (tokens.log_ratio.abs().clamp(max=20.0).exp() * mask.flatten()).sum(),
            (correction.weights * correction.keep).sum(),
            global_valid_seqs.to(tokens.mask).reshape(()),
            global_valid_toks.to(tokens.mask).reshape(()),
        ]
    )
    error, weight, sequences, count = own.double().tolist()
    divisors = {_TOKENS: max(count, 1.0), _SEQUENCES: max(sequences, 1.0)}
    metrics = {
        "token_mult_prob_error": error / divisors[_TOKENS],
        "sampling_importance_ratio": weight / divisors[_TOKENS],
    }
    sums = dict(zip(statistics.sum_names, statistics.sums.tolist(), strict=True))
    for name, (divisor, row, total) in _means(statistics.config).items():
        if row in sums or f"{row}@tokens" in sums:
            metrics[PREFIX + name] = total(sums) / divisors[divisor]
    return metrics


def normalizers(config: MismatchConfig, token_level: bool) -> dict[str, str]:
    """Metric → name of NeMo-RL's MetricNormalizer, for every metric that may be returned."""
    whole = _TOKENS if token_level else _SEQUENCES
    return {
        "loss": whole,
        "kl_penalty": whole,
        "num_valid_samples": _NONE,
        "token_mult_prob_error": _TOKENS,
        "sampling_importance_ratio": _TOKENS,
        **{PREFIX + name: divisor for name, (divisor, _, _) in _means(config).items()},
    }


def _means(config: MismatchConfig) -> dict[str, tuple[str, str, Callable[[_Sums], float]]]:
    """All metrics of this configuration; two are over tokens or sequences as the bounds that act say."""
    row = "ratio" if config.tis.level in ("token", "none") else "unit_ratio"
    means = {**_MEANS, "rollout_is_mean": (_TOKENS, row, lambda s: s[f"{row}@tokens"] + s["one@tokens"] + _left_out(s))}
    square = "unit_square" if config.tis.level == "sequence" else "product_square"
    means["chi2_seq"] = (_SEQUENCES, square, lambda s: s[f"{square}@sequences"] - s["one@sequences"])
    bounds = acting_bounds(config)
    if bounds is not None:
        divisor, measure = (_TOKENS, "tokens") if bounds.level == "token" else (_SEQUENCES, "sequences")
        for name, verdict in _OUTSIDE.items():
            means[name] = (divisor, verdict, lambda s, verdict=verdict: s[f"{verdict}@{measure}"])
    return means
