"""`policy_loss`: the correction applied to an objective, aggregated over tokens and sequences (DESIGN 3.1, 3.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.correction import Correction, SequenceGroups, compute_correction
from mismatch_plugin.core.levels import SAFETY_BOUND, spread
from mismatch_plugin.core.objectives import kl_to_reference, ppo_clip_loss, reinforce_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.statistics import Statistics
from mismatch_plugin.core.validity import TRAIN_NOT_FINITE

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


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
    3: −sg(w) A log π_θ, w from π_θ/π_rollout. π_old is `packed.old_log_probs`, else `train_log_probs`, else
    log_probs.detach() (an exactly on-policy step).

    log_probs: [T] log π_θ with gradient; half precision is widened to float32. packed.advantages: [T].
    Aggregations: token-mean Σ_t / Σ m · seq-mean-token-mean mean over sequences of Σ_t / Σ_seq m · seq-mean-token-sum
    mean over sequences of Σ_t (divided by length_norm if set).
    groups, batch_factor, collectives, syncs, errors: as `correct`. Gradient: through log_probs and packed.entropy only.
    """
    packed_tokens = packed.loss_mask.shape
    if log_probs.shape != packed_tokens:
        raise ValueError(f"log_probs has shape {tuple(log_probs.shape)}, the packed batch {tuple(packed_tokens)}.")
    if packed.advantages is None:
        raise ValueError(
            "advantages is missing: policy_loss needs one advantage a token (or a sequence, in from_lists)."
        )
    if log_probs.dtype in (torch.bfloat16, torch.float16):
        log_probs = log_probs.float()
    current = log_probs.detach()
    old = packed.old_log_probs if packed.old_log_probs is not None else packed.train_log_probs
    old = current if old is None else old.detach()
    train = current if config.use_rollout_log_probs else old
    correction = compute_correction(train, packed, config, groups, batch_factor)

    mask = _selected(packed, correction, config)
    log_probs = torch.where(mask, log_probs, 0.0)
    advantages = torch.where(mask, packed.advantages.detach(), 0.0)
    sums: dict[str, Tensor] = {}
    if config.algorithm == 3:
        loss_T = reinforce_loss(log_probs, advantages)
    else:
        # Under bypass the selected rollout log-probs are π_θ itself where a value is no log-prob: ratio 1.
        anchor = torch.where(mask, correction.tokens.rollout if config.use_rollout_log_probs else old, 0.0)
        clip = config.ppo
        loss_T, log_r = ppo_clip_loss(
            log_probs, anchor, advantages, clip.eps_clip_low, clip.eps_clip_high, clip.dual_clip
        )
        if config.metrics != "off":
            sums |= _clip_sums(log_r.detach(), advantages, config)
    share_T = _share_of_unit(packed, correction, config, config.denominator == "original")
    coefficient = correction.weights * correction.keep
    loss_sum = (loss_T * (coefficient if share_T is None else coefficient * share_T)).sum()
    terms, term_sums = _terms(log_probs, packed, correction, config)
    if config.metrics != "off":
        # Like the weights in the statistics, the loss stands before the step's batch normalisation.
        undo = correction.factor if config.tis.batch_normalize_scope != "micro_batch" else None
        sums |= {"pg_loss": loss_sum if undo is None else loss_sum.detach() * undo, **term_sums}
    original = _units(packed, correction, config, groups, original=True)
    denominator = original if config.denominator == "original" else _units(packed, correction, config, groups)
    statistics = correction.statistics
    if config.metrics != "off":
        statistics = statistics.with_sums({**sums, "denominator": denominator, "terms_denominator": original})
    return PolicyLoss(loss_sum, denominator, terms, original, correction, statistics)


def _selected(packed: PackedSequences, correction: Correction, config: MismatchConfig) -> Tensor:
    """The tokens whose values enter at all: `loss_mask`, less those whose π_train is not finite.

    Under the policy `error` these stay, so that the loss shows them even before the step's error is raised.
    """
    code = correction.tokens.code
    if code is None or config.rollout_log_prob_policy == "error":
        return packed.loss_mask
    return packed.loss_mask.logical_and(code != TRAIN_NOT_FINITE)


def _clip_sums(log_r: Tensor, advantages: Tensor, config: MismatchConfig) -> dict[str, Tensor]:
    """Clipped tokens on either side (where the clip is active for the advantage's sign), and −log r."""
    bounded = log_r.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    r = bounded.exp()
    high = (r > 1.0 + config.ppo.eps_clip_high).logical_and_(advantages > 0)
    low = (r < 1.0 - config.ppo.eps_clip_low).logical_and_(advantages < 0)
    return {"clip_high": high.sum(), "clip_low": low.sum(), "ppo_kl": -bounded.double().sum()}


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


def _units(
    packed: PackedSequences,
    correction: Correction,
    config: MismatchConfig,
    groups: SequenceGroups | None,
    original: bool = False,
) -> Tensor:
    """Tokens or sequences on this rank that the loss is divided by, 0-d int64. A sequence counts on one rank only."""
    if config.aggregation == "token-mean":
        return (packed.loss_mask if original else correction.keep).sum(dtype=torch.float64).long()
    tokens = correction.tokens_N if original else correction.kept_N
    units = (tokens > 0).sum()
    return units if groups is None or groups.counts_sequences else torch.zeros_like(units)


def _terms(
    log_probs: Tensor, packed: PackedSequences, correction: Correction, config: MismatchConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Entropy bonus and KL penalty over the original mask: (losses with coefficients, sums for the metrics)."""
    terms: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    mask, settings = _selected(packed, correction, config), config.terms
    share_T = _share_of_unit(packed, correction, config, original=True)
    share = mask.to(correction.weights.dtype) if share_T is None else mask * share_T
    if settings.entropy_coef and packed.entropy is None:
        raise ValueError("entropy is missing: terms.entropy_coef needs the policy's entropy at each token.")
    if packed.entropy is not None:
        entropy = torch.where(mask, packed.entropy, 0.0)
        sums["entropy"] = entropy.detach().double().sum()
        if settings.entropy_coef:
            terms["entropy"] = -settings.entropy_coef * (entropy * share).sum()
    if settings.kl_coef and packed.ref_log_probs is None:
        raise ValueError("ref_log_probs is missing: terms.kl_coef needs the reference policy's log-probs.")
    if packed.ref_log_probs is not None:
        reference = torch.where(mask, packed.ref_log_probs.detach(), 0.0)
        kl = kl_to_reference(log_probs, reference, settings.kl_type)
        sums["ref_kl"] = kl.detach().double().sum()
        if settings.kl_coef:
            weight = correction.weights if settings.kl_importance_weighted else 1.0
            terms["kl"] = settings.kl_coef * (kl * share * weight).sum()
    return terms, sums
