"""Rejection settings: what a criterion measures, how it is aggregated, and between which bounds a unit is kept."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, model_validator

from mismatch_plugin.config.fields import Section, described
from mismatch_plugin.config.units import UNITS, Aggregate, Unit, aggregate_name
from mismatch_plugin.config.values import unknown

Statistic = Literal["ratio", "k1", "k2", "k3", "tv", "binary_kl", "binary_kl_reverse"]
Condition = Literal["any", "negative", "away"]

BUDGETS = ("share", "mean")
_SPEC = (
    "AGGREGATE:STATISTIC[:LOWER]:UPPER[:BUDGET][@CONDITION], for example sequence_max:k2:0.5, token:tv:0.15@away, "
    "token:k2:0.02:mean=0.02 or sequence_mean:k3:0.01:share=0.1"
)


class Criterion(Section):
    """One rejection rule: a unit is kept where lower ≤ aggregate(statistic) ≤ upper.

    `ratio` and `k1` are synonyms: they aggregate l = log ρ and their bounds are bounds on ρ itself. The others have
    an upper bound in their own unit (nats; `tv`: probability) and no lower bound unless one is given.

    condition: on which units the criterion is judged; the others stay.
    any: all
    negative: where A < 0; of a sequence, where its mean advantage over the loss mask is
    away: tokens that the step moves further from π_rollout: A > 0 and π > π_rollout, or A ≤ 0 and π < π_rollout

    share, mean: a budget. From the second step on the upper bound is raised so far that in the step before it
    would have rejected at most that share of the units, or no more than for the mean of the rest to reach that value.
    """

    statistic: Statistic = "ratio"
    aggregate: Annotated[Aggregate, BeforeValidator(aggregate_name)] = described(
        "token", "what is judged as one: a level's word is taken for its unit, too"
    )
    lower_bound: float | None = described(
        None, "lower bound; for ratio and k1 1/upper if absent, 0 turns it off", ge=0.0
    )
    upper_bound: float | None = described(None, "upper bound; for ratio and k1 the TIS upper bound if absent", gt=0.0)
    condition: Condition = "any"
    share: float | None = described(None, "of all units, at most so many are rejected", gt=0.0, lt=1.0)
    mean: float | None = described(
        None, "the largest are rejected until the mean of the rest is no more", gt=0.0, allow_inf_nan=False
    )

    @property
    def name(self) -> str:
        """`aggregate_statistic`, and `_condition` where there is one, as used in metric names."""
        condition = f"_{self.condition}" if self.condition != "any" else ""
        return f"{self.aggregate}_{'ratio' if self.statistic == 'k1' else self.statistic}{condition}"

    @property
    def unit(self) -> Unit:
        """What is judged as one."""
        return UNITS[self.aggregate]

    @property
    def in_log_space(self) -> bool:
        """True for ratio and k1, whose bounds act on ρ and are compared as logarithms."""
        return self.statistic in ("ratio", "k1")

    @property
    def budget(self) -> str:
        """As it is written behind the bounds: share=Q or mean=τ; "" without one."""
        given = ((name, getattr(self, name)) for name in BUDGETS)
        return ":".join(f"{name}={value:.10g}" for name, value in given if value is not None)

    @property
    def log_bounds(self) -> tuple[float | None, float | None]:
        """(lower, upper) in the space in which the aggregate is compared; None where there is no bound."""
        lower, upper = self.lower_bound, self.upper_bound
        if self.in_log_space:
            lower = math.log(lower) if lower else None
            upper = math.log(upper) if upper is not None and upper != math.inf else None
            return lower, upper
        return (lower or None), (None if upper == math.inf else upper)

    def resolved(self, inherited_upper: float | None) -> Criterion:
        """This criterion with absent bounds filled in. Raises ValueError where there is nothing to inherit."""
        lower, upper = self.lower_bound, self.upper_bound
        if upper is None:
            upper = inherited_upper if self.in_log_space else None
        if upper is None:
            inherits = " and there is no TIS bound to inherit" if self.in_log_space else ""
            raise ValueError(f"rs criterion {self.name} has no upper bound{inherits}: give it one ({_SPEC}).")
        if lower is None and self.in_log_space:
            if upper < 1.0:
                raise ValueError(
                    f"rs criterion {self.name} has upper bound {upper:g} alone, and its reciprocal, the lower bound, "
                    f"is above it: write both, LOWER:UPPER. Bounds of ratio and k1 are on ρ: e^−δ where the mean "
                    f"log-ratio is to stay above −δ."
                )
            lower = 1.0 / upper
        return self.model_copy(update={"lower_bound": lower, "upper_bound": upper}).in_order()

    def in_order(self) -> Criterion:
        """This criterion. Raises ValueError where its lower bound is above the upper bound."""
        if self.lower_bound is not None and self.upper_bound is not None and self.lower_bound > self.upper_bound:
            raise ValueError(
                f"rs criterion {self.name} has lower bound {self.lower_bound:g} above upper bound "
                f"{self.upper_bound:g}: swap them."
            )
        return self

    @model_validator(mode="after")
    def _means_something(self) -> Criterion:
        if self.condition == "away" and not self.unit.per_token:
            raise ValueError(
                f"rs criterion {self.name}: a sequence has tokens on both sides of π_rollout, so that away is for "
                f"aggregate token: choose that, or condition negative."
            )
        faults = {
            "is one of share and mean: leave one out": self.share is not None and self.mean is not None,
            "raises one bound, and ratio has two: choose k2 or k3": self.in_log_space,
            "raises the upper bound alone: leave the lower one out": bool(self.lower_bound),
            "counts all units: leave the condition out": self.condition != "any",
        }
        if self.budget and (fault := next((text for text, there in faults.items() if there), "")):
            raise ValueError(f"rs criterion {self.name}: a budget ({self.budget}) {fault}.")
        return self.in_order()


def parse_criterion(value: Any) -> Any:
    """`"sequence_max:k2:0.5@negative"` as a dict of Criterion fields; anything but a string is passed through."""
    if not isinstance(value, str):
        return value
    spec, at, condition = value.partition("@")
    aggregate, *rest = spec.split(":")
    budgets = dict(part.split("=", 1) for part in rest if "=" in part)
    statistic, *limits = [part for part in rest if "=" not in part] or [""]
    if not statistic or len(limits) > 2:
        raise ValueError(f"rs criterion {value!r} cannot be read: write {_SPEC}.")
    for name in budgets:
        if name not in BUDGETS:
            raise unknown(f"the budget of rs criterion {value!r},", name, BUDGETS)
    bounds = dict(zip(("upper_bound", "lower_bound"), reversed(limits), strict=False))
    fields = {"aggregate": aggregate, "statistic": statistic, **bounds, **budgets}
    return fields | ({"condition": condition} if at else {})


class Rejection(Section):
    """Which tokens and sequences leave the loss. Criteria are ANDed, each judged on the original `loss_mask`."""

    criteria: tuple[Annotated[Criterion, BeforeValidator(parse_criterion)], ...] = described(
        (),
        f"rejection criteria, ANDed ({_SPEC}); aggregates: {', '.join(get_args(Aggregate))}; statistics: "
        f"{', '.join(get_args(Statistic))}; conditions: {', '.join(get_args(Condition))}; budgets, which raise the "
        "upper bound from the second step on: share=Q (at most that share is rejected), mean=τ (of what is kept)",
        flag="--rs-criterion",
    )
    veto_threshold: float | None = described(
        None, "any token with ρ below this rejects its sequence", unit="ratio", gt=0.0, lt=1.0
    )
    policy: Literal["auto", "current"] = described(
        "auto",
        "which policy criteria and veto compare with π_rollout: auto = the algorithm's π_train, current = π_θ, anew "
        "at every mini-batch",
    )
    group: Literal["keep", "exclude", "drop"] = described(
        "keep",
        "a rejected response in its group's advantages: keep = it counts in mean and deviation, exclude = only "
        "accepted ones count, drop = and groups with fewer than min_group accepted ones have no gradient",
    )
    min_group: int | None = described(
        None, "accepted responses that a group needs under rs.group drop", unit="responses", ge=2
    )
    max_staleness: int | None = described(
        None,
        "tokens sampled more than this many weight versions before the trainer's leave the loss",
        unit="versions",
        ge=0,
    )

    @property
    def least_accepted(self) -> int:
        """Accepted responses that a group needs for a gradient."""
        return self.min_group or 1
