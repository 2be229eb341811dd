"""The corrected GRPO loss on Megatron-LM RL's own layouts: rows [b, s − 1], or one bin [1, bin − 1] of sequences.

Megatron keeps the sum and the denominator (`loss_func` in train_rl.py multiplies by its loss mask, adds up, and divides
by the trained tokens), so what is computed here is one loss a token, 0 where correction rejects it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.loss import sum_tokens, token_loss
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.core.packed import HALF, PackedSequences
from mismatch_plugin.core.segments import bounded_exp, segment_sum, spread


class GrpoTerms(NamedTuple):
    """What Megatron's `calculate_grpo_loss` returns, all [b, s − 1] (or [1, bin − 1]).

    loss carries gradient. ratios: π_θ over the policy that the clip (or, in algorithm 3, the weight) is anchored to.
    truncated_from_above/below: that ratio is outside 1 ± ε (algorithm 3: outside the bounds of the weight).
    """

    loss: Tensor
    kl_term: Tensor
    ratios: Tensor
    entropy_term: Tensor
    truncated_from_above: Tensor
    truncated_from_below: Tensor


def pack(
    config: MismatchConfig,
    old: Tensor,
    rollout: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    seq_starts: Sequence[int] | None,
    seq_lengths: Sequence[int] | None,
) -> PackedSequences:
    """Rows or a bin as packed sequences of b·(s − 1) tokens: nothing is moved, prompts and padding are masked.

    old: [b, s − 1], or [1, bin − 1]; the others as `calculate_grpo_loss` gets them.
    seq_starts: one a sequence, and Megatron's own end of the last one, which may be left out.
    A bin's exact 0.0 is a slot that the engine did not report (Megatron fills with 0.0; the rows' fill is π_old): it
    gets π_old too, ratio 1, unless the policy for invalid values is one that counts and treats them, or nothing of its
    sequence was reported.
    Raises: ValueError where there is not one advantage a sequence.
    """
    (batch, width), device = old.shape, old.device
    mask = loss_mask.reshape(-1).to(device) != 0
    per_sequence, lengths = advantages.reshape(-1), (width,) * batch
    if seq_starts is not None and seq_lengths is not None:
        # A sequence of n tokens has its log-probs in [start, start + n − 1); up to the next one there is padding.
        spans = [(int(start), int(start) + int(n) - 1) for start, n in zip(seq_starts, seq_lengths, strict=False)]
        if not spans:
            spans, per_sequence = [(0, 0)], old.new_zeros(1)
        lengths = tuple(after - before for before, after in pairwise([*(start for start, _ in spans), width]))
        ends = [end for _, end in spans]
        end_of_own = torch.repeat_interleave(torch.tensor(ends), torch.tensor(lengths), output_size=width)
        mask = mask & (torch.arange(width) < end_of_own).to(device)
    if len(lengths) != per_sequence.numel():
        raise ValueError(
            f"advantages has {per_sequence.numel()} values for {len(lengths)} sequences: pass one a sequence."
        )
    old, rollout = _widen(old), None if rollout is None else _widen(rollout)
    packed = PackedSequences(loss_mask=mask, lengths=lengths, rollout_log_probs=rollout, old_log_probs=old)
    if rollout is not None and seq_starts is not None:
        packed = packed.replace(rollout_log_probs=_unreported(rollout, old, packed, config))
    positions = None
    if config.metrics == "full":  # by position in the response, not in the row
        before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
        positions = before[:-1] - before[packed.offsets[:-1]][packed.sequence_index]
    return packed.replace(advantages=per_sequence.to(device, old.dtype)[packed.sequence_index], positions=positions)


def grpo_terms(
    log_probs: Tensor,
    ref: Tensor,
    packed: PackedSequences,
    config: MismatchConfig,
    batch_factor: Tensor | float | None = None,
    thresholds: Mapping[str, Tensor] | None = None,
) -> tuple[GrpoTerms, Statistics]:
    """Per-token loss of the algorithm that the two flags choose, with Megatron's KL and entropy terms.

    log_probs, ref: [b, s − 1], any float dtype; half precision is widened to float32. packed: from `pack`.
    config: from `settings`, with Megatron's own ε, β and λ (the entropy coefficient).
    loss = w · keep · policy term + β · (e^d − d − 1) + λ · p log p, d = log π_ref − log π_θ, p = π_θ of the token.
    Rejection scales neither added term; importance weights scale the KL where `terms.kl_importance_weighted` says so.
    Under the mask all is 0 and nothing, not even NaN, leaks.
    Host syncs: none. Gradient: through log_probs only.
    """
    shape = log_probs.shape
    entropy_weight = config.terms.entropy_coef
    terms = config.terms.model_copy(update={"kl_type": "k3", "entropy_coef": 0.0})
    config = config.model_copy(update={"terms": terms})
    widened = packed.replace(ref_log_probs=_widen(ref))
    token = token_loss(log_probs.reshape(-1), widened, config, batch_factor=batch_factor, thresholds=thresholds)
    log_p = token.log_probs
    entropy = -log_p.exp() * log_p  # Megatron's own estimator, of the sampled token alone
    kl = token.kl()
    assert kl is not None  # ref is given
    low, high, log_r = 1.0 - config.ppo.eps_clip_low, 1.0 + config.ppo.eps_clip_high, token.log_r
    if log_r is None:  # REINFORCE: no clip, and in algorithm 3 a weight
        weighs = config.use_rollout_log_probs
        low, high = (config.tis.lower, config.tis.upper) if weighs and not config.weighs_by_sign else (0.0, math.inf)
        anchor = token.correction.tokens.rollout if weighs else packed.old_log_probs
        assert anchor is not None  # `pack` gives both
        log_r = torch.where(token.selected, log_p - anchor, 0.0)
    ratios = bounded_exp(log_r.detach())
    above, below = (ratios > high) & token.selected, (ratios < low) & token.selected
    columns = (token.total() - entropy_weight * entropy, kl, ratios, entropy, above, below)
    return GrpoTerms(*(value.view(shape) for value in columns)), sum_tokens(token).statistics


def _unreported(rollout: Tensor, old: Tensor, packed: PackedSequences, config: MismatchConfig) -> Tensor:
    """A bin's log-probs with its 0.0 replaced: by π_old, or by NaN, which is counted and treated as the policy says.

    NaN also in a sequence of which nothing at all was reported: that is no appended token, its log-probs are missing.
    """
    zero = rollout == 0.0
    some_N = segment_sum(zero.logical_not().logical_and_(packed.loss_mask), packed.offsets) > 0
    missing = rollout.new_full((), float("nan"))
    fill = missing
    if config.rollout_log_prob_policy == "error":
        fill = torch.where(spread(some_N, packed.sequence_index), old.to(rollout.dtype), missing)
    return torch.where(zero, fill, rollout)


def _widen(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return flat.float() if flat.dtype in HALF else flat
