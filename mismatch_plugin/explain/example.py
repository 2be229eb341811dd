"""A worked example: eight tokens through every setting, computed by `correct` and the losses themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import LEVELS, PRODUCTS, UNITS
from mismatch_plugin.config.values import ignore_mismatch_warnings
from mismatch_plugin.core.correction import correct
from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.loss import token_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import spread
from mismatch_plugin.explain.account import PADDING
from mismatch_plugin.report.table import Table

MODES = ("truncate", "clip", "mask")
UPPER = 2.0
VETO = 0.45
GROWTH = 0.5
PENALTY = 0.1
REJECTED = "✗"
KEPT = "✓"

# Of each token: its probability under the rollout engine, the trainer before the step (old) and during it (current),
# whether it trains, and the weight version that sampled it. A holds a tool's output, which cuts it into two turns.
_SEQUENCES: dict[str, list[tuple[float, float, float, int, int]]] = {
    "A": [(0.4, 0.5, 0.55, 1, 3), (0.1, 0.9, 0.9, 0, 3), (0.5, 0.6, 0.45, 1, 5), (0.9, 0.9, 0.6, 1, 5)],
    "B": [(0.2, 0.6, 0.63, 1, 4), (0.4, 0.6, 0.78, 1, 4)],
    "C": [(0.5, 0.2, 0.45, 1, 5), (0.5, 0.4, 0.4, 1, 5)],
}
_ADVANTAGES, _REWARDS, _TRAINER_VERSION = (-1.0, 1.0, 1.0), (1.0, 0.0, 0.0), 5
_ROWS = list(_SEQUENCES.values())
_HEADERS = ("setting", *(f"{name}{i}" for name, row in _SEQUENCES.items() for i in range(1, len(row) + 1)))

Row = tuple[str, ...]


def example_batch() -> PackedSequences:
    """The batch: three sequences, eight tokens, one of them under the mask."""
    return PackedSequences.from_lists(
        old_log_probs=[[math.log(token[1]) for token in row] for row in _ROWS],
        rollout_log_probs=[[math.log(token[0]) for token in row] for row in _ROWS],
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
    """The batch with what settings may read: π_ref is π_old, the entropy 1, and groups have advantages of rewards."""
    packed = example_batch()
    packed = packed.replace(ref_log_probs=packed.old_log_probs, entropy=torch.ones(packed.loss_mask.shape))
    if config.rs.group == "keep":
        return packed
    advantages = spread(_advantages(config), packed.sequence_index)
    return packed.replace(advantages=advantages, rewards=torch.tensor(_REWARDS, dtype=torch.float64))


def example_tables() -> tuple[Table, ...]:
    """Weights, rejection, and the loss with what is added to it."""
    return explain_table(), rejection_table(), loss_table()


# Weights --------------------------------------------------------------------------------------------------------------


def explain_table() -> Table:
    """Input, then one row a setting: the weight of every token, and which tokens leave the loss."""
    rows = [_numbers("π_rollout", 0), _numbers("π_train", 1)]
    for level in LEVELS:
        # An upper bound of inf leaves the aggregated ratio as it is.
        rows.append(_weights(f"{level}: ratio", _tis(level, "truncate", math.inf)))
        rows += [_weights(f"{level}: {mode}", _tis(level, mode)) for mode in MODES]
    rows += [_weights(f"{level}: normalised", _tis(level, "truncate", batch_normalize=True)) for level in LEVELS]
    rows += [_weights(f"{level}: bounds grow", _tis(level, "clip", bound_growth=GROWTH)) for level in PRODUCTS]
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
    return Table("Worked example: weights", _HEADERS, tuple(rows), notes=notes)


def _tis(level: str, mode: str, upper: float = UPPER, **more: Any) -> dict[str, Any]:
    return {"use_tis": True, "tis": {"level": level, "mode": mode, "upper_bound": upper, **more}}


def _weights(label: str, settings: dict[str, Any]) -> Row:
    """The weight of every token as `correct` gives it, with a mark where it is rejected."""
    correction = correct(example_batch(), _config(settings))
    tokens = zip(correction.weights.tolist(), correction.keep.tolist(), strict=True)
    return _row(label, [f"{weight:.3g}" + ("" if keep else f" {REJECTED}") for weight, keep in tokens])


# Rejection ------------------------------------------------------------------------------------------------------------

_REJECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "sequence_mean:ratio:2": (
        {"criteria": ["sequence_mean:ratio:2"]},
        "sequence_mean:ratio:2: a response whose geometric mean is outside ½ to 2.",
    ),
    f"veto {VETO:g}": (
        {"veto_threshold": VETO},
        f"veto: a response with a token whose ratio is below {VETO:g} (in practice 1e-4).",
    ),
    "sequence_mean:ratio:1.1": (
        {"criteria": ["sequence_mean:ratio:1.1"]},
        "sequence_mean:ratio:1.1: the same with 1.1, and its reciprocal.",
    ),
    "… @negative": (
        {"criteria": ["sequence_mean:ratio:1.1@negative"]},
        "@negative: judged only where the advantage is negative.",
    ),
    "token:tv:0.25": ({"criteria": ["token:tv:0.25"]}, "token:tv:0.25: a token with |π_train − π_rollout| above 0.25."),
    "… @away": (
        {"criteria": ["token:tv:0.25@away"]},
        "@away: judged only where the step leads further away from π_rollout; C1 moves back towards it.",
    ),
    "… policy current": (
        {"criteria": ["token:tv:0.25"], "policy": "current"},
        "policy current: the same criterion judges π_θ in place of π_train, anew at every mini-batch.",
    ),
    "max_staleness 1": (
        {"max_staleness": 1},
        f"max_staleness 1: a token sampled by weights more than one version before the trainer's, {_TRAINER_VERSION}.",
    ),
}
"""Label → (settings of `rs`, what it rejects)."""


def rejection_table() -> Table:
    """Input, then one row a rule: which tokens it leaves in the loss."""
    rows = [
        _numbers("π_rollout", 0),
        _numbers("π_train", 1),
        _numbers("π_θ", 2),
        _of_sequences("advantage", _ADVANTAGES),
        _numbers("weight version", 4),
    ]
    for label, (rs, _) in _REJECTIONS.items():
        keep = correct(example_batch(), _config({"rs": rs}), log_probs=current_log_probs()).keep
        rows.append(_row(label, [KEPT if kept else REJECTED for kept in keep.tolist()]))
    lines = (*(note for _, note in _REJECTIONS.values()), "No rule changes a weight. Several are ANDed.")
    return Table("Worked example: rejection", _HEADERS, tuple(rows), notes=lines)


# The loss -------------------------------------------------------------------------------------------------------------

_OBJECTIVES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce")
_EPSILON = 0.2


def loss_table() -> Table:
    """Input, then one row an objective: the gradient of each token's loss; the penalty; advantages of a group."""
    rows = [
        _numbers("π_old", 1),
        _numbers("π_θ", 2),
        _numbers("ratio π_θ/π_old", lambda token: token[2] / token[1]),
        _of_sequences("advantage", _ADVANTAGES),
    ]
    rows += [_gradients(f"{name}: gradient", _objective(name)) for name in _OBJECTIVES]
    rows.append(_gradients("penalty: gradient", {"terms": {"rollout_kl_coef": PENALTY}}, penalty=True))
    rows.append(_of_sequences("reward", _REWARDS))
    for group in ("keep", "exclude"):
        config = _config({"rs": {"criteria": ["sequence_mean:ratio:2"], "group": group}})
        rows.append(_of_sequences(f"advantage, group {group}", _advantages(config).tolist()))
    lines = (
        "gradient: of the token's loss, by log π_θ, before the denominator; a negative one makes the token likelier.",
        f"ppo: −min(r A, clip(r) A), clipped at 1 ± {_EPSILON:g}: nothing moves further than that.",
        "gspo: the same with the geometric mean of the response's ratios for r (here with the same clip; its own "
        "default is 3e-4 and 4e-4).",
        f"cispo: −clip(r) A log π_θ, clipped above at {1 + _EPSILON:g}: what is clipped keeps its gradient.",
        "sapo: −(4/τ) σ(τ (r − 1)) A, τ 1 where A > 0, else 1.05: no clip; far ratios lose their gradient smoothly.",
        "gmpo: −A times the geometric mean of the response's ratios, each clipped at e^±0.4 on the side of A's sign.",
        "reinforce: −A log π_θ. Algorithm 3 is this, with weights of π_θ/π_rollout.",
        f"penalty: terms.rollout_kl_coef {PENALTY:g}, on ½ l² with l = log π_θ − log π_rollout; it is added.",
        "group exclude: GRPO's advantages of the rewards when sequence_mean:ratio:2 rejects B: its reward leaves mean "
        "and deviation. keep: it stays in them.",
    )
    return Table("Worked example: the loss", _HEADERS, tuple(rows), notes=lines)


