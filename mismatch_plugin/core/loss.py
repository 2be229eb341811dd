"""`policy_loss`: the correction applied to an objective, aggregated over tokens and sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.core.correction import Correction, SequenceGroups, compute_correction, refuse_no_config
from mismatch_plugin.core.levels import SAFETY_BOUND, spread
from mismatch_plugin.core.objectives import kl_to_reference, ppo_clip_loss, reinforce_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.statistics import Statistics
from mismatch_plugin.core.validity import train_is_valid

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig, PPOClip


TERMS = ("entropy", "kl")


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """Sums over the local tokens, to be divided by their denominators summed over the whole step.

    loss_sum: policy term, 0-d, with gradient. denominator: 0-d int64, tokens or sequences it is divided by (accepted
    ones, or all for `original`). terms: entropy and KL, coefficient included, 0-d, with gradient.
    terms_denominator: 0-d int64, always the original tokens or sequences, so that rejection does not scale them.
    """

    loss_sum: Tensor
    denominator: Tensor
    terms: dict[str, Tensor]
    terms_denominator: Tensor
    correction: Correction
    statistics: Statistics

    @property
    def loss(self) -> Tensor:
        """The whole loss where this batch is the whole step: loss_sum / denominator + Σ terms / terms_denominator."""
        loss = self.loss_sum / self.denominator.clamp(min=1)
        for term in self.terms.values():
            loss = loss + term / self.terms_denominator.clamp(min=1)
        return loss


def policy_loss(
    log_probs: Tensor,
    packed: PackedSequences,
    config: MismatchConfig,
    groups: SequenceGroups | None = None,
    batch_factor: Tensor | float | None = None,
) -> PolicyLoss:
    """The corrected policy loss of the algorithm that the two flags choose.

    0: PPO-clip(π_θ/π_old) · 1: PPO-clip(π_θ/π_rollout) · 2: w · PPO-clip(π_θ/π_old), w from π_old/π_rollout ·
    3: −sg(w) A log π_θ, w from π_θ/π_rollout. π_old is `packed.old_log_probs`, or log_probs.detach() where
    that is absent (an exactly on-policy step).

    log_probs: log π_θ with gradient, [T], or [B, S] for a batch from `from_padded` (padding gets zero gradient); half
    precision is widened to float32. packed.advantages: [T].
    Aggregations: token-mean Σ_t / Σ m · seq-mean-token-mean mean over sequences of Σ_t / Σ_seq m · seq-mean-token-sum
    mean over sequences of Σ_t (divided by length_norm if set).
    groups, batch_factor, collectives, syncs, errors: as `correct`. Gradient: through log_probs and packed.entropy only.
    Writes nothing: `report_dir` is for the hooks; a loop of its own calls `report.log.write_step`.
    """
    advantages = refuse_unfit(packed, config)
    log_probs = packed.flatten(log_probs, "log_probs")
    if log_probs.dtype in (torch.bfloat16, torch.float16):
        log_probs = log_probs.float()
    old, train = anchors(log_probs, packed, config)
    correction = compute_correction(train, packed, config, groups, batch_factor)

    columns = _loss_columns(log_probs, advantages, old, packed, correction, config)
    totals, sums_K = token_totals(columns)
    loss_sum = totals["pg_loss"].to(log_probs.dtype)
    terms = {name: totals[f"{name} term"].to(log_probs.dtype) for name in TERMS if f"{name} term" in totals}
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
            # Like the weights in the statistics, the loss stands before the step's batch normalisation.
            sums_K[names.index("pg_loss")] *= correction.factor
        if "denominator" not in names:
            names, sums_K = (*names, "denominator"), torch.cat([sums_K, denominator.double().reshape(1)])
        statistics = statistics.with_vector(names, sums_K)
    return PolicyLoss(loss_sum, denominator, terms, original, correction, statistics)


def refuse_unfit(packed: PackedSequences, config: MismatchConfig) -> Tensor:
    """Raise where the batch lacks what the loss needs. Returns its advantages."""
    refuse_no_config(config)
    if packed.advantages is None:
        raise ValueError(
            "advantages is missing: policy_loss needs one advantage a token (or a sequence, in from_lists)."
        )
    if config.terms.entropy_coef and packed.entropy is None:
        raise ValueError("entropy is missing: terms.entropy_coef needs the policy's entropy at each token.")
    if config.terms.kl_coef and packed.ref_log_probs is None:
        raise ValueError("ref_log_probs is missing: terms.kl_coef needs the reference policy's log-probs.")
    return packed.advantages


def anchors(log_probs: Tensor, packed: PackedSequences, config: MismatchConfig) -> tuple[Tensor, Tensor]:
    """(log π_old, log π_train of the correction and the diagnostics), each [T], detached."""
    current = log_probs.detach()
    old = current if packed.old_log_probs is None else packed.old_log_probs.detach()
    return old, current if config.use_rollout_log_probs else old


def token_totals(columns: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_t of every [T] column: by name, 0-d, with gradient; and all of them, [K] float64, without.

    In float64, but a column that carries gradient is summed in its own dtype.
    """
    totals = {name: v.sum(dtype=None if v.requires_grad else torch.float64) for name, v in columns}
    return totals, torch.stack([total.detach().double() for total in totals.values()])


