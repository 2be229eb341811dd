"""What a setting makes of every token, taken from the functions that train: no formula of the loss is written here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.config.units import UNITS
from mismatch_plugin.config.values import ignore_mismatch_warnings, merge
from mismatch_plugin.core.correction import Correction
from mismatch_plugin.core.loss import PolicyLoss, policy_loss, token_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import bounded_exp
from mismatch_plugin.core.units import ActingBounds, acting_bounds
from mismatch_plugin.core.weights import grown
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
    """[T] The bound on the ratio of every token's unit, as `core.weights` lets it grow."""
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
