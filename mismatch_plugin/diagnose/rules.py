"""Which setting to choose: the rules, as data. The tables of docs are made of them, and `recommend` goes by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_plugin.config.values import at, dotted_fields_set
from mismatch_plugin.diagnose.measure import OLD_SHARE, Figures
from mismatch_plugin.diagnose.result import Prediction
from mismatch_plugin.report.table import NOTHING, Table

SMALL_KL = 1e-3
"""Below it no algorithm differed from another on the lab's Llama (bf16 and int8 engines: 1e-4)."""
CLIPPED_KL = 3e-3
"""Below it, Gaussian noise puts fewer than 1.5 % of the ratios outside PPO's 1 ± 0.2."""
STRONG_KL = 0.1
SMALL_ESS = 0.3
TAIL = 1e-4
"""Share of tokens far away (see Figures.tail) from which on they are a population of their own."""
MOST_TAIL = 0.05
SHORT = 100
"""Trained tokens of the longest response."""
OLD_KL = 4.0
"""Tokens of the oldest weights with so many times the k3 of the others are not worth keeping."""
HEAVY = 0.1
"""Share of groups whose baseline rejected responses move."""
CREDIT = 0.5
"""Share of responses from which on their tokens have advantages of their own."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of "which setting to choose".

    run: the user's run, in words. also: what else must hold of the figures.
    kl: [from, to) of k3, nats a token. length: the longest response at most, trained tokens. kl_length: their product
    at most.
    preset: the settings. changes: what differs from it, as nested settings. reason: why these. keeps: share of the
    tokens that they leave in the loss, at least.
    bounds: level of the bounds on the ratio that the data may give in place of the preset's, "" for none. data_bounds:
    they always do.
    """

    name: str
    run: str
    preset: str
    reason: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    also: Callable[[Figures], bool] = lambda _: True
    kl: tuple[float, float] = (0.0, math.inf)
    length: float = math.inf
    kl_length: float = math.inf
    bounds: str = ""
    data_bounds: bool = False
    keeps: float = 0.9

    def holds(self, figures: Figures) -> bool:
        """Whether this is the row of such a run."""
        inside = self.kl[0] <= figures.k3_kl < self.kl[1] and figures.max_length <= self.length
        return inside and figures.kl_length <= self.kl_length and self.also(figures)

    @property
    def setting(self) -> str:
        """The preset, and the changes as one types them: `seq_is, tis.level turn`."""
        changed = sorted(dotted_fields_set(dict(self.changes)))
        return ", ".join([self.preset, *(f"{path} {at(self.changes, path)}" for path in changed)])

    def with_bounds(self, lower: float, upper: float) -> dict[str, Any]:
        """The changes that put bounds of the data in the place of the preset's."""
        if self.bounds == "geometric":
            return {"rs": {"criteria": [f"sequence_mean:ratio:{lower!r}:{upper!r}"]}}
        return {"tis": {"lower_bound": lower, "upper_bound": upper}}