def _loss_columns(
    log_probs: Tensor,
    advantages: Tensor,
    old: Tensor,
    packed: PackedSequences,
    correction: Correction,
    config: MismatchConfig,
) -> Iterator[tuple[str, Tensor]]:
    """(name, [T]) columns whose sums are the loss, its terms, what it is divided by, and what the metrics report.

    One at a time, so that few live at once.
    """
    token = token_losses(log_probs, advantages, old, packed, correction, config)
    mask = token.selected
    share_T = _share_of_unit(packed, correction, config, config.denominator == "original")
    coefficient = correction.weights * correction.keep
    yield "pg_loss", token.losses * (coefficient if share_T is None else coefficient * share_T)
    if token.log_r is not None and config.metrics != "off":
        yield from clip_columns(token.log_r.detach(), token.advantages, config.ppo)
    if config.aggregation == "token-mean":
        yield "terms_denominator", packed.loss_mask
        if config.denominator != "original":
            yield "denominator", correction.keep
    yield from _term_columns(token.log_probs, mask, packed, correction, config)


class TokenLosses(NamedTuple):
    """[T] each. Values are 0 where `selected` is False; log_probs and losses carry gradient.

    losses: before weight and rejection. log_r: log π_θ − log π_anchor, unclamped; None in algorithm 3.
    """

    selected: Tensor
    log_probs: Tensor
    advantages: Tensor
    losses: Tensor
    log_r: Tensor | None


def token_losses(
    log_probs: Tensor,
    advantages: Tensor,
    old: Tensor,
    packed: PackedSequences,
    correction: Correction,
    config: MismatchConfig,
    clip: PPOClip | None = None,
) -> TokenLosses:
    """The objective of every token that enters: `loss_mask`, less those whose π_train is invalid.

    Under the policy `error` these stay, so that the loss shows them even before the step's error is raised.
    log_probs, advantages, old: [T], anything where nothing trains. clip: instead of the configuration's.
    """
    code, selected = correction.tokens.code, packed.loss_mask
    if code is not None and config.rollout_log_prob_policy != "error":
        selected = selected.logical_and(train_is_valid(code))
    log_probs = torch.where(selected, log_probs, 0.0)
    advantages = torch.where(selected, advantages.detach(), 0.0)
    if config.algorithm == 3:
        return TokenLosses(selected, log_probs, advantages, reinforce_loss(log_probs, advantages), None)
    # Under bypass the selected rollout log-probs are π_θ itself where a value is no log-prob: ratio 1.
    anchor = torch.where(selected, correction.tokens.rollout if config.use_rollout_log_probs else old, 0.0)
    clip = clip or config.ppo
    losses, log_r = ppo_clip_loss(log_probs, anchor, advantages, clip.eps_clip_low, clip.eps_clip_high, clip.dual_clip)
    return TokenLosses(selected, log_probs, advantages, losses, log_r)


def clip_columns(log_r: Tensor, advantages: Tensor, clip: PPOClip) -> Iterator[tuple[str, Tensor]]:
    """Tokens where the clip is active for the advantage's sign, by side; those cut by the dual clip; and −log r."""
    bounded = log_r.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    r = bounded.exp()
    if clip.dual_clip is not None:
        yield "clip_dual", (r > clip.dual_clip).logical_and_(advantages < 0)
    yield "clip_high", (r > 1.0 + clip.eps_clip_high).logical_and_(advantages > 0)
    yield "clip_low", (r < 1.0 - clip.eps_clip_low).logical_and_(advantages < 0)
    yield "ppo_kl", bounded.neg_()


def _share_of_unit(
    packed: PackedSequences, correction: Correction, config: MismatchConfig, original: bool
) -> Tensor | None:
    """What one token's loss counts for in its unit: [T], or None where it is 1."""
    if config.aggregation == "seq-mean-token-mean":
        tokens = correction.tokens_N if original else correction.kept_N
        share = tokens.clamp(min=1).reciprocal()
        return spread(share.to(correction.weights.dtype), packed.sequence_index)
    if config.length_norm is not None:
        return correction.weights.new_full((), 1.0 / config.length_norm)
    return None


def _sequences(tokens_N: Tensor, groups: SequenceGroups | None) -> Tensor:
    """Sequences with a token, 0-d int64. A sequence counts on one rank only."""
    units = (tokens_N > 0).sum()
    return units if groups is None or groups.counts_sequences else torch.zeros_like(units)


def _term_columns(
    log_probs: Tensor, mask: Tensor, packed: PackedSequences, correction: Correction, config: MismatchConfig
) -> Iterator[tuple[str, Tensor]]:
    """Entropy bonus and KL penalty over the original mask, coefficients included, and what the metrics report."""
    settings, measured = config.terms, config.metrics != "off"
    share_T = _share_of_unit(packed, correction, config, original=True)
    share = mask.to(correction.weights.dtype) if share_T is None else mask * share_T
    if packed.entropy is not None:
        entropy = torch.where(mask, packed.entropy, 0.0)
        if measured:
            yield "entropy", entropy.detach()
        if settings.entropy_coef:
            yield "entropy term", entropy * share * -settings.entropy_coef
    if packed.ref_log_probs is not None and (measured or settings.kl_coef):
        reference = torch.where(mask, packed.ref_log_probs.detach(), 0.0)
        kl = kl_to_reference(log_probs, reference, settings.kl_type)
        if measured:
            yield "ref_kl", kl.detach()
        if settings.kl_coef:
            weight = correction.weights if settings.kl_importance_weighted else 1.0
            yield "kl term", kl * share * weight * settings.kl_coef
