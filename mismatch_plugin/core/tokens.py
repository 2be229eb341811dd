"""The three log-probs of every token after selection: what all later arithmetic starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.host import on_host
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.validity import (
    PADDING,
    POSITIVE_TOLERANCE,
    SOUND,
    TRAIN_NOT_FINITE,
    all_sound,
    classify,
    train_is_valid,
)

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig


@dataclass(frozen=True, eq=False)
class Tokens:
    """Per-token log-probs, [T], selected so that nothing under the mask can leak.

    mask: `loss_mask` as a number; where invalid log-probs are left out, without these. padding: its complement, bool.
    train: log π_train, 0 at padding and where it is invalid. rollout: log π_rollout, equal to train at padding and
    where either value is invalid. log_ratio: train − rollout, so exactly 0 there. code: what each token is
    (`validity.KINDS`), None where no rollout log-probs were given at all.
    """

    mask: Tensor
    padding: Tensor
    train: Tensor
    rollout: Tensor
    log_ratio: Tensor
    code: Tensor | None

    @property
    def defective(self) -> Tensor | None:
        """[T] bool: a training token with an invalid log-prob; None where nothing was measured."""
        if self.code is None:
            return None
        return (self.code != SOUND).logical_and_(self.code != PADDING)

    def stopping(self, config: MismatchConfig) -> Tensor | None:
        """[T] bool: the invalid log-probs that raise under the policy `error` (`validity.stopping_kinds`)."""
        if self.code is None or config.uses_rollout_values:
            return self.defective
        return (self.code >= TRAIN_NOT_FINITE).logical_and_(self.code != PADDING)


def select_again(tokens: Tokens, current_T: Tensor) -> Tokens:
    """The same tokens with log π_θ in π_train's place. Both log-probs are 0 where any of the three is invalid."""
    assert tokens.code is not None  # nothing is judged without rollout log-probs
    valid = (current_T > -math.inf).logical_and_(current_T <= POSITIVE_TOLERANCE).logical_and_(tokens.code == SOUND)
    current, rollout = torch.where(valid, current_T, 0.0), torch.where(valid, tokens.rollout, 0.0)
    return replace(tokens, train=current, rollout=rollout, log_ratio=current - rollout)


def select_tokens(train_T: Tensor, packed: PackedSequences, excludes_invalid: bool = False) -> Tokens:
    """Select the training tokens' log-probs before any arithmetic.

    excludes_invalid: tokens with an invalid log-prob are treated as padding. Host syncs: none. Gradient: none (call it
    without one).
    """
    loss_mask, rollout = packed.loss_mask, packed.rollout_log_probs
    dtype = train_T.dtype if rollout is None else torch.promote_types(train_T.dtype, rollout.dtype)
    padding = loss_mask.logical_not()
    if rollout is None:
        valid = (train_T > -math.inf).logical_and_(train_T <= POSITIVE_TOLERANCE).logical_and_(loss_mask)
        train = torch.where(valid, train_T, 0.0)
        return Tokens(loss_mask.to(dtype), padding, train, train, torch.zeros_like(train), None)
    if on_host(train_T):
        tokens = _select_sound(train_T, rollout, loss_mask.to(dtype), padding)
        if tokens is not None:
            return tokens
    code = classify(train_T, rollout, padding)
    sound = code == SOUND
    if excludes_invalid:
        loss_mask, padding = sound, sound.logical_not()
    train = torch.where(sound if excludes_invalid else train_is_valid(code), train_T, 0.0)
    selected = torch.where(sound, rollout, train)
    return Tokens(loss_mask.to(dtype), padding, train, selected, train - selected, code)


def _select_sound(train_T: Tensor, rollout_T: Tensor, mask: Tensor, padding: Tensor) -> Tokens | None:
    """`select_tokens` where every training token is sound; None where one is not, or padding is not finite."""
    train, rollout = train_T * mask.to(train_T.dtype), rollout_T * mask  # padding that is NaN or infinite stays NaN
    log_ratio = train - rollout
    if not all_sound(train, rollout, log_ratio):
        return None
    code = padding.view(torch.int8).mul(PADDING - SOUND).add_(SOUND)
    return Tokens(mask, padding, train, rollout, log_ratio, code)
