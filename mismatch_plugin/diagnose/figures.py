"""What a setting is chosen by: a few figures of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_plugin.core.correction import training_side
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.rejection import k3
from mismatch_plugin.limits import SAFETY_BOUND

OLD_SHARE = 0.05
"""Of the tokens: so few of the oldest may be left out."""


@dataclass(frozen=True)
class Figures:
    """What the rules look at.

    k3_kl: nats a token, the estimate of KL. ess: effective sample size of the tokens' ratios, a share.
    mean_length, max_length: trained tokens a response; inf where nobody knows.
    tail: share of tokens with a ratio outside [½, 2] and |l| above ten medians: Gaussian noise of one size has none.
    mean_turns: runs of tokens that train, a response. longest_turn: its trained tokens; inf where nobody knows.
    credit: share of the responses whose advantages differ from token to token.
    drifting: share of responses whose mean log-ratio, times √length, is six robust deviations from the median one; each
    token's limited to six medians of |l|, so that single tokens are no drift.
    stale: weight versions that the oldest tokens are behind. fresh: versions that all but `OLD_SHARE` of the tokens are
    behind at most; inf where nobody knows. old_kl: k3 of the others, over that of these; 0 without others.
    one_step: one optimizer step a rollout batch. expensive_pass: the user would save the second forward pass.
    """

    k3_kl: float
    ess: float
    mean_length: float
    max_length: float
    tail: float = 0.0
    drifting: float = 0.0
    stale: float = 0.0
    fresh: float = math.inf
    old_kl: float = 0.0
    mean_turns: float = 1.0
    longest_turn: float = math.inf
    credit: float = 0.0
    one_step: bool = False
    expensive_pass: bool = False

    @property
    def kl_length(self) -> float:
        """k3 times the longest response: half the variance of the log of its product of ratios."""
        return self.k3_kl * self.max_length

    @property
    def kl_turn(self) -> float:
        """The same of the longest turn."""
        return self.k3_kl * self.longest_turn


def figures_of(
    packed: PackedSequences, *, stale: float | None = None, one_step: bool = False, expensive_pass: bool = False
) -> Figures:
    """The figures of a batch with rollout log-probs and π_old (`old_log_probs`).

    stale: how many steps the oldest tokens are behind; None: newest minus oldest of `weight_versions`.
    Raises: ValueError where no token trains.
    """
    packed = packed.prepared()
    assert packed.rollout_log_probs is not None
    mask = packed.loss_mask & torch.isfinite(packed.rollout_log_probs)
    raw = training_side(packed) - packed.rollout_log_probs
    log_ratio = raw[mask].double().clamp(-SAFETY_BOUND, SAFETY_BOUND)
    if not len(log_ratio):
        raise ValueError("no token trains: nothing can be recommended.")
    ratio, size = log_ratio.exp(), log_ratio.abs()
    far = (size > math.log(2.0)) & (size > 10 * size.median())
    count = len(packed.lengths)
    lengths = torch.zeros(count, dtype=torch.float64).index_add_(0, packed.sequence_index[mask], torch.ones_like(ratio))
    limit = float(6 * size.median())
    sums = torch.zeros(count, dtype=torch.float64)
    sums.index_add_(0, packed.sequence_index[mask], log_ratio.clamp(-limit, limit))
    sums, lengths = sums[lengths > 0], lengths[lengths > 0]
    shift = (sums / lengths - (sums / lengths).median()) * lengths.sqrt()
    deviation = 1.4826 * shift.abs().median()
    of_turns = torch.zeros(len(packed.turns.sequence), dtype=torch.float64)
    of_turns.index_add_(0, packed.turns.index[mask], torch.ones_like(ratio))
    versions = packed.weight_versions
    fresh, old_kl = _staleness(packed, mask, k3(log_ratio))
    if stale is None:
        stale = 0.0 if versions is None else float(versions[mask].max() - versions[mask].min())
    return Figures(
        k3_kl=float(k3(log_ratio).mean()),
        ess=float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        mean_length=float(lengths.mean()),
        max_length=float(lengths.max()),
        tail=float(far.double().mean()),
        drifting=float((shift.abs() > 6 * deviation).double().mean()) if deviation > 0 else 0.0,
        stale=stale,
        fresh=fresh,
        old_kl=old_kl,
        mean_turns=float((of_turns > 0).sum() / len(lengths)),
        longest_turn=float(of_turns.max()),
        credit=_credit(packed, mask),
        one_step=one_step,
        expensive_pass=expensive_pass,
    )


def _staleness(packed: PackedSequences, mask: Tensor, k3_T: Tensor) -> tuple[float, float]:
    """(`Figures.fresh`, `Figures.old_kl`)."""
    if packed.weight_versions is None or packed.trainer_version is None:
        return math.inf, 0.0
    behind = packed.trainer_version - packed.weight_versions[mask]
    fresh = max(int(behind.sort().values[math.ceil((1.0 - OLD_SHARE) * len(behind)) - 1]), 0)
    old = behind > fresh
    rest = float(k3_T[~old].mean())
    return float(fresh), float(k3_T[old].mean()) / rest if old.any() and rest > 0 else 0.0


def _credit(packed: PackedSequences, mask: Tensor) -> float:
    """`Figures.credit`."""
    if packed.advantages is None:
        return 0.0
    values, index, count = packed.advantages[mask].double(), packed.sequence_index[mask].long(), len(packed.lengths)
    empty = torch.zeros(count, dtype=torch.float64)
    most = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    least = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    differ = (most - least) > 1e-6 * torch.maximum(most.abs(), least.abs())
    return float(differ[torch.bincount(index, minlength=count) > 0].double().mean())
