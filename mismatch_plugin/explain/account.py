"""What a setting makes of every token, by the functions that train, and a worked example: no formula is here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import LEVELS, PRODUCTS, UNITS
from mismatch_plugin.config.values import ignore_mismatch_warnings, merge
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.loss import PolicyLoss, policy_loss, token_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import bounded_exp, spread
from mismatch_plugin.core.units import ActingBounds, acting_bounds, grown
from mismatch_plugin.diagnose.predict import units_in
from mismatch_plugin.report.table import NOTHING, Table, figure

PADDING = "·"


class Account(NamedTuple):
    """columns: name → [T]. rejected_by: of each token, the rules that reject it, each judged alone."""

    columns: dict[str, Tensor]
    rejected_by: list[list[str]]
    result: PolicyLoss


def account(log_probs: Tensor, packed: PackedSequences, config: MismatchConfig) -> Account:
    """Every token of a batch with all three log-probs and advantages. The gate stops nothing. Raises as `policy_loss`.

    l = log π_train − log π_rollout, ρ = e^l. unit_ratio: ρ of the token's unit before bounding, `lower` and `upper` the
    bounds on it. weight: after bounding and batch normalisation. kept: 1 where it stays. r: what the objective clips.
    objective: its loss without weight and rejection. loss: weight · kept · objective. gradient: d loss / d log π_θ of
    the whole loss, denominator and terms included.
    """
    result = policy_loss(log_probs, packed, config.model_copy(update={"gate_kl": None}))
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    loss = token_loss(log_probs, packed, config)
    plain = token_loss(log_probs, packed, config, weights=torch.ones_like(log_probs))
    log_ratio = result.correction.tokens.log_ratio
    columns: dict[str, Tensor | None] = {
        "log_prob": log_probs,
        "old_log_prob": packed.old_log_probs,
        "rollout_log_prob": packed.rollout_log_probs,
        "advantage": packed.advantages,
        "log_ratio": log_ratio,
        "ratio": bounded_exp(log_ratio),
        "weight": result.correction.weights,
        "kept": result.correction.keep,
        "r": None if loss.log_r is None else bounded_exp(loss.log_r),
        "objective": plain.policy,
        "loss": loss.policy,
        "gradient": gradient,
    }
    if (bounds := acting_bounds(config)) is not None:
        # The aggregated ratio is the weight that no bound changes, in an algorithm with weights.
        free = {"use_tis": True, "tis": {"level": bounds.unit.level, "mode": "truncate", "upper_bound": math.inf}}
        columns["unit_ratio"] = _corrected(log_probs, packed, _only(config, free)).weights
        columns["upper"] = _grown(bounds, bounds.log_upper, packed)
        if not (config.weighted and config.tis.mode == "truncate"):  # there the lower one bounds nothing
            columns["lower"] = _grown(bounds, bounds.log_lower, packed)
    verdicts = {name: _corrected(log_probs, packed, alone).keep for name, alone in _rules(config)}
    rejected_by = [[name for name, keep in verdicts.items() if not keep[at]] for at in range(len(log_probs))]
    return Account({k: column.detach() for k, column in columns.items() if column is not None}, rejected_by, result)


def _corrected(log_probs: Tensor, packed: PackedSequences, config: MismatchConfig) -> Correction:
    return token_loss(log_probs, packed, config).correction


def _grown(bounds: ActingBounds, log_bound: float, packed: PackedSequences) -> Tensor:
    """[T] The bound on the ratio of every token's unit, as `core.units` lets it grow."""
    if not bounds.growth or math.isinf(log_bound):
        return torch.full(packed.loss_mask.shape, math.exp(log_bound), dtype=torch.float64)
    units = units_in(bounds.unit.level, packed)
    return torch.as_tensor(grown(log_bound, units.at_tokens(units.count_U).pow(bounds.growth))).exp()


def _rules(config: MismatchConfig) -> Iterator[tuple[str, MismatchConfig]]:
    """(name, the settings with this rule alone) of everything that may reject a token."""
    tis, rs = config.tis, config.rs
    if config.weighted and tis.mode == "mask":
        mode = tis.model_dump(exclude={"batch_normalize", "batch_normalize_scope"})
        yield "mask mode", _only(config, {"use_tis": True, "tis": mode})
    for criterion in config.criteria:
        yield criterion.name, _only(config, {"rs": {"criteria": [criterion.model_dump()], "policy": rs.policy}})
    if rs.veto_threshold is not None:
        yield "veto", _only(config, {"rs": {"veto_threshold": rs.veto_threshold, "policy": rs.policy}})
    if rs.max_staleness is not None:
        yield "staleness", _only(config, {"rs": {"max_staleness": rs.max_staleness}})


def _only(config: MismatchConfig, settings: dict[str, Any]) -> MismatchConfig:
    """The algorithm's training side with nothing but these settings."""
    base = {"use_rollout_log_probs": config.use_rollout_log_probs, "metrics": "off"}
    with ignore_mismatch_warnings():
        return MismatchConfig.build(merge(base, settings))


# Tables ---------------------------------------------------------------------------------------------------------------


def account_tables(log_probs: Tensor, packed: PackedSequences, config: MismatchConfig) -> tuple[Table, Table, Table]:
    """From log-probs to weights; from weights to the loss; its sums."""
    found = account(log_probs, packed, config)
    return _weights(found, packed, config), _losses(found, packed, config), _sums(found.result, config)


