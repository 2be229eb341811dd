"""A worked example: eight tokens under every mode and level, computed by `correct` itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import LEVELS, PRODUCTS, UNITS
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import spread
from mismatch_plugin.explain.account import PADDING
from mismatch_plugin.report.table import Table

MODES = ("truncate", "clip", "mask")
UPPER = 2.0
GROWTH = 0.5
REJECTED = "✗"

# Of each token: its probability under the rollout engine, the trainer before the step (old) and during it (current),
# whether it trains, and the weight version that sampled it. A holds a tool's output, which cuts it into two turns.
_SEQUENCES: dict[str, list[tuple[float, float, float, int, int]]] = {
    "A": [(0.4, 0.5, 0.55, 1, 3), (0.1, 0.9, 0.9, 0, 3), (0.5, 0.6, 0.45, 1, 5), (0.9, 0.9, 0.6, 1, 5)],
    "B": [(0.2, 0.6, 0.63, 1, 4), (0.4, 0.6, 0.78, 1, 4)],
    "C": [(0.5, 0.2, 0.45, 1, 5), (0.5, 0.4, 0.4, 1, 5)],
}
_ADVANTAGES, _REWARDS, _TRAINER_VERSION = (-1.0, 1.0, 1.0), (1.0, 0.0, 0.0), 5
_ROWS = list(_SEQUENCES.values())


def example_batch() -> PackedSequences:
    """Three sequences, eight tokens, one of them under the mask; π_ref is π_old, and the entropy 1."""
    old = [[math.log(token[1]) for token in row] for row in _ROWS]
    return PackedSequences.from_lists(
        old_log_probs=old,
        rollout_log_probs=[[math.log(token[0]) for token in row] for row in _ROWS],
        ref_log_probs=old,
        entropy=[[1.0] * len(row) for row in _ROWS],
        loss_masks=[[token[3] for token in row] for row in _ROWS],
        weight_versions=[[token[4] for token in row] for row in _ROWS],
        trainer_version=_TRAINER_VERSION,
        advantages=_ADVANTAGES,
        sequence_ids=tuple(_SEQUENCES),
    )


def current_log_probs() -> Tensor:
    """[T] log π_θ of the batch, float64, with gradient."""
    return torch.tensor([math.log(token[2]) for row in _ROWS for token in row], dtype=torch.float64).requires_grad_()


def batch_for(config: MismatchConfig) -> PackedSequences:
    """The batch; where `rs.group` says what becomes of a group, its sequences are one, with advantages of rewards."""
    packed = example_batch()
    if config.rs.group == "keep":
        return packed
    rewards = torch.tensor(_REWARDS, dtype=torch.float64)
    accepted = correct(packed, config).kept_N
    advantages = group_advantages(rewards, [0] * len(_REWARDS), accepted, min_accepted=config.rs.least_accepted)
    return packed.replace(advantages=spread(advantages, packed.sequence_index), rewards=rewards)


def explain_table() -> Table:
    """Input, then one row a setting: the weight of every token, and which tokens leave the loss."""
    inputs = [[f"{token[place]:.3g}" for row in _ROWS for token in row] for place in (0, 1)]
    rows: list[tuple[str, ...]] = [("π_rollout", *inputs[0]), ("π_train", *inputs[1])]
    for level in LEVELS:
        # An upper bound of inf leaves the aggregated ratio as it is.
        rows.append(_weights(f"{level}: ratio", level, "truncate", math.inf))
        rows += [_weights(f"{level}: {mode}", level, mode) for mode in MODES]
    rows += [_weights(f"{level}: normalised", level, "truncate", batch_normalize=True) for level in LEVELS]
    rows += [_weights(f"{level}: bounds grow", level, "clip", bound_growth=GROWTH) for level in PRODUCTS]
    notes = (
        f"Each column is a token; A (two turns), B and C are sequences. The bounds are {1 / UPPER:g} and {UPPER:g}.",
        f"{PADDING} is a token under the loss mask (here a tool's output): it counts nowhere, whatever its ratio is.",
        *(f"{level}: {UNITS[level].ratio}." for level in LEVELS),
        "truncate lowers a ratio to the upper bound.",
        "clip also raises one to the lower bound.",
        "mask rejects what is outside the bounds and leaves the rest as it is.",
        f"{REJECTED} is a rejected token: it leaves the loss, and by default its denominator as well.",
        "normalised: truncated, then divided by the mean weight (of tokens, of turns, or of sequences).",
        f"bounds grow: clipped at 2^√n and ½^√n, n tokens in the product (tis.bound_growth {GROWTH:g}).",
    )
    headers = ("setting", *(f"{name}{at}" for name, row in _SEQUENCES.items() for at in range(1, len(row) + 1)))
    return Table("Worked example: weights", headers, tuple(rows), notes=notes)


def _weights(label: str, level: str, mode: str, upper: float = UPPER, **more: Any) -> tuple[str, ...]:
    """The weight of every token as `correct` gives it, with a mark where it is rejected."""
    settings = {"use_tis": True, "tis": {"level": level, "mode": mode, "upper_bound": upper, **more}}
    with ignore_mismatch_warnings():  # bounds for show are not bounds for use
        config = MismatchConfig.model_validate(settings)
    batch = example_batch()
    correction = correct(batch, config)
    cells = []
    for trains, weight, kept in zip(batch.loss_mask, correction.weights.tolist(), correction.keep, strict=True):
        shown = f"{weight:.3g}" if kept else f"{weight:.3g} {REJECTED}"
        cells.append(shown if trains else PADDING)
    return (label, *cells)
