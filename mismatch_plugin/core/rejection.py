"""Rejection: what a criterion measures at each token, and which tokens and sequences it leaves.

References: Schulman 2020, "Approximating KL divergence" (k1, k2, k3); arXiv 2602.04879 (tv, binary_kl); KPop 2026
(binary_kl in both directions); arXiv 2512.23075 (maximum over the sequence).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from mismatch_plugin.core.segments import Column
from mismatch_plugin.core.tokens import Tokens
from mismatch_plugin.core.weights import outside_bounds
from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

PROBABILITY_FLOOR = 1e-6
"""Probabilities of the binary KL are kept in [1e-6, 1 − 1e-6]: 1 − 1e-8 is 1 in float32, and its log would be −inf."""


def token_statistic(statistic: str, log_ratio_T: Tensor, train_T: Tensor, rollout_T: Tensor) -> Tensor:
    """A criterion's statistic at each token, zero where the log-ratio was masked to zero.

    With l = log π_train − log π_rollout:
    ratio, k1: l
    k2: l²/2
    k3: e^l − 1 − l, l clamped to ±20
    tv: |π_train − π_rollout|
    binary_kl: KL(Bern(π_rollout) ‖ Bern(π_train))
    binary_kl_reverse: KL(Bern(π_train) ‖ Bern(π_rollout))
    log_ratio_T, train_T, rollout_T: [T]; train and rollout must be equal wherever l was masked. Host syncs: none.
    """
    if statistic in ("ratio", "k1"):
        return log_ratio_T
    if statistic == "k2":
        return log_ratio_T.square().mul_(0.5)
    if statistic == "k3":
        return k3(log_ratio_T)
    if statistic == "tv":
        return train_T.exp().sub_(rollout_T.exp()).abs_()
    if statistic == "binary_kl":
        return binary_kl(rollout_T, train_T)
    if statistic == "binary_kl_reverse":
        return binary_kl(train_T, rollout_T)
    raise ValueError(f"statistic {statistic!r} is unknown.")


def k3(log_ratio: Tensor) -> Tensor:
    """e^l − 1 − l with l clamped to ±20: an estimator of KL(π_rollout ‖ π_train) that is never negative."""
    bounded = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return bounded.expm1().sub_(bounded)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(Bern(p) ‖ Bern(q)) = H(p, q) − H(p, p), probabilities kept away from 0 and 1. Six kernels."""
    p, q = torch.stack([log_p, log_q]).exp_().clamp_(PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR).unbind(0)
    cross_entropy = binary_cross_entropy(q, p, reduction="none")
    entropy = torch.ops.aten.binary_cross_entropy.out(p, p, None, 0, out=q)  # q's memory: one tensor less at the peak
    return cross_entropy.sub_(entropy)


def reject_tokens(config: MismatchConfig, tokens: Tokens) -> dict[str, Tensor]:
    """For each token-level criterion, by name: [T] bool, True where a response token is outside its bounds."""
    outside = {}
    for criterion in config.criteria:
        if not criterion.judges_tokens:
            continue
        value = token_statistic(criterion.statistic, tokens.log_ratio, tokens.train, tokens.rollout)
        outside[criterion.name] = outside_bounds(value, *criterion.log_bounds, padding=tokens.padding)
    return outside


def rejection_columns(config: MismatchConfig, tokens: Tokens, has_k3: bool) -> Iterator[Column]:
    """What is summed per sequence for the sequence criteria, the veto and dropped sequences.

    Sums of l, for ratio and k1, are there already, and with `has_k3` (the metrics need it) those of k3. All are 0 at
    padding, as every statistic is.
    """
    for statistic in {c.statistic: None for c in config.criteria if c.aggregate in ("sequence_sum", "sequence_mean")}:
        if statistic not in ("ratio", "k1") and not (statistic == "k3" and has_k3):
            yield Column(statistic, token_statistic(statistic, tokens.log_ratio, tokens.train, tokens.rollout))
    if config.rs.veto_threshold is not None:
        yield Column("catastrophic", tokens.log_ratio < math.log(config.rs.veto_threshold))
    if config.rollout_log_prob_policy == "drop-sequence" and tokens.defective is not None:
        yield Column("invalid", tokens.defective)


def maximum_columns(config: MismatchConfig, tokens: Tokens) -> Iterator[tuple[str, Tensor]]:
    """(criterion name, [T]) columns whose maximum over the sequence is judged."""
    for criterion in config.criteria:
        if criterion.aggregate == "sequence_max":
            value = token_statistic(criterion.statistic, tokens.log_ratio, tokens.train, tokens.rollout)
            # The other statistics are not negative, so the zeros at padding do no harm.
            yield criterion.name, value.masked_fill(tokens.padding, -torch.inf) if criterion.in_log_space else value


def reject_sequences(
    config: MismatchConfig, sums_N: dict[str, Tensor], means_N: dict[str, Tensor], maxima_N: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For each sequence criterion, by name, and for `veto` and `invalid`: [N] bool, True where it rejects; and what
    each criterion compared, [N].

    sums_N, means_N: Σ m x and Σ m x / Σ m of each column ("log_ratio" for ratio and k1); maxima_N by criterion name.
    What a sequence without response tokens gets is arbitrary: it counts nowhere.
    """
    outside, values = {}, {}
    for criterion in config.criteria:
        if criterion.judges_tokens:
            continue
        if criterion.aggregate == "sequence_max":
            value = maxima_N[criterion.name]
        else:
            columns = sums_N if criterion.aggregate == "sequence_sum" else means_N
            value = columns["log_ratio" if criterion.in_log_space else criterion.statistic]
        values[criterion.name] = value
        outside[criterion.name] = outside_bounds(value, *criterion.log_bounds)
    if config.rs.veto_threshold is not None:
        outside["veto"] = sums_N["catastrophic"] > 0
    if "invalid" in sums_N:
        outside["invalid"] = sums_N["invalid"] > 0
    return outside, values