def _weights(found: Account, packed: PackedSequences, config: MismatchConfig) -> Table:
    bounds, factor = acting_bounds(config), found.result.correction.factor
    level = "" if bounds is None else bounds.unit.level
    side, train = ("π_θ", "log_prob") if config.use_rollout_log_probs else ("π_old", "old_log_prob")
    columns = {f"log {side}": train, "log π_rollout": "rollout_log_prob", "l": "log_ratio", "ρ": "ratio"}
    notes = [f"l = log {side} − log π_rollout, ρ = e^l: how much likelier the trainer finds a token than the sampler."]
    if bounds is not None and not bounds.unit.per_token:
        columns[f"{level} ρ"] = "unit_ratio"
        notes.append(f"{level} ρ: {UNITS[level].ratio}.")
    columns |= {"lower": "lower", "upper": "upper", "weight": "weight"}
    if not config.weighted:
        notes.append("Without importance weights every weight is 1.")
    if factor is not None:
        notes.append(f"The bounded weights were divided by their mean, {figure(float(factor), 4)}.")
    notes.append(f"{PADDING} is under the loss mask: it counts nowhere.")
    return _table("From log-probs to weights", found, packed, columns, notes)


def _losses(found: Account, packed: PackedSequences, config: MismatchConfig) -> Table:
    notes = [
        f"objective: {config.policy_objective}, {_formula(config)}; loss = weight · kept · objective.",
        "gradient = d loss / d log π_θ of the whole loss below. Negative: the step makes the token likelier.",
    ]
    if config.dry_run:
        notes.append("A dry run: the rules judge, and nothing is applied.")
    if config.budgets:
        notes.append("A first step: the bound of a budget is the one given, from the second on what the budget needs.")
    columns = {"log π_θ": "log_prob", "r": "r", "A": "advantage", "kept": "kept", "rejected by": "rejected_by"}
    columns |= {"objective": "objective", "loss": "loss", "gradient": "gradient"}
    return _table("From weights to the loss", found, packed, columns, notes)


def _table(title: str, found: Account, packed: PackedSequences, columns: dict[str, str], notes: list[str]) -> Table:
    """A row a token. columns: header → column of the account; those without a value are left out."""
    shown: dict[str, list[str]] = {
        header: [f"{figure(value, 4)}".replace("-", "−", value < 0) for value in found.columns[name].tolist()]
        for header, name in columns.items()
        if name in found.columns
    }
    if "kept" in shown:
        shown["kept"] = ["yes" if kept else "no" for kept in found.columns["kept"].tolist()]
    if "rejected by" in columns and any(found.rejected_by):
        shown["rejected by"] = [", ".join(rules) or NOTHING for rules in found.rejected_by]
    headers = [header for header in columns if header in shown]
    labels = zip(packed.sequence_ids, packed.lengths, strict=True)
    names = [f"{label}{at}" for label, length in labels for at in range(1, length + 1)]
    trained = packed.loss_mask.tolist()
    rows = (
        (name, *(shown[header][at] if trained[at] else PADDING for header in headers)) for at, name in enumerate(names)
    )
    return Table(title, ("token", *headers), tuple(rows), notes=tuple(notes))


_FORMULAS = {
    "ppo": "−min(r A, clip(r) A)",
    "gspo": "−min(r A, clip(r) A), r of the whole sequence: its geometric mean",
    "cispo": "−clip(r) A log π_θ, clip(r) without gradient",
    "sapo": "−(4/τ) σ(τ (r − 1)) A",
    "gmpo": "−A times the geometric mean of the response's clipped r",
    "reinforce": "−A log π_θ",
}


def _formula(config: MismatchConfig) -> str:
    formula, clip = _FORMULAS[config.policy_objective], config.ppo
    if config.policy_objective == "reinforce":
        return formula
    anchor = "π_rollout" if config.use_rollout_log_probs else "π_old"
    if config.ratio_bounds is None:
        taus = f"τ {clip.tau_positive:g} where A > 0, else {clip.tau_negative:g}"
        return f"{formula} with r = π_θ / {anchor}, {taus}"
    between = f"{config.ratio_bounds[0]:.7g} to {config.ratio_bounds[1]:.7g}"
    dual = "" if clip.dual_clip is None else f", at most {clip.dual_clip:g} |A| where A < 0"
    return f"{formula} with r = π_θ / {anchor}, clipped to {between}{dual}"


def _sums(result: PolicyLoss, config: MismatchConfig) -> Table:
    unit = "tokens" if config.aggregation == "token-mean" else "sequences"
    accepted = "accepted " if config.rejects and config.denominator != "original" else ""
    rows = [("policy", figure(float(result.loss_sum.detach()), 6), f"{int(result.denominator)} {accepted}{unit}")]
    of = f"{int(result.terms_denominator)} {unit}"
    rows += [(name, figure(float(term.detach()), 6), of) for name, term in result.terms.items()]
    rows.append(("loss", figure(float(result.loss.detach()), 6), NOTHING))
    notes = ("loss: each sum divided by its number, added up.",)
    return Table("Sums", ("", "sum", "divided by"), tuple(rows), notes=notes)


# The worked example ---------------------------------------------------------------------------------------------------

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
        rows.append(_example_weights(f"{level}: ratio", level, "truncate", math.inf))
        rows += [_example_weights(f"{level}: {mode}", level, mode) for mode in MODES]
    rows += [_example_weights(f"{level}: normalised", level, "truncate", batch_normalize=True) for level in LEVELS]
    rows += [_example_weights(f"{level}: bounds grow", level, "clip", bound_growth=GROWTH) for level in PRODUCTS]
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


def _example_weights(label: str, level: str, mode: str, upper: float = UPPER, **more: Any) -> tuple[str, ...]:
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
