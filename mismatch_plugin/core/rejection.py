"""Rejection: what a criterion measures at each token, and which tokens and sequences it leaves.

References: Schulman 2020, "Approximating KL divergence" (k1, k2, k3); arXiv 2602.04879 (tv, binary_kl, away);
KPop 2026 (binary_kl in both directions); arXiv 2512.23075 (maximum over the sequence); DeepSeek-V3.2, arXiv 2512.02556
(negative); arXiv 2510.01161 (M2PO: a budget on the mean).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import Column, histogram, segment_max
from mismatch_plugin.core.units import outside_bounds
from mismatch_plugin.core.validity import Tokens, select_again
from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config import Criterion, MismatchConfig

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
    return binary_kl(train_T, rollout_T)


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


CONDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "negative": lambda advantages, log_ratio: advantages < 0,
    "away": lambda advantages, log_ratio: torch.where(advantages > 0, log_ratio, -log_ratio) > 0,
}
"""Condition → (advantages, log-ratio) → bool, where it is judged; `any` is none. Under away the gradient of −A log π
moves π further from π_rollout: up where A > 0 and l > 0, down where A ≤ 0 and l < 0."""


@dataclass(frozen=True, eq=False)
class RejectionInputs:
    """What criteria and the veto judge. [T] without gradient.
    tokens: the log-probs of their policy. advantages: 0 at padding; None where nothing reads them.
    separate_policy: theirs is π_θ while weights and metrics are those of π_old, so no sum can be shared.
    thresholds: criterion → the upper bound that its budget gives (`Statistics.thresholds`), 0-d.
    """

    tokens: Tokens
    advantages: Tensor | None
    separate_policy: bool
    thresholds: Mapping[str, Tensor]

    def values(self, criterion: Criterion) -> Tensor:
        """What the criterion measures at each token."""
        tokens = self.tokens
        return token_statistic(criterion.statistic, tokens.log_ratio, tokens.train, tokens.rollout)

    def column(self, criterion: Criterion) -> str:
        """The name of its sum over a sequence."""
        return ("judged_" if self.separate_policy else "") + (
            "log_ratio" if criterion.in_log_space else criterion.statistic
        )

    def outside(self, criterion: Criterion) -> Tensor:
        """[T] bool: response tokens that a token criterion judges and rejects."""
        values = self.values(criterion)
        if criterion.name in self.thresholds:  # above 0, where padding is; no lower bound, no condition (`Criterion`)
            return values > self.thresholds[criterion.name]
        outside = outside_bounds(values, *criterion.log_bounds, padding=self.tokens.padding)
        return _where_judged(criterion, outside, self.advantages, self.tokens.log_ratio)


def _where_judged(criterion: Criterion, outside: Tensor, advantages: Tensor | None, log_ratio: Tensor) -> Tensor:
    condition = CONDITIONS.get(criterion.condition)
    if condition is None:
        return outside
    assert advantages is not None  # validate_fields
    return outside.logical_and_(condition(advantages, log_ratio))


def rejection_inputs(
    config: MismatchConfig,
    packed: PackedSequences,
    tokens: Tokens,
    current_T: Tensor | None,
    thresholds: Mapping[str, Tensor] | None = None,
) -> RejectionInputs:
    """What this batch's criteria judge. current_T: [T] log π_θ, read where `config.rejects_on_current_policy`; l is 0
    where it is invalid. Raises ValueError where it is missing, or thresholds are of other criteria."""
    advantages = None
    if config.advantage_readers:
        assert packed.advantages is not None  # validate_fields
        advantages = packed.advantages.masked_fill(tokens.padding, 0.0)
    separate = config.rejects_on_current_policy
    if separate and current_T is None:
        raise ValueError(
            "log_probs is missing: under rs.policy current criteria and veto judge log π_θ: pass it to correct, or "
            "choose rs.policy auto, which judges old_log_probs."
        )
    judged = select_again(tokens, current_T) if separate and current_T is not None else tokens
    budgets = [criterion.name for criterion in config.budgets]
    if thresholds and not (isinstance(thresholds, Mapping) and thresholds.keys() <= {*budgets}):
        raise ValueError(
            f"thresholds, a {type(thresholds).__name__}, is not of these settings: pass Statistics.thresholds of the "
            f"step before, with one for each budget ({', '.join(budgets) or 'there is none'})."
        )
    return RejectionInputs(judged, advantages, separate, thresholds or {})


def stale_tokens(config: MismatchConfig, packed: PackedSequences) -> Tensor | None:
    """[T] bool: sampled more than `rs.max_staleness` weight versions before `trainer_version` (padding: anything); None
    without that limit. Host syncs: none."""
    if config.rs.max_staleness is None:
        return None
    assert packed.weight_versions is not None and packed.trainer_version is not None  # validate_fields
    return packed.weight_versions < packed.trainer_version - config.rs.max_staleness


def reject_tokens(config: MismatchConfig, judged: RejectionInputs, stale_T: Tensor | None) -> dict[str, Tensor]:
    """For each token-level criterion, by name, and for `staleness`: [T] bool, True where a response token goes."""
    outside = {criterion.name: judged.outside(criterion) for criterion in config.criteria if criterion.unit.per_token}
    if stale_T is not None:
        outside["staleness"] = stale_T.masked_fill(judged.tokens.padding, False)
    return outside


def rejection_columns(config: MismatchConfig, judged: RejectionInputs, has_k3: bool) -> Iterator[Column]:
    """What is summed per sequence for the sequence criteria, the veto and dropped sequences, 0 at padding. Sums of
    π_train's l are there already, and with `has_k3` (the metrics need it) those of its k3."""
    tokens = judged.tokens
    there = {"log_ratio", "k3"} if has_k3 else {"log_ratio"}
    of_sequences = [criterion for criterion in config.criteria if not criterion.unit.per_token]
    for name, criterion in {judged.column(c): c for c in of_sequences if c.unit.aggregate != "max"}.items():
        if name not in there:
            yield Column(name, judged.values(criterion))
    by_sign = config.weighs_by_sign and not config.unit.one_ratio_per_token
    if judged.advantages is not None and (by_sign or any(c.condition != "any" for c in of_sequences)):
        yield Column("advantage", judged.advantages)
    if config.rs.veto_threshold is not None:
        yield Column("catastrophic", tokens.log_ratio < math.log(config.rs.veto_threshold))
    if config.rollout_log_prob_policy == "drop-sequence" and tokens.defective is not None:
        yield Column("invalid", tokens.defective)