def _objective(name: str) -> dict[str, Any]:
    clip = {"eps_clip_low": 1.0 if name == "cispo" else _EPSILON, "eps_clip_high": _EPSILON}
    return {"objective": name} | ({"ppo": clip} if name in ("ppo", "gspo", "cispo") else {})


def _gradients(label: str, settings: dict[str, Any], penalty: bool = False) -> Row:
    """d / d log π_θ of every token's loss; of what the term adds where `penalty` says so."""
    current = current_log_probs()
    loss = token_loss(current, example_batch(), _config(settings))
    total = loss.total() - loss.policy if penalty else loss.policy
    (gradient,) = torch.autograd.grad(total.sum(), current)
    return _row(label, [_number(value) for value in gradient.tolist()])


def _advantages(config: MismatchConfig) -> Tensor:
    """[N] of the rewards, all of one group, as `rs.group` of these settings has them."""
    accepted = None if config.rs.group == "keep" else correct(example_batch(), config).kept_N
    rewards = torch.tensor(_REWARDS, dtype=torch.float64)
    return group_advantages(rewards, [0] * len(_REWARDS), accepted, min_accepted=config.rs.least_accepted)


# Cells ----------------------------------------------------------------------------------------------------------------


def _config(settings: dict[str, Any]) -> MismatchConfig:
    with ignore_mismatch_warnings():  # bounds for show are not bounds for use
        return MismatchConfig.model_validate(settings)


def _row(label: str, cells: Sequence[str]) -> Row:
    """With a point where the loss mask is 0."""
    return (label, *(cell if m else PADDING for cell, m in zip(cells, example_batch().loss_mask.tolist(), strict=True)))


def _numbers(label: str, of: int | Callable[[tuple[float, ...]], float]) -> Row:
    """One of the example's own columns, or something of them; the inputs are shown under the mask, too."""
    pick = of if callable(of) else lambda token: token[of]
    cells = [_number(pick(token)) for row in _ROWS for token in row]
    return (label, *cells) if not callable(of) else _row(label, cells)


def _of_sequences(label: str, values: Sequence[float]) -> Row:
    """One number a sequence, at each of its tokens."""
    batch = example_batch()
    return _row(label, [_number(value) for value in spread(torch.tensor(values), batch.sequence_index).tolist()])


def _number(value: float) -> str:
    text = f"{value + 0.0:.3g}"
    return f"−{text[1:]}" if text.startswith("-") else text
