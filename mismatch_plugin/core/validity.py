"""Which log-probs are invalid, found on the device and, for CPU data, named; and the log-probs of every token after
selection, what all later arithmetic starts from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mismatch_plugin.core.segments import histogram, on_host

if TYPE_CHECKING:
    from mismatch_plugin.config import MismatchConfig

KINDS = ("floor", "sound", "positive", "zero_fill", "nan", "train_not_finite", "train_positive", "padding")
"""What a token's code means, by index. All but `sound` and `padding` are defects."""
SOUND, ZERO_FILL, NAN, TRAIN_NOT_FINITE, TRAIN_POSITIVE, PADDING = 1, 3, 4, 5, 6, 7
ROLLOUT_DEFECTS, TRAIN_DEFECTS = (KINDS[0], *KINDS[2:5]), KINDS[5:7]
DEFECTS = (*ROLLOUT_DEFECTS, *TRAIN_DEFECTS)
"""Of the rollout's log-prob, of the training side's, and all, in the order of `KINDS`."""
NAMED = 8
"""Defects of a kind that are found one by one; the others are only counted."""
_SHOWN = 3

POSITIVE_TOLERANCE = 0.1
"""A log-prob above this is no rounding: bf16 logits near 25 round log-probs by less."""
FLOOR = -5000.0
"""No sampled token has a log-prob this low; engines write −9999 or −inf for "not available"."""
ZERO_FILL_GAP = 3.0
"""A rollout log-prob of exactly 0.0 is a fill where the training side gives the token less than e^−3 = 5 %."""

_EXPLANATION = {
    "nan": "is missing or NaN",
    "positive": "is above 0",
    "floor": "is −inf or an engine's floor",
    "zero_fill": "is exactly 0.0 although the training side is far from 0: a fill, not a certain token",
    "train_not_finite": "is NaN or −inf",
    "train_positive": "is above 0",
}


class InvalidLogProbError(ValueError):
    """A log-prob that is used is invalid, and the policy is `error`. placed: the message says which."""

    placed = False


@dataclass(frozen=True)
class InvalidLogProb:
    """One defect: `sequence` and `position` count from 0 inside the batch and the sequence."""

    kind: str
    sequence: object
    position: int
    value: float

    def __str__(self) -> str:
        side = "training" if self.kind in TRAIN_DEFECTS else "rollout"
        return (
            f"{side} log-prob of sequence {self.sequence}, position {self.position} {_EXPLANATION[self.kind]} "
            f"(value {self.value:g}, kind {self.kind})"
        )


Locator = Callable[[], tuple[tuple[InvalidLogProb, ...], dict[str, int]]]


def stopping_kinds(config: MismatchConfig) -> tuple[str, ...]:
    """The kinds of defect that raise under the policy `error`: those of log-probs that enter the loss, which a training
    log-prob always does (`config.uses_rollout_values`)."""
    return DEFECTS if config.uses_rollout_values else TRAIN_DEFECTS


def classify(train_T: Tensor, rollout_T: Tensor, padding_T: Tensor) -> Tensor:
    """Code of each token, an index into `KINDS`: [T] float, float, bool → [T] int8. Host syncs: none."""
    # 0 floor (NaN lands there too, for the moment), 1 sound, 2 positive.
    code = (rollout_T > FLOOR).view(torch.int8).add_(rollout_T > POSITIVE_TOLERANCE)
    code.masked_fill_((rollout_T == 0.0).logical_and_(train_T < -ZERO_FILL_GAP), ZERO_FILL)
    code.masked_fill_(rollout_T != rollout_T, NAN)
    code.masked_fill_((train_T > -math.inf).logical_not_(), TRAIN_NOT_FINITE)
    code.masked_fill_(train_T > POSITIVE_TOLERANCE, TRAIN_POSITIVE)
    return code.masked_fill_(padding_T, PADDING)


def all_sound(train_T: Tensor, rollout_T: Tensor, log_ratio_T: Tensor) -> bool:
    """Whether `classify` finds nothing but sound tokens; all three are 0 at padding. On the CPU only: it syncs."""
    if train_T.numel() == 0:
        return True
    (lowest, highest), (floor, ceiling) = torch.aminmax(train_T), torch.aminmax(rollout_T)  # NaN where one value is
    if not (lowest > -math.inf and floor > FLOOR and torch.maximum(highest, ceiling) <= POSITIVE_TOLERANCE):
        return False
    if log_ratio_T.amin() >= -ZERO_FILL_GAP:
        return True
    return bool(train_T.masked_fill(rollout_T != 0.0, 0.0).amin() >= -ZERO_FILL_GAP)


def train_is_valid(code_T: Tensor) -> Tensor:
    """[T] bool: a token that trains, whose training log-prob is finite and not above 0."""
    return code_T < TRAIN_NOT_FINITE


