"""Which rollout log-probs are no log-probs, found on the device and, for CPU data, named one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

KINDS = ("floor", "sound", "positive", "zero_fill", "train_not_finite", "nan", "padding")
"""What a token's code means, by index. All but `sound` and `padding` are defects."""
SOUND, ZERO_FILL, TRAIN_NOT_FINITE, NAN, PADDING = 1, 3, 4, 5, 6
DEFECTS = tuple(kind for kind in KINDS if kind not in ("sound", "padding"))

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
    "train_not_finite": "meets a training log-prob that is not finite",
}


class InvalidLogProbError(ValueError):
    """A log-prob on a training token is no log-prob, and the policy is `error`."""


@dataclass(frozen=True)
class InvalidLogProb:
    """One defect: `sequence` and `position` count from 0 inside the batch and the sequence."""

    kind: str
    sequence: object
    position: int
    value: float

    def __str__(self) -> str:
        return (
            f"rollout log-prob of sequence {self.sequence}, position {self.position} {_EXPLANATION[self.kind]} "
            f"(value {self.value:g}, kind {self.kind})"
        )


Locator = Callable[[], tuple[InvalidLogProb, ...]]


def classify(train_T: Tensor, rollout_T: Tensor, padding_T: Tensor, train_not_finite_T: Tensor) -> Tensor:
    """Code of each token, an index into `KINDS`.

    train_T, rollout_T: [T] float. padding_T, train_not_finite_T: [T] bool. Returns [T] int8. Host syncs: none.
    """
    # 0 floor (NaN lands there too, for the moment), 1 sound, 2 positive.
    code = (rollout_T > FLOOR).view(torch.int8).add_(rollout_T > POSITIVE_TOLERANCE)
    code.masked_fill_((rollout_T == 0.0).logical_and_(train_T < -ZERO_FILL_GAP), ZERO_FILL)
    code.masked_fill_(rollout_T != rollout_T, NAN)
    code.masked_fill_(train_not_finite_T, TRAIN_NOT_FINITE)
    return code.masked_fill_(padding_T, PADDING)


def count_kinds(code_T: Tensor) -> Tensor:
    """How many tokens have each code: [T] → [len(KINDS)]. No host sync."""
    if code_T.device.type == "cpu":  # the fastest there; elsewhere it is a host sync
        return torch.bincount(code_T, minlength=len(KINDS)).double()
    return torch.histc(code_T.float(), bins=len(KINDS), min=-0.5, max=len(KINDS) - 0.5)


def bucket(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """Index of each value's bucket, int32: how many edges are ≤ the value. No NaN.

    One kernel.
    """
    return torch.bucketize(values, _constants(edges, values.dtype, values.device), right=True, out_int32=True)


# Made once: copying them to the device in the hook would be a host sync.
@lru_cache
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def find_invalid(
    train_T: Tensor,
    rollout_T: Tensor,
    loss_mask_T: Tensor,
    lengths: Sequence[int],
    labels: Sequence[object],
    positions_T: Tensor | None = None,
) -> tuple[InvalidLogProb, ...]:
    """Every defect with its place. It syncs: for data preparation on the CPU, or once a defect was counted."""
    codes = classify(train_T, rollout_T, loss_mask_T.logical_not(), train_T - train_T != 0)
    defects = (codes != SOUND) & (codes != PADDING)
    if not defects.any():
        return ()
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    found, sequence = [], 0
    for token in defects.nonzero().flatten().tolist():
        while token >= starts[sequence + 1]:
            sequence += 1
        kind = KINDS[int(codes[token])]
        value = float(train_T[token] if kind == "train_not_finite" else rollout_T[token])
        position = token - starts[sequence] if positions_T is None else int(positions_T[token])
        found.append(InvalidLogProb(kind, labels[sequence], position, value))
    return tuple(found)


def invalid_error(found: Sequence[InvalidLogProb], summary: str = "") -> InvalidLogProbError:
    """The error for the first few of the defects found (or a summary of them), with what to do about them."""
    shown = summary or "; ".join(str(item) for item in found[:3])
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return InvalidLogProbError(
        f"{shown}{more}. Check that the rollout engine returns a log-prob for every sampled token, or choose "
        f"--rollout-log-prob-policy neutral, drop-token or drop-sequence."
    )
