"""What a setting makes of every token, taken from the functions that train: no formula of the loss is written here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from mismatch_plugin.config import ALGORITHM_NAMES, MismatchConfig
from mismatch_plugin.config.values import ignore_mismatch_warnings, merge
from mismatch_plugin.core.correction import Correction, correct
from mismatch_plugin.core.groups import group_advantages
from mismatch_plugin.core.loss import policy_loss, token_loss
from mismatch_plugin.core.packed import PackedSequences
from mismatch_plugin.core.segments import bounded_exp, spread
from mismatch_plugin.core.units import ActingBounds, acting_bounds
from mismatch_plugin.core.weights import grown
from mismatch_plugin.diagnose.levels import units_in
from mismatch_plugin.explain.numbers import Numbers


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Token(_Model):
    """One token. name: its sequence and its place there, from 1. trains: the loss mask; the rest is None without.

    log_ratio: l = log π_train − log π_rollout. ratio: ρ = e^l. unit_ratio: that of its unit, before bounding. lower,
    upper: bounds on it that act. weight: after bounding and batch normalisation. kept: stays in the loss.
    rejected_by: the rules that reject it, each judged alone. objective_ratio: r, which the objective clips. objective:
    its loss without weight and rejection. loss: weight · kept · objective. gradient: d loss / d log π_θ of the whole
    loss, denominator and terms included.
    """

    name: str
    trains: bool
    log_prob: float | None = None
    old_log_prob: float | None = None
    rollout_log_prob: float | None = None
    advantage: float | None = None
    log_ratio: float | None = None
    ratio: float | None = None
    unit_ratio: float | None = None
    lower: float | None = None
    upper: float | None = None
    weight: float | None = None
    kept: bool | None = None
    rejected_by: tuple[str, ...] = ()
    objective_ratio: float | None = None
    objective: float | None = None
    loss: float | None = None
    gradient: float | None = None


class Sums(_Model):
    """loss = policy / denominator + Σ terms / terms_denominator. counted: what the denominators count.

    policy: sum of the tokens' losses, under seq-mean-token-mean divided by their sequence's length. terms: coefficient
    included.
    """

    policy: float
    denominator: int
    counted: str
    terms: dict[str, float] = {}
    terms_denominator: int
    loss: float


class Account(_Model):
    """All of it. settings: as a file for --mismatch-config has them. level: whose ratio is bounded, "" where none is.
    batch_factor: what batch normalisation divided the weights by. metrics: as training reports them."""

    algorithm: int
    name: str
    settings: dict[str, Any]
    level: str
    batch_factor: float | None
    tokens: tuple[Token, ...]
    sums: Sums
    metrics: dict[str, float]


def account(numbers: Numbers, config: MismatchConfig) -> Account:
    """Every token under the settings; the gate stops nothing here. Raises as `policy_loss`."""
    packed, log_probs = _with_advantages(numbers, config), numbers.log_probs
    numbers = numbers._replace(packed=packed)
    result = policy_loss(log_probs, packed, config.model_copy(update={"gate_kl": None}))  # it would stop here
    metrics = result.statistics.metrics()  # raises where a log-prob that is used is invalid
    (gradient,) = torch.autograd.grad(result.loss, log_probs)
    loss = token_loss(log_probs, packed, config)
    plain = token_loss(log_probs, packed, config, weights=torch.ones_like(log_probs))
    bounds, tokens = acting_bounds(config), result.correction.tokens
    columns: dict[str, Tensor] = {
        "log_prob": log_probs,
        "old_log_prob": given(packed.old_log_probs),
        "rollout_log_prob": given(packed.rollout_log_probs),
        "advantage": given(packed.advantages),
        "log_ratio": tokens.log_ratio,
        "ratio": bounded_exp(tokens.log_ratio),
        "weight": result.correction.weights,
        "objective": plain.policy,
        "loss": loss.policy,
        "gradient": gradient,
    }
    if loss.log_r is not None:
        columns["objective_ratio"] = bounded_exp(loss.log_r.detach())
    if bounds is not None:
        # The aggregated ratio is the weight that no bound changes, in an algorithm with weights.
        free = {"use_tis": True, "tis": {"level": bounds.unit.level, "mode": "truncate", "upper_bound": math.inf}}
        columns["unit_ratio"] = _corrected(numbers, _only(config, free)).weights
        columns["upper"] = _grown(bounds, bounds.log_upper, numbers)
        if not (config.weighted and config.tis.mode == "truncate"):  # there the lower one bounds nothing
            columns["lower"] = _grown(bounds, bounds.log_lower, numbers)
    verdicts = {name: _corrected(numbers, alone).keep for name, alone in _rules(config)}
    values = {name: column.tolist() for name, column in columns.items()}
    kept, trained = result.correction.keep.tolist(), packed.loss_mask.tolist()
    found = []
    for at, name in enumerate(_names(packed)):
        if not trained[at]:
            found.append(Token(name=name, trains=False))
            continue
        rejected = tuple(rule for rule, keep in verdicts.items() if not keep[at])
        own = {column: value[at] for column, value in values.items()}
        found.append(Token(name=name, trains=True, kept=kept[at] > 0, rejected_by=rejected, **own))
    factor = result.correction.factor
    unit = "tokens" if config.aggregation == "token-mean" else "sequences"
    return Account(
        algorithm=config.algorithm,
        name=ALGORITHM_NAMES[config.algorithm],
        settings=config.model_dump(mode="json", exclude_unset=True),
        level="" if bounds is None else bounds.unit.level,
        batch_factor=None if factor is None else float(factor),
        tokens=tuple(found),
        sums=Sums(
            policy=float(result.loss_sum.detach()),
            denominator=int(result.denominator),
            counted=unit if config.denominator == "original" or not config.rejects else f"accepted {unit}",
            terms={name: float(term.detach()) for name, term in result.terms.items()},
            terms_denominator=int(result.terms_denominator),
            loss=float(result.loss.detach()),
        ),
        metrics=metrics,
    )


def _with_advantages(numbers: Numbers, config: MismatchConfig) -> PackedSequences:
    """The batch, with the advantages that its rewards give where there are any."""
    packed, rs = numbers.packed, config.rs
    if numbers.rewards is None:
        if rs.group != "keep":
            raise ValueError(f"rs.group {rs.group} makes advantages of rewards: give --rewards, one a sequence.")
        return packed
    groups = [0.0] * len(packed.lengths) if numbers.groups is None else numbers.groups
    accepted = None if rs.group == "keep" else correct(packed, config).kept_N
    rewards = torch.tensor(numbers.rewards, dtype=torch.float64)
    advantages = group_advantages(rewards, groups, accepted, min_accepted=rs.least_accepted)
    return packed.replace(advantages=spread(advantages, packed.sequence_index), rewards=rewards)


def given(values: Tensor | None) -> Tensor:
    """What `read_numbers` has filled in."""
    assert values is not None
    return values


def _names(packed: PackedSequences) -> Iterator[str]:
    for label, length in zip(packed.sequence_ids, packed.lengths, strict=True):
        yield from (f"{label}{at}" for at in range(1, length + 1))


def _corrected(numbers: Numbers, config: MismatchConfig) -> Correction:
    return token_loss(numbers.log_probs, numbers.packed, config).correction


def _grown(bounds: ActingBounds, log_bound: float, numbers: Numbers) -> Tensor:
    """The bound on the ratio of every token's unit, as `core.weights` lets it grow."""
    if not bounds.growth or math.isinf(log_bound):
        return torch.full_like(numbers.log_probs, math.exp(log_bound))
    units = units_in(bounds.unit.level, numbers.packed)
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
    if config.rollout_log_prob_policy.startswith("drop"):
        drop = {"rollout_log_prob_policy": config.rollout_log_prob_policy, "use_tis": True}
        yield "invalid log-prob", _only(config, drop)


def _only(config: MismatchConfig, settings: dict[str, Any]) -> MismatchConfig:
    """The algorithm's training side with nothing but these settings."""
    policy = "error" if config.rollout_log_prob_policy == "error" else "neutral"
    base = {"use_rollout_log_probs": config.use_rollout_log_probs, "rollout_log_prob_policy": policy, "metrics": "off"}
    with ignore_mismatch_warnings():
        return MismatchConfig.build(merge(base, settings))