RULES = (
    Rule(
        name="drifting",
        run="a few responses that drift as a whole",
        preset="geo_rs_token_tis",
        reason="a response that is off in all its tokens is dropped, by bounds from your own data; the others have "
        "token weights",
        also=lambda figures: 0.002 <= figures.drifting <= 0.05,
        kl=(0.0, STRONG_KL),
        bounds="geometric",
        data_bounds=True,
    ),
    Rule(
        name="experts",
        run="in sync, single tokens far off (a mixture of experts whose router chooses otherwise)",
        preset="token_icepop",
        reason="single tokens are far off, for which a truncated weight would still be its bound: their weight is 0, "
        "all others keep theirs. Of a mixture of experts replay the routing if the host can",
        also=lambda figures: TAIL <= figures.tail <= MOST_TAIL and figures.stale < 1,
        kl=(0.0, STRONG_KL),
        bounds="token",
    ),
    Rule(
        name="strong",
        run=f"strong: KL from {STRONG_KL:g} or ESS below {SMALL_ESS:g}",
        preset="token_is",
        reason="find the cause first: no weight repairs a wrong temperature, a filter or old weights, and inspect "
        "recommends nothing until then; where it is meant (--accept unexplained) token weights bound the gradient and "
        "reject nothing",
        also=lambda figures: figures.k3_kl >= STRONG_KL or figures.ess < SMALL_ESS,
        keeps=1.0,
    ),
    Rule(
        name="one step",
        run="one optimizer step a rollout batch, and the second forward pass is expensive",
        preset="pg_is",
        reason="the pass is saved and the weights are made anew at every step; there is no trust region, so not with "
        "several mini-batches",
        also=lambda figures: figures.one_step and figures.expensive_pass,
        kl=(SMALL_KL, STRONG_KL),
        kl_length=1.0,
        keeps=1.0,
    ),
    Rule(
        name="saved pass",
        run="the second forward pass is expensive, small mismatch, rollouts in sync",
        preset="ppo_is_bypass",
        reason="the pass is saved and the clip kept, which so small a mismatch hardly reaches; the first to break when "
        "it grows (lost at two bits in the comparison)",
        also=lambda figures: figures.expensive_pass and not figures.stale,
        kl=(0.0, CLIPPED_KL),
        keeps=1.0,
    ),
    Rule(
        name="in sync",
        run="engines of one precision, small mismatch",
        preset="disabled",
        reason="no algorithm differs at such a mismatch: a weight adds variance for nothing. Keep the metrics",
        kl=(0.0, SMALL_KL),
        keeps=1.0,
    ),
    Rule(
        name="stale",
        run="rollouts some steps old, asynchronous",
        preset="token_is",
        reason="the clip stays anchored at π_old, the weight covers the lag. In the comparison, where KL is larger, it "
        "gained wherever rollouts were stale. Bypass, whose clip limits the lag itself, ended higher there; it was "
        "lost where weights were rounded, too",
        also=lambda figures: figures.stale >= 1,
        kl=(SMALL_KL, STRONG_KL),
        keeps=1.0,
    ),
    Rule(
        name="credit",
        run="an advantage for each token",
        preset="prefix_is",
        reason="a token's advantage is about what follows it, so the product of the ratios up to it is its weight. Its "
        "bias is below that of token weights; at a larger KL × length few tokens have much of the weight",
        also=lambda figures: figures.credit >= CREDIT,
        kl=(SMALL_KL, STRONG_KL),
        kl_length=0.5,
        keeps=1.0,
    ),
    Rule(
        name="short",
        run="short responses, one reward each",
        preset="seq_is",
        reason="the weight of the whole response: unbiased up to its bound while π_θ is π_old, and so short a product "
        "of ratios keeps its variance small",
        kl=(SMALL_KL, STRONG_KL),
        length=SHORT,
        kl_length=1.0,
        keeps=1.0,
    ),
    Rule(
        name="turns",
        run="several short turns, too long together for a product of ratios",
        preset="seq_is",
        changes={"tis": {"level": "turn"}},
        reason="the weight of a turn is a product over its own tokens: its variance stays small where that of the "
        "product over all turns does not. Exact where turns are contexts of their own; else what earlier turns change "
        "is not reweighted",
        also=lambda figures: figures.mean_turns >= 2 and figures.kl_turn <= 1.0 < figures.kl_length,
        kl=(SMALL_KL, STRONG_KL),
        keeps=1.0,
    ),
    Rule(
        name="long",
        run="all others: other precision or kernels, any length",
        preset="token_is",
        reason="least variance of all weights, at any length; a product of ratios would spread with the length until "
        "one response has all the weight. Its bias (what came before a token is not reweighted) is small while the "
        "mismatch is",
        kl=(SMALL_KL, STRONG_KL),
        keeps=1.0,
    ),
)
"""The first that holds is taken."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What is added to the setting of a rule, whichever it is. flag: what one types.

    holds: of the figures and of what is predicted for the setting; None where nothing is. changes: nested settings.
    """

    name: str
    run: str
    flag: str
    reason: str
    holds: Callable[[Figures, Prediction | None], bool]
    changes: Callable[[Figures], dict[str, Any]]


ADDITIONS = (
    Addition(
        name="too old",
        run=f"a few tokens (at most {OLD_SHARE:.0%}) of older weights, {OLD_KL:g} times as far off as the others",
        flag="`--rs-max-staleness`, the number from `inspect`",
        reason="they are so few and so far off that they are not worth their variance",
        holds=lambda figures, _: math.isfinite(figures.fresh) and figures.old_kl >= OLD_KL,
        changes=lambda figures: {"rs": {"max_staleness": int(figures.fresh)}},
    ),
    Addition(
        name="groups",
        run=f"rejected responses in at least {HEAVY:.0%} of the groups (GRPO)",
        flag="`--rs-group exclude`",
        reason="a rejected response's reward stays in its group's mean and deviation, and moves the advantages of the "
        "others; without it they are those of the accepted responses",
        holds=lambda _, found: found is not None and (found.groups_changed or 0.0) >= HEAVY,
        changes=lambda _: {"rs": {"group": "exclude"}},
    ),
)
"""Looked at in this order, once the setting is chosen."""


def rules_table() -> Table:
    """Which setting to choose."""
    rows = [
        (rule.run, _kl(rule), _length(rule), f"`{rule.preset}`{_more(rule)}",
         "all" if rule.keeps == 1.0 else f"≥ {rule.keeps:.0%}", rule.reason)
        for rule in RULES
    ]  # fmt: skip
    added = [(f"in addition: {item.run}", "any", "any", item.flag, NOTHING, item.reason) for item in ADDITIONS]
    headers = ("your run", "KL, nats a token", "longest response", "setting", "tokens kept", "why")
    notes = (
        "The first row that fits is taken, by k3 as the estimate of KL. mismatch-plugin inspect does it, predicts what "
        "the setting keeps of your own tokens, and takes bounds from them, or the next row, where that is below 90 %.",
        "For every row the tests make data in its range, and fail where less is kept or another is taken.",
    )
    return Table("Which setting to choose", headers, (*rows, *added), notes=notes)


def _more(rule: Rule) -> str:
    return f"{rule.setting.removeprefix(rule.preset)}{', bounds from `inspect`' * rule.data_bounds}"


def _kl(rule: Rule) -> str:
    low, high = rule.kl
    if low == 0.0:
        return "any" if high == math.inf else f"below {high:g}"
    return f"{low:g} to {high:g}"


def _length(rule: Rule) -> str:
    parts = [f"to {rule.length:g} tokens"] if rule.length < math.inf else []
    parts += [f"KL × length to {rule.kl_length:g}"] if rule.kl_length < math.inf else []
    return ", ".join(parts) or "any"
