"""The three log-probs of every token after selection: what all later arithmetic starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import PADDING, SOUND, classify


@dataclass(frozen=True, eq=False)
class Tokens:
    """Per-token log-probs, [T], selected so that nothing under the mask can leak.

    mask: `loss_mask` as a number. padding: its complement, bool. train: log π_train, 0 at padding. rollout:
    log π_rollout, equal to train at padding and where the value is no log-prob. log_ratio: train − rollout, so exactly
    0 there. code: what each token is (`validity.KINDS`), None where no rollout log-probs were given at all.
    """

    mask: Tensor
    padding: Tensor
    train: Tensor
    rollout: Tensor
    log_ratio: Tensor
    code: Tensor | None

    @property
    def defective(self) -> Tensor | None:
        """[T] bool: a training token whose log-prob is none; None where nothing was measured."""
        if self.code is None:
            return None
        return (self.code != SOUND).logical_and_(self.code != PADDING)


def select_tokens(train_T: Tensor, packed: PackedSequences) -> Tokens:
    """Select the training tokens' log-probs before any arithmetic.

    Host syncs: none. Gradient: none (call it without one).
    """
    padding, rollout = packed.loss_mask.logical_not(), packed.rollout_log_probs
    mask = packed.loss_mask.to(train_T.dtype if rollout is None else torch.promote_types(train_T.dtype, rollout.dtype))
    finite = train_T.abs() < math.inf
    train = torch.where(packed.loss_mask.logical_and(finite), train_T, 0.0)
    if rollout is None:
        return Tokens(mask, padding, train, train, torch.zeros_like(train), None)
    code = classify(train_T, rollout, padding, finite.logical_not_())
    selected = torch.where(code == SOUND, rollout, train)
    return Tokens(mask, padding, train, selected, train - selected, code)