def sequence_maxima(config: MismatchConfig, judged: RejectionInputs, offsets: Tensor) -> dict[str, Tensor]:
    """What the sequence_max criteria compare of the local tokens, [N] by name."""
    maxima = {}
    for criterion in config.criteria:
        if criterion.unit.aggregate == "max":
            value = judged.values(criterion)
            # The other statistics are not negative, so the zeros at padding do no harm.
            padded = value.masked_fill(judged.tokens.padding, -torch.inf) if criterion.in_log_space else value
            maxima[criterion.name] = segment_max(padded, offsets)
    return maxima


def reject_sequences(
    config: MismatchConfig,
    judged: RejectionInputs,
    sums_N: dict[str, Tensor],
    means_N: dict[str, Tensor],
    maxima_N: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For each sequence criterion, by name, and for `veto` and `invalid`: [N] bool, True where it rejects; and what
    each criterion compared, [N].
    sums_N, means_N: Σ m x and Σ m x / Σ m of each column (`RejectionInputs.column`); maxima_N by criterion name.
    What a sequence without response tokens gets is arbitrary: it counts nowhere.
    """
    outside, values = {}, {}
    for criterion in config.criteria:
        if criterion.unit.per_token:
            continue
        if criterion.unit.aggregate == "max":
            value = maxima_N[criterion.name]
        else:
            value = (sums_N if criterion.unit.aggregate == "sum" else means_N)[judged.column(criterion)]
        values[criterion.name] = value
        lower, upper = criterion.log_bounds
        rejected = outside_bounds(value, lower, judged.thresholds.get(criterion.name, upper))
        outside[criterion.name] = _where_judged(criterion, rejected, sums_N.get("advantage"), value)
    if config.rs.veto_threshold is not None:
        outside["veto"] = sums_N["catastrophic"] > 0
    if "invalid" in sums_N:
        outside["invalid"] = sums_N["invalid"] > 0
    return outside, values


BUDGET_BINS = 2048
BUDGET_SCALE = 1e-8
BUDGET_LAST = 1e12
BUDGET_EDGE = math.asinh(BUDGET_LAST / BUDGET_SCALE)
"""Bins of a statistic x ≥ 0 are equal in asinh(x / 1e-8): 2.3 % of x wide from 1e-7 to 1e12; the last has what is
beyond."""


def budget_histogram(values: Tensor, counted: Tensor) -> Tensor:
    """How many of a criterion's values lie in each bin, [2048] float64. counted: bool, which. Host syncs: none."""
    place = values.double().div(BUDGET_SCALE).asinh_().clamp_(0.0, BUDGET_EDGE)
    return histogram(place.masked_fill_(counted.logical_not(), -1.0), BUDGET_BINS, 0.0, BUDGET_EDGE)


def budget_threshold(counts: Tensor, criterion: Criterion) -> Tensor:
    """The upper bound of a criterion with a budget for the step after these counts: 0-d float64, never below its own.

    share q: the smallest edge of a bin above which at most q of the units lie.
    mean τ: the largest edge below which their mean is at most τ, each at the upper edge of its bin (M2PO); what
        is in the lowest bin always stays.
    counts: [2048] of `budget_histogram`, summed over the whole step, so that the bound is the same for every split.
    inf where nothing is to be rejected; the criterion's own bound where nothing was counted. Host syncs: none.
    """
    places = torch.arange(1, BUDGET_BINS + 1, dtype=counts.dtype, device=counts.device)
    edges = places.mul_(BUDGET_EDGE / BUDGET_BINS).sinh_().mul_(BUDGET_SCALE)
    below = counts.cumsum(0)
    open_ended = edges.clone()
    open_ended[-1] = math.inf
    if criterion.share is not None:
        fits = below >= (1.0 - criterion.share) * below[-1]
        threshold = open_ended.masked_fill(fits.logical_not(), math.inf).amin()
    else:
        fits = (counts * edges).cumsum(0) <= (criterion.mean or 0.0) * below
        threshold = open_ended.masked_fill(fits.logical_or_(below == counts).logical_not(), 0.0).amax()
    assert criterion.upper_bound is not None  # a budget has one (`Criterion`)
    return torch.where(below[-1] > 0, threshold.clamp_(min=criterion.upper_bound), criterion.upper_bound)
