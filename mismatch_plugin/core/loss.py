"""`token_loss`: the corrected loss of every token, which each host reduces in its own way; `policy_loss` sums it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.core.correction import (
    Correction,
    SequenceGroups,
    compute_correction,
    given_correction,
    validate_config_type,
)
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.objectives import OBJECTIVES, ObjectiveInputs, kl_from_rollout, kl_to_reference
from mismatch_plugin.core.packed import HALF, PackedSequences
from mismatch_plugin.core.segments import Column, spread
from mismatch_plugin.core.validity import SOUND, Tokens, train_is_valid
from mismatch_plugin.limits import SAFETY_BOUND

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


class Term(NamedTuple):
    """A loss next to the policy term. value: [T], as measured. added: [T], what is added times the coefficient."""

    name: str
    value: Tensor
    added: Tensor
    coefficient: float


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """The corrected loss of every token: [T] each, 0 where nothing trains.
    policy: w · keep · objective, with gradient. log_probs: log π_θ, with gradient. advantages: detached.
    selected: bool, the tokens that enter: `loss_mask`, less those whose π_train is invalid. Under the policy `error`
        these stay, so that the loss shows them even before the step's error is raised.
    log_r: log of the ratio that the objective clips, unclamped, with gradient; None where it has none (reinforce).
    """

    policy: Tensor
    selected: Tensor
    log_probs: Tensor
    advantages: Tensor
    log_r: Tensor | None
    correction: Correction
    packed: PackedSequences = field(repr=False)
    config: MismatchConfig = field(repr=False)

    def kl(self) -> Tensor | None:
        """`terms.kl_type` of KL(π_θ ‖ π_ref), with gradient, not weighted; None without ref_log_probs."""
        if self.packed.ref_log_probs is None:
            return None
        reference = torch.where(self.selected, self.packed.ref_log_probs.detach(), 0.0)
        return kl_to_reference(self.log_probs, reference, self.config.terms.kl_type)

    def rollout_kl(self) -> Tensor | None:
        """Penalty `terms.rollout_kl_type` on the distance to π_rollout, with gradient, not weighted; None without
        `terms.rollout_kl_coef`. 0 where a rollout log-prob is invalid."""
        code, rollout, terms = self.correction.tokens.code, self.packed.rollout_log_probs, self.config.terms
        if not terms.rollout_kl_coef or code is None or rollout is None:
            return None
        sound = self.selected.logical_and(code == SOUND)
        sampler = torch.where(sound, rollout.detach(), self.log_probs.detach())
        return kl_from_rollout(self.log_probs, sampler, terms.rollout_kl_type)

    def terms(self) -> Iterator[Term]:
        """Entropy bonus, KL penalties to the reference (weighted if asked) and to the sampler (accepted tokens alone if
        asked), where there is what they need; one at a time, so that few live at once."""
        terms = self.config.terms
        if self.packed.entropy is not None:
            entropy = torch.where(self.selected, self.packed.entropy, 0.0)
            yield Term("entropy", entropy, entropy, -terms.entropy_coef)
        kl = self.kl() if terms.kl_coef or self.config.metrics != "off" else None
        if kl is not None:
            weighted = kl * self.correction.weights.to(kl.dtype) if terms.kl_importance_weighted else kl
            yield Term("kl", kl, weighted, terms.kl_coef)
        distance = self.rollout_kl()
        if distance is not None:
            kept = distance * self.correction.keep.to(distance.dtype) if terms.rollout_kl_on == "accepted" else distance
            yield Term("rollout_kl", distance, kept, terms.rollout_kl_coef)

    def total(self) -> Tensor:
        """policy + Σ coefficient · added, for a host that reduces all of it in one way."""
        total = self.policy
        for term in self.terms():
            if term.coefficient:
                total = total + term.coefficient * term.added
        return total

    def clip_columns(self) -> Iterator[tuple[str, Tensor]]:
        """Tokens where the clip is active, by side; cut by the dual clip; −log r within ±20. None without ratio."""
        if self.log_r is None:
            return
        bounded = self.log_r.detach().clamp(-SAFETY_BOUND, SAFETY_BOUND)
        objective = OBJECTIVES[self.config.policy_objective]
        yield from objective.clipped(bounded.exp(), self.advantages, self.config.ppo)
        yield "ppo_kl", bounded.neg_()


def token_loss(
    log_probs: Tensor,
    packed: PackedSequences,
    config: MismatchConfig,
    groups: SequenceGroups | None = None,
    batch_factor: Tensor | float | None = None,
    weights: Tensor | None = None,
    correction: Correction | None = None,
    thresholds: Mapping[str, Tensor] | None = None,
) -> TokenLoss:
    """The corrected loss per token of the algorithm that the two flags choose; every host's loss is made of it.

    0: PPO-clip(π_θ/π_old)
    1: PPO-clip(π_θ/π_rollout)
    2: w · PPO-clip(π_θ/π_old), w from π_old/π_rollout
    3: −sg(w) A log π_θ, w from π_θ/π_rollout
    Another `objective` takes the place of PPO-clip. π_old is `packed.old_log_probs`, or log_probs.detach() without.

    log_probs: log π_θ with gradient, [T], or [B, S] for a batch from `from_padded` (padding gets zero gradient).
    weights: [T], made elsewhere (verl's driver): they take the place of the correction, and nothing is judged again.
    correction: that of this batch where it is known before (`known_before_loss`), made with batch_factor 1.
    All else, collectives and syncs as `correct`. Gradient: through log_probs and packed.entropy only.
    Raises also ValueError where advantages are missing, or what a term with a coefficient needs.
    """
    validate_batch(packed, config)
    assert packed.advantages is not None
    log_probs = packed.flatten(log_probs, "log_probs")
    if log_probs.dtype in HALF:
        log_probs = log_probs.float()
    current = log_probs.detach()
    old = current if packed.old_log_probs is None else packed.old_log_probs.detach()
    train = current if config.use_rollout_log_probs else old
    objective, advantages = OBJECTIVES[config.policy_objective], packed.advantages.detach()

    def entering(tokens: Tokens) -> ObjectiveInputs:
        selected = packed.loss_mask
        if tokens.code is not None and config.rollout_log_prob_policy != "error":
            selected = selected.logical_and(train_is_valid(tokens.code))
        # Under bypass the selected rollout log-probs are π_θ itself where a value is invalid: ratio 1.
        anchor = tokens.rollout if config.use_rollout_log_probs else old
        return ObjectiveInputs(selected, torch.where(selected, log_probs, 0.0), anchor, advantages, config.ppo)

    def further(tokens: Tokens) -> Iterator[Column]:
        if objective.averages:
            inputs = entering(tokens)
            yield Column("objective", objective.averaged(inputs))
            yield Column("objective_tokens", inputs.selected)

    if correction is not None and batch_factor is not None:
        correction = replace(correction, weights=correction.weights / batch_factor, factor=batch_factor)
    elif correction is None and weights is not None:
        correction = given_correction(weights, train, packed, config, groups, further)
    elif correction is None:
        correction = compute_correction(train, packed, config, groups, batch_factor, current, thresholds, further)
    inputs = entering(correction.tokens)
    selected, advantages_T = inputs.selected, torch.where(inputs.selected, advantages, 0.0)
    if objective.averages:
        mean_N = correction.sums_N["objective"] / correction.sums_N["objective_tokens"].clamp(min=1)
        mean_T = torch.where(selected, spread(mean_N.to(log_probs.dtype), packed.sequence_index), 0.0)
        inputs = inputs._replace(mean=mean_T)
    log_r = objective.log_ratio(inputs)
    losses = objective.loss(inputs._replace(advantages=advantages_T), log_r)
    policy = losses * correction.applied.to(losses.dtype)
    return TokenLoss(policy, selected, inputs.log_probs, advantages_T, log_r, correction, packed, config)


def known_before_loss(config: MismatchConfig) -> bool:
    """Whether `correct` of a batch with π_old is all that its loss needs: neither π_θ nor sums of the objective's."""
    averages = OBJECTIVES[config.policy_objective].averages
    return not (config.use_rollout_log_probs or config.rejects_on_current_policy or averages)


def validate_batch(packed: PackedSequences, config: MismatchConfig) -> None:
    """Raise where the batch lacks what the loss needs."""
    validate_config_type(config)
    if not isinstance(packed, PackedSequences):
        given = type(packed).__name__
        raise TypeError(f"packed is a {given}: policy_loss takes log_probs, then the PackedSequences, then the config.")
    if packed.advantages is None:
        raise ValueError("advantages is missing: policy_loss needs one a token (or a sequence, in from_lists).")
    if config.terms.entropy_coef and packed.entropy is None:
        raise ValueError("entropy is missing: terms.entropy_coef needs the policy's entropy at each token.")
    if config.terms.kl_coef and packed.ref_log_probs is None:
        raise ValueError("ref_log_probs is missing: terms.kl_coef needs the reference policy's log-probs.")


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """Sums over the local tokens, to be divided by their denominators summed over the whole step.
    loss_sum: policy term, 0-d, with gradient. denominator: 0-d int64, tokens or sequences it is divided by (accepted
    ones, or all for `original`). terms: entropy, kl, rollout_kl, coefficient included, 0-d, with gradient.
    terms_denominator: 0-d int64, always the original tokens or sequences, so that rejection does not scale them.
    """

    loss_sum: Tensor
    denominator: Tensor
    terms: dict[str, Tensor]
    terms_denominator: Tensor
    correction: Correction
    statistics: Statistics

    def __repr__(self) -> str:
        sums = {"policy": self.loss_sum, **self.terms}
        shown = ", ".join(f"{name} {value.detach().item():.6g}" for name, value in sums.items())
        return (
            f"PolicyLoss(loss {self.loss.detach().item():.6g} of this batch; sums: {shown}; divided by "
            f"{int(self.denominator)}, terms by {int(self.terms_denominator)})"
        )

    @property
    def loss(self) -> Tensor:
        """The whole loss where this batch is the whole step (of several `step_loss` makes it): loss_sum / denominator
        + Σ terms / terms_denominator."""
        loss = self.loss_sum / self.denominator.clamp(min=1)
        for term in self.terms.values():
            loss = loss + term / self.terms_denominator.clamp(min=1)
        return loss

    @property
    def own_factor(self) -> Tensor | float:
        """The mean weight that this batch was divided by, where the step's takes its place; else 1."""
        factor = self.correction.factor
        return factor if self.statistics.config.normalizes_step and factor is not None else 1.0

    @property
    def undivided(self) -> Tensor:
        """Σ over this batch before any division, 0-d, with gradient: for gradient accumulation, where `backward` runs
        once a micro-batch and `step_loss(results).scale_gradients(…)` divides at the step's end.
        Raises ValueError where terms are divided by something else than the policy term."""
        config = self.statistics.config
        if config.other_terms and (config.normalizes_step or config.changes_denominator):
            divided = "batch normalisation" if config.normalizes_step else "rejection (denominator accepted)"
            raise ValueError(
                f"{' and '.join(config.other_terms)} cannot be accumulated: {divided} divides the policy term alone. "
                f"Call step_loss(results).loss.backward() once, or switch one off."
            )
        return (self.loss_sum * self.own_factor).to(self.loss_sum.dtype) + sum(self.terms.values())


def policy_loss(
    log_probs: Tensor,
    packed: PackedSequences,
    config: MismatchConfig,
    groups: SequenceGroups | None = None,
    batch_factor: Tensor | float | None = None,
    thresholds: Mapping[str, Tensor] | None = None,
) -> PolicyLoss:
    """`token_loss` summed: the corrected policy loss, its terms, and what each is divided by.

    Aggregations:
    token-mean: Σ_t / Σ m
    seq-mean-token-mean: mean over sequences of Σ_t / Σ_seq m
    seq-mean-token-sum: mean over sequences of Σ_t (divided by length_norm if set)
    Micro-batches and ranks of one optimizer step: `step_loss`, which also brings the step's mean weight.
    Warns (UserWarning) where algorithms 0 and 2 have no old_log_probs: then nothing clips. Raises also ValueError for
    `rs.group` without packed.rewards. All else as `token_loss`. Writes nothing: a loop of its own calls
    `report.log.write_step`.
    """
    token = token_loss(log_probs, packed, config, groups, batch_factor, thresholds=thresholds)
    if config.rs.group != "keep" and packed.rewards is None:
        raise ValueError(
            f"rewards is missing: rs.group {config.rs.group} acts in mp.group_advantages(rewards, group_ids, accepted) "
            f"alone. Form the advantages with it, and pass rewards next to them."
        )
    if packed.old_log_probs is None and not config.use_rollout_log_probs and config.policy_objective != "reinforce":
        warnings.warn(
            "old_log_probs is missing, so π_old is π_θ and nothing clips: right for one step per rollout. With "
            "several, pass those from before the first.",
            stacklevel=2,
        )
    result = sum_tokens(token, groups)
    if batch_factor is None and config.normalizes_step:
        return replace(result, statistics=replace(result.statistics, own_means=1))
    return result


def sum_tokens(token: TokenLoss, groups: SequenceGroups | None = None) -> PolicyLoss:
    """The sums of a token loss, by the configuration's aggregation. Collectives and host syncs: none."""
    config, correction = token.config, token.correction
    # In float64, but a column that carries gradient is summed in its own dtype.
    totals = {name: v.sum(dtype=None if v.requires_grad else torch.float64) for name, v in _loss_columns(token)}
    sums_K = torch.stack([total.detach().double() for total in totals.values()])
    dtype = token.policy.dtype
    terms = {name.removesuffix(_TERM): total.to(dtype) for name, total in totals.items() if name.endswith(_TERM)}
    if config.aggregation == "token-mean":
        original = totals["terms_denominator"].long()
        denominator = totals["denominator"].long() if "denominator" in totals else original
    else:
        original = _sequences(correction.tokens_N, groups)
        denominator = original if config.denominator == "original" else _sequences(correction.kept_N, groups)
    statistics = correction.statistics
    if config.metrics != "off":
        names = tuple(totals)
        if correction.factor is not None and config.tis.batch_normalize_scope != "micro_batch":
            # Like the weights in the statistics, the loss is that before the step's batch normalisation.
            sums_K[names.index("pg_loss")] *= correction.factor
        if "denominator" not in names:
            names, sums_K = (*names, "denominator"), torch.cat([sums_K, denominator.double().reshape(1)])
        statistics = statistics.with_vector(names, sums_K)
    return PolicyLoss(totals["pg_loss"].to(dtype), denominator, terms, original, correction, statistics)


_TERM = " term"
"""Ends the name of the column that a term adds to the loss; without it is what the metrics show."""


def _loss_columns(token: TokenLoss) -> Iterator[tuple[str, Tensor]]:
    """(name, [T]) columns, one at a time: their sums are the loss, its terms, its divisors, and what metrics report."""
    config, measured = token.config, token.config.metrics != "off"
    share_T = _share_of_unit(token, config.denominator == "original")
    yield "pg_loss", token.policy if share_T is None else token.policy * share_T
    if measured:
        yield from token.clip_columns()
    if config.aggregation == "token-mean":
        yield "terms_denominator", token.packed.loss_mask
        if config.denominator != "original":
            yield "denominator", token.correction.keep
    share_T = _share_of_unit(token, original=True)
    metrics = {"entropy": "entropy", "kl": "ref_kl", "rollout_kl": "rollout_kl"}
    for name, value, added, coefficient in token.terms():
        if measured:
            yield metrics[name], value.detach()
        if coefficient:
            yield f"{name}{_TERM}", (added if share_T is None else added * share_T) * coefficient


def _share_of_unit(token: TokenLoss, original: bool) -> Tensor | None:
    """What one token's loss counts for in its sequence: [T], or None where it is 1."""
    config, correction = token.config, token.correction
    if config.aggregation == "seq-mean-token-mean":
        tokens = correction.tokens_N if original else correction.kept_N
        share = tokens.clamp(min=1).reciprocal()
        return spread(share.to(token.policy.dtype), token.packed.sequence_index)
    if config.length_norm is not None:
        return token.policy.new_full((), 1.0 / config.length_norm)
    return None


def _sequences(tokens_N: Tensor, groups: SequenceGroups | None) -> Tensor:
    """Sequences with a token, 0-d int64. A sequence counts on one rank only."""
    units = (tokens_N > 0).sum()
    return units if groups is None or groups.counts_sequences else torch.zeros_like(units)