def count_kinds(code_T: Tensor) -> Tensor:
    """How many tokens have each code: [T] → [len(KINDS)]. No host sync."""
    if on_host(code_T):  # the fastest there; elsewhere it is a host sync
        return torch.bincount(code_T, minlength=len(KINDS)).double()
    return histogram(code_T.float(), len(KINDS), -0.5, len(KINDS) - 0.5)


def find_invalid(
    train_T: Tensor,
    rollout_T: Tensor,
    loss_mask_T: Tensor,
    lengths: Sequence[int],
    labels: Sequence[object],
    positions_T: Tensor | None = None,
) -> tuple[tuple[InvalidLogProb, ...], dict[str, int]]:
    """(the first `NAMED` defects of each kind in order of place, {kind: how many there are}). It syncs: for data
    preparation on the CPU, or once a defect was counted."""
    if on_host(train_T):
        mask = loss_mask_T.to(rollout_T.dtype)
        train, rollout = train_T * mask, rollout_T * mask
        if all_sound(train, rollout, train - rollout):
            return (), {}
    codes = classify(train_T, rollout_T, loss_mask_T.logical_not())
    counts: dict[str, int] = dict(zip(KINDS, count_kinds(codes).long().tolist(), strict=True))
    counts = {kind: counts[kind] for kind in DEFECTS if counts[kind]}
    if not counts:
        return (), {}
    tokens = torch.cat([(codes == KINDS.index(kind)).nonzero().flatten()[:NAMED] for kind in counts]).sort().values
    ends = torch.tensor(tuple(lengths), dtype=torch.int64, device=tokens.device).cumsum(0)
    sequences = torch.searchsorted(ends, tokens, right=True)
    found = []
    for token, sequence in zip(tokens.tolist(), sequences.tolist(), strict=True):
        kind = KINDS[int(codes[token])]
        value = float((train_T if kind in TRAIN_DEFECTS else rollout_T)[token])
        start = int(ends[sequence]) - lengths[sequence]
        position = token - start if positions_T is None else int(positions_T[token])
        found.append(InvalidLogProb(kind, labels[sequence], position, value))
    return tuple(found), counts


def invalid_error(found: Sequence[InvalidLogProb], total: int | None = None, summary: str = "") -> InvalidLogProbError:
    """The error for the first few of the defects found (or a summary of them), with what to do about them. total: how
    many there are, where `found` are only the first ones."""
    shown = summary or "; ".join(str(item) for item in found[:_SHOWN])
    rest = (len(found) if total is None else total) - len(found[:_SHOWN])
    more = f"; and {rest} more" if rest > 0 and not summary else ""
    of_training = {item.kind in TRAIN_DEFECTS for item in found} or {False, True}
    of_rollout = "that the rollout engine returns a log-prob for every sampled token"
    of_trainer = "that the training side's log-probs are finite and not above 0 (a flipped sign?)"
    checks = [check for side, check in ((False, of_rollout), (True, of_trainer)) if side in of_training]
    error = InvalidLogProbError(
        f"{shown}{more}. Check {' and '.join(checks)}, or choose --rollout-log-prob-policy neutral, drop-token or "
        f"drop-sequence."
    )
    error.placed = bool(found)
    return error


@dataclass(frozen=True, eq=False)
class Tokens:
    """Per-token log-probs, [T], selected so that nothing under the mask can leak.
    mask: `loss_mask` as a number; where invalid log-probs are left out, without these. padding: its complement, bool.
    train: log π_train, 0 at padding and where it is invalid. rollout: log π_rollout, equal to train at padding and
    where either value is invalid. log_ratio: train − rollout, so exactly 0 there. code: what each token is
    (`KINDS`), None where no rollout log-probs were given at all.
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
        """[T] bool: the invalid log-probs that raise under the policy `error` (`stopping_kinds`)."""
        if self.code is None or config.uses_rollout_values:
            return self.defective
        return (self.code >= TRAIN_NOT_FINITE).logical_and_(self.code != PADDING)


def select_again(tokens: Tokens, current_T: Tensor) -> Tokens:
    """The same tokens with log π_θ in π_train's place. Both log-probs are 0 where any of the three is invalid."""
    assert tokens.code is not None  # nothing is judged without rollout log-probs
    valid = (current_T > -math.inf).logical_and_(current_T <= POSITIVE_TOLERANCE).logical_and_(tokens.code == SOUND)
    current, rollout = torch.where(valid, current_T, 0.0), torch.where(valid, tokens.rollout, 0.0)
    return replace(tokens, train=current, rollout=rollout, log_ratio=current - rollout)


def select_tokens(train_T: Tensor, loss_mask: Tensor, rollout: Tensor | None, excludes_invalid: bool = False) -> Tokens:
    """Select the training tokens' log-probs before any arithmetic. All [T]; rollout None: none were given.
    excludes_invalid: an invalid log-prob is treated as padding. Host syncs: none. Gradient: none (call it without)."""
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
